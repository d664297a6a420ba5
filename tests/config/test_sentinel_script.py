"""Servers and Sentinels of `config/helm/files/sentinel.sh`: failover, and restarts that find the primary."""

import os
import random
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, RedisError
from redis.retry import Retry

from loadtest.fleet import ROOT
from shared.process import request_parent_death_signal
from shared.redis.client import create_redis
from shared.redis.embedded import find_redis_server
from shared.settings.tree import RedisSettings
from tests.config.redis_with_users import FOLDER, PASSWORDS
from tests.long import IS_LONG
from tests.waiting import wait_for

SCRIPT = ROOT / "config" / "helm" / "files" / "sentinel.sh"
SERVER, SENTINEL = 6379, 26379  #: each pod has its own address
WITHIN_S = 60.0


class Pods:
    """Three pods, each with a server and a Sentinel, on addresses of the loopback interface."""

    def __init__(self, programs: Path, folder: Path) -> None:
        network = f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}"
        self.hosts = [f"{network}.{number}" for number in (1, 2, 3)]
        self._programs, self._folder = programs, folder
        self._config = folder / "config"
        shutil.copytree(FOLDER, self._config)
        shutil.copy(SCRIPT, self._config)
        self._processes: dict[tuple[str, str], subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        sentinels = "+".join(f"{host}:{SENTINEL}" for host in self.hosts)
        return f"redis+sentinel://gateway:{PASSWORDS['gateway']}@{sentinels}/fleet"

    def start(self, host: str, down_after_s: int = 1) -> None:
        passwords = {f"REDIS_{user.upper()}_PASSWORD": text for user, text in PASSWORDS.items()}
        data, temporary = self._folder / host / "data", self._folder / host / "tmp"
        for path in (data, temporary):
            path.mkdir(parents=True, exist_ok=True)
        for role in ("server", "sentinel"):
            self._processes[host, role] = subprocess.Popen(
                ["sh", self._config / "sentinel.sh", role, "--bind", host],
                cwd=data,
                env={
                    "PATH": f"{self._programs}:{os.environ['PATH']}", "TMPDIR": str(temporary), "SELF": host,
                    "PEERS": " ".join(self.hosts), "DOWN_AFTER_MS": f"{down_after_s}000",
                    "REDIS_REPLICA_PASSWORD": "follows-the-primary", **passwords,
                },
                stdout=subprocess.DEVNULL, preexec_fn=request_parent_death_signal,
            )  # fmt: skip

    def end(self, host: str) -> None:
        for role in ("server", "sentinel"):
            process = self._processes[host, role]
            process.send_signal(signal.SIGKILL)
            process.wait()

    def primary(self, host: str) -> str:
        """Returns the primary that the Sentinel of a pod reports, without a password."""
        with suppress(RedisError), self.sentinel(host) as client:
            state = client.sentinel_masters()["fleet"]
            if state["num-slaves"] >= 2 and state["num-other-sentinels"] >= 2:
                return state["ip"]
        return ""

    @staticmethod
    def sentinel(host: str) -> Redis:
        return Redis(host=host, port=SENTINEL, protocol=2, retry=Retry(NoBackoff(), 0))

    def roles(self) -> list[str]:
        """Returns the role of each server that responds: `master`, or `slave` with `up` or `down` of its link."""
        found = []
        for host in self.hosts:
            with (
                suppress(RedisError),
                Redis(
                    host=host, port=SERVER, username="sentinel", password="follows-the-primary",
                    protocol=2, retry=Retry(NoBackoff(), 0),
                ) as client,
            ):  # fmt: skip
                state = client.info("replication")
                found.append(f"{state['role']} {state.get('master_link_status', '')}".strip())
        return sorted(found)


@pytest.fixture
def pods(redis_program, tmp_path) -> Iterator[Pods]:
    if not IS_LONG and redis_program != find_redis_server():
        pytest.skip("the long form: make faults")
    programs = Path(redis_program).parent
    if not (programs / "redis-cli").exists():
        pytest.skip("there is no redis-cli")
    made = Pods(programs, tmp_path)
    for port in (SERVER, SENTINEL):
        try:
            socket.create_server((made.hosts[1], port)).close()
        except OSError as error:
            pytest.skip(f"{made.hosts[1]}:{port}: {error}")
    try:
        for host in made.hosts:
            made.start(host)
        yield made
    finally:
        for host in made.hosts:
            with suppress(KeyError):
                made.end(host)


async def test_a_replica_takes_over_and_a_restarted_pod_follows_it(pods):
    first = pods.hosts[0]
    for host in pods.hosts:
        wait_for(lambda host=host: pods.primary(host) == first, WITHIN_S)
    wait_for(lambda: pods.roles() == ["master", "slave up", "slave up"], WITHIN_S)
    with pods.sentinel(first) as client, pytest.raises(NoPermissionError):
        client.sentinel_remove("fleet")

    redis = create_redis(RedisSettings(url=pods.url))
    async with redis:
        await redis.set("vlm:stream:1", "kept")
        assert await redis.wait(2, 5000) == 2

    pods.end(first)
    second = ""

    def has_failed_over() -> bool:
        nonlocal second
        second = pods.primary(pods.hosts[1])
        return second not in ("", first)

    wait_for(has_failed_over, WITHIN_S)
    pods.start(first)

    def follow_one() -> bool:
        roles = pods.roles()
        assert roles.count("master") < 2, "the old primary took writes again"
        return roles == ["master", "slave up", "slave up"]

    wait_for(follow_one, WITHIN_S)
    wait_for(lambda: pods.primary(first) == second, WITHIN_S)
    redis = create_redis(RedisSettings(url=pods.url))
    async with redis:
        assert await redis.get("vlm:stream:1") == b"kept"

    # A restart of all pods: no Sentinel responds, and the volumes show that the server is not the first one.
    for host in pods.hosts:
        pods.end(host)
    for host in pods.hosts:
        pods.start(host, down_after_s=60)  # prevents a failover while servers start
    wait_for(lambda: pods.roles() == ["master", "slave up", "slave up"], WITHIN_S)
    wait_for(lambda: pods.primary(second) == second, WITHIN_S)
