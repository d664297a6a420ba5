"""The registry of workers and models: workers write their records, and gateways read them.

Records expire. A model is known for a day after its last worker, so that requests are queued while all workers
restart.
"""

import asyncio
from collections.abc import Iterable
from typing import Literal

import msgspec

from shared.protocol import PROTOCOL_VERSION, ModelCard, Report, decode_card, encode
from shared.queue.keys import MODEL_TTL_S, RedisStore, to_ms
from shared.redis.client import with_ttl


class WorkerRecord(Report, frozen=True, omit_defaults=True):
    """The heartbeat of a worker."""

    worker_id: str
    card: ModelCard
    engine: str
    num_running: int = 0
    num_waiting: int = 0
    max_num_seqs: int = 1
    num_steps: int = 0
    num_finished: int = 0  #: requests since its start
    num_failed: int = 0  #: failed by the engine, an application or a crash, not by a deadline
    state: Literal["ready", "draining"] = "ready"


class AdapterSource(Report, frozen=True):
    """The source of an adapter that all workers of a model load."""

    path: str  #: relative to the workers' `lora_dir`
    revision: str  #: changes with each request to load it


class _AnyRecord(Report, frozen=True):
    """The common fields of records of every version."""

    worker_id: str
    card: msgspec.Raw
    engine: str = ""


_record_decoder = msgspec.json.Decoder(WorkerRecord)
_source_decoder = msgspec.json.Decoder(AdapterSource)
_any_record_decoder = msgspec.json.Decoder(_AnyRecord)


def decode_record(data: bytes) -> WorkerRecord:
    """Decode a record; with another protocol version, only the worker's identity. Raises: msgspec.MsgspecError."""
    record = _any_record_decoder.decode(data)
    card = decode_card(record.card)
    if card.version != PROTOCOL_VERSION:
        return WorkerRecord(record.worker_id, card, record.engine)
    return _record_decoder.decode(data)


class Registry(RedisStore):
    """The registered workers and models. All methods raise RedisError."""

    async def announce(self, record: WorkerRecord, ttl_s: float) -> None:
        keys, name, ttl_ms = self._keys, record.card.name, to_ms(MODEL_TTL_S)
        add_worker = with_ttl(keys.workers, ttl_ms, "SADD", keys.workers, record.worker_id)
        add_model = with_ttl(keys.models, ttl_ms, "SADD", keys.models, name)
        execute = self._sender.execute
        await asyncio.gather(
            self._sender.execute_soon(
                "SET", keys.worker(record.worker_id), encode(record), "PX", to_ms(ttl_s)
            ),
            execute(*add_worker),
            execute("SET", keys.model(name), encode(record.card), "PX", ttl_ms),
            execute(*add_model),
        )

    async def withdraw(self, worker_id: str) -> None:
        await self._withdraw(self._keys.workers, worker_id, self._keys.worker(worker_id))

    async def forget(self, model: str) -> None:
        await self._withdraw(self._keys.models, model, self._keys.model(model))

    async def workers(self) -> list[WorkerRecord]:
        return await self._members(self._keys.workers, self._keys.worker, decode_record)

    async def worker(self, worker_id: str) -> WorkerRecord | None:
        key = self._keys.worker(worker_id)
        value = await self._ask("GET", key)
        return None if value is None else self._decode(key, value, decode_record)

    async def models(self) -> list[ModelCard]:
        """The models served within the last day, by name."""
        found = await self._members(self._keys.models, self._keys.model, decode_card)
        return sorted(found, key=lambda card: card.name)

    async def silence_s(self, models: Iterable[str]) -> dict[str, float]:
        """Seconds since a worker announced each of these models."""
        names = list(models)
        ttls = await asyncio.gather(
            *(self._sender.execute("PTTL", self._keys.model(name)) for name in names)
        )
        return {n: MODEL_TTL_S - max(0, ms) / 1000 for n, ms in zip(names, ttls, strict=True)}

    async def adapters(self, model: str) -> dict[str, AdapterSource]:
        key = self._keys.adapters(model)
        found = await self._ask("HGETALL", key)
        sources: dict[str, AdapterSource] = {}
        for name, value in zip(found[::2], found[1::2], strict=True):
            source = self._decode(f"{key} {name!r}", value, _source_decoder.decode)
            if source is not None:
                sources[name.decode(errors="replace")] = source
        return sources

    async def put_adapter(self, model: str, name: str, source: AdapterSource) -> None:
        """Add an adapter for all current and future workers of a model."""
        key, ttl_ms = self._keys.adapters(model), to_ms(MODEL_TTL_S)
        await self._sender.execute(*with_ttl(key, ttl_ms, "HSET", key, name, encode(source)))

    async def keep_adapters(self, model: str) -> None:
        await self._sender.execute("PEXPIRE", self._keys.adapters(model), to_ms(MODEL_TTL_S))

    async def remove_adapter(self, model: str, name: str) -> None:
        await self._sender.execute("HDEL", self._keys.adapters(model), name)
