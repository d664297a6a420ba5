"""The worker's end of the queue: claim requests, keep their leases, publish their events, give them back.

A claim is one attempt at a request. Its number fences all earlier attempts: what they still send is
refused.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from secrets import token_hex
from types import MappingProxyType
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from shared.protocol import ErrorCode, Failed, encode
from shared.queue.api import CLEARED_AFTER_TOKENS, Claim, Publication, QueueUnavailable
from shared.queue.keys import (
    BELL_TTL_S,
    CRASH_TTL_S,
    GROUP,
    HOME_TTL_S,
    QUEUE_TTL_S,
    RELEASED_CONSUMER,
    RedisKeys,
    cancel_arguments,
    keys_of_calls,
    to_ms,
)
from shared.queue.publish import Publisher, refusals
from shared.queue.scripts import BEGIN, CANCEL, CLAIM, REAP, RELEASE, RENEW, TAKE, named
from shared.redis.client import redis_errors_as, retry_idempotent
from shared.redis.link import Command, RedisLink, RedisSender, with_ttl

Entry = tuple[bytes, list[bytes]]
Replies = Mapping[bytes, list[Any]]  #: of the claim script, by entry
NO_REPLIES: Replies = MappingProxyType({})

#: Entries of our own that are idle so long and unknown here: the reply that named them was lost.
GHOST_AFTER_S = 3.0
#: Consumers that hold nothing and were not seen so long are forgotten.
FORGET_AFTER_S = 3600.0
#: How often they are looked for.
REAP_EVERY_S = 600.0
#: Interactive calls that overtake batch work before the oldest of it, if it is old enough, queues among them.
OVERTAKES_PER_AGED = 10
#: A gateway without a mailbox is gone; longer than a living one needs to make it again.
GONE_AFTER_S = 10.0
#: A request is given up after so many lost workers for each that counts against it: it is innocent as far as is known.
LOSSES_PER_ATTEMPT = 4

_FAILURES = {
    b"expired": (ErrorCode.DEADLINE_EXCEEDED, "the request's deadline passed while it waited"),
    b"exhausted": (ErrorCode.TOO_MANY_ATTEMPTS, "every worker that tried the request ended early"),
    b"kills_workers": (
        ErrorCode.REQUEST_KILLS_WORKERS,
        "every worker that ran the request by itself ended early",
    ),
}

logger = logging.getLogger(__name__)


class RedisWorkerQueue:
    """One worker's end of one model's queue: a `WorkerQueue`."""

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
        batch_age_s: float,
        ghost_after_s: float = GHOST_AFTER_S,
    ) -> None:
        self._keys = RedisKeys(keys_prefix)
        self._sender = RedisSender(redis)
        self._reader = RedisLink(blocking_redis)
        self._bell = Bell(RedisLink(blocking_redis), self._keys.bell(model, worker_id))
        self.entries = QueueEntries(self._sender, self._reader, self._keys, model, worker_id)
        self._model = model
        self._queue = self._keys.queue(model)
        self._worker_id = worker_id
        self._lease_s = lease_s
        self._max_attempts = max_attempts
        self._script = ClaimScript(self._keys, model, worker_id, max_attempts)
        self._last_read_id = b"0"
        self._ghost_after_s = ghost_after_s
        self._batch_age_s = batch_age_s
        self._num_overtakes = 0
        self._last_reap_at = time.monotonic()
        self._liveness = GatewayLiveness()
        self.publisher = Publisher(self._sender, self._keys, model, worker_id)
        self._held: set[bytes] = set()  # entries that this worker knows to be its own
        self.num_claims = Counter({"new": 0, "reclaimed": 0, "reconciled": 0})  #: by kind

    @property
    def num_fenced(self) -> int:
        """See `WorkerQueue.num_fenced`."""
        return self.publisher.num_fenced

    @property
    def num_backlog(self) -> int:
        """See `WorkerQueue.num_backlog`."""
        return self.entries.num_backlog

    # Claiming

    @redis_errors_as(QueueUnavailable)
    async def read(self, count: int, block_s: float) -> list[Claim]:
        """See `WorkerQueue.read`. One in so many calls that overtake batch work lets an old one of it into the queue."""
        if self._num_overtakes >= OVERTAKES_PER_AGED:
            self._num_overtakes = 0
            await self.entries.age(self._batch_age_s)
        claims = await self._read(count, block_s)
        if self.num_backlog:
            self._num_overtakes += len(claims)
        return claims

    async def _read(self, count: int, block_s: float) -> list[Claim]:
        claim = self._script.of_read(self._last_read_id, count)
        entries, answers = await self.entries.wait(count, block_s, claim)
        if entries:
            self._last_read_id = entries[-1][0]
        if not isinstance(answers, list):  # each call of its own teaches Redis the script
            return await self._claim_entries(entries, "new", count)
        # There may be answers without entries: the reply of an earlier read was lost.
        claimed, replies = split_replies(answers)
        others = [entry for entry in entries if entry[0] not in replies]
        return await self._claim_entries([*claimed, *others], "new", count, replies)

    @redis_errors_as(QueueUnavailable)
    async def read_aside(self, count: int, block_s: float) -> list[Claim]:
        """See `WorkerQueue.read_aside`."""
        claim = self._script.of_read(self._last_read_id, count)
        has_rung, answers = await self._bell.wait(count, block_s, claim)
        if has_rung and not isinstance(answers, list):  # Redis has forgotten the script
            answers = await self._sender.run(CLAIM, (self._queue,), claim[4:])
        claimed, replies = split_replies(answers if isinstance(answers, list) else ())
        if claimed:
            self._last_read_id = claimed[-1][0]
        claims = await self._claim_entries(claimed, "new", count, replies)
        if self.num_backlog:
            self._num_overtakes += len(claims)
        return claims

    @redis_errors_as(QueueUnavailable)
    async def take(self, count: int) -> list[Claim]:
        """See `WorkerQueue.take`."""
        return await self._claim_entries(await self.entries.take(count), "new", count)

    @redis_errors_as(QueueUnavailable)
    async def reclaim(self, count: int) -> list[Claim]:
        """See `WorkerQueue.reclaim`."""
        return await self._reclaim(count)

    async def _reclaim(self, count: int) -> list[Claim]:
        idle = await self.entries.idle(count, self._lease_s, self._held)
        if not idle:
            return []
        entries = await self.entries.seize(idle, self._lease_s)
        for entry_id, _ in entries:
            self._held.discard(entry_id)  # it was ours, then another's who lost it too
        return await self._claim_entries(entries, "reclaimed", count)

    @redis_errors_as(QueueUnavailable)
    async def reconcile(self) -> list[Claim]:
        """See `WorkerQueue.reconcile`. Consumers that hold nothing are forgotten now and then."""
        await self.entries.look_at_backlog()
        if time.monotonic() - self._last_reap_at > REAP_EVERY_S:
            self._last_reap_at = time.monotonic()
            await self.entries.reap()
        entries: list[Entry] = []
        for entry_id in await self.entries.unknown(self._ghost_after_s, self._held):
            found = await self.entries.find(entry_id)
            if found is None:
                await self.entries.remove([entry_id])
            else:
                entries.append(found)
        return await self._claim_entries(entries, "reconciled", 0)

    async def _claim_entries(
        self, entries: Sequence[Entry], kind: str, free: int, replies: Replies = NO_REPLIES
    ) -> list[Claim]:
        named: list[tuple[bytes, str]] = []
        nudges: list[bytes] = []  # which have done their work, and what nobody knows
        is_released = False
        for entry_id, fields in entries:
            if fields[0] != b"id":
                nudges.append(entry_id)
                is_released |= self._note_nudge(fields[0])
            elif entry_id not in self._held:
                named.append((entry_id, _request_id(fields)))
        live = await self._claim_all(named, replies)
        self.num_claims[kind] += len(live)
        if nudges:
            try:
                await self.entries.remove(nudges)
                if is_released and len(live) < free:
                    live += await self._reclaim(free - len(live))
            except RedisError as error:  # what is claimed already must not get lost
                logger.warning("could not look at released requests: %s", error)
        return live

    def _note_nudge(self, kind: bytes) -> bool:
        """Take note of what a nudge says. Returns whether requests were released."""
        if kind == b"batch":
            self.entries.num_backlog = max(1, self.entries.num_backlog)
        elif kind != b"nudge":
            logger.error("removing an entry of unknown kind from the queue: %r", kind[:64])
        return kind == b"nudge"

    async def _claim_all(self, named: Sequence[tuple[bytes, str]], replies: Replies) -> list[Claim]:
        if len(named) == 1:  # `gather` would cost two turns of the loop
            claims = [await self._claim(*named[0], replies)]
        else:
            claims = await asyncio.gather(*(self._claim(*entry, replies) for entry in named))
        return [claim for claim in claims if claim is not None]

    async def _claim(self, entry_id: bytes, request_id: str, replies: Replies) -> Claim | None:
        self._held.add(entry_id)
        try:
            reply = replies.get(entry_id) or await self._call(entry_id, request_id)
            if reply[0] != b"stray":
                verdict, claim = read_claim(reply, entry_id, request_id, self._max_attempts)
                if verdict == b"ok":
                    return claim
                await retry_idempotent(lambda: self._publish([giving_up(claim, verdict)]))
        except RedisError as error:
            logger.warning("could not claim %s: %s", request_id, error)
        self._held.discard(entry_id)
        return None

    async def _call(self, entry_id: bytes, request_id: str) -> list[Any]:
        keys, arguments = self._script.of_one(entry_id, request_id)
        return await retry_idempotent(lambda: self._sender.run(CLAIM, keys, arguments))

    @redis_errors_as(QueueUnavailable)
    async def begin(self, claim: Claim) -> bool:
        """See `WorkerQueue.begin`. Until then a loss is not blamed on it: it may wait long for its turn to run alone."""
        request = self._keys.request(self._model, claim.id)
        keys, arguments = (request,), named(attempt=claim.attempt)
        return await retry_idempotent(lambda: self._sender.run(BEGIN, keys, arguments)) == 1

    @redis_errors_as(QueueUnavailable)
    async def publish(self, publications: Sequence[Publication]) -> dict[str, str]:
        """See `WorkerQueue.publish`. Calls that end or are refused are no longer held."""
        return await self._publish(publications)

    async def _publish(self, publications: Sequence[Publication]) -> dict[str, str]:
        refused = await self.publisher.publish(publications)
        for publication in publications:
            claim = publication.claim
            if publication.ending is not None or claim.id in refused:
                self._held.discard(claim.entry_id)
        return refused

    # Leases

    @redis_errors_as(QueueUnavailable)
    async def renew(self, claims: Iterable[Claim]) -> dict[str, str]:
        """See `WorkerQueue.renew`."""
        claims = list(claims)
        keys = [self._queue]
        keys += [self._keys.request(self._model, claim.id) for claim in claims]
        arguments = named(
            group=GROUP,
            worker=self._worker_id,
            queue_ttl_ms=to_ms(QUEUE_TTL_S),
            items=[
                {"attempt": claim.attempt, "entry": claim.entry_id.decode()} for claim in claims
            ],
        )
        refused = refusals(claims, await self._sender.run(RENEW, keys, arguments))
        self._held.difference_update(c.entry_id for c in claims if c.id in refused)
        return refused

    @redis_errors_as(QueueUnavailable)
    async def cancel_deserted(self, claims: Iterable[Claim]) -> list[Claim]:
        """See `WorkerQueue.cancel_deserted`."""
        claims = list(claims)
        listening = await self.publisher.listening({claim.reply_to for claim in claims})
        gone = self._liveness.update(listening, time.monotonic())
        deserted = [claim for claim in claims if claim.reply_to in gone]
        if deserted:
            await self._cancel(deserted)
        return deserted

    async def _cancel(self, claims: Sequence[Claim]) -> None:
        keys = [self._queue, self._keys.backlog(self._model), self._keys.reservations(self._model)]
        keys += keys_of_calls(self._keys, self._model, [claim.id for claim in claims])
        self._held.difference_update([claim.entry_id for claim in claims])
        arguments = named(**cancel_arguments(self._keys, self._model))
        await self._sender.run(CANCEL, keys, arguments)

    @redis_errors_as(QueueUnavailable)
    async def release(self, claims: Iterable[Claim], *, blame: bool = False) -> int:
        """See `WorkerQueue.release`."""
        claims = list(claims)
        if not claims:
            return 0
        requests = [self._keys.request(self._model, claim.id) for claim in claims]
        items = [{"attempt": claim.attempt, "entry": claim.entry_id.decode()} for claim in claims]
        return await retry_idempotent(lambda: self._release(requests, items, blame))

    async def _release(self, requests: list[str], items: list[dict[str, Any]], blame: bool) -> int:
        arguments = named(
            group=GROUP,
            released=RELEASED_CONSUMER,
            blame=blame,
            crashes=self._keys.crash(self._model, ""),
            crash_ttl_ms=to_ms(CRASH_TTL_S),
            items=items,
        )
        return await self._sender.run(RELEASE, [self._queue, *requests], arguments)

    @redis_errors_as(QueueUnavailable)
    async def leave(self, keep: Iterable[Claim] = ()) -> None:
        """See `WorkerQueue.leave`.

        Whoever interrupts `read`, `reclaim` or `reconcile` does not know how far they came. Commands of one
        worker are executed in their order, so that Redis knows by now.
        """
        await self._bell.remove(self._sender)
        self._held.intersection_update([claim.entry_id for claim in keep])
        for entry_id in await self.entries.unknown(0.0, self._held):
            entry = await self.entries.find(entry_id)
            if entry is not None and entry[1][0] == b"id":
                await self._give_back(entry_id, _request_id(entry[1]))
            else:
                await self.entries.remove([entry_id])
        await self.entries.reap(self._worker_id)

    async def _give_back(self, entry_id: bytes, request_id: str) -> None:
        """Without blame, unless its attempt is another worker's, whose lease had run out."""
        request = self._keys.request(self._model, request_id)
        fields = await self._sender.execute("HMGET", request, "state", "attempt", "worker")
        state, attempt, worker = fields
        is_running = state == b"running"
        blame = is_running and worker != self._worker_id.encode()
        item = {"attempt": int(attempt) if is_running else None, "entry": entry_id.decode()}
        await self._release([request], [item], blame)

    async def create_group(self) -> None:
        """Make the queue, unless it exists. Raises: RedisError."""
        await self.entries.create_group()

    async def close(self) -> None:
        self._reader.close()
        self._bell.close()
        await self._sender.close()


