"""What a worker says about the calls that it holds, and how that reaches their logs and their gateways' mailboxes."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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

#: A suspect that has come so many tokens further will hardly end this worker: it needs to be alone no longer, and the
#: loss of the worker is no evidence against it.
CLEARED_AFTER_TOKENS = 8

Ending = Literal["finished", "failed"]


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """One attempt at a call. Units: seconds by Redis's clock at the time of the claim."""

    id: str
    reply_to: str
    payload: bytes  #: the call, as its gateway encoded it
    log: tuple[bytes, ...]  #: what earlier attempts have published
    entry_id: bytes
    attempt: int  #: the fencing token
    failures: int  #: workers that were lost while they tried it, as far as this counts against it
    is_last_chance: bool  #: one more failure and the call is given up
    waited_s: float  #: since it was enqueued
    remaining_s: float  #: until its deadline

    @property
    def is_suspect(self) -> bool:
        """Whether a worker may have died of it."""
        return self.failures > 0


@dataclass(frozen=True, slots=True, eq=False)
class Publication:
    """What one publish says about one call; sent again unchanged until Redis has answered.

    `number` counts the publications of the claim from 1; `num_tokens` the output tokens before this one.
    """

    claim: Claim
    number: int
    num_tokens: int
    num_new_tokens: int  #: output tokens that these events add
    events: bytes  #: encoded, with commas between
    ending: Ending | None = None  #: how the call ends, if it does
    dead_reason: str = ""  #: why the call goes to the dead letters, if it does

    def to_item(self) -> dict[str, Any]:
        """The publish script's view of it."""
        return {
            "attempt": self.claim.attempt,
            "number": self.number,
            "index": self.num_tokens,
            "count": self.num_new_tokens,
        }

    def to_ending(self) -> dict[str, Any]:
        """The finish script's view of it. A failure ends a call wherever its tokens stand."""
        return {
            "id": self.claim.id,
            "entry": self.claim.entry_id.decode(),
            "attempt": self.claim.attempt,
            "state": self.ending,
            "index": self.num_tokens if self.ending == "finished" else None,
            "count": self.num_new_tokens,
            "reason": self.dead_reason,
        }


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
        items = [item.to_item() for item in batch]
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
            items=[item.to_ending() for item in batch],
        )
        verdicts = await self._sender.run(FINISH, keys, arguments)
        return self._refused(batch, verdicts)

    def _request_keys(self, claim: Claim) -> tuple[str, str]:
        request_id = claim.id
        return self._keys.request(self._model, request_id), self._keys.log(self._model, request_id)

    def _refused(self, batch: list[Publication], verdicts: list[bytes]) -> dict[str, str]:
        self.num_fenced += verdicts.count(b"fenced")
        return refusals([item.claim for item in batch], verdicts)


def refusals(claims: Sequence[Claim], verdicts: Sequence[bytes]) -> dict[str, str]:
    """The requests whose verdict is not ok, by id."""
    return {
        claim.id: verdict.decode()
        for claim, verdict in zip(claims, verdicts, strict=True)
        if verdict != b"ok"
    }
