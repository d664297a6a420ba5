"""A real PostgreSQL with pgvector from the wheel `pgserver`, on a unix socket. Root runs it as another user."""

import atexit
import os
import shutil
import signal
import subprocess
import tempfile
import warnings
from contextlib import suppress
from functools import cache, partial
from itertools import count
from pathlib import Path

import psutil
import psycopg
import pytest

from tests.waiting import wait_for

_numbers = count()
_TRIES = 5
_LATE = (subprocess.SubprocessError, AssertionError)  #: timeouts of pgserver


class Postgres:
    """The server of this test run. It ends with the interpreter."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pgserver = pytest.importorskip("pgserver", reason="has no wheel for this Python")

        folder = Path(tempfile.mkdtemp(prefix="vlm-pg-"))
        folder.chmod(0o755)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)  # after the end of the server
        self._get = partial(pgserver.get_server, folder / "data", cleanup_mode="delete")
        self.start()
        self.url = self._server.get_uri()

    def start(self) -> None:
        """Starts the server, with recovery after `kill`. Retries, since pgserver waits only ten seconds."""
        for is_last in (*[False] * (_TRIES - 1), True):
            try:
                self._server = self._get()
                self._server.ensure_postgres_running()
                return
            except _LATE:
                if is_last:
                    raise

    def new_database(self) -> str:
        """Creates an empty database; returns its URL."""
        name = f"db{os.getpid()}_{next(_numbers)}"
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return self.url.replace("/postgres?", f"/{name}?")

    def kill(self) -> None:
        """Kills all processes of the server with SIGKILL."""
        process = psutil.Process(self._server.get_pid())
        family = [process, *process.children(recursive=True)]
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGKILL)
        wait_for(lambda: not any(each.is_running() for each in family if each.pid != process.pid))
        wait_for(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


@cache
def postgres() -> Postgres:
    """Returns the server, which starts at its first use."""
    return Postgres()
