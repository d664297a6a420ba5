"""A worker's publications: events of its calls, appended to their logs and their gateways' mailboxes."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any

from shared.queue.api import Claim, Publication
from shared.queue.keys import (
    AFTER_END_S,
    DEAD_TTL_S,
    GROUP,
    MAX_DEAD_ENTRIES,
    MAX_MAILBOX_ENTRIES,
    RedisKeys,
    keys_of_calls,
    to_ms,
)
from shared.queue.scripts import PUBLISH, named
from shared.redis.link import RedisSender

#: A gateway whose mailbox is missing for this long is gone: a live gateway creates it again sooner.
GONE_AFTER_S = 10.0
#: Maximum items of one script call, which blocks Redis while it runs.
MAX_ITEMS = 64


class GatewayLiveness:
    """How long each gateway's mailbox has been missing. Units: readings of one monotonic clock.

    A gateway renews its mailbox. Redis may lose a mailbox, or let it expire while it was frozen; a live gateway
    creates it again within seconds.
    """

    def __init__(self) -> None:
        self._missing_since: dict[str, float] = {}

    def update(self, missing: Iterable[str], now: float) -> set[str]:
        """Record the gateways without a mailbox. Returns the gateways that are gone."""
        self._missing_since = {name: self._missing_since.get(name, now) for name in missing}
        return {g for g, since in self._missing_since.items() if now - since >= GONE_AFTER_S}


class Publisher:
    """One worker's events for one model."""

    def __init__(self, sender: RedisSender, keys: RedisKeys, model: str, worker_id: str) -> None:
        self._sender = sender
        self._keys = keys
        self._model = model
        self._model_keys = (keys.queue(model), keys.dead(model), keys.reservations(model))
        self._common: dict[str, Any] = {
            "worker": worker_id,
            "max_entries": MAX_MAILBOX_ENTRIES,
            "group": GROUP,
            "keep_ms": to_ms(AFTER_END_S),
            "dead_ttl_ms": to_ms(DEAD_TTL_S),
            "max_dead": MAX_DEAD_ENTRIES,
            "spent": keys.spent,
            "model": model,
        }
        self._liveness = GatewayLiveness()
        self.num_fenced = 0  #: publications refused because another worker owns the request

    async def publish(self, publications: Sequence[Publication]) -> dict[str, str]:
        """See `WorkerQueue.publish`: one script call for each gateway and `MAX_ITEMS` items. Raises: RedisError."""
        if results := [item for item in publications if item.result]:
            await asyncio.gather(*map(self._store, results))
        by_gateway: dict[str, list[Publication]] = {}
        for publication in publications:
            by_gateway.setdefault(publication.claim.reply_to, []).append(publication)
        batches = [
            (reply_to, items[start : start + MAX_ITEMS])
            for reply_to, items in by_gateway.items()
            for start in range(0, len(items), MAX_ITEMS)
        ]
        if len(batches) == 1:  # `gather` would cost two iterations of the event loop
            return await self._send(*batches[0])
        refused: dict[str, str] = {}
        calls = [self._send(reply_to, batch) for reply_to, batch in batches]
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer
            refused |= answer
        return refused

    async def _store(self, item: Publication) -> None:
        """Keep the result of an attempt as long as its log. Raises: RedisError."""
        key = self._keys.result(self._model, item.claim.id, item.claim.attempt)
        await self._sender.execute("SET", key, item.result, "PX", to_ms(AFTER_END_S))

    async def find_gone(self, gateways: Iterable[str]) -> set[str]:
        """The gateways that are gone. Raises: RedisError."""
        names = list(gateways)
        keys = [self._keys.mailbox(self._model, name) for name in names]
        missing: list[str] = []
        if keys and await self._sender.execute("EXISTS", *keys) < len(keys):
            found = [await self._sender.execute("EXISTS", key) for key in keys]
            missing = [name for name, count in zip(names, found, strict=True) if count == 0]
        return self._liveness.update(missing, time.monotonic())

    async def _send(self, reply_to: str, batch: list[Publication]) -> dict[str, str]:
        if len(batch) > 1:
            batch.sort(key=lambda item: item.ending is None)  # see `scripts/publish.lua`
        keys = [self._keys.mailbox(self._model, reply_to), *self._model_keys]
        keys += keys_of_calls(self._keys, self._model, [item.claim.id for item in batch])
        items = [_to_item(item) for item in batch]
        arguments = named(*[item.events for item in batch], items=items, **self._common)
        verdicts = await self._sender.run(PUBLISH, keys, arguments)
        self.num_fenced += verdicts.count(b"fenced")
        return refusals([item.claim for item in batch], verdicts)


def _to_item(publication: Publication) -> dict[str, Any]:
    """The item of the publish script. A failure ends a call at any number of tokens."""
    claim = publication.claim
    item: dict[str, Any] = {
        "attempt": claim.attempt,
        "number": publication.number,
        "index": publication.num_tokens,
        "count": publication.num_new_tokens,
    }
    if publication.usage is not None:
        item["prompt"], item["cached"] = publication.usage
    if publication.ending is not None:
        item["entry"], item["state"] = claim.entry_id.decode(), publication.ending
        if publication.keep_s:
            item["keep_ms"] = to_ms(publication.keep_s)
        if publication.ending == "failed":
            del item["index"]
        if publication.dead_reason:
            item |= {"id": claim.id, "reason": publication.dead_reason}
    return item


def refusals(claims: Sequence[Claim], verdicts: Sequence[bytes]) -> dict[str, str]:
    """The requests whose verdict is not ok, by id."""
    return {
        claim.id: verdict.decode()
        for claim, verdict in zip(claims, verdicts, strict=True)
        if verdict != b"ok"
    }
