"""The audit log: requests to change keys, deployments, nodes and adapters, with caller and time."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime  # noqa: TID251 (a date in a path)

import msgspec
from redis.asyncio import Redis

from gateway.http.errors import unavailable
from gateway.http.exchange import RequestContext
from shared.packages.store import PackageStore, StoreError
from shared.queue.keys import RedisStore, to_ms

_MAX_ENTRIES = 100_000  #: approximate maximum number of entries in Redis
_TTL_S = 366 * 86400.0  #: time to live in Redis after the last entry


class AuditEntry(msgspec.Struct, frozen=True):
    at: float  #: epoch seconds
    key: str  #: name of the key; a hash if the key is in the settings
    address: str
    action: str  #: name of the operation
    name: str  #: name of the changed object
    id: str  #: id of the request, as in the log
    object: str = "audit.entry"


_decoder = msgspec.json.Decoder(AuditEntry)


class AuditLog(RedisStore):
    """Writes entries to the package store, if there is one, and then to Redis. The package store keeps all entries."""

    def __init__(
        self, redis: Redis, prefix: str, durable: PackageStore | None, name_of: Callable[[str], str]
    ) -> None:
        """`name_of`: returns the name of a tenant's key."""
        super().__init__(redis, prefix)
        self._durable = durable
        self._name_of = name_of

    async def append(self, action: str, name: str, context: RequestContext) -> None:
        """Write an entry before the change. Raises: ApiError, RedisError; then the change must not be made."""
        now = time.time()  # noqa: TID251
        entry = AuditEntry(
            now, self._name_of(context.tenant), context.address, action, name, context.id
        )
        data = msgspec.json.encode(entry)
        if self._durable is not None:
            day = datetime.fromtimestamp(now, UTC).date().isoformat()
            path = f"audit/{day}/{to_ms(now):013d}-{context.id}.json"
            try:
                await asyncio.to_thread(self._durable.put_if_absent, path, data)
            except (StoreError, OSError):
                raise unavailable() from None
        log = self._keys.audit
        await self._ask("XADD", log, "MAXLEN", "~", _MAX_ENTRIES, "*", "entry", data)
        await self._ask("PEXPIRE", log, to_ms(_TTL_S))

    async def read(self, limit: int) -> list[AuditEntry]:
        """The latest entries, newest first. Raises: RedisError."""
        found = await self._ask("XREVRANGE", self._keys.audit, "+", "-", "COUNT", limit)
        return [_decoder.decode(fields[1]) for _, fields in found]
