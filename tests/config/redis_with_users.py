"""A redis-server with the configuration and the users of `config/redis`, on a unix socket."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from loadtest.fleet import ROOT

FOLDER = ROOT / "config" / "redis"
PASSWORDS = {"gateway": "opens-the-gate", "worker": "does-the-work"}
WITHIN_S = 30.0


class RedisWithUsers:
    """A running server. `url` and `client` are for one of its users."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket

    def url(self, user: str, password: str = "") -> str:
        return f"unix://{user}:{password or PASSWORDS.get(user, 'any')}@{self.socket}"

    def client(self, user: str) -> Redis:
        return self.at(self.url(user))

    @staticmethod
    def at(url: str) -> Redis:
        return Redis.from_url(url, protocol=2, retry=Retry(NoBackoff(), 0))

    def is_ready(self) -> bool:
        try:
            with self.client("probe") as probe:
                return probe.execute_command("PING") is True
        except RedisError:
            return False


@contextmanager
def run_redis(server: Path, folder: Path) -> Iterator[RedisWithUsers]:
    """Start it as compose does, by `start.sh`."""
    running = RedisWithUsers(folder / "redis.sock")
    variables = {f"REDIS_{user.upper()}_PASSWORD": text for user, text in PASSWORDS.items()}
    path = f"{server.parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        ["sh", FOLDER / "start.sh", "--port", "0", "--unixsocket", running.socket],
        cwd=folder, env={"PATH": path, "TMPDIR": str(folder), **variables},
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        give_up_at = time.monotonic() + WITHIN_S
        while not running.is_ready():
            assert process.poll() is None, "redis-server ended"
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
        yield running
    finally:
        process.kill()
        process.wait()
