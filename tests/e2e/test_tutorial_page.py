"""The tutorial as a reader follows it: its blocks run in their order, and print what the page shows."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.fleet_process import ROOT, Served, start_fleet

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```$(?:\n^```text\n(.*?)^```$)?", PAGE, re.M | re.S)
ROOT_KEY = "root-key-of-the-tutorial"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Has a `vlm` that runs this checkout, as the activated environment has."""
    folder = tmp_path_factory.mktemp("tutorial")
    program = folder / "vlm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m vlm "$@"\n')
    program.chmod(0o755)
    return folder


def run(commands: str, folder: Path, url: str, **variables: str) -> str:
    """What commands of the shell print."""
    environment = {
        **os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "VLM_URL": url,
        **variables,
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-ec", commands.replace(". .venv/bin/activate\n", "")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_block_prints_what_the_page_shows(shapes_fleet: Served, folder: Path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert len(BLOCKS) >= 5
    names: dict[str, Any] = {}
    for language, code, shown in BLOCKS:
        if language == "bash":
            printed = run(code, folder, shapes_fleet.url)
        else:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code.replace("http://127.0.0.1:8000", shapes_fleet.url), names)
            printed = out.getvalue()
        if shown:
            pattern = ".*?".join(re.escape(part) for part in shown.strip().split("..."))
            assert re.fullmatch(pattern, printed.strip(), re.S), printed
    names["client"].close()


def test_the_key_of_a_colleague_works(folder: Path):
    """The commands with keys, whose server the page starts anew."""
    [create] = re.findall(r"^(VLM_API_KEY=.* vlm keys create .*)$", PAGE, re.M)
    [ask] = re.findall(r"^VLM_API_KEY=vlm-\.\.\. (vlm chat) --url \S+ (.*)$", PAGE, re.M)
    fleet = start_fleet(folder / "keys", engine="mock", VLM_GATEWAY__ROOT_KEY=ROOT_KEY)
    try:
        created = run(create, folder, fleet.url, VLM_GATEWAY__ROOT_KEY=ROOT_KEY)
        assert run(" ".join(ask), folder, fleet.url, VLM_API_KEY=created.split()[-1]).strip()
    finally:
        fleet.end()