def _request_id(fields: Sequence[bytes]) -> str:
    return fields[1].decode(errors="replace")  # an id that is none is no request's: a stray


class Bell:
    """Wakes a worker when something is put aside for it. While it exists, something may be."""

    def __init__(self, link: RedisLink, key: str) -> None:
        self._link = link
        self.key = key
        self._rung = b""  # empty before the key is made
        self._renew_at = 0.0

    async def wait(self, count: int, block_s: float, and_then: Command) -> tuple[bool, Any]:
        """Whether it rang, and what Redis says then to `and_then`; an error may be its answer. Raises: RedisError."""
        ttl_ms = to_ms(BELL_TTL_S)
        if not self._rung:
            made = with_ttl(self.key, ttl_ms, "XADD", self.key, "*", "made", "")
            self._rung = await self._link.execute(*made)
        renewal: Command = ("PEXPIRE", self.key, ttl_ms)
        read = ("XREAD", "COUNT", count, "BLOCK", to_ms(block_s), "STREAMS", self.key, self._rung)
        is_due = (now := time.monotonic()) >= self._renew_at
        *renewed, rung, answer = await self._exchange([renewal] * is_due + [read, and_then])
        if rung:
            self._rung = rung[0][1][-1][0]
        elif 0 in renewed:
            self._rung = b""  # Redis has lost it
        if is_due or not rung:
            self._renew_at = now + BELL_TTL_S / 4 if rung else 0.0
        return bool(rung), answer

    async def _exchange(self, commands: list[Command]) -> list[Any]:
        """The replies, of which the last may be an error. Raises: RedisError."""
        replies = await self._link.exchange(commands)
        for reply in replies[:-1]:
            if isinstance(reply, Exception):
                raise reply
        return replies

    async def remove(self, sender: RedisSender) -> None:
        """Nothing more is put aside. Raises: RedisError."""
        await sender.execute("DEL", self.key)

    def close(self) -> None:
        self._link.close()


