"""The examples of the API pages work with another port, and print what the pages show.

A block that follows a `python` or `bash` block is what that prints: `text` with `...` for anything, `json` by its shape:
keys and types are the same, strings without `...` too.
"""

import contextlib
import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.fleet_process import ROOT

#: In the order of their examples: later pages use names of the first.
NAMES = ("chat", "output", "completions", "responses", "messages", "ollama", "batches", "errors")
PAGES = [ROOT / "docs" / name for name in (*(f"api-{name}.md" for name in NAMES), "api.md")]
PAGE = "\n".join(page.read_text() for page in PAGES)
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$(?:\n^```(text|json)\n(.*?)^```$)?", PAGE, re.M | re.S)
CURLS = [block for block in BLOCKS if block[0] == "bash" and "curl -s" in block[1]]
PYTHONS = [block for block in BLOCKS if block[0] == "python"]


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
        if place == "$.data":  # of models: the fleet of these tests serves one more
            got = [each for each in got if each["id"] in {model["id"] for model in shown}]
        assert len(shown) == len(got), place
        for index, pair in enumerate(zip(shown, got, strict=True)):
            check_shape(*pair, f"{place}[{index}]")
    elif isinstance(shown, str):
        check_output("text", shown, got)


@pytest.fixture(scope="module")
def namespace() -> Iterator[dict[str, Any]]:
    """What earlier Python blocks of the page have defined."""
    names: dict[str, Any] = {}
    yield names
    for client in ("client", "claude"):
        names[client].close()


def test_the_page_has_examples_and_shows_what_they_print():
    assert len(CURLS) >= 2
    assert len(PYTHONS) >= 5
    assert all(kind for *_, kind, _ in CURLS + PYTHONS)


@pytest.mark.parametrize("number", range(len(PYTHONS)))
def test_python(number, shapes_fleet, namespace, monkeypatch):
    """Each block goes on where the one before it ended."""
    monkeypatch.chdir(ROOT)
    _, code, kind, shown = PYTHONS[number]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code.replace("http://127.0.0.1:8000", shapes_fleet.url), namespace)
    check_output(kind, shown, printed.getvalue())


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("number", range(len(CURLS)))
def test_curl(number, shapes_fleet):
    _, command, kind, shown = CURLS[number]
    command = command.replace("http://127.0.0.1:8000", shapes_fleet.url)
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    check_output(kind, shown, done.stdout)
