"""The worker's end of the queue: claim requests, keep their leases, publish their events, give them back.

A claim is one attempt at a request. Its number fences all earlier attempts: what they still send is refused.
It must not know engines; it sees requests and events.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from secrets import token_hex
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from shared.protocol import (
    Delta,
    ErrorCode,
    Failed,
    GenerateRequest,
    SamplingParams,
    decode_events,
    decode_request,
)
from shared.publication import Claim, Publication
from shared.publisher import Publisher, refusals
from shared.redis_client import retry_idempotent
from shared.redis_keys import GROUP, QUEUE_TTL_S, RELEASED, RedisKeys, to_ms
from shared.redis_link import RedisLink, RedisSender
from shared.scripts import CLAIM, REAP, RELEASE, RENEW

logger = logging.getLogger(__name__)

#: Entries of our own that are idle so long and unknown here: the reply that named them was lost.
GHOST_AFTER_S = 3.0
#: Consumers that hold nothing and were not seen so long are forgotten.
FORGET_AFTER_S = 3600.0


_VERDICTS = {
    b"expired": (ErrorCode.DEADLINE_EXCEEDED, "the request's deadline passed while it waited"),
    b"exhausted": (ErrorCode.TOO_MANY_ATTEMPTS, "every worker that tried the request ended early"),
    b"unreadable": (ErrorCode.INVALID_REQUEST, "the worker cannot read the request"),
}


class RequestClaims:
    """One worker's share of one model's queue."""

    def __init__(
        self,
        redis: Redis,
        blocking_redis: Redis,
        *,
        keys_prefix: str,
        model: str,
        worker_id: str,
        lease_s: float,
        max_attempts: int,
        ghost_after_s: float = GHOST_AFTER_S,
    ) -> None:
        self._keys = RedisKeys(keys_prefix)
        self._sender = RedisSender(redis)
        self._reader = RedisLink(blocking_redis)
        self._model = model
        self._queue = self._keys.queue(model)
        self._worker_id = worker_id
        self._lease_s = lease_s
        self._max_attempts = max_attempts
        self._ghost_after_s = ghost_after_s
        self._publisher = Publisher(self._sender, self._keys, model, worker_id)
        self._held: set[bytes] = set()  # entries that this worker knows to be its own
        self.num_claims = Counter({"new": 0, "reclaimed": 0, "reconciled": 0})  #: by kind

    @property
    def num_fenced(self) -> int:
        """Publications refused because another worker owns the request."""
        return self._publisher.num_fenced

    # Claiming

    async def read(self, count: int, block_s: float) -> list[Claim]:
        """Claim up to `count` waiting requests; wait for the first. Raises: RedisError."""
        command = ("XREADGROUP", "GROUP", GROUP, self._worker_id, "COUNT", count)
        try:
            reply = await self._reader.execute(
                *command, "BLOCK", to_ms(block_s), "STREAMS", self._queue, ">"
            )
        except ResponseError as error:
            await self._handle_missing_queue(error)
            return []
        entries = reply[0][1] if reply else []
        return await self._claim_entries(entries, "new", count)

    async def reclaim(self, count: int) -> list[Claim]:
        """Claim up to `count` requests whose lease has run out. Raises: RedisError."""
        # Not XAUTOCLAIM: it gives up after looking at 10 x COUNT entries, which may all be alive.
        command = ("XPENDING", self._queue, GROUP, "IDLE", to_ms(self._lease_s), "-", "+", count)
        try:
            idle = await self._sender.execute(*command)
        except ResponseError as error:
            await self._handle_missing_queue(error)
            return []
        if not idle:
            return []
        # Of several workers that saw the same entry one gets it: taking it resets its idle time.
        claim = ("XCLAIM", self._queue, GROUP, self._worker_id, to_ms(self._lease_s))
        entries = [
            entry for entry in await self._sender.execute(*claim, *(i[0] for i in idle)) if entry
        ]
        for entry_id, _ in entries:
            self._held.discard(entry_id)  # our own, if we let its lease run out
        return await self._claim_entries(entries, "reclaimed", count)

    async def reconcile(self) -> list[Claim]:
        """Claim what Redis counts as ours but whose naming never reached us. Raises: RedisError."""
        claims: list[Claim] = []
        for entry_id in await self._unknown_entries(self._ghost_after_s):
            entries = await self._sender.execute("XRANGE", self._queue, entry_id, entry_id)
            if entries:
                claims += await self._claim_entries(entries, "reconciled", 0)
            else:
                await self._sender.execute("XACK", self._queue, GROUP, entry_id)
        return claims

    async def _unknown_entries(self, idle_s: float) -> list[bytes]:
        command = ("XPENDING", self._queue, GROUP, "IDLE", to_ms(idle_s), "-", "+", 1000)
        try:
            pending = await self._sender.execute(*command, self._worker_id)
        except ResponseError as error:
            await self._handle_missing_queue(error)
            return []
        return [entry[0] for entry in pending if entry[0] not in self._held]

    async def _handle_missing_queue(self, error: ResponseError) -> None:
        if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
            raise error
        await self.create_group()

    async def create_group(self) -> None:
        """Make the queue and its group, unless they exist. Raises: RedisError."""
        try:
            await self._sender.execute("XGROUP", "CREATE", self._queue, GROUP, "0", "MKSTREAM")
            await self._sender.execute("PEXPIRE", self._queue, to_ms(QUEUE_TTL_S))
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    async def _claim_entries(
        self, entries: Sequence[tuple[bytes, list[bytes]]], kind: str, free: int
    ) -> list[Claim]:
        nudges = [entry_id for entry_id, fields in entries if fields[0] == b"nudge"]
        named = [(entry_id, fields[1].decode()) for entry_id, fields in entries
                 if fields[0] == b"id" and entry_id not in self._held]  # fmt: skip
        claims = await asyncio.gather(*(self._claim(*entry) for entry in named))
        live = [claim for claim in claims if claim is not None]
        self.num_claims[kind] += len(live)
        if nudges:
            await self._sender.execute("XACK", self._queue, GROUP, *nudges)
            await self._sender.execute("XDEL", self._queue, *nudges)
            if len(live) < free:
                live += await self.reclaim(free - len(live))
        return live

    async def _claim(self, entry_id: bytes, request_id: str) -> Claim | None:
        self._held.add(entry_id)
        keys = (
            self._queue,
            self._keys.request(self._model, request_id),
            self._keys.log(self._model, request_id),
        )
        arguments = (entry_id, GROUP, self._worker_id, token_hex(8), self._max_attempts)
        try:
            reply = await retry_idempotent(lambda: self._sender.run(CLAIM, keys, arguments))
            claim = await self._read_claim(entry_id, request_id, reply)
        except RedisError as error:
            logger.warning("could not claim %s: %s", request_id, error)
            claim = None
        if claim is None:
            self._held.discard(entry_id)
        return claim

    async def _read_claim(self, entry_id: bytes, request_id: str, reply: list[Any]) -> Claim | None:
        """The claim of a reply; requests that cannot run any more are ended here."""
        verdict = reply[0]
        if verdict == b"stray":
            return None
        _, attempt, failures, payload, reply_to, log, waited_ms, remaining_ms = reply
        try:
            request = decode_request(payload)
            events = decode_events(b"[" + b",".join(log) + b"]")
        except msgspec.MsgspecError as error:
            logger.error("cannot read request %s: %s", request_id, error)
            gateway = reply_to.decode()
            request = GenerateRequest(request_id, gateway, self._model, (), SamplingParams())
            events, verdict = (), b"unreadable"
        claim = Claim(
            request=request,
            entry_id=entry_id,
            attempt=attempt,
            failures=failures,
            is_last_chance=failures > 0 and failures == self._max_attempts - 1,
            output_token_ids=tuple(
                token for event in events if isinstance(event, Delta) for token in event.token_ids
            ),
            waited_s=waited_ms / 1000,
            remaining_s=remaining_ms / 1000,
        )
        if verdict == b"ok":
            return claim
        await self._give_up(claim, verdict)
        return None

    async def _give_up(self, claim: Claim, verdict: bytes) -> None:
        code, message = _VERDICTS[verdict]
        failed = Failed(claim.request.request_id, claim.attempt, code, message)
        reason = "" if verdict == b"expired" else verdict.decode()
        end = Publication(claim, 1, len(claim.output_token_ids), (failed,), reason)
        await retry_idempotent(lambda: self.publish([end]))

    async def publish(self, publications: Sequence[Publication]) -> dict[str, str]:
        """Send events; see `Publisher.publish`. Requests that end or are refused are no longer held."""
        refused = await self._publisher.publish(publications)
        for publication in publications:
            claim = publication.claim
            if publication.terminal is not None or claim.request.request_id in refused:
                self._held.discard(claim.entry_id)
        return refused

    # Leases

    async def renew(self, claims: Iterable[Claim]) -> dict[str, str]:
        """Keep the leases. Returns the requests that are no longer ours, and why. Raises: RedisError."""
        claims = list(claims)
        keys = [self._queue]
        arguments: list[str | bytes | int] = [GROUP, self._worker_id, to_ms(QUEUE_TTL_S)]
        for claim in claims:
            keys.append(self._keys.request(self._model, claim.request.request_id))
            arguments += (claim.attempt, claim.entry_id)
        refused = refusals(claims, await self._sender.run(RENEW, keys, arguments))
        self._held.difference_update(c.entry_id for c in claims if c.request.request_id in refused)
        return refused

    async def release(self, claims: Iterable[Claim], *, blame: bool = False) -> int:
        """Give requests back for others to take at once; returns how many. Raises: RedisError.

        `blame`: the attempt counts as a failure of the request, as if the worker had died of it.
        """
        claims = list(claims)
        keys = [self._queue]
        arguments: list[str | bytes | int] = [GROUP, RELEASED, int(blame)]
        for claim in claims:
            keys.append(self._keys.request(self._model, claim.request.request_id))
            arguments += (claim.attempt, claim.entry_id)
        if not claims:
            return 0
        return await retry_idempotent(lambda: self._sender.run(RELEASE, keys, arguments))

    async def leave(self) -> None:
        """Give back what was read but never claimed, and forget this consumer. Raises: RedisError."""
        for entry_id in await self._unknown_entries(0.001):
            for _, fields in await self._sender.execute("XRANGE", self._queue, entry_id, entry_id):
                keys = (self._queue, self._keys.request(self._model, fields[1].decode()))
                await self._sender.run(RELEASE, keys, (GROUP, RELEASED, 0, "", entry_id))
        await self.reap(self._worker_id)

    async def reap(self, leaving: str = "") -> None:
        """Forget consumers that hold nothing: old ones, and the one named. Raises: RedisError."""
        await self._sender.run(REAP, (self._queue,), (GROUP, leaving, to_ms(FORGET_AFTER_S)))

    async def close(self) -> None:
        """Hang up."""
        self._reader.close()
        await self._sender.close()