class QueueEntries:
    """One worker's view of one queue. `num_backlog` is how long the backlog was when it was last looked at."""

    def __init__(
        self, sender: RedisSender, reader: RedisLink, keys: RedisKeys, model: str, worker_id: str
    ) -> None:
        self._sender = sender
        self._reader = reader
        self._worker_id = worker_id
        self._queue = keys.queue(model)
        self._batch_keys = (keys.queue(model), keys.backlog(model))
        self._requests = keys.requests(model)
        self._read = ("XREADGROUP", "GROUP", GROUP, worker_id, "COUNT")
        self.num_backlog = 0

    async def wait(
        self, count: int, block_s: float, and_then: Command
    ) -> tuple[Sequence[Entry], Any]:
        """Up to `count` entries that nobody has read, and what Redis says to `and_then`; waits for the first entry.

        The command stands behind the read, so that Redis does both at once when an entry comes. If it fails, that
        is its answer. Raises: RedisError.
        """
        where = (count, "BLOCK", to_ms(block_s), "STREAMS", self._queue, ">")
        reply, answer = await self._reader.exchange([(*self._read, *where), and_then])
        if isinstance(reply, ResponseError):
            await self._handle_missing_queue(reply)
            return [], None
        if isinstance(reply, Exception):
            raise reply
        return (reply[0][1] if reply else []), answer

    async def take(self, count: int, age_s: float | None = None) -> Sequence[Entry]:
        """Up to `count` entries, of batch work where nothing else waits; does not wait. Raises: RedisError.

        `age_s`: what has waited that long joins the queue, the oldest at once.
        """
        arguments = named(
            requests=self._requests,
            group=GROUP,
            worker=self._worker_id,
            count=count,
            age_ms=None if age_s is None else to_ms(age_s),
        )
        try:
            entries, self.num_backlog = await self._sender.run(TAKE, self._batch_keys, arguments)
        except ResponseError as error:
            await self._handle_missing_queue(error)
            return []
        return entries

    async def age(self, age_s: float) -> None:
        """Let the oldest batch call into the queue, if it has waited that long. Raises: RedisError."""
        await self.take(0, age_s)

    async def look_at_backlog(self) -> None:
        """Whether there is batch work. Raises: RedisError."""
        self.num_backlog = await self._sender.execute("XLEN", self._batch_keys[1])

    async def idle(self, count: int, lease_s: float, held: Set[bytes]) -> Sequence[bytes]:
        """Up to `count` entries whose lease has run out, without those that this worker is busy with."""
        # Not XAUTOCLAIM: it gives up after looking at 10 x COUNT entries, which may all be alive.
        most = count + len(held)
        command = ("XPENDING", self._queue, GROUP, "IDLE", to_ms(lease_s), "-", "+", most)
        try:
            idle = await self._sender.execute(*command)
        except ResponseError as error:
            await self._handle_missing_queue(error)
            return []
        me = self._worker_id.encode()
        others = [i[0] for i in idle if i[1] != me or i[0] not in held]
        return others[:count]

    async def seize(self, entry_ids: Sequence[bytes], lease_s: float) -> Sequence[Entry]:
        """Make entries ours whose lease has run out. Raises: RedisError.

        Of several workers that saw the same entry one gets it: taking it resets its idle time.
        """
        command = ("XCLAIM", self._queue, GROUP, self._worker_id, to_ms(lease_s))
        return [entry for entry in await self._sender.execute(*command, *entry_ids) if entry]

    async def unknown(self, idle_s: float, held: Set[bytes]) -> Sequence[bytes]:
        """What Redis counts as ours and is not held. Raises: RedisError."""
        command = ("XPENDING", self._queue, GROUP, "IDLE", round(idle_s * 1000), "-", "+", 1000)
        try:
            pending = await self._sender.execute(*command, self._worker_id)
        except ResponseError as error:
            await self._handle_missing_queue(error)
            return []
        return [entry[0] for entry in pending if entry[0] not in held]

    async def find(self, entry_id: bytes) -> Entry | None:
        """An entry by its id, if it is in the queue. Raises: RedisError."""
        found = await self._sender.execute("XRANGE", self._queue, entry_id, entry_id)
        return found[0] if found else None

    async def remove(self, entry_ids: Sequence[bytes]) -> None:
        """Take entries out of the queue that are no request's. Raises: RedisError."""
        await self._sender.execute("XACK", self._queue, GROUP, *entry_ids)
        await self._sender.execute("XDEL", self._queue, *entry_ids)

    async def create_group(self) -> None:
        """Make the queue and its group, unless they exist. Raises: RedisError."""
        try:
            command = ("XGROUP", "CREATE", self._queue, GROUP, "0", "MKSTREAM")
            await self._sender.execute(*with_ttl(self._queue, to_ms(QUEUE_TTL_S), *command))
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    async def reap(self, leaving: str = "") -> None:
        """Forget consumers that hold nothing: old ones, and the one named. Raises: RedisError."""
        await self._sender.run(
            REAP, (self._queue,), named(group=GROUP, worker=leaving, idle_ms=to_ms(FORGET_AFTER_S))
        )

    async def _handle_missing_queue(self, error: ResponseError) -> None:
        if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
            raise error
        await self.create_group()


