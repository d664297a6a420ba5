"""Clients of the primary of a Sentinel group. Each new connection asks the Sentinels for the primary's address."""

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from redis.asyncio import Redis, SSLConnection
from redis.asyncio.connection import parse_url
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.exceptions import RedisError

from shared.settings.redis_url import SentinelUrl

if TYPE_CHECKING:
    from shared.redis.client import RedisLink

#: Timeout of one Sentinel, after which the next Sentinel is asked.
ANSWER_TIMEOUT_S = 0.5
#: Interval of checks for a new primary. An old primary that is still alive accepts writes until the Sentinels demote it,
#: after 8 s or more; these writes are lost.
CHECK_EVERY_S = 1.0


class SentinelPool(SentinelConnectionPool):
    """Connections to the primary, closed when another server becomes the primary."""

    def __init__(self, name: str, sentinel: Sentinel, **options: Any) -> None:
        super().__init__(name, sentinel, **options)
        self._links: WeakKeyDictionary[RedisLink, tuple[str, int]] = WeakKeyDictionary()
        self._watch: asyncio.Task[None] | None = None

    async def find_primary(self, link: "RedisLink") -> tuple[str, int]:
        """Host and port for a connection outside the pool. Raises: RedisError."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_primary())
        self._links[link] = await self.get_master_address()
        return self._links[link]

    async def get_master_address(self) -> tuple[str, int]:
        """Raises: MasterNotFoundError if no Sentinel answers, or if the Sentinels report no live primary."""
        try:
            return await super().get_master_address()
        except MasterNotFoundError:
            pings = (sentinel.ping() for sentinel in self.sentinel_manager.sentinels)
            replies = await asyncio.gather(*pings, return_exceptions=True)
        causes = [reply for reply in replies if isinstance(reply, BaseException)]
        if len(causes) == len(replies):
            raise MasterNotFoundError(f"no Sentinel answers: {causes[0]}") from causes[0]
        raise MasterNotFoundError(f"the Sentinels report no live primary {self.service_name!r}")

    async def _watch_primary(self) -> None:
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            with suppress(RedisError, OSError):
                primary = await self.get_master_address()
                for link, address in list(self._links.items()):
                    if address != primary:
                        link.close()

    async def disconnect(self, inuse_connections: bool = True) -> None:
        """Close the connections to primary and Sentinels; only to the primary if `inuse_connections` is False."""
        await super().disconnect(inuse_connections)
        if inuse_connections:
            if self._watch is not None:
                self._watch.cancel()
                self._watch = None
            for sentinel in self.sentinel_manager.sentinels:
                await sentinel.aclose()


def create_sentinel_redis(url: SentinelUrl, options: dict[str, Any]) -> Redis:
    """Create a client of the primary. `options`: the options of its connections."""
    options = options | parse_url(url.primary)
    del options["host"]
    of_sentinels = {
        name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")
    }
    if options.pop("connection_class", None) is SSLConnection:
        options["ssl"] = True
        of_sentinels |= {name: v for name, v in options.items() if name.startswith("ssl")}
    of_sentinels |= {"retry": options["retry"], "protocol": 2}
    for name in ("socket_timeout", "socket_connect_timeout"):
        of_sentinels[name] = ANSWER_TIMEOUT_S
    sentinel = Sentinel(url.sentinels, sentinel_kwargs=of_sentinels)
    return Redis.from_pool(SentinelPool(url.name, sentinel, **options))
