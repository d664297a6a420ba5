"""A fleet of real processes, started by `vlm serve` and found by its output."""

import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Self

import httpx
import psutil
from typer.testing import CliRunner

import vlm

ROOT = Path(__file__).parent.parent.parent
SAMPLE = ROOT / "engines" / "packages" / "shapes" / "samples" / "shapes.png"


class Served:
    """A running `vlm serve` and its output."""

    def __init__(self, process: subprocess.Popen[str], screen: str) -> None:
        self.process = process
        self.screen = screen
        self.url = re.findall(r"http://127\.0\.0\.1:\d+", screen)[0]

    @classmethod
    def start(cls, command: list[str], cwd: Path = ROOT, **variables: str) -> Self:
        """Runs a command that serves; returns when its output is complete."""
        process = subprocess.Popen(
            command, cwd=cwd, env={**os.environ, "PYTHONPATH": str(cwd), **variables}, text=True,
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "Ctrl-C" in line:
                return cls(process, "".join(lines))
        raise AssertionError("the fleet ended early:\n" + "".join(lines))

    @property
    def curl(self) -> str:
        """The `curl` command in the output."""
        screen = self.screen
        return screen[screen.index("curl ") : screen.index("\nEOF")] + "\nEOF\n"

    def family(self) -> list[psutil.Process]:
        """Returns the running processes."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if _lives(child)]

    def child(self, command: str) -> psutil.Process:
        [found] = [p for p in self.family() if command in _command_line(p)]
        return found

    def redis(self) -> psutil.Process:
        [found] = [p for p in self.family() if p.name() == "redis-server"]
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, trust_env=False, timeout=60, verify=False)

    def end(self) -> None:
        family = self.family() if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        for process in family:
            with suppress(psutil.NoSuchProcess):  # can end by itself
                process.kill()
        assert self.process.stderr is not None
        self.process.stderr.close()


def start_fleet(
    data_dir: Path, *arguments: str, engine: str = "mock", cwd: Path = ROOT, **variables: str
) -> Served:
    """Starts `vlm serve` on a free port; returns when its output is complete."""
    return Served.start(
        [sys.executable, "-m", "vlm", "serve", "--engine", engine, "--port", "0",
         "--data-dir", str(data_dir), *arguments],
        cwd,
        **variables,
    )  # fmt: skip


def is_ready(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/readyz?workers=1", trust_env=False, verify=False).is_success
    return False


def run_vlm(*arguments: str, timeout: float = 60, **options) -> subprocess.CompletedProcess[str]:
    """Runs one `vlm` command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "vlm", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=timeout, **options,
    )  # fmt: skip


def invoke_vlm(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """As `run_vlm`, but in this process without the imports, for tests that do not test the command itself."""
    done = CliRunner().invoke(vlm.app, arguments, env=variables)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def run_vlm_on_terminal(*arguments: str, **variables: str) -> tuple[int, str]:
    """Runs one `vlm` command on a terminal; returns its exit code and output."""
    master, slave = pty.openpty()
    with open(master, "rb", buffering=0) as screen:
        process = subprocess.Popen(
            [sys.executable, "-m", "vlm", *arguments], cwd=ROOT, stdin=slave, stdout=slave, stderr=slave,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "200", **variables},
        )  # fmt: skip
        os.close(slave)
        shown = b""
        with suppress(OSError):  # raised at its end
            while piece := screen.read(65536):
                shown += piece
    return process.wait(), shown.decode()


def _command_line(process: psutil.Process) -> list[str]:
    """Returns an empty list if the process has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
