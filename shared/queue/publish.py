"""What a worker says about the calls that it holds, and how that reaches their logs and their gateways' mailboxes."""

import asyncio
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
    to_ms,
)
from shared.queue.scripts import FINISH, PUBLISH, named
from shared.redis.link import RedisSender


class Publisher:
    """One worker's events for one model."""

    def __init__(self, sender: RedisSender, keys: RedisKeys, model: str, worker_id: str) -> None:
        self._sender = sender
        self._keys = keys
        self._model = model
        self._worker_id = worker_id
        self.num_fenced = 0  #: publications refused because another worker owns the request

    async def publish(self, publications: Sequence[Publication]) -> dict[str, str]:
        """Send events: per gateway one call for requests that go on and one for those that end.

        Returns the requests that were refused and why: gone, cancelled, ended, fenced or gap. They are no
        longer this worker's. Sending the same publications again after an error changes nothing.

        Raises: RedisError.
        """
        batches: dict[tuple[str, bool], list[Publication]] = {}
        for publication in publications:
            key = (publication.claim.reply_to, publication.ending is not None)
            batches.setdefault(key, []).append(publication)
        calls = [
            (self._finish if ends else self._continue)(reply_to, batch)
            for (reply_to, ends), batch in batches.items()
        ]
        if len(calls) == 1:  # `gather` would cost two turns of the loop
            return await calls[0]
        refused: dict[str, str] = {}
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer
            refused |= answer
        return refused

    async def listening(self, gateways: Iterable[str]) -> list[tuple[str, bool]]:
        """Gateways by name, and whether each has its mailbox. Raises: RedisError."""
        names = list(gateways)
        keys = [self._keys.mailbox(self._model, name) for name in names]
        found = await asyncio.gather(*(self._sender.execute("EXISTS", key) for key in keys))
        return [(name, count == 1) for name, count in zip(names, found, strict=True)]

    async def _continue(self, reply_to: str, batch: list[Publication]) -> dict[str, str]:
        keys = [self._keys.mailbox(self._model, reply_to)]
        for item in batch:
            keys += self._request_keys(item.claim)
        items = [_to_item(item) for item in batch]
        events = [item.events for item in batch]
        arguments = named(*events, max_entries=MAX_MAILBOX_ENTRIES, items=items)
        verdicts = await self._sender.run(PUBLISH, keys, arguments)
        return self._refused(batch, verdicts)

    async def _finish(self, reply_to: str, batch: list[Publication]) -> dict[str, str]:
        mailbox = self._keys.mailbox(self._model, reply_to)
        keys = [self._keys.queue(self._model), mailbox, self._keys.dead(self._model)]
        keys += (self._keys.places(self._model), self._keys.held(self._model))
        for item in batch:
            keys += self._request_keys(item.claim)
        arguments = named(
            *(item.events for item in batch),
            group=GROUP,
            worker=self._worker_id,
            keep_ms=to_ms(AFTER_END_S),
            max_entries=MAX_MAILBOX_ENTRIES,
            dead_ttl_ms=to_ms(DEAD_TTL_S),
            max_dead=MAX_DEAD_ENTRIES,
            items=[_to_ending(item) for item in batch],
        )
        verdicts = await self._sender.run(FINISH, keys, arguments)
        return self._refused(batch, verdicts)

    def _request_keys(self, claim: Claim) -> tuple[str, str]:
        request_id = claim.id
        return self._keys.request(self._model, request_id), self._keys.log(self._model, request_id)

    def _refused(self, batch: list[Publication], verdicts: list[bytes]) -> dict[str, str]:
        self.num_fenced += verdicts.count(b"fenced")
        return refusals([item.claim for item in batch], verdicts)


def _to_item(publication: Publication) -> dict[str, Any]:
    """The publish script's view of it."""
    return {
        "attempt": publication.claim.attempt,
        "number": publication.number,
        "index": publication.num_tokens,
        "count": publication.num_new_tokens,
    }


def _to_ending(publication: Publication) -> dict[str, Any]:
    """The finish script's view of it. A failure ends a call wherever its tokens stand."""
    claim = publication.claim
    return {
        "id": claim.id,
        "entry": claim.entry_id.decode(),
        "attempt": claim.attempt,
        "state": publication.ending,
        "index": publication.num_tokens if publication.ending == "finished" else None,
        "count": publication.num_new_tokens,
        "reason": publication.dead_reason,
    }


def refusals(claims: Sequence[Claim], verdicts: Sequence[bytes]) -> dict[str, str]:
    """The requests whose verdict is not ok, by id."""
    return {
        claim.id: verdict.decode()
        for claim, verdict in zip(claims, verdicts, strict=True)
        if verdict != b"ok"
    }
