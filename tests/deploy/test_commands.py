"""The output of deployment commands."""

from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import vlm
from deploy import commands
from shared.packages.deployments import Resources

DIGEST = "sha256:" + 64 * "a"
MESSAGE = "an instance of a rather long message that has to be read to its end"
REVISION = {
    "digest": DIGEST, "num_ready": 2, "num_running": 12, "num_finished": 3, "num_failed": 1,
    "spec": {"canary": 0.1},
}  # fmt: skip
APP = {
    "name": "captioner", "state": "canary", "message": MESSAGE, "desired": 2, "generation": 7,
    "active": REVISION, "candidate": REVISION, "events": [{"text": MESSAGE}],
    "generations": [
        {"generation": 2, "cause": "deploy", "version": DIGEST, "outcome": None, "message": MESSAGE}
    ],
    "slots": [
        {"id": 1795469491511, "state": "starting", "phase": "install", "digest": DIGEST, "node": None}
    ],
}  # fmt: skip


@pytest.mark.parametrize("width", [80, None])
def test_tables_lose_no_text_on_a_terminal_and_in_a_pipe(width, capsys, monkeypatch):
    if width:
        monkeypatch.setattr(commands, "screen", Console(markup=False, width=width))
    gateway: Any = SimpleNamespace(call=lambda _, path="": APP if path else {"data": [APP]})
    commands.run_apps(gateway, None)
    commands.run_app(gateway, "captioner", None, None)
    printed = capsys.readouterr().out
    if not width:  # the active version, and separately the last generation
        head, _, row, *_ = printed.splitlines()
        places = ("serves", 12 * "a"), ("last gen.", "7 ")
        assert all(row[head.index(column) :].startswith(value) for column, value in places)
    assert "\u2026" not in printed
    for word in ("answers/s", "candidate", *MESSAGE.split()):
        assert word in printed
    assert (MESSAGE + "\n" in printed) == (width is None)
    if width:
        assert max(map(len, printed.splitlines())) <= width


def test_sessions_show_resources_in_the_syntax_of_commands(monkeypatch):
    session = {
        "id": "s", "state": "open", "application": "echo", "priority": "batch", "created": 0,
        "resources": {"cpu": 0.5, "memory_bytes": 4 * 10**9, "gpu": 0},
        **dict.fromkeys(("pending", "running", "succeed", "failed", "cancelled"), 0),
    }  # fmt: skip
    gateway = SimpleNamespace(pages=lambda path: [session])
    monkeypatch.setattr("deploy.session_cli.connect", lambda url, key: gateway)
    shown = CliRunner().invoke(vlm.app, ["session", "list"]).stdout
    [given] = [word for word in shown.split() if word.startswith("cpu=")]
    assert commands.parse_resources(given) == Resources(0.5, 4 * 10**9)
