"""Who serves which model: workers announce themselves, gateways look.

Records expire by themselves. A model stays known for a day after its last worker, so that a fleet whose
workers are all restarting keeps queueing. It must not know how a worker works.
"""

import asyncio
from collections.abc import Callable
from typing import Literal

import msgspec
from redis.asyncio import Redis

from shared.protocol import Message, ModelCard, decode_card, encode
from shared.redis_client import retry_idempotent
from shared.redis_keys import MODEL_TTL_S, RedisKeys, to_ms
from shared.redis_link import RedisSender


class WorkerRecord(Message, frozen=True, omit_defaults=True):
    """What a worker says of itself with every heartbeat."""

    worker_id: str
    card: ModelCard
    engine: str
    num_running: int = 0
    num_waiting: int = 0
    max_num_seqs: int = 1
    num_steps: int = 0
    state: Literal["ready", "draining"] = "ready"


_record_decoder = msgspec.json.Decoder(WorkerRecord)


class Registry:
    """The workers and models under one key prefix. All calls raise RedisError."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._keys = RedisKeys(prefix)
        self._sender = RedisSender(redis)

    async def announce(self, record: WorkerRecord, ttl_s: float) -> None:
        """Say that a worker is there, for `ttl_s` from now."""
        keys, execute, name = self._keys, self._sender.execute, record.card.name
        await asyncio.gather(
            execute("SET", keys.worker(record.worker_id), encode(record), "PX", to_ms(ttl_s)),
            execute("SADD", keys.workers, record.worker_id),
            execute("SET", keys.model(name), encode(record.card), "PX", to_ms(MODEL_TTL_S)),
            execute("SADD", keys.models, name),
            execute("PEXPIRE", keys.workers, to_ms(MODEL_TTL_S)),
            execute("PEXPIRE", keys.models, to_ms(MODEL_TTL_S)),
        )

    async def withdraw(self, worker_id: str) -> None:
        """Say that a worker is gone."""
        await self._sender.execute("DEL", self._keys.worker(worker_id))
        await self._sender.execute("SREM", self._keys.workers, worker_id)

    async def workers(self) -> list[WorkerRecord]:
        """The workers that are there now."""
        found = await self._members(self._keys.workers, self._keys.worker)
        return [_record_decoder.decode(data) for data in found]

    async def models(self) -> list[ModelCard]:
        """The models that were served within the last day, by name."""
        found = await self._members(self._keys.models, self._keys.model)
        return sorted((decode_card(data) for data in found), key=lambda card: card.name)

    async def _members(self, index: str, key_of: Callable[[str], str]) -> list[bytes]:
        """The values of a set's members; members whose value has expired leave the set."""
        names = await retry_idempotent(lambda: self._sender.execute("SMEMBERS", index))
        if not names:
            return []
        keys = [key_of(name.decode()) for name in names]
        values = await retry_idempotent(lambda: self._sender.execute("MGET", *keys))
        gone = [name for name, value in zip(names, values, strict=True) if value is None]
        if gone:
            await self._sender.execute("SREM", index, *gone)
        return [value for value in values if value is not None]

    async def close(self) -> None:
        """Hang up."""
        await self._sender.close()
