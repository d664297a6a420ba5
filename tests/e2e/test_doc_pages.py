"""Examples of the tutorial and of the API pages work with another port and print the output that the pages show.

A block after a `python` or `bash` block is its output: in `text`, `...` matches anything; in `json`, keys and types are
compared, and strings without `...`.
"""

import asyncio
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.factories_keys import KEYS, run_team
from tests.integration.fleet_process import ROOT, Served

#: In the order of their examples, because later pages use names of earlier ones.
API = ("chat", "output", "completions", "responses", "messages", "ollama", "errors")
PAGES = ("tutorial", *(f"api-{name}" for name in API))
Names = dict[str, Any]

pytestmark = pytest.mark.timeout(900)


def read(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text()


def check_output(kind: str, shown: str, printed: str) -> None:
    if kind == "json":
        check_shape(json.loads(shown), json.loads(printed), "$")
    else:
        pattern = ".*?".join(re.escape(part) for part in shown.strip().split("..."))
        assert re.fullmatch(pattern, printed.strip(), re.S), printed


def check_shape(shown: Any, got: Any, place: str) -> None:
    assert type(shown) is type(got), place
    if isinstance(shown, dict):
        assert list(shown) == list(got), place
        for key, value in shown.items():
            check_shape(value, got[key], f"{place}.{key}")
    elif isinstance(shown, list):
        assert len(shown) == len(got), place
        for index, pair in enumerate(zip(shown, got, strict=True)):
            check_shape(*pair, f"{place}[{index}]")
    elif isinstance(shown, str):
        check_output("text", shown, got)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a `vlm` command that runs this checkout, as in the activated environment."""
    folder = tmp_path_factory.mktemp("tutorial")
    program = folder / "vlm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m vlm "$@"\n')
    program.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def names() -> Iterator[dict[str, Names]]:
    """Names that earlier Python blocks have defined, in the tutorial and in the API pages."""
    names: dict[str, Names] = {"tutorial": {}, "api": {}}
    yield names
    for defined in names.values():
        for client in {"client", "claude"} & defined.keys():
            defined[client].close()


def run(commands: str, folder: Path, url: str, **variables: str) -> str:
    """Runs shell commands; returns their output."""
    environment = {
        **os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "VLM_URL": url,
        **variables,
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-ec", commands.replace(". .venv/bin/activate\n", "")],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("page", PAGES)
def test_every_block_prints_what_the_page_shows(
    page: str, shapes_fleet: Served, folder: Path, names: dict[str, Names], monkeypatch
):
    monkeypatch.chdir(ROOT)
    group = page.partition("-")[0]
    pattern = r"^```(bash|python)\n(.*?)^```$(?:\n^```(text|json)\n(.*?)^```$)?"
    blocks = re.findall(pattern, read(page), re.M | re.S)
    assert blocks
    for language, code, kind, shown in blocks:
        code = code.replace("http://127.0.0.1:8000", shapes_fleet.url)
        if language == "bash":
            printed = run(code, folder, shapes_fleet.url)
        else:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, names[group])
            printed = out.getvalue()
        assert kind or group == "tutorial"
        if kind:
            check_output(kind, shown, printed)


async def test_the_key_of_a_colleague_works(folder: Path, redis_server: str, redis_prefix: str):
    """The commands that need keys. In the tutorial, the server is restarted with keys before them."""
    page = read("tutorial")
    [create] = re.findall(r"^(VLM_API_KEY=.* vlm keys create .*)$", page, re.M)
    [ask] = re.findall(r"^VLM_API_KEY=vlm-\.\.\. (vlm chat) --url \S+ (.*)$", page, re.M)
    async with run_team(redis_server, redis_prefix, f"file://{folder}/store", 1) as team:
        place, root_key = (folder, team.gateways[0].url), KEYS["root_key"]
        created = await asyncio.to_thread(run, create, *place, VLM_GATEWAY__ROOT_KEY=root_key)
        key = created.split()[-1]
        assert (await asyncio.to_thread(run, " ".join(ask), *place, VLM_API_KEY=key)).strip()
