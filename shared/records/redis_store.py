"""Records in Redis: bounded by number and bytes for each owner; the oldest make room."""

import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec
from redis.asyncio import Redis

from shared.queue.keys import RedisKeys, to_ms
from shared.records.api import Record, RecordsUnavailable
from shared.redis.client import redis_errors_as, retry_idempotent
from shared.redis.link import RedisSender
from shared.redis.script import load_script, named

_SCRIPTS = Path(__file__).parent / "scripts"
PUT_RECORD = load_script(_SCRIPTS / "put_record.lua")
DELETE_RECORD = load_script(_SCRIPTS / "delete_record.lua")

#: A call whose reply was lost is repeated within that time.
_REPLY_S = 60.0

_decoder = msgspec.msgpack.Decoder(Record)


class RedisRecordStore:
    """The records under one key prefix: a `RecordStore`."""

    def __init__(
        self, redis: Redis, prefix: str, *, ttl_s: float, max_records: int, max_bytes: int
    ) -> None:
        self._keys = RedisKeys(prefix)
        self._sender = RedisSender(redis)
        self._ttl_s = ttl_s
        self._max_records = max_records
        self._max_bytes = max_bytes

    @redis_errors_as(RecordsUnavailable)
    async def put(
        self, owner: str, name: str, record: Record, *, anew: bool = False
    ) -> Sequence[tuple[str, Record]] | None:
        size = record.num_bytes
        if size > self._max_bytes:
            return None
        arguments = named(
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
        keys = self._keys_of_call(owner)
        found = await retry_idempotent(lambda: self._sender.run(PUT_RECORD, keys, arguments))
        pairs = zip(found[::2], found[1::2], strict=True)
        return [(name.decode(), _decoder.decode(data)) for name, data in pairs]

    @redis_errors_as(RecordsUnavailable)
    async def get(self, owner: str, name: str) -> Record | None:
        key = self._keys.record(owner, name)
        data = await retry_idempotent(lambda: self._sender.execute("GET", key))
        return None if data is None else _decoder.decode(data)

    @redis_errors_as(RecordsUnavailable)
    async def delete(self, owner: str, name: str) -> Record | None:
        arguments = named(prefix=self._keys.record(owner, ""), name=name, reply_ms=to_ms(_REPLY_S))
        keys = self._keys_of_call(owner)
        data = await retry_idempotent(lambda: self._sender.run(DELETE_RECORD, keys, arguments))
        return None if data is None else _decoder.decode(data)

    def _keys_of_call(self, owner: str) -> tuple[str, str, str]:
        keys = self._keys
        reply = keys.record_reply(owner, secrets.token_hex(8))
        return keys.records(owner), keys.record_sizes(owner), reply

    async def close(self) -> None:
        await self._sender.close()
