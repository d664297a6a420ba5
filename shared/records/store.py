"""Records of tenants, such as conversations. Their number and bytes are limited: the oldest are deleted first."""

import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec
from redis.asyncio import Redis

from shared.protocol import ImageRef
from shared.queue.keys import RedisStore, to_ms
from shared.redis.client import load_script, redis_errors_as

_SCRIPTS = Path(__file__).parent / "scripts"
PUT_RECORD = load_script(_SCRIPTS / "put_record.lua")
DELETE_RECORD = load_script(_SCRIPTS / "delete_record.lua")

#: How long Redis keeps the reply of a call, so that a retry after a lost connection gets the same reply.
_REPLY_S = 60.0


class RecordsUnavailable(Exception):
    """The store cannot be reached, or is full."""


class Record(msgspec.Struct, frozen=True):
    """A stored value: its bytes, and references to its images."""

    data: bytes
    images: tuple[ImageRef, ...] = ()

    @property
    def num_bytes(self) -> int:
        return len(self.data) + sum(image.num_bytes for image in self.images)


_decoder = msgspec.msgpack.Decoder(Record)


@redis_errors_as(RecordsUnavailable)
class RecordStore(RedisStore):
    """Records by owner and name. Writes wait until a replica has received them. All methods raise RecordsUnavailable."""

    def __init__(
        self, redis: Redis, prefix: str, *, ttl_s: float, max_records: int, max_bytes: int
    ) -> None:
        super().__init__(redis, prefix)
        self._ttl_s = ttl_s
        self._max_records = max_records
        self._max_bytes = max_bytes

    async def put(
        self, owner: str, name: str, record: Record, *, anew: bool = False
    ) -> Sequence[tuple[str, Record]] | None:
        """Store a record. `anew`: replace an existing record.

        Returns the records that were deleted to make room, with their names; None if the record is larger than
        `max_bytes`, and not stored.
        """
        size = record.num_bytes
        if size > self._max_bytes:
            return None
        found = await self._run(
            PUT_RECORD,
            self._keys_of_call(owner),
            msgspec.msgpack.encode(record),
            prefix=self._keys.record(owner, ""),
            name=name,
            ttl_ms=to_ms(self._ttl_s),
            size=size,
            max_bytes=self._max_bytes,
            max_records=self._max_records,
            anew=anew,
            reply_ms=to_ms(_REPLY_S),
        )
        await self._confirm(("EXISTS", self._keys.record(owner, name)))
        pairs = zip(found[::2], found[1::2], strict=True)
        return [(name.decode(), _decoder.decode(data)) for name, data in pairs]

    async def get(self, owner: str, name: str) -> Record | None:
        data = await self._ask("GET", self._keys.record(owner, name))
        return None if data is None else _decoder.decode(data)

    async def delete(self, owner: str, name: str) -> Record | None:
        """Delete a record; returns it, or None if it does not exist."""
        keys, prefix = self._keys_of_call(owner), self._keys.record(owner, "")
        data = await self._run(
            DELETE_RECORD, keys, prefix=prefix, name=name, reply_ms=to_ms(_REPLY_S)
        )
        if data is None:
            return None
        await self._confirm(("EXISTS", keys[-1]))
        return _decoder.decode(data)

    async def names(self, owner: str) -> list[str]:
        return [
            name.decode() for name in await self._ask("ZRANGE", self._keys.records(owner), 0, -1)
        ]

    def _keys_of_call(self, owner: str) -> tuple[str, str, str]:
        keys = self._keys
        reply = keys.record_reply(owner, secrets.token_hex(8))
        return keys.records(owner), keys.record_sizes(owner), reply
