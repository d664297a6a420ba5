"""The Redis of `config/redis`: the main path works with its users, and commands that they do not need are denied."""

import asyncio
import inspect
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import hiredis
import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from gateway.keys.audit import AuditLog
from gateway.keys.directory import KeyStore
from gateway.keys.usage import today
from loadtest.fleet import ROOT
from shared.blobs.redis_store import RedisBlobStore
from shared.packages.deployment_state import DeploymentState
from shared.packages.rollout import NodeRecord
from shared.protocol import ModelCard, Tokens
from shared.queue.entries import QueueEntries
from shared.queue.gateway import RedisGatewayQueue, RedisMailbox
from shared.queue.keys import GROUP, RedisKeys
from shared.queue.registry import AdapterSource, Registry, WorkerRecord
from shared.queue.resume import Leases, ResumableCalls
from shared.queue.worker import ClaimScript, Publisher, RedisWorkerQueue
from shared.records.store import RecordStore
from shared.redis.client import RedisSender, Script, create_redis, with_ttl
from shared.redis.confirm import Confirmer
from shared.sessions.store import Session, SessionStore
from shared.settings.tree import RedisSettings
from tests import factories_queue
from tests.config.redis_with_users import FOLDER, RedisWithUsers, run_redis
from tests.factories_gateway import (
    CHAT,
    RunningGateway,
    content_of,
    make_body,
    make_settings,
    run_gateway_on_socket,
)
from tests.factories_images import data_url, image_part
from tests.factories_queue import (
    events_of,
    make_delta,
    make_finished,
    make_request,
    publication,
    wait_until_written,
)
from tests.faults.processes import Process
from tests.waiting import until_equal

USERS = (FOLDER / "users.acl").read_text().replace("\\\n", "")
MODEL = "mock"
SHA = "0" * 64


@pytest.fixture(scope="module")
def server(redis_program, tmp_path_factory) -> Iterator[RedisWithUsers]:
    with run_redis(redis_program, tmp_path_factory.mktemp("redis")) as server:
        yield server


@asynccontextmanager
async def run_worker(server: RedisWithUsers, name: str) -> AsyncIterator[Process]:
    """Runs a worker process that gets only the URL of its user."""
    variables = {
        "VLM_REDIS_URL": server.url("worker"),
        "VLM_WORKER__ID": name,
        "VLM_WORKER__DRAIN_S": "0",
        "VLM_WORKER__LEASE_S": "2",
        "VLM_ENGINE__KIND": "mock",
    }
    process = Process(
        name,
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "vlm", "worker", "--die-with-parent", str(os.getpid())),
            cwd=ROOT, env={**os.environ, **variables}, stderr=asyncio.subprocess.PIPE,
        ),
    )  # fmt: skip
    try:
        await process.says("is ready")
        yield process
    finally:
        await process.end()


def ask_about_an_image(**changes) -> dict:
    content = [image_part(data_url()), {"type": "text", "text": "What is it?"}]
    return make_body(content, **{"model": MODEL, "ignore_eos": True, **changes})


async def follow(gateway: RunningGateway, has_begun: asyncio.Event) -> str:
    """Reads a slow stream to its end; returns its text."""
    lines = []
    body = ask_about_an_image(max_tokens=100, stream=True)
    async with gateway.client.stream("POST", CHAT, json=body) as response:
        async for line in response.aiter_lines():
            has_begun.set()
            lines.append(line)
    return "\n".join(lines)


async def outlive(gateway: RunningGateway, worker: Process) -> None:
    """Another worker finishes the requests of a worker that stops."""
    begun = [asyncio.Event() for _ in range(4)]
    streams = [asyncio.create_task(follow(gateway, has_begun)) for has_begun in begun]
    await asyncio.gather(*(has_begun.wait() for has_begun in begun))
    worker.signal(signal.SIGTERM)
    assert await worker.ended() == 0
    assert all(text.rstrip().endswith("[DONE]") for text in await asyncio.gather(*streams))


