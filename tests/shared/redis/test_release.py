"""A gateway warns of a Redis server whose release has known faults, where others than its owner may reach it."""

import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError

from shared.redis.client import create_redis, has_known_faults, read_release, warn_of_known_faults
from shared.redis.embedded import find_redis_server
from shared.settings.tree import RedisSettings
from tests.factories_gateway import make_settings, run_gateway_on_socket
from tests.waiting import until


@pytest.mark.parametrize(
    ("release", "has_faults"),
    [
        ("6.0.20", True),
        ("6.2.14", True),
        ("6.2.19", True),
        ("6.2.20", False),
        ("7.0.14", True),
        ("7.0.15", False),
        ("7.2.10", True),
        ("7.2.11", False),
        ("7.4.5", True),
        ("8.0.4", False),
        ("8.2.1", True),
        ("8.4.0", False),
        ("255.255.255", False),
        ("unstable", False),
        ("", False),
        ("valkey 7.2.10", True),
        ("valkey 8.0.6", False),
        ("valkey 8.1.1", True),
        ("valkey 8.1.4", False),
        ("valkey 9.0.0", False),
        ("another 1.0.0", False),
    ],
)
def test_releases_before_the_patch_of_their_line_have_known_faults(release, has_faults):
    server, _, version = release.rpartition(" ")
    assert has_known_faults(server or "redis", version) is has_faults


@asynccontextmanager
async def run_on_loopback(
    folder: Path, *options: str, program: Path | None = None
) -> AsyncIterator[str]:
    """The URL of a server on a port; of the bundled one, which is such a release."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        program or find_redis_server(),
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
    ]
    server = subprocess.Popen([*command, *options], cwd=folder, stdout=subprocess.DEVNULL)
    url = f"redis://127.0.0.1:{port}"
    try:
        async with connect(url) as client:
            await until(lambda: answers(client))
        yield url
    finally:
        server.terminate()
        server.wait()


@asynccontextmanager
async def connect(url: str) -> AsyncIterator[Redis]:
    client = create_redis(RedisSettings(url=url))
    try:
        yield client
    finally:
        await client.aclose()


async def answers(client: Redis) -> bool:
    try:
        return await client.ping()
    except ConnectionError:
        return False


def version_of(program: Path) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.partition("v=")[2].split()[0]


async def test_a_gateway_warns_where_others_may_reach_such_a_server(
    tmp_path, caplog, redis_program
):
    version = version_of(redis_program)
    server = "valkey" if "valkey" in redis_program.name else "redis"
    async with run_on_loopback(tmp_path, program=redis_program) as url:
        async with connect(url) as client:
            assert await read_release(client) == (server, version)
        async with run_gateway_on_socket(make_settings(url, "vlm")):
            warning = f"{server.title()} {version} has known faults"
            assert (warning in caplog.text) is has_known_faults(server, version)


async def test_a_user_without_any_right_may_read_the_release(tmp_path):
    async with run_on_loopback(tmp_path) as url:
        async with connect(url) as admin:
            await admin.execute_command("ACL", "SETUSER", "limited", "on", ">secret")
        async with connect(url.replace("//", "//limited:secret@")) as limited:
            assert await read_release(limited) == ("redis", version_of(find_redis_server()))


async def test_a_gateway_says_nothing_of_a_server_on_a_unix_socket(redis_server, caplog):
    async with run_gateway_on_socket(make_settings(redis_server, "vlm")):
        assert "has known faults" not in caplog.text


async def test_nothing_is_said_where_the_release_is_not_told(tmp_path, caplog):
    async with (
        run_on_loopback(tmp_path, "--rename-command", "HELLO", "") as url,
        connect(url) as client,
    ):
        await warn_of_known_faults(client)
    assert not caplog.records


async def test_nothing_is_said_of_a_server_that_is_away(caplog):
    async with connect("redis://127.0.0.1:1") as client:
        await warn_of_known_faults(client)
    assert not caplog.records
