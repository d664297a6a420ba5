"""The README is true: its settings table, its commands, its files and its Python run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.api.chat.schemas import IGNORED_FIELDS, NEUTRAL_VALUES, ChatCompletionRequest
from shared.settings.table import to_markdown

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()


def test_settings_table_is_the_one_that_the_code_makes():
    assert to_markdown() in README, "run: vlm settings --markdown"


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`make ([a-z-]+)", README))))
def test_every_make_target_that_is_named_exists(target):
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`vlm ([a-z-]+(?: gateway)?)", README))))
def test_every_vlm_command_that_is_named_exists(command):
    done = subprocess.run(
        [sys.executable, "-m", "vlm", *command.split(), "--help"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_every_file_that_is_linked_exists(link):
    assert (ROOT / link).exists()


def table_row(name: str) -> set[str]:
    [row] = [line for line in README.splitlines() if line.startswith(f"| {name} |")]
    return set(re.findall(r"`([^`]+)`", row.split("|", 2)[2]))


def test_fields_that_change_nothing_are_listed_completely():
    assert table_row("accepted, changes nothing") == set(IGNORED_FIELDS)


def test_fields_that_work_are_listed_completely():
    listed = set().union(
        *(table_row(row) for row in ("sampling", "length", "output", "priority", "labels"))
    )
    fields = set(ChatCompletionRequest.__struct_fields__)
    supported = fields - set(IGNORED_FIELDS) - set(NEUTRAL_VALUES) - {"model", "messages"}
    assert {name.split(".")[0] for name in listed} == supported
