"""A primary, two replicas and three Sentinels, as processes on the loopback interface."""

import random
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from shared.process import request_parent_death_signal
from tests.waiting import wait_for

NAME = "fleet"
PASSWORD = "of-the-primary"
DOWN_AFTER_S = 1.0
WITHIN_S = 60.0
_SERVER = """
bind 127.0.0.1
{ports}
dir {directory}
appendonly yes
save ""
repl-diskless-sync-delay 0
requirepass {password}
masterauth {password}
"""
_SENTINEL = """
bind 127.0.0.1
{ports}
dir {directory}
requirepass of-the-sentinels
sentinel monitor {name} 127.0.0.1 {primary} 2
sentinel auth-pass {name} {password}
sentinel down-after-milliseconds {name} {down_after_ms}
sentinel failover-timeout {name} 5000
sentinel parallel-syncs {name} 2
"""
_TLS = """port 0
tls-port {port}
tls-cert-file {certificate}
tls-key-file {certificate}
tls-ca-cert-file {certificate}
tls-auth-clients no
tls-replication yes"""
CERTIFICATE = Path(__file__).parent.parent / "gateway" / "media" / "tls" / "first.pem"


def has_tls(program: Path) -> bool:
    """Returns whether the server was built with TLS."""
    wrong = [program, "--tls-port", "none"]
    return b"Bad directive" not in subprocess.run(wrong, capture_output=True, timeout=10).stderr


class Sentinels:
    """The servers by port, and the URL that names the primary."""

    def __init__(self, folder: Path, program: Path, *, tls: bool) -> None:
        self._program = program
        self._tls = tls
        self._client: dict[str, Any] = {"socket_timeout": 1.0}
        if tls:
            self._client |= {
                "ssl": True,
                "ssl_ca_certs": str(CERTIFICATE),
                "ssl_check_hostname": False,
            }
        ports = _free_ports(6)
        self.servers, self.sentinels = ports[:3], ports[3:]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._folder = folder

    @property
    def url(self) -> str:
        hosts = "+".join(f"127.0.0.1:{port}" for port in self.sentinels)
        url = f"redis+sentinel://:{PASSWORD}@{hosts}/{NAME}?sentinel_password=of-the-sentinels"
        if self._tls:
            url = url.replace("redis", "rediss", 1)
            url += f"&ssl_ca_certs={CERTIFICATE}&ssl_check_hostname=False"
        return url

    def start(self) -> None:
        primary = self.servers[0]
        for port in self.servers:
            follows = f"replicaof 127.0.0.1 {primary}" if port != primary else ""
            self._start(port, _SERVER + follows)
        wait_for(lambda: self._info(primary, "connected_slaves") == 2, WITHIN_S)
        for port in self.sentinels:
            self._start(port, _SENTINEL, "--sentinel")
        for port in self.sentinels:
            wait_for(lambda port=port: self._knows_all(port), WITHIN_S)

    def primary(self) -> int:
        """Returns the port of the primary, as reported by the first Sentinel that answers."""
        for port in self.sentinels:
            try:
                with self._sentinel(port) as client:
                    return int(client.sentinel_master(NAME)["port"])
            except RedisError:
                continue
        raise AssertionError("no Sentinel answers")

    def fail_over(self) -> None:
        """Promotes a replica; the old primary stays alive and becomes a replica."""

        def has_begun() -> bool:
            try:
                return bool(client.sentinel_failover(NAME))
            except ResponseError:  # the replicas are not yet known to be in sync
                return False

        with self._sentinel(self.sentinels[0]) as client:
            wait_for(has_begun, WITHIN_S)

    def kill(self, port: int) -> None:
        self.processes[port].kill()
        self.processes[port].wait()

    def close(self) -> None:
        for port in self.processes:
            self.kill(port)

    def _start(self, port: int, config: str, *options: str) -> None:
        directory = self._folder / str(port)
        directory.mkdir()
        values = {"primary": self.servers[0], "name": NAME, "password": PASSWORD}
        values["down_after_ms"] = int(1000 * DOWN_AFTER_S)
        ports = _TLS if self._tls else "port {port}"
        values["ports"] = ports.format(port=port, certificate=CERTIFICATE)
        path = directory / "redis.conf"
        path.write_text(config.format(directory=directory, **values))
        self.processes[port] = subprocess.Popen(
            [self._program, path, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            preexec_fn=request_parent_death_signal,
        )

    def _sentinel(self, port: int) -> Redis:
        return Redis(port=port, password="of-the-sentinels", **self._client)

    def _info(self, port: int, field: str) -> object:
        try:
            with Redis(port=port, password=PASSWORD, **self._client) as client:
                return client.info("replication")[field]
        except RedisError:
            return None

    def _knows_all(self, port: int) -> bool:
        try:
            with self._sentinel(port) as client:
                state = client.sentinel_master(NAME)
        except RedisError:
            return False
        return state["num-slaves"] == 2 and state["num-other-sentinels"] == 2


def _free_ports(count: int) -> Sequence[int]:
    """Returns ports below the ephemeral range of the system."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(20000, 32000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
    return ports


@contextmanager
def run_sentinels(folder: Path, program: Path, *, tls: bool = False) -> Iterator[Sentinels]:
    sentinels = Sentinels(folder, program, tls=tls)
    try:
        sentinels.start()
        yield sentinels
    finally:
        sentinels.close()
