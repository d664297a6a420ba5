"""The bundled Redis server: it starts in any folder, keeps its data, and never outlives its parent."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shared.redis.client import create_redis
from shared.redis.embedded import MAX_SOCKET_PATH, EmbeddedRedis, EmbeddedRedisError
from shared.settings.tree import RedisSettings
from tests.waiting import wait_for


async def ask(server: EmbeddedRedis, *command: str):
    async with create_redis(RedisSettings(url=server.url)) as client:
        return await client.execute_command(*command)


async def test_the_server_evicts_nothing_and_listens_on_no_port(tmp_path):
    expected = {
        "maxmemory": b"67108864",
        "maxmemory-policy": b"noeviction",
        "appendonly": b"yes",
        "appendfsync": b"everysec",
        "port": b"0",
        "save": b"",
    }
    with EmbeddedRedis(tmp_path, max_memory_bytes=64 * 1024 * 1024) as server:
        for name, value in expected.items():
            assert await ask(server, "CONFIG", "GET", name) == [name.encode(), value]
        assert server.socket_path.stat().st_mode & 0o777 == 0o700


async def test_a_server_starts_in_a_folder_with_a_long_path(tmp_path):
    with EmbeddedRedis(tmp_path / ("long" * 30)) as server:
        assert len(str(server.socket_path)) <= MAX_SOCKET_PATH
        assert await ask(server, "PING")
        folder = server.socket_path.parent
    assert not folder.exists()


def test_a_second_server_in_one_directory_is_refused(tmp_path):
    with EmbeddedRedis(tmp_path), pytest.raises(EmbeddedRedisError, match="another server uses"):
        EmbeddedRedis(tmp_path).start()


def test_the_error_of_a_failed_start_contains_the_reason(tmp_path):
    (tmp_path / "appendonly.aof").write_bytes(b"this is no append only file" * 100)

    with pytest.raises(EmbeddedRedisError, match="redis-server ended"):
        EmbeddedRedis(tmp_path).start()


CHILD = """
import sys, time
import shared.process
if sys.argv[1] == "portable":
    shared.process._prctl = None
    shared.process.POLL_S = 0.05
shared.process.die_with_parent(int(sys.argv[2]))
print("ready", flush=True)
time.sleep(600)
"""
FATHER = """
import os, subprocess, sys, time
command = [sys.executable, "-c", sys.argv[1], sys.argv[2], str(os.getpid())]
child = subprocess.Popen(command, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("way", ["kernel", "portable"])
def test_a_child_ends_with_its_parent(way):
    parent = subprocess.Popen(
        [sys.executable, "-c", FATHER, CHILD, way],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))

    parent.kill()
    parent.communicate()

    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
