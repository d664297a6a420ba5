"""README, settings page and API page are true: commands, targets, tables and examples of a settings file."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

import vlm
from engines.registry import settings_classes
from gateway.api.chat.schemas import IGNORED_FIELDS, ChatCompletionRequest
from gateway.api.fields import UNSUPPORTED
from shared.settings.load import load_settings
from shared.settings.table import to_markdown

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)
SETTINGS = (ROOT / "docs" / "settings.md").read_text()
API = (ROOT / "docs" / "api.md").read_text()


def test_settings_table_is_the_one_that_the_code_makes():
    assert to_markdown(settings_classes()) in SETTINGS, "run: vlm settings --markdown"


def test_the_settings_file_on_the_page_loads(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    path.write_text(re.findall(r"^```yaml\n(.*?)^```$", SETTINGS, re.M | re.S)[0])
    monkeypatch.setenv("VLM_CONFIG", str(path))
    monkeypatch.chdir(tmp_path)
    assert load_settings().gateway.port == 9000


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?:`|^)make ([a-z-]+)", TEXT, re.M))))
def test_every_make_target_that_is_named_exists(target):
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


COMMANDS = r"(?:`|^)vlm ((?:bench |loadtest (?=[a-z]))?[a-z][a-z-]+)"


@pytest.mark.parametrize("command", sorted(set(re.findall(COMMANDS, TEXT, re.M))))
def test_every_vlm_command_that_is_named_exists(command):
    done = CliRunner().invoke(vlm.app, [*command.split(), "--help"])
    assert done.exit_code == 0, done.output


def table_row(name: str) -> set[str]:
    [row] = [line for line in API.splitlines() if line.startswith(f"| {name} |")]
    return set(re.findall(r"`([^`]+)`", row.split("|", 2)[2]))


def test_fields_that_change_nothing_are_listed_completely():
    assert table_row("accepted, changes nothing") == set(IGNORED_FIELDS)


def test_fields_that_are_refused_are_listed_with_the_values_that_are_not():
    for path, fields in UNSUPPORTED.items():
        listed = ", ".join(
            f"`{name}`" + (f" ({' or '.join(map(to_json, values))})" if values else "")
            for name, values in sorted(fields.items())
        )
        assert f"| `{path}` | {listed} |" in API


def to_json(value: object) -> str:
    return f"`{json.dumps(value)}`"


def test_fields_that_work_are_listed_completely():
    listed = set().union(
        *(
            table_row(row)
            for row in (
                "sampling",
                "length",
                "output",
                "form",
                "image size",
                "tools",
                "thinking",
                "priority",
                "labels",
            )
        )
    )
    fields = set(ChatCompletionRequest.__struct_fields__)
    supported = fields - set(IGNORED_FIELDS) - {"model", "messages"}
    assert {name.split(".")[0] for name in listed} == supported