async def leave_early(gateway: RunningGateway) -> None:
    """A client disconnects after the first event, and its request leaves the queue."""
    body = ask_about_an_image(max_tokens=300, stream=True)
    async with gateway.client.stream("POST", CHAT, json=body) as response:
        await anext(response.aiter_lines())

    async def num_open() -> int:
        return (await gateway.services.queue.stats(MODEL)).num_open

    await until_equal(num_open, 0)


async def test_the_main_path_works_with_the_users(server, caplog):
    """Requests with images: complete, streamed, resumed, disconnected, and taken over by another worker."""
    settings = make_settings(server.url("gateway"), "vlm")
    async with (
        run_gateway_on_socket(settings, refresh=False) as gateway,
        run_worker(server, "first") as first,
        run_worker(server, "second") as second,
    ):
        await gateway.services.models.refresh()
        whole = await gateway.chat(ask_about_an_image(max_tokens=5))
        assert whole.json()["usage"]["completion_tokens"] == 5
        resumable = {"x-vlm-resumable": "true"}
        streamed = await gateway.chat(
            ask_about_an_image(max_tokens=5, stream=True), headers=resumable
        )
        again = await gateway.client.get(streamed.headers["x-vlm-stream"])
        assert content_of(again.text) == content_of(streamed.text) != ""
        await leave_early(gateway)
        assert await gateway.services.usage.read(today(), today())
        assert 'vlm_queue_depth{model="mock"}' in (await gateway.client.get("/metrics")).text
        await outlive(gateway, first)
        second.signal(signal.SIGTERM)
        assert await second.ended() == 0
    said = "".join([*first.lines, *second.lines, caplog.text])
    assert "permission" not in said.lower()
    assert "WARNING" not in said
    assert "opens-the-gate" not in said
    assert "does-the-work" not in said


DENIED = {
    "gateway": (
        ("GET", f"other:blob:{SHA}"), ("XREAD", "STREAMS", "vlm:{m}:dead", "0"),
        ("XREADGROUP", "GROUP", "workers", "g", "STREAMS", "vlm:{m}:queue", ">"),
        ("RPUSH", "vlm:{m}:log:r", "forged"), ("SADD", "vlm:workers", "forged"),
    ),
    "worker": (
        ("INFO",), ("GET", "vlm:stream:r"), ("XTRIM", "vlm:{m}:queue", "MAXLEN", "0"), ("SMEMBERS", "vlm:workers"),
        ("MGET", "vlm:worker:w"), ("XGROUP", "SETID", "vlm:{m}:queue", "workers", "$"),
        ("XINFO", "STREAM", "vlm:{m}:queue"), ("HGETALL", "vlm:apps"), ("GET", "vlm:node:n"),
    ),
    "node": (("GET", "vlm:stream:r"), ("XTRIM", "vlm:{m}:queue", "MAXLEN", "0")),
}  # fmt: skip
#: Commands that no process needs: those that read or end everything, and those that change the server.
DENIED_TO_ALL = (
    ("SET", "other", "1"), ("XGROUP", "DESTROY", "vlm:{m}:queue", "workers"),
    ("FLUSHALL",), ("FLUSHDB",), ("KEYS", "*"), ("SCAN", "0"), ("RANDOMKEY",), ("DBSIZE",),
    ("CONFIG", "GET", "*"), ("CONFIG", "SET", "dir", "/tmp"),
    ("MODULE", "LIST"), ("SHUTDOWN", "NOSAVE"), ("SAVE",), ("BGREWRITEAOF",),
    ("MONITOR",), ("SLOWLOG", "GET"), ("CLIENT", "LIST"), ("CLIENT", "KILL", "TYPE", "normal"),
    ("REPLICAOF", "127.0.0.1", "1"), ("PSYNC", "?", "-1"), ("ACL", "LIST"), ("ACL", "WHOAMI"),
    ("SCRIPT", "FLUSH"), ("SCRIPT", "KILL"), ("DUMP", "vlm:models"),
    ("RESTORE", "vlm:models", "0", "x"), ("MIGRATE", "127.0.0.1", "1", "vlm:models", "0", "1"),
    ("OBJECT", "FREQ", "vlm:models"), ("RENAME", "vlm:models", "vlm:workers"),
    ("COPY", "vlm:models", "vlm:workers"), ("SORT", "vlm:models"), ("PERSIST", "vlm:models"),
    ("PUBLISH", "vlm", "x"), ("SUBSCRIBE", "vlm"), ("MULTI",), ("PING",),
)  # fmt: skip


