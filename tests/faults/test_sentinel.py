"""Redis with replicas under Sentinel: a failover pauses streams and loses none."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.exceptions import RedisError

from shared.redis.client import RedisLink, create_redis
from shared.redis.embedded import find_redis_server
from shared.settings.tree import RedisSettings
from tests.faults.fleet import Fleet, playing, run_fleet_at, tokens_seen
from tests.faults.history import FINISHED
from tests.faults.sentinels import Sentinels, has_tls, run_sentinels
from tests.long import IS_LONG
from tests.waiting import until

NUM_STREAMS = 12
#: Sentinels demote an old primary that is still alive only this long after a failover.
DEMOTED_AFTER_S = 8.0


@pytest.fixture(params=["plain", "TLS"])
def sentinels(tmp_path: Path, redis_program: Path, request: pytest.FixtureRequest):
    if not IS_LONG and redis_program != find_redis_server():
        pytest.skip("the long form: make faults")
    tls = request.param == "TLS"
    if tls and not has_tls(redis_program):
        pytest.skip(f"{redis_program} has no TLS")
    with run_sentinels(tmp_path, redis_program, tls=tls) as sentinels:
        yield sentinels


@pytest.fixture
async def fleet(sentinels: Sentinels) -> AsyncIterator[Fleet]:
    """A gateway that finds the primary by the Sentinels."""
    async with run_fleet_at(sentinels.url) as fleet:
        yield fleet


async def test_a_primary_killed_in_mid_stream_loses_nothing(fleet: Fleet, sentinels: Sentinels):
    """P4: the streams pause until a replica is the primary and continue, even without one Sentinel."""
    await fleet.worker()
    await fleet.worker()
    primary = sentinels.primary()
    texts = [fleet.name() for _ in range(NUM_STREAMS)]
    async with playing(fleet, texts, num_tokens=100) as clients:
        await tokens_seen(fleet, clients, texts, 10)
        sentinels.kill(sentinels.sentinels[0])
        sentinels.kill(primary)
    assert clients.history.outcomes() == {FINISHED: NUM_STREAMS}
    assert sentinels.primary() != primary


async def test_a_connection_to_a_new_replica_is_replaced(sentinels: Sentinels):
    redis = create_redis(RedisSettings(url=sentinels.url))
    link = RedisLink(redis)
    primary = sentinels.primary()
    try:
        await link.execute("SET", "key", "1")
        sentinels.fail_over()
        await until(lambda: sentinels.primary() != primary, within_s=30.0)

        async def is_set() -> bool:
            try:
                return (
                    bool(await link.execute("SET", "key", "2")) and await redis.get("key") == b"2"
                )
            except RedisError:
                return False

        started_at = time.monotonic()
        await until(is_set, within_s=30.0)
        assert time.monotonic() - started_at < DEMOTED_AFTER_S
    finally:
        link.close()
        await redis.aclose()
