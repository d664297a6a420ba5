"""Connections to Redis: commands are sent together, time out, and are not retried implicitly."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from loadtest.fleet import ROOT
from shared.blobs.redis_store import RedisBlobStore
from shared.redis.client import RedisLink, RedisSender, create_redis, retry_idempotent
from shared.settings.tree import RedisSettings
from tests.factories_settings import make_group
from tests.faults.proxy import FaultProxy, run_proxy
from tests.rounds import in_one_round

TIMEOUT_S = 0.5


@asynccontextmanager
async def slow_redis(
    redis_server: str, bytes_per_s: float = 0.0
) -> AsyncIterator[tuple[Redis, FaultProxy]]:
    """A client with a short timeout behind a slow connection."""
    async with run_proxy(Path(redis_server.removeprefix("unix://"))) as proxy:
        proxy.bytes_per_s = bytes_per_s
        client = create_redis(make_group(RedisSettings, url=proxy.url, command_timeout_s=TIMEOUT_S))
        yield client, proxy
        await client.aclose()


async def longest_answer_s(sender: RedisSender, until: asyncio.Future) -> float:
    """Sends small commands one after another until the future is done; returns the longest duration."""
    longest_s = 0.0
    while not until.done():
        started_at = time.monotonic()
        await sender.execute("PING")
        longest_s = max(longest_s, time.monotonic() - started_at)
    return longest_s


@in_one_round
async def test_the_timeout_of_an_image_grows_with_concurrent_images(redis_server, redis_prefix):
    """18 MB at 20 MB/s with a timeout of half a second; small commands are not delayed by them."""
    async with slow_redis(redis_server, 20e6) as (redis, _):
        store, tokens = RedisBlobStore(redis, redis_prefix), RedisSender(redis)
        images = [bytes([number]) * 1_500_000 for number in range(12)]
        putting = asyncio.gather(*(store.put(image, "request", ttl_s=60.0) for image in images))
        began_at = time.monotonic()
        longest_s = await longest_answer_s(tokens, putting)
        all_s = time.monotonic() - began_at
        gets = [store.get(ref) for ref in await putting]
        assert await asyncio.gather(*gets) == images
        assert longest_s < 0.5 * all_s
        await store.close()
        await tokens.close()


@in_one_round
async def test_a_frozen_connection_fails_all_pending_commands_together(redis_server):
    """All pending commands fail together if no byte moved for the timeout of one command."""
    async with slow_redis(redis_server) as (client, proxy):
        sender = RedisSender(client)
        await sender.execute("PING")
        proxy.freeze()
        started_at = time.monotonic()
        waiting = [sender.execute("ECHO", bytes(1_000_000)) for _ in range(20)]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(result) for result in results} == {RedisTimeoutError}
        assert time.monotonic() - started_at < 4 * TIMEOUT_S
        proxy.thaw()
        assert await retry_idempotent(lambda: sender.execute("ECHO", "a")) == b"a"
        await sender.close()


@pytest.fixture
async def sender(redis):
    sender = RedisSender(redis)
    yield sender
    await sender.close()


async def test_commands_of_one_loop_iteration_are_sent_in_one_write(sender, monkeypatch):
    await sender.execute("PING")
    start = RedisLink.start
    batches = []

    def watch(link, commands, on_replies):
        batches.append(len(commands))
        return start(link, commands, on_replies)

    monkeypatch.setattr(RedisLink, "start", watch)
    for _ in range(2):
        replies = await asyncio.gather(*(sender.execute("ECHO", number) for number in range(10)))
        assert replies == [str(number).encode() for number in range(10)]

    assert batches == [1, 9, 10]  # a command after a single one is sent immediately


async def test_closing_cancels_pending_commands(redis):
    sender = RedisSender(redis)
    await sender.execute("PING")
    waiting = [asyncio.create_task(sender.execute("BLPOP", "nothing", 30)) for _ in range(2)]
    await asyncio.sleep(0.01)
    await sender.close()

    await asyncio.wait(waiting, timeout=5)
    assert all(task.cancelled() for task in waiting)


async def test_each_caller_gets_its_own_reply_when_it_arrives(sender):
    leaving = asyncio.create_task(sender.execute("ECHO", "a"))
    good, bad = (asyncio.create_task(sender.execute(name)) for name in ("PING", "NONSENSE"))
    last = asyncio.create_task(sender.execute("BLPOP", "nothing", 5))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await good == b"PONG"
    with pytest.raises(ResponseError):
        await bad
    assert not last.done()
    last.cancel()


async def test_an_interrupted_read_leaves_no_reply_for_the_next(redis_blocking):
    link = RedisLink(redis_blocking)
    reading = asyncio.create_task(link.execute("BLPOP", "nothing", 30))
    await asyncio.sleep(0.02)
    reading.cancel()
    await asyncio.wait([reading])

    assert await link.execute("ECHO", "b") == b"b"
    link.close()


@pytest.mark.parametrize(
    ("error", "num_calls"), [(RedisConnectionError, 3), (RedisTimeoutError, 3), (ResponseError, 1)]
)
async def test_only_lost_calls_are_repeated(error, num_calls):
    calls = []

    async def fail() -> None:
        calls.append(1)
        raise error

    with pytest.raises(error):
        await retry_idempotent(fail)
    assert len(calls) == num_calls


@pytest.mark.parametrize(
    ("options", "is_accepted"),
    [
        ("", False),
        ("?ssl_ca_certs={ca}", False),  # the certificate has another host name
        ("?ssl_ca_certs={ca}&ssl_check_hostname=False", True),
        ("?ssl_cert_reqs=none", True),
    ],
)
async def test_tls_options_of_the_url_are_honoured(options: str, is_accepted: bool):
    certificate = ROOT / "tests/gateway/media/tls/first.pem"
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, OSError):
            await reader.readuntil(b"PING\r\n")
            writer.write(b"+PONG\r\n")
            await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        query = options.format(ca=certificate)
        redis = create_redis(RedisSettings(url=f"rediss://127.0.0.1:{port}/0{query}"))
        link = RedisLink(redis)
        try:
            if is_accepted:
                assert await link.execute("PING") == b"PONG"
            else:
                with pytest.raises(RedisConnectionError, match="certificate"):
                    await link.execute("PING")
        finally:
            link.close()
            await redis.aclose()
