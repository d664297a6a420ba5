"""Runs a temporary fleet on this machine with `vlm serve`.

Used by `loadtest.run` and by benchmarks. Imports no other package of this project: it starts the command line, and
polls the readiness probe.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
HOST = "127.0.0.1"
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0
PAUSE_S = 0.05


class ServerError(Exception):
    """The server did not start or respond. The message ends with the server's last lines of output."""


@dataclass(frozen=True, slots=True)
class Server:
    process: subprocess.Popen[bytes]
    port: int

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


@contextmanager
def run_fleet(
    engine: str = "mock", environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> Iterator[Server]:
    """Run `vlm serve` with its own Redis. Enters the block once it is ready. Raises: ServerError."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="vlm-load-") as data_dir:
        arguments = ["-m", "vlm", "serve", "--engine", engine, "--port", str(port)]
        arguments += ["--data-dir", data_dir, "--host", HOST]
        with run_server(arguments, port, environment=environment, folder=folder) as server:
            yield server


@contextmanager
def run_server(
    arguments: list[str],
    port: int,
    probe: str = "/readyz?workers=1",
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Iterator[Server]:
    """Run Python in the checkout `folder`; enters the block once `probe` answers 200. Raises: ServerError."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder or ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_until_ready(process, port, probe)
            yield Server(process, port)
        except ServerError as error:
            output.seek(0)
            raise ServerError(
                f"{error}\n{output.read()[-2000:].decode(errors='replace')}"
            ) from None
        finally:
            stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, probe: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _answers(port, probe):
        if process.poll() is not None:
            raise ServerError(f"the server ended with exit code {process.returncode}")
        if time.monotonic() > deadline:
            raise ServerError(f"the server was not ready within {START_TIMEOUT_S:.0f} s")
        time.sleep(PAUSE_S)


def _answers(port: int, probe: str) -> bool:
    connection = HTTPConnection(HOST, port, timeout=2.0)
    try:
        connection.request("GET", probe)
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a process and its children. They are killed after a timeout."""
    if process.poll() is not None:
        return
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in children:
        if child.is_running():
            child.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