@pytest.mark.parametrize("user", ["gateway", "worker", "node"])
def test_other_commands_and_keys_are_denied(server, user):
    with server.client(user) as client:
        for command in (*DENIED[user], *DENIED_TO_ALL):
            with pytest.raises(NoPermissionError):
                client.execute_command(*command)
        for command in ("'FLUSHALL'", "'KEYS', '*'", "'SET', 'other', '1'", "'DBSIZE'"):
            with pytest.raises(ResponseError, match=r"(?i)acl|perm|can't"):
                client.execute_command("EVAL", f"return redis.call({command})", 0)


def test_keda_can_only_read_the_length_of_queues(server):
    """The commands of KEDA's scaler for streams by lag."""
    queue = RedisKeys().queue("n@3f2a")
    with server.client("admin") as admin:
        admin.xgroup_create(queue, GROUP, id="0", mkstream=True)
        admin.xadd(queue, {"id": "r"})
    with server.client("keda") as keda:
        version = keda.info()["redis_version"]
        assert keda.ping()
        assert keda.xlen(queue) == 1
        [group] = keda.xinfo_groups(queue)
        assert group["name"] == GROUP.encode()
        assert group.get("lag", 1) == 1, version  # Redis 6 does not report the lag
        denied = (("XINFO", "STREAM", queue), ("XRANGE", queue, "-", "+"), ("DEL", queue))
        for command in (*denied, ("XLEN", "other"), *DENIED_TO_ALL[:-1]):
            with pytest.raises(NoPermissionError):
                keda.execute_command(*command)


async def test_connections_need_a_user_and_the_right_password(server):
    with server.client("probe") as probe:
        assert probe.execute_command("PING")
        with pytest.raises(NoPermissionError):
            probe.execute_command("GET", "vlm:models")
    for url in (
        f"unix://{server.socket}",
        server.url("gateway", "wrong"),
        server.url("worker", "opens-the-gate"),
        server.url("default", "any"),
        server.url("nobody", "any"),
    ):
        with RedisWithUsers.at(url) as stranger, pytest.raises(AuthenticationError):
            stranger.execute_command("GET", "vlm:models")
    settings = make_settings(server.url("gateway", "wrong"), "vlm")
    async with run_gateway_on_socket(settings, refresh=False) as gateway:
        answer = await gateway.client.get("/readyz")
    assert (answer.status_code, answer.json()) == (503, {"status": "no redis"})


#: The code that speaks to Redis in each kind of process, besides the sender itself.
CALLED = {
    "gateway": (
        *(RedisGatewayQueue, ResumableCalls, RedisMailbox, RecordStore, SessionStore, Leases),
        *(RedisBlobStore.put, RedisBlobStore._put, RedisBlobStore._release, RedisBlobStore.get),
        *(Confirmer, KeyStore, AuditLog),
        *(Registry.workers, Registry.models, Registry.silence_s, Registry._members),
        *(Registry.adapters, Registry.put_adapter, Registry.remove_adapter),
        *(DeploymentState.apps, DeploymentState.put, DeploymentState._put, DeploymentState.now),
    ),
    "worker": (
        *(RedisWorkerQueue, QueueEntries, Publisher, ClaimScript, RedisBlobStore.get),
        *(Registry.announce, Registry.withdraw, Registry._withdraw),
        *(Registry.adapters, Registry.keep_adapters),
    ),
}
CALLED["node"] = (
    *CALLED["worker"],
    *(DeploymentState, RedisGatewayQueue.stats, RedisGatewayQueue._age_s),
    *(RedisGatewayQueue.fail_all,),
    *(Registry.workers, Registry.worker, Registry._members, Registry.forget),
)
CONTAINERS = ("XGROUP", "XINFO")  #: commands whose subcommands have separate permissions
OF_NODES = inspect.getsource(RedisGatewayQueue.fail_all)  #: not called by gateways


WORD = r"""['"]([A-Z]{3,})['"](?:,\s*['"]([A-Z]+)['"])?"""


