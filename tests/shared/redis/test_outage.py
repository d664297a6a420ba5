"""An outage of Redis is logged at its start, rarely during it, and at its end."""

import pytest

from shared.redis.client import OutageLog, create_redis
from shared.settings import SettingsError
from shared.settings.tree import RedisSettings


def messages(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_an_outage_and_its_end_are_logged_once_with_address_and_cause(caplog):
    log = OutageLog("redis://127.0.0.1:1/0")
    log.succeeded()
    for _ in range(5):
        log.failed(ConnectionError("connection refused."))
    for _ in range(2):
        log.succeeded()
    told, _ = messages(caplog)
    for words in ("redis://127.0.0.1:1/0", "connection refused", "VLM_REDIS_URL"):
        assert words in told


@pytest.mark.parametrize(
    "url", ["redis://127.0.0.1:1/0?mistaken=1", "redis+sentinel://127.0.0.1:1/fleet?mistaken=1"]
)
def test_an_unknown_option_of_the_url_is_named(url):
    with pytest.raises(SettingsError, match=r"VLM_REDIS_URL: .* unknown option 'mistaken'$"):
        create_redis(RedisSettings(url=url))
