"""Who serves which model: workers announce themselves, gateways look.

Records expire by themselves. A model stays known for a day after its last worker, so that a fleet
whose workers are all restarting keeps queueing.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

import msgspec
from redis.asyncio import Redis

from shared.protocol import PROTOCOL_VERSION, ModelCard, Report, decode_card, encode
from shared.queue.keys import MODEL_TTL_S, RedisKeys, to_ms
from shared.redis.client import retry_idempotent
from shared.redis.link import RedisSender, with_ttl

logger = logging.getLogger(__name__)

Member = TypeVar("Member")


class WorkerRecord(Report, frozen=True, omit_defaults=True):
    """What a worker says of itself with every heartbeat."""

    worker_id: str
    card: ModelCard
    engine: str
    num_running: int = 0
    num_waiting: int = 0
    max_num_seqs: int = 1
    num_steps: int = 0
    num_finished: int = 0  #: requests, since it started
    num_failed: int = 0
    #: Of a deployment's latest answers: how many first tokens, or whole answers of other tasks, and
    #: mean times of a further token took how long; by bucket (`shared.packages.latency`).
    first_counts: dict[int, int] = msgspec.field(default_factory=dict)
    token_counts: dict[int, int] = msgspec.field(default_factory=dict)
    state: Literal["ready", "draining"] = "ready"


class AdapterSource(Report, frozen=True):
    """An adapter that every worker of a model is to load."""

    path: str  #: below the directory that the workers' settings name
    revision: str  #: new each time that it is to be loaded


class _AnyRecord(Report, frozen=True):
    """What records of every version have."""

    worker_id: str
    card: msgspec.Raw
    engine: str = ""


_record_decoder = msgspec.json.Decoder(WorkerRecord)
_source_decoder = msgspec.json.Decoder(AdapterSource)
_any_record_decoder = msgspec.json.Decoder(_AnyRecord)


def decode_record(data: bytes) -> WorkerRecord:
    """Read a record; of a worker of another version only who it is. Raises: msgspec.MsgspecError."""
    record = _any_record_decoder.decode(data)
    card = decode_card(record.card)
    if card.version != PROTOCOL_VERSION:
        return WorkerRecord(record.worker_id, card, record.engine)
    return _record_decoder.decode(data)


class Registry:
    """The workers and models under one key prefix. All calls raise RedisError."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._keys = RedisKeys(prefix)
        self._sender = RedisSender(redis)
        self._unreadable: set[str] = set()  # keys whose values were found so, and told

    async def announce(self, record: WorkerRecord, ttl_s: float) -> None:
        """Say that a worker is there, for `ttl_s` from now."""
        keys, name, ttl_ms = self._keys, record.card.name, to_ms(MODEL_TTL_S)
        add_worker = with_ttl(keys.workers, ttl_ms, "SADD", keys.workers, record.worker_id)
        add_model = with_ttl(keys.models, ttl_ms, "SADD", keys.models, name)
        execute = self._sender.execute
        await asyncio.gather(
            execute("SET", keys.worker(record.worker_id), encode(record), "PX", to_ms(ttl_s)),
            execute(*add_worker),
            execute("SET", keys.model(name), encode(record.card), "PX", ttl_ms),
            execute(*add_model),
        )

    async def withdraw(self, worker_id: str) -> None:
        """Say that a worker is gone."""
        await self._sender.execute("DEL", self._keys.worker(worker_id))
        await self._sender.execute("SREM", self._keys.workers, worker_id)

    async def forget(self, model: str) -> None:
        """Have gateways know a model no more: nobody will serve it again."""
        await self._sender.execute("DEL", self._keys.model(model))
        await self._sender.execute("SREM", self._keys.models, model)

    async def workers(self) -> list[WorkerRecord]:
        """The workers that are there now."""
        return await self._members(self._keys.workers, self._keys.worker, decode_record)

    async def models(self) -> list[ModelCard]:
        """The models that were served within the last day, by name."""
        found = await self._members(self._keys.models, self._keys.model, decode_card)
        return sorted(found, key=lambda card: card.name)

    async def silence_s(self, models: Iterable[str]) -> dict[str, float]:
        """For how long no worker has announced each of these models."""
        names = list(models)
        ttls = await asyncio.gather(
            *(self._sender.execute("PTTL", self._keys.model(name)) for name in names)
        )
        return {n: MODEL_TTL_S - max(0, ms) / 1000 for n, ms in zip(names, ttls, strict=True)}

    async def adapters(self, model: str) -> dict[str, AdapterSource]:
        """The adapters that are to be loaded beside a model, by name."""
        key = self._keys.adapters(model)
        found = await retry_idempotent(lambda: self._sender.execute("HGETALL", key))
        sources: dict[str, AdapterSource] = {}
        for name, value in zip(found[::2], found[1::2], strict=True):
            source = self._decode(f"{key} {name!r}", value, _source_decoder.decode)
            if source is not None:
                sources[name.decode(errors="replace")] = source
        return sources

    async def put_adapter(self, model: str, name: str, source: AdapterSource) -> None:
        """Have every worker of a model load an adapter, those that come later too."""
        key, ttl_ms = self._keys.adapters(model), to_ms(MODEL_TTL_S)
        await self._sender.execute(*with_ttl(key, ttl_ms, "HSET", key, name, encode(source)))

    async def keep_adapters(self, model: str) -> None:
        """Keep the list as long as the model is known from now."""
        await self._sender.execute("PEXPIRE", self._keys.adapters(model), to_ms(MODEL_TTL_S))

    async def remove_adapter(self, model: str, name: str) -> None:
        """Have the workers of a model unload an adapter."""
        await self._sender.execute("HDEL", self._keys.adapters(model), name)

    async def _members(
        self, index: str, key_of: Callable[[str], str], decode: Callable[[bytes], Member]
    ) -> list[Member]:
        """The values of a set's members; members whose value has expired leave the set."""
        names = await retry_idempotent(lambda: self._sender.execute("SMEMBERS", index))
        if not names:
            return []
        keys = [key_of(name.decode(errors="replace")) for name in names]
        values = await retry_idempotent(lambda: self._sender.execute("MGET", *keys))
        gone = [name for name, value in zip(names, values, strict=True) if value is None]
        if gone:
            await self._sender.execute("SREM", index, *gone)
        return [
            member
            for key, value in zip(keys, values, strict=True)
            if value is not None and (member := self._decode(key, value, decode)) is not None
        ]

    def _decode(self, key: str, value: bytes, decode: Callable[[bytes], Member]) -> Member | None:
        """The value, or None if it cannot be read: one odd worker must not hide the others."""
        try:
            member = decode(value)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            if key not in self._unreadable:
                logger.error("cannot read %s, leaving it out: %s", key, error)
                self._unreadable.add(key)
            return None
        self._unreadable.discard(key)
        return member

    async def close(self) -> None:
        await self._sender.close()