def commands_in(source: str, pattern: str = WORD) -> set[str]:
    """Returns the possible commands in a source, with the subcommand if that has its own permission."""
    found = re.findall(pattern, source)
    return {f"{word}|{sub}" if word in CONTAINERS else word for word, sub in found}


def commands_of_script(script: Script) -> set[str]:
    """Returns the commands of a script, without those of functions that it does not use."""
    source = script.source
    for function, name in re.findall(r"(?ms)^(local function (\w+)\(.*?^end$)", source):
        if len(re.findall(rf"\b{name}\(", source)) == 1:
            source = source.replace(function, "")
    return commands_in(source, r"redis\.p?call\(\s*" + WORD)


def commands_of(code) -> set[str]:
    """Returns the commands of a function or class, including those of the scripts that it names."""
    source = inspect.getsource(code)
    source = source if source == OF_NODES else source.replace(OF_NODES, "")
    known = vars(inspect.getmodule(code)).items()
    named = [s for name, s in known if re.search(rf"\b{name}\b", source)]
    scripts = [script for script in named if isinstance(script, Script)]
    return commands_in(source).union(*map(commands_of_script, scripts))


def rights_of(user: str, sign: str) -> set[str]:
    """Returns the commands (`+`) or the key patterns (`~`) of a user."""
    [line] = re.findall(rf"^user {user} .*", USERS, re.MULTILINE)
    return set(re.findall(rf" {re.escape(sign)}(\S+)", line))


def patterns_of_keys() -> set[str]:
    """Returns all keys of the code, with `*` for each name."""
    keys, patterns = RedisKeys(), {RedisKeys().spent + "*"}
    for name, member in vars(RedisKeys).items():
        if isinstance(member, property):
            patterns.add(getattr(keys, name))
        elif inspect.isfunction(member) and not name.startswith("_"):
            patterns.add(member(keys, *["*"] * (len(inspect.signature(member).parameters) - 1)))
    return patterns


@pytest.mark.parametrize("user", ["gateway", "worker", "node", "keda"])
def test_users_can_access_only_keys_of_the_code(user):
    assert rights_of(user, "~") <= patterns_of_keys()


@pytest.mark.parametrize("user", ["gateway", "worker", "node"])
def test_users_can_run_exactly_the_commands_of_their_code(server, user):
    allowed = {command.upper() for command in rights_of(user, "+")}
    sending = (RedisSender.run, with_ttl)
    called = set().union(*map(commands_of, (*sending, *CALLED[user])))
    with server.client("admin") as admin:
        known = {name.upper() for name in admin.execute_command("COMMAND")}
    assert allowed == {word for word in called if word.partition("|")[0] in known}


