"""An outage of Redis is logged once, then seldom, and its end is logged too."""

import asyncio

import pytest

from shared.redis.client import OutageLog, create_redis, wait_for_redis
from shared.settings import SettingsError
from shared.settings.tree import RedisSettings
from tests.waiting import until


def messages(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_an_outage_and_its_end_are_told_once_with_the_address_the_cause_and_what_to_do(caplog):
    log = OutageLog("redis://127.0.0.1:1/0", remind_after_s=3600)
    log.succeeded()
    for _ in range(5):
        log.failed(ConnectionError("connection refused."))
    for _ in range(2):
        log.succeeded()
    told, _ = messages(caplog)
    for words in ("redis://127.0.0.1:1/0", "connection refused", "VLM_REDIS_URL"):
        assert words in told


async def test_a_wrong_password_is_told_as_one(redis, redis_server, redis_prefix, caplog):
    await redis.execute_command("ACL", "SETUSER", redis_prefix, "on", ">right", "+time")
    url = redis_server.replace("://", f"://{redis_prefix}:mistaken@")
    waiting = asyncio.create_task(wait_for_redis(RedisSettings(url=url)))
    try:
        await until(lambda: messages(caplog))
    finally:
        waiting.cancel()
        await redis.execute_command("ACL", "DELUSER", redis_prefix)
    [told] = messages(caplog)
    assert "password" in told
    assert "start Redis" not in told
    assert "mistaken" not in told


def test_a_long_outage_is_told_again(caplog):
    log = OutageLog("redis://127.0.0.1:1/0", remind_after_s=0)
    log.failed(ConnectionError())
    log.failed(ConnectionError())
    assert len(messages(caplog)) == 2
    assert "ConnectionError" in caplog.text


@pytest.mark.parametrize(
    "url", ["redis://127.0.0.1:1/0?mistaken=1", "redis+sentinel://127.0.0.1:1/fleet?mistaken=1"]
)
def test_an_unknown_option_of_the_url_is_named(url):
    with pytest.raises(SettingsError, match=r"VLM_REDIS_URL: .* unknown option 'mistaken'$"):
        create_redis(RedisSettings(url=url))