class ClaimScript:
    """Keys and arguments of one worker's calls for one model."""

    def __init__(self, keys: RedisKeys, model: str, worker_id: str, max_attempts: int) -> None:
        self._keys = keys
        self._model = model
        self._read_nonce = token_hex(8)  # a request comes by a read once, so one is enough
        self._common: dict[str, Any] = {
            "group": GROUP,
            "worker": worker_id,
            "max_attempts": max_attempts,
            "max_losses": LOSSES_PER_ATTEMPT * max_attempts,
            "cleared_after": CLEARED_AFTER_TOKENS,
            "home_ms": to_ms(HOME_TTL_S),
        }
        self._of_reads = self._common | {
            "nonce": self._read_nonce,
            "requests": keys.requests(model),
            "logs": keys.log(model, ""),
        }
        self._read_command = ("EVALSHA", CLAIM.sha, 1, keys.queue(model))

    def of_one(self, entry_id: bytes, request_id: str) -> tuple[list[str], tuple[bytes, ...]]:
        """Claim the request of an entry."""
        keys = [
            self._keys.queue(self._model),
            self._keys.request(self._model, request_id),
            self._keys.log(self._model, request_id),
        ]
        nonces = {"nonce": token_hex(8), "read_nonce": self._read_nonce}
        return keys, named(entry=entry_id.decode(), **nonces, **self._common)

    def of_read(self, last_id: bytes, count: int) -> Command:
        """Claim up to `count` requests that the read before this command brings; `last_id` came before.

        Answered by entry, request id, length of the reply and the reply of each, in one flat list, or by an error if
        Redis has forgotten the script.
        """
        arguments = named(entry=last_id.decode(), count=count, **self._of_reads)
        return (*self._read_command, *arguments)


