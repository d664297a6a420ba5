"""The worker's end of the queue: claim requests, keep their leases, publish their events, give them back.

A claim is one attempt at a request. Its number fences all earlier attempts: what they still send is refused.
It must not know engines; it sees requests and events.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from secrets import token_hex

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from shared.claim_reply import giving_up, read_claim
from shared.publication import Claim, Publication
from shared.publisher import Publisher, refusals
from shared.redis_client import retry_idempotent
from shared.redis_keys import AFTER_END_S, GROUP, QUEUE_TTL_S, RELEASED, RedisKeys, to_ms
from shared.redis_link import RedisLink, RedisSender
from shared.scripts import BEGIN, CANCEL, CLAIM, REAP, RELEASE, RENEW

logger = logging.getLogger(__name__)

#: Entries of our own that are idle so long and unknown here: the reply that named them was lost.
GHOST_AFTER_S = 3.0
#: Consumers that hold nothing and were not seen so long are forgotten.
FORGET_AFTER_S = 3600.0


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
        self.publisher = Publisher(self._sender, self._keys, model, worker_id)
        self._held: set[bytes] = set()  # entries that this worker knows to be its own
        self.num_claims = Counter({"new": 0, "reclaimed": 0, "reconciled": 0})  #: by kind

    @property
    def num_fenced(self) -> int:
        """Publications refused because another worker owns the request."""
        return self.publisher.num_fenced

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
        idle = await self._idle_entries(count)
        if not idle:
            return []
        # Of several workers that saw the same entry one gets it: taking it resets its idle time.
        claim = ("XCLAIM", self._queue, GROUP, self._worker_id, to_ms(self._lease_s))
        entries = [entry for entry in await self._sender.execute(*claim, *idle) if entry]
        for entry_id, _ in entries:
            self._held.discard(entry_id)  # it was ours, then another's who lost it too
        return await self._claim_entries(entries, "reclaimed", count)

    async def _idle_entries(self, count: int) -> list[bytes]:
        """Up to `count` entries whose lease has run out, without those that this worker is busy with."""
        # Not XAUTOCLAIM: it gives up after looking at 10 x COUNT entries, which may all be alive.
        most = count + len(self._held)
        command = ("XPENDING", self._queue, GROUP, "IDLE", to_ms(self._lease_s), "-", "+", most)
        try:
            idle = await self._sender.execute(*command)
        except ResponseError as error:
            await self._handle_missing_queue(error)
            return []
        me = self._worker_id.encode()
        others = [i[0] for i in idle if i[1] != me or i[0] not in self._held]
        return others[:count]

    async def reconcile(self) -> list[Claim]:
        """Claim what Redis counts as ours but whose naming never reached us. Raises: RedisError."""
        entries: list[tuple[bytes, list[bytes]]] = []
        for entry_id in await self._unknown_entries(self._ghost_after_s):
            found = await self._sender.execute("XRANGE", self._queue, entry_id, entry_id)
            entries += found
            if not found:
                await self._sender.execute("XACK", self._queue, GROUP, entry_id)
        return await self._claim_entries(entries, "reconciled", 0)

    async def _unknown_entries(self, idle_s: float) -> list[bytes]:
        command = ("XPENDING", self._queue, GROUP, "IDLE", round(idle_s * 1000), "-", "+", 1000)
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
        named: list[tuple[bytes, str]] = []
        others: list[bytes] = []  # nudges, which have done their work, and what nobody knows
        for entry_id, fields in entries:
            if fields[0] != b"id":
                others.append(entry_id)
                _warn_of_unknown_kind(fields)
            elif entry_id not in self._held:
                named.append((entry_id, _request_id(fields)))
        live = await self._claim_all(named)
        self.num_claims[kind] += len(live)
        if others:
            try:
                await self._remove(others)
                if len(live) < free:
                    live += await self.reclaim(free - len(live))
            except RedisError as error:  # what is claimed already must not get lost
                logger.warning("could not look at released requests: %s", error)
        return live

    async def _claim_all(self, named: Sequence[tuple[bytes, str]]) -> list[Claim]:
        if len(named) == 1:  # `gather` would cost two turns of the loop
            claims = [await self._claim(*named[0])]
        else:
            claims = await asyncio.gather(*(self._claim(*entry) for entry in named))
        return [claim for claim in claims if claim is not None]

    async def _remove(self, entry_ids: Sequence[bytes]) -> None:
        await self._sender.execute("XACK", self._queue, GROUP, *entry_ids)
        await self._sender.execute("XDEL", self._queue, *entry_ids)

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
            if reply[0] != b"stray":
                verdict, claim = read_claim(
                    reply, entry_id=entry_id, request_id=request_id,
                    model=self._model, max_attempts=self._max_attempts,
                )  # fmt: skip
                if verdict == b"ok":
                    return claim
                await retry_idempotent(lambda: self.publish([giving_up(claim, verdict)]))
        except RedisError as error:
            logger.warning("could not claim %s: %s", request_id, error)
        self._held.discard(entry_id)
        return None

    async def begin(self, claim: Claim) -> bool:
        """Say that a suspect starts to run. Returns whether it is still ours. Raises: RedisError.

        Until then a worker's death is not blamed on it: it may wait long for its turn to run alone.
        """
        request = self._keys.request(self._model, claim.request.request_id)
        keys, arguments = (request,), (claim.attempt,)
        return await retry_idempotent(lambda: self._sender.run(BEGIN, keys, arguments)) == 1

    async def publish(self, publications: Sequence[Publication]) -> dict[str, str]:
        """Send events; see `Publisher.publish`. Requests that end or are refused are no longer held."""
        refused = await self.publisher.publish(publications)
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

    async def cancel(self, claims: Sequence[Claim]) -> None:
        """End requests that nobody waits for any more. Raises: RedisError."""
        keys = [self._queue]
        for claim in claims:
            request_id = claim.request.request_id
            keys.append(self._keys.request(self._model, request_id))
            keys.append(self._keys.log(self._model, request_id))
            self._held.discard(claim.entry_id)
        await self._sender.run(CANCEL, keys, (GROUP, to_ms(AFTER_END_S)))

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

    async def give_back_strays(self, in_flight: Iterable[Claim]) -> None:
        """Give back what Redis counts as ours beyond `in_flight`; call it when nobody claims any more.

        Whoever interrupts `read`, `reclaim` or `reconcile` does not know how far they came. Commands of one
        worker are executed in their order, so that Redis knows by now. Raises: RedisError.
        """
        self._held.intersection_update([claim.entry_id for claim in in_flight])
        for entry_id in await self._unknown_entries(0.0):
            entries = await self._sender.execute("XRANGE", self._queue, entry_id, entry_id)
            if entries and entries[0][1][0] == b"id":
                await self._give_back(entry_id, _request_id(entries[0][1]))
            else:
                await self._remove([entry_id])

    async def _give_back(self, entry_id: bytes, request_id: str) -> None:
        """Without blame, unless its attempt is another worker's, whose lease had run out."""
        request = self._keys.request(self._model, request_id)
        fields = await self._sender.execute("HMGET", request, "state", "attempt", "worker")
        state, attempt, worker = fields
        is_running = state == b"running"
        blame = int(is_running and worker != self._worker_id.encode())
        item = (attempt if is_running else "", entry_id)
        await self._sender.run(RELEASE, (self._queue, request), (GROUP, RELEASED, blame, *item))

    async def leave(self) -> None:
        """Give back what is still ours, and forget this consumer. Raises: RedisError."""
        await self.give_back_strays(())
        await self.reap(self._worker_id)

    async def reap(self, leaving: str = "") -> None:
        """Forget consumers that hold nothing: old ones, and the one named. Raises: RedisError."""
        await self._sender.run(REAP, (self._queue,), (GROUP, leaving, to_ms(FORGET_AFTER_S)))

    async def close(self) -> None:
        """Hang up."""
        self._reader.close()
        await self._sender.close()


def _request_id(fields: Sequence[bytes]) -> str:
    return fields[1].decode(errors="replace")  # an id that is none is no request's: a stray


def _warn_of_unknown_kind(fields: Sequence[bytes]) -> None:
    if fields[0] != b"nudge":
        logger.error("removing an entry of unknown kind from the queue: %r", fields[0][:64])
