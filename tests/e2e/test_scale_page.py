"""The commands of docs/scale.md run unchanged, except for ports, the folder and the engine."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.fleet_process import ROOT

PAGE = (ROOT / "docs" / "scale.md").read_text()
PORTS = ("6379", "6380", "8000")


@pytest.mark.skipif(
    not (shutil.which("redis-server") and shutil.which("curl")), reason="no redis-server or no curl"
)
def test_a_fleet_grows_by_the_commands_of_the_page(tmp_path: Path):
    script = "set -m\nset -e\n" + "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, re.S))
    with socket.socket() as one, socket.socket() as two, socket.socket() as three:
        for port, free in zip(PORTS, (one, two, three), strict=True):
            free.bind(("127.0.0.1", 0))
            script = script.replace(port, str(free.getsockname()[1]))
    script = script.replace(".venv/bin/vlm", f"{sys.executable} -m vlm")
    script = script.replace("engines/packages", f"{ROOT}/engines/packages")
    assert script.count("vlm chat") == 3
    script = script.replace("--model shapes", "--engine mock") + "echo finished\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLM_LOGS__LEVEL": "error"}
    process = subprocess.Popen(
        ["bash", "-c", script], cwd=tmp_path, env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:  # the shell ends at the first command that fails
            said.append(line)
            if line == "finished\n":
                break
        assert said[-1] == "finished\n", "".join(said[-40:])
    finally:
        _end_session(process.pid)
        process.communicate()


def _end_session(session: int) -> None:
    """Kills all processes of a session, because each job of the shell has its own process group."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            os.kill(int(folder.name), signal.SIGKILL)