def test_a_missing_password_stops_the_server(tmp_path):
    done = subprocess.run(
        ["sh", FOLDER / "start.sh"], cwd=tmp_path, env={"PATH": os.environ["PATH"]},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0
    assert "REDIS_GATEWAY_PASSWORD" in done.stderr


@asynccontextmanager
async def connect(server: RedisWithUsers, user: str) -> AsyncIterator[tuple[Redis, Redis]]:
    """Opens a user's clients as the processes do: one for commands, and one for blocking reads."""
    settings = RedisSettings(url=server.url(user))
    async with create_redis(settings) as client, create_redis(settings, blocking=True) as blocking:
        yield client, blocking


@asynccontextmanager
async def open_queue(
    server: RedisWithUsers,
) -> AsyncIterator[tuple[RedisGatewayQueue, RedisBlobStore, RedisWorkerQueue]]:
    """Opens the queue of a gateway and a worker, each with its own user."""
    async with connect(server, "gateway") as (gateway, _), connect(server, "worker") as workers:
        queue, blobs = RedisGatewayQueue(gateway, "vlm"), RedisBlobStore(gateway, "vlm")
        claims = RedisWorkerQueue(
            *workers, keys_prefix="vlm", model=factories_queue.MODEL, worker_id="w",
            lease_s=10.0, max_attempts=3, batch_age_s=60.0,
        )  # fmt: skip
        try:
            yield queue, blobs, claims
        finally:
            for closes in (queue, blobs, claims):
                await closes.close()


def keys_that_never_expire(server: RedisWithUsers) -> list[bytes]:
    with server.client("admin") as admin:
        keys = list(admin.scan_iter())
        assert keys
        return [key for key in keys if admin.pttl(key) == -1]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_accepted_requests_survive_a_restart(redis_program, tmp_path, how):
    """Waiting requests, a running one, its tokens and its images: all are kept, and all expire."""
    waiting = {f"waits-{number}" for number in range(8)}
    image = b"image"
    with run_redis(redis_program, tmp_path) as server:
        async with open_queue(server) as (queue, blobs, worker):
            await factories_queue.enqueue(queue, make_request(id="runs"))
            ref = await blobs.put(image, "runs", ttl_s=60.0)
            await worker.create_group()
            [claim] = await worker.read(1, 1.0)
            await worker.publish([publication(claim, 1, 0, make_delta(claim, 0, 5, 6))])
            for name in sorted(waiting):
                await factories_queue.enqueue(queue, make_request(id=name))
            if how == signal.SIGKILL:
                with server.client("admin") as admin:
                    wait_until_written(admin)
            server.end(how)
            server.start()
            assert keys_that_never_expire(server) == []
        async with open_queue(server) as (queue, blobs, worker):
            assert await blobs.get(ref) == image
            ends = publication(claim, 2, 2, make_delta(claim, 2, 7), make_finished(claim, 3))
            assert await worker.publish([ends]) == {}
            events = await events_of(queue, "runs")
            tokens = [t for event in events if isinstance(event, Tokens) for t in event.token_ids]
            assert tokens == [5, 6, 7]
            claims = await worker.read(len(waiting), 1.0)
            assert {claim.id for claim in claims} == waiting
            assert {claim.attempt for claim in claims} == {1}
            assert keys_that_never_expire(server) == []


async def make_every_kind_of_key(server: RedisWithUsers) -> None:
    """Writes the records of starting processes, and a request."""
    async with (
        open_queue(server) as (queue, blobs, worker),
        connect(server, "gateway") as (gateway, blocking),
        connect(server, "node") as (node, _),
    ):
        mailbox, sessions = RedisMailbox(blocking, "vlm", "g"), SessionStore(gateway, "vlm")
        adapters, registry = Registry(gateway, "vlm"), Registry(node, "vlm")
        deployments = DeploymentState(node, "vlm")
        await worker.create_group()
        await worker.read(1, 0.001)
        await registry.announce(WorkerRecord("w", ModelCard(MODEL, 1, 128, 100), "mock"), 60.0)
        await deployments.announce(NodeRecord("n", 8.0, 10**9, 1), 60.0)
        await mailbox.open([MODEL])
        await adapters.put_adapter(MODEL, "a", AdapterSource("a", "1"))
        await sessions.create(Session("s", "owner", "app", 1.0, idle_s=60.0, timeout_s=0.0))
        await factories_queue.enqueue(queue, make_request())
        await blobs.put(b"image", "r", ttl_s=60.0)
        for part in (mailbox, sessions, adapters, registry, deployments):
            await part.close()


def read_log(folder: Path) -> Iterator[list[list[bytes]]]:
    """Yields the commands and transactions of the append-only file, which are loaded atomically."""
    reader, whole = hiredis.Reader(), []
    for path in sorted(folder.rglob("*.aof")):
        reader.feed(path.read_bytes())
    while (command := reader.gets()) is not False:
        whole.append(command)
        if whole[0] != [b"MULTI"] or command == [b"EXEC"]:
            yield [command for command in whole if command not in ([b"MULTI"], [b"EXEC"])]
            whole = []


async def test_every_key_expires_wherever_the_log_ends(redis_program, tmp_path):
    """A server that dies loses its last second, and a process its next command."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    with run_redis(redis_program, first) as server:
        await make_every_kind_of_key(server)
        with server.client("admin") as admin:
            wait_until_written(admin)
    left = set()
    with run_redis(redis_program, second) as server, server.client("admin") as admin:
        for commands in read_log(first):
            for command in commands:
                admin.execute_command(*command)
            left |= {key for key in admin.scan_iter() if admin.pttl(key) == -1}
    assert left == set()
