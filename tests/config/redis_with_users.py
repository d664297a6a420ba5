"""A redis-server with the configuration and the users of `config/redis`, on a unix socket."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from loadtest.fleet import ROOT
from tests.waiting import wait_for

FOLDER = ROOT / "config" / "redis"
PASSWORDS = {
    "gateway": "opens-the-gate",
    "worker": "does-the-work",
    "node": "starts-workers",
    "keda": "counts-requests",
}
WITHIN_S = 30.0


class RedisWithUsers:
    """A server with the shipped configuration and users, which tests can kill and restart with its data.

    `url` and `client` are for a given user. `admin` is an additional user with access to every key.
    """

    def __init__(self, program: Path, folder: Path) -> None:
        self.socket = folder / "redis.sock"
        self._program = program
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._config = folder / "config"
        shutil.copytree(FOLDER, self._config)
        with (self._config / "users.acl").open("a") as users:
            users.write("user admin reset on nopass ~* &* +@all\n")

    def url(self, user: str, password: str = "") -> str:
        return f"unix://{user}:{password or PASSWORDS.get(user, 'any')}@{self.socket}"

    def client(self, user: str) -> Redis:
        return self.at(self.url(user))

    @staticmethod
    def at(url: str) -> Redis:
        return Redis.from_url(url, protocol=2, retry=Retry(NoBackoff(), 0))

    def is_ready(self) -> bool:
        with suppress(RedisError), self.client("probe") as probe:
            return probe.execute_command("PING") is True
        return False

    def start(self) -> None:
        """Starts it with `start.sh`, as compose does, and waits until it has loaded its data."""
        variables = {f"REDIS_{user.upper()}_PASSWORD": text for user, text in PASSWORDS.items()}
        path = f"{self._program.parent}:{os.environ['PATH']}"
        self._process = subprocess.Popen(
            ["sh", self._config / "start.sh", "--port", "0", "--unixsocket", self.socket],
            cwd=self._folder, env={"PATH": path, "TMPDIR": str(self._folder), **variables},
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        wait_for(lambda: self.is_ready() or self._process.poll() is not None, WITHIN_S)
        assert self._process.poll() is None, "redis-server ended"

    def end(self, signal_number: signal.Signals = signal.SIGKILL) -> None:
        """Ends the server and waits for it."""
        if self._process is not None:
            self._process.send_signal(signal_number)
            self._process.wait()
            self._process = None


@contextmanager
def run_redis(program: Path, folder: Path) -> Iterator[RedisWithUsers]:
    """Runs a server in its own folder."""
    server = RedisWithUsers(program, folder)
    try:
        server.start()
        yield server
    finally:
        server.end()