class GatewayLiveness:
    """How long each gateway's mailbox has been missing. Units: readings of one monotonic clock.

    A mailbox lives as long as its gateway renews it. Redis may lose it, or let it expire while it was frozen itself;
    the gateway makes it again within seconds then. Only one that stays away is taken for dead.
    """

    def __init__(self) -> None:
        self._missing_since: dict[str, float] = {}

    def update(self, present: Iterable[tuple[str, bool]], now: float) -> set[str]:
        """Take what was found, by gateway; returns those that are gone. Others are forgotten."""
        self._missing_since = {
            gateway: self._missing_since.get(gateway, now)
            for gateway, is_present in present
            if not is_present
        }
        return {g for g, since in self._missing_since.items() if now - since >= GONE_AFTER_S}


def split_replies(answers: Sequence[Any]) -> tuple[list[Entry], dict[bytes, list[Any]]]:
    """The entries that one call of the claim script has claimed, and what it says of each."""
    entries: list[Entry] = []
    replies: dict[bytes, list[Any]] = {}
    at = 0
    while at < len(answers):
        entry_id, request_id, length = answers[at : at + 3]
        entries.append((entry_id, [b"id", request_id]))
        replies[entry_id] = list(answers[at + 3 : (at := at + 3 + length)])
    return entries, replies


def read_claim(
    reply: list[Any], entry_id: bytes, request_id: str, max_attempts: int
) -> tuple[bytes, Claim]:
    """The verdict and the claim of a reply. Verdicts: ok, expired, kills_workers or exhausted."""
    verdict, attempt, failures, payload, reply_to, waited_ms, remaining_ms, *log = reply
    claim = Claim(
        id=request_id,
        reply_to=reply_to.decode(),
        payload=payload,
        log=tuple(log),
        entry_id=entry_id,
        attempt=attempt,
        failures=failures,
        is_last_chance=failures > 0 and failures == max_attempts - 1,
        waited_s=waited_ms / 1000,
        remaining_s=remaining_ms / 1000,
    )
    return verdict, claim


def giving_up(claim: Claim, verdict: bytes) -> Publication:
    """The end of a call that cannot run any more."""
    code, message = _FAILURES[verdict]
    failed = encode(Failed(claim.id, claim.attempt, code, message))
    reason = "" if verdict == b"expired" else verdict.decode()
    return Publication(claim, 1, 0, 0, failed, "failed", reason)
