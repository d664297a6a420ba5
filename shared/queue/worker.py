"""The worker's side of the queue: claim requests, renew their leases, publish their events, release them."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from random import randrange
from secrets import token_hex
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from shared.protocol import ErrorCode, Failed, encode
from shared.queue.api import CLEARED_AFTER_TOKENS, Claim, Publication, QueueUnavailable
from shared.queue.entries import Entry, QueueEntries
from shared.queue.keys import (
    AFFINITY_TTL_S,
    AFTER_END_S,
    CRASH_TTL_S,
    DEAD_TTL_S,
    GROUP,
    MAX_DEAD_ENTRIES,
    MAX_MAILBOX_ENTRIES,
    QUEUE_TTL_S,
    RELEASED_CONSUMER,
    RedisKeys,
    RedisStore,
    cancel_arguments,
    keys_of_calls,
    to_ms,
)
from shared.queue.scripts import BEGIN, CANCEL, CLAIM, PUBLISH, RELEASE, RENEW
from shared.redis.client import (
    Command,
    RedisLink,
    RedisSender,
    named,
    redis_errors_as,
    retry_idempotent,
)

Replies = Mapping[bytes, list[Any]]  #: replies of the claim script, by entry

#: An entry that Redis assigns to this worker, but that the worker does not hold, belongs to a lost reply if it is idle for
#: longer than this. Leases are renewed more often, so entries held by another worker with the same name stay younger.
UNKNOWN_AFTER_S = 4.0
#: Interval between renewals of a worker's leases; at most a quarter of a lease, so that late heartbeats do not lose the lease.
RENEW_EVERY_S = 2.5
#: Heartbeats between checks of all requests of a worker, in case Redis has lost writes.
CHECK_EVERY = 240
#: Interval between deletions of old consumers.
REAP_EVERY_S = 600.0
#: Interactive calls that overtake batch calls before the oldest batch call joins the queue.
OVERTAKES_PER_AGED = 10
#: A request fails after `max_attempts` times this many lost workers, whether or not they count as crashes.
LOSSES_PER_ATTEMPT = 4
#: A gateway whose mailbox is missing for this long is gone: a live gateway creates it again sooner.
GONE_AFTER_S = 10.0
#: Maximum items of one script call, which blocks Redis while it runs.
MAX_ITEMS = 64

_FAILURES = {
    b"expired": (ErrorCode.DEADLINE_EXCEEDED, "the request's deadline passed while it waited"),
    b"exhausted": (ErrorCode.TOO_MANY_ATTEMPTS, "every worker that ran the request was lost"),
    b"kills_workers": (
        ErrorCode.REQUEST_KILLS_WORKERS,
        "every worker that ran only this request was lost",
    ),
}

logger = logging.getLogger(__name__)


@redis_errors_as(QueueUnavailable)
class RedisWorkerQueue(RedisStore):
    """One worker's side of one model's queue: a `WorkerQueue`."""

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
        unknown_after_s: float = UNKNOWN_AFTER_S,
    ) -> None:
        super().__init__(redis, keys_prefix)
        self._reader = RedisLink(blocking_redis)
        self.entries = QueueEntries(self._sender, self._reader, self._keys, model, worker_id)
        self._model = model
        self._queue = self._keys.queue(model)
        self._worker_id = worker_id
        self._lease_s = lease_s
        self._max_attempts = max_attempts
        self._script = ClaimScript(self._keys, model, worker_id, max_attempts)
        self._last_read_id = b"0"
        self._unknown_after_s = unknown_after_s
        self._batch_age_s = batch_age_s
        self._num_overtakes = 0
        self._last_reap_at = time.monotonic()
        self.publisher = Publisher(self._sender, self._keys, model, worker_id)
        self._held: dict[bytes, int] = {}  # attempts of this worker's entries
        self._renew_every_s = min(RENEW_EVERY_S, lease_s / 4)
        self._find_at = 0.0  # by the monotonic clock: next search for unknown entries
        self._renew_at = 0.0  # next renewal of leases
        self._doubtful: set[bytes] = set()  # entries that this worker may have lost
        self._num_renewals = randrange(CHECK_EVERY)  # not all workers check at once
        self.num_claims = Counter({"new": 0, "reclaimed": 0, "reconciled": 0})

    @property
    def num_fenced(self) -> int:
        return self.publisher.num_fenced

    @property
    def num_backlog(self) -> int:
        return self.entries.num_backlog

    # Claiming

    async def read(self, count: int, block_s: float) -> list[Claim]:
        """See `WorkerQueue.read`. An old batch call joins the queue after `OVERTAKES_PER_AGED` claims."""
        if self._num_overtakes >= OVERTAKES_PER_AGED:
            self._num_overtakes = 0
            await self.entries.take(0, self._batch_age_s)
        claims = await self._read(count, block_s)
        if self.num_backlog:
            self._num_overtakes += len(claims)
        return claims

    async def _read(self, count: int, block_s: float) -> list[Claim]:
        claim = self._script.of_read(self._last_read_id, count)
        entries, answers = await self.entries.wait(count, block_s, claim)
        if not isinstance(answers, list):  # Redis does not have the script yet
            keys, arguments = (self._queue,), claim[4:]
            answers = await retry_idempotent(lambda: self._sender.run(CLAIM, keys, arguments))
        # Some replies have no entry in this read: their requests were reserved, or an earlier read's reply was lost.
        claimed, replies = split_replies(answers)
        others = [entry for entry in entries if entry[0] not in replies]
        if claimed or others:
            self._last_read_id = (claimed or others)[-1][0]
        return await self._claim_entries([*claimed, *others], "new", count, replies)

    async def take(self, count: int) -> list[Claim]:
        return await self._claim_entries(await self.entries.take(count), "new", count)

    async def take_scan(self, every_s: float) -> bool:
        command = ("SET", self._keys.scan(self._model), self._worker_id, "NX", "PX", to_ms(every_s))
        try:
            return await self._sender.execute(*command) is not None
        except ResponseError:  # an older ACL may not allow this key
            return True

    async def end_scan(self) -> None:
        with suppress(ResponseError):
            await self._sender.execute("DEL", self._keys.scan(self._model))

    async def reclaim(self, count: int) -> list[Claim]:
        idle = await self.entries.idle(count, self._lease_s, self._held)
        if not idle:
            return []
        entries = await self.entries.seize(idle, self._lease_s)
        for entry_id, _ in entries:
            self._held.pop(entry_id, None)  # lost earlier by this worker, and now by the next owner
        return await self._claim_entries(entries, "reclaimed", count)

    async def reconcile(self) -> list[Claim]:
        """See `WorkerQueue.reconcile`. Consumers without entries are deleted every `REAP_EVERY_S`."""
        await self.entries.refresh_num_backlog()
        unknown = await self._find_unknown()
        if time.monotonic() - self._last_reap_at > REAP_EVERY_S:
            self._last_reap_at = time.monotonic()
            await self.entries.reap()
        entries: list[Entry] = []
        for entry_id in unknown:
            found = await self.entries.find(entry_id)
            if found is None:
                await self.entries.remove([entry_id])
            else:
                entries.append(found)
        return await self._claim_entries(entries, "reconciled", 0)

    async def _find_unknown(self) -> Sequence[bytes]:
        """Entries whose claim reply was lost. Redis is asked as often as leases are renewed."""
        if time.monotonic() < self._find_at:
            return ()
        unknown, _ = await asyncio.gather(
            self.entries.unknown(self._unknown_after_s, self._held), self.entries.keep_wakeups()
        )
        self._find_at = time.monotonic() + self._renew_every_s
        return unknown

    async def _claim_entries(
        self, entries: Sequence[Entry], kind: str, free: int, replies: Replies | None = None
    ) -> list[Claim]:
        named: list[tuple[bytes, str]] = []
        wakeups: list[bytes] = []  # and entries of an unknown kind
        is_released = False
        for entry_id, fields in entries:
            if fields[0] != b"id":
                wakeups.append(entry_id)
                is_released |= self._note_wakeup(fields[0])
            elif entry_id not in self._held:
                self._held[entry_id] = 0  # before the first await: concurrent calls skip the entry
                named.append((entry_id, _request_id(fields)))
        live = await self._claim_all(named, replies or {})
        self.num_claims[kind] += len(live)
        if wakeups:
            try:
                await self.entries.remove(wakeups)
                if is_released and len(live) < free:
                    live += await self.reclaim(free - len(live))
            except (RedisError, QueueUnavailable) as error:  # return the claims anyway
                logger.warning("could not reclaim released requests: %s", error)
        return live

    def _note_wakeup(self, kind: bytes) -> bool:
        """Handle a wakeup entry. Returns True if requests were released."""
        if kind == b"batch":
            self.entries.num_backlog = max(1, self.entries.num_backlog)
        elif kind != b"nudge":
            logger.error("removing an entry of unknown kind from the queue: %r", kind[:64])
        return kind == b"nudge"

    async def _claim_all(self, named: Sequence[tuple[bytes, str]], replies: Replies) -> list[Claim]:
        if len(named) == 1:  # `gather` would cost two iterations of the event loop
            claims = [await self._claim(*named[0], replies)]
        else:
            claims = await asyncio.gather(*(self._claim(*entry, replies) for entry in named))
        return [claim for claim in claims if claim is not None]

    async def _claim(self, entry_id: bytes, request_id: str, replies: Replies) -> Claim | None:
        try:
            reply = replies.get(entry_id)
            if reply is None:
                keys, arguments = self._script.of_one(entry_id, request_id)
                reply = await self._run(CLAIM, keys, **arguments)
            if reply[0] != b"unknown":
                verdict, claim = read_claim(reply, entry_id, request_id, self._max_attempts)
                if verdict == b"ok":
                    self._held[entry_id] = claim.attempt
                    return claim
                failure = giving_up(claim, verdict)
                await retry_idempotent(lambda: self.publisher.publish([failure]))
        except RedisError as error:
            logger.warning("could not claim %s: %s", request_id, error)
        self._held.pop(entry_id, None)
        return None

    async def begin(self, claim: Claim) -> bool:
        """See `WorkerQueue.begin`. Before this call, the loss of the worker does not count as a crash."""
        keys = (self._keys.request(self._model, claim.id),)
        return await self._run(BEGIN, keys, attempt=claim.attempt, worker=self._worker_id) == 1

    async def publish(self, publications: Sequence[Publication]) -> dict[str, str]:
        """See `WorkerQueue.publish`. Calls that end or are refused are no longer held."""
        refused = await self.publisher.publish(publications)
        for publication in publications:
            claim = publication.claim
            if publication.ending is not None or claim.id in refused:
                self._let_go(claim)
        return refused

    def _let_go(self, claim: Claim) -> None:
        if self._holds(claim):  # else: this worker has claimed it again
            del self._held[claim.entry_id]

    def _holds(self, claim: Claim) -> bool:
        return self._held.get(claim.entry_id) == claim.attempt

    # Leases

    async def renew(self, claims: Iterable[Claim]) -> dict[str, str]:
        """See `WorkerQueue.renew`.

        Scripts that cancel or take over a request add its entry to the stream of wakeups of the worker that runs it.
        Leases are renewed at intervals, by one command. A request is checked if its entry is in the stream or was not
        renewed. All requests are checked if the stream may have a gap, and every `CHECK_EVERY` calls.
        """
        claims = list(claims)
        entry_ids = {claim.entry_id for claim in claims}
        lost = await self.entries.pop_lost()
        self._num_renewals += 1
        if lost is None or self._num_renewals % CHECK_EVERY == 0:
            lost = entry_ids
        self._doubtful |= lost
        if time.monotonic() >= self._renew_at:
            sure = [
                c.entry_id for c in claims if self._holds(c) and c.entry_id not in self._doubtful
            ]
            renewed = await self.entries.renew(sure, to_ms(self._renew_every_s / 5))
            # Keep the entries of claims that have not reached the caller yet, for the next call.
            self._doubtful = lost | (entry_ids - renewed)
            self._renew_at = time.monotonic() + self._renew_every_s
        checked = [c for c in claims if c.entry_id in self._doubtful or not self._holds(c)]
        return await self._check(checked) if checked else {}

    async def _check(self, claims: Sequence[Claim]) -> dict[str, str]:
        """Renew the leases of the requests that still belong to this attempt. Returns the other requests, with reasons."""
        keys = [self._queue]
        keys += [self._keys.request(self._model, claim.id) for claim in claims]
        verdicts = await self._run(
            RENEW, keys, group=GROUP, worker=self._worker_id, queue_ttl_ms=to_ms(QUEUE_TTL_S),
            items=_items(claims),
        )  # fmt: skip
        refused = refusals(claims, verdicts)
        self._doubtful.difference_update(claim.entry_id for claim in claims)
        for claim in claims:
            if claim.id in refused:
                self._let_go(claim)
        return refused

    async def cancel_deserted(self, claims: Iterable[Claim]) -> list[Claim]:
        claims = list(claims)
        gone = await self.publisher.find_gone({claim.reply_to for claim in claims})
        deserted = [claim for claim in claims if claim.reply_to in gone]
        if deserted:
            await self._cancel(deserted)
        return deserted

    async def _cancel(self, claims: Sequence[Claim]) -> None:
        keys = [self._queue, self._keys.backlog(self._model), self._keys.reservations(self._model)]
        keys += keys_of_calls(self._keys, self._model, [claim.id for claim in claims])
        for claim in claims:
            self._let_go(claim)
        await self._run(CANCEL, keys, **cancel_arguments(self._keys, self._model))

    async def release(self, claims: Iterable[Claim], *, is_crash: bool = False) -> int:
        claims = list(claims)
        if not claims:
            return 0
        for claim in claims:  # if the script fails, `reconcile` finds the calls
            self._let_go(claim)
        requests = [self._keys.request(self._model, claim.id) for claim in claims]
        return await self._release(requests, _items(claims), is_crash)

    async def _release(
        self, requests: list[str], items: list[dict[str, Any]], is_crash: bool
    ) -> int:
        crashes, crash_ttl_ms = self._keys.crash(self._model, ""), to_ms(CRASH_TTL_S)
        return await self._run(
            RELEASE, [self._queue, *requests], group=GROUP, released=RELEASED_CONSUMER,
            is_crash=is_crash, crashes=crashes, crash_ttl_ms=crash_ttl_ms, items=items,
        )  # fmt: skip

    async def leave(self, keep: Iterable[Claim] = ()) -> None:
        """See `WorkerQueue.leave`.

        The results of an interrupted `read`, `reclaim` or `reconcile` are unknown here. Redis has run their commands
        by now, because it runs a worker's commands in order.
        """
        await self.entries.end_reservations()
        kept = {claim.entry_id for claim in keep}
        self._held = {entry: attempt for entry, attempt in self._held.items() if entry in kept}
        for entry_id in await self.entries.unknown(0.0, self._held):
            entry = await self.entries.find(entry_id)
            if entry is not None and entry[1][0] == b"id":
                await self._give_back(entry_id, _request_id(entry[1]))
            else:
                await self.entries.remove([entry_id])
        await self.entries.reap(self._worker_id)

    async def _give_back(self, entry_id: bytes, request_id: str) -> None:
        """Release a call. It counts as a crash if the attempt belongs to another worker, whose lease has expired."""
        request = self._keys.request(self._model, request_id)
        fields = await self._sender.execute("HMGET", request, "state", "attempt", "worker")
        state, attempt, worker = fields
        is_running = state == b"running"
        is_crash = is_running and worker != self._worker_id.encode()
        item = {"attempt": int(attempt) if is_running else None, "entry": entry_id.decode()}
        await self._release([request], [item], is_crash)

    async def create_group(self) -> None:
        """Create the queue, unless it exists. Raises: QueueUnavailable."""
        await self.entries.create_group()

    async def close(self) -> None:
        self._reader.close()
        await super().close()


def _items(claims: Iterable[Claim]) -> list[dict[str, Any]]:
    return [{"attempt": claim.attempt, "entry": claim.entry_id.decode()} for claim in claims]


def _request_id(fields: Sequence[bytes]) -> str:
    return fields[1].decode(errors="replace")  # no request has an invalid id


class ClaimScript:
    """Keys and arguments of the claim script, for one worker and model."""

    def __init__(self, keys: RedisKeys, model: str, worker_id: str, max_attempts: int) -> None:
        self._keys = keys
        self._model = model
        self._read_nonce = token_hex(8)  # one nonce for all reads: each entry is read only once
        self._common: dict[str, Any] = {
            "group": GROUP,
            "worker": worker_id,
            "max_attempts": max_attempts,
            "max_losses": LOSSES_PER_ATTEMPT * max_attempts,
            "cleared_after": CLEARED_AFTER_TOKENS,
            "affinity_ms": to_ms(AFFINITY_TTL_S),
            "wakeups": keys.wakeups(model, ""),
        }
        self._of_reads = self._common | {
            "nonce": self._read_nonce,
            "requests": keys.requests(model),
            "logs": keys.log(model, ""),
        }
        self._read_command = ("EVALSHA", CLAIM.sha, 1, keys.queue(model))

    def of_one(self, entry_id: bytes, request_id: str) -> tuple[list[str], dict[str, Any]]:
        """The keys and arguments that claim the request of an entry."""
        keys = [
            self._keys.queue(self._model),
            self._keys.request(self._model, request_id),
            self._keys.log(self._model, request_id),
        ]
        nonces = {"nonce": token_hex(8), "read_nonce": self._read_nonce}
        return keys, {"entry": entry_id.decode(), **nonces, **self._common}

    def of_read(self, last_id: bytes, count: int) -> Command:
        """The command that follows a read of `count` entries and claims their requests. `last_id`: last entry before.

        The reply is a flat list with, for each request, its entry, its id, the length of the claim's reply, and this
        reply. It is an error if Redis does not have the script.
        """
        arguments = named(entry=last_id.decode(), count=count, **self._of_reads)
        return (*self._read_command, *arguments)


def split_replies(answers: Sequence[Any]) -> tuple[list[Entry], dict[bytes, list[Any]]]:
    """The entries that the claim script has claimed, and its reply for each."""
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
    """The failure of a call that can no longer run."""
    code, message = _FAILURES[verdict]
    failed = encode(Failed(claim.id, claim.attempt, code, message))
    reason = "" if verdict == b"expired" else verdict.decode()
    return Publication(claim, 1, 0, 0, failed, "failed", reason)


class Publisher:
    """Appends the events of a worker's calls of one model to their logs and their gateways' mailboxes."""

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
        #: By gateway: the time since which its mailbox is missing, by the monotonic clock.
        self._missing_since: dict[str, float] = {}
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
        """The gateways that are gone. Raises: RedisError.

        Redis can lose a mailbox, or let it expire while Redis is frozen. A live gateway creates it again within seconds.
        """
        names = list(gateways)
        keys = [self._keys.mailbox(self._model, name) for name in names]
        missing: list[str] = []
        if keys and await self._sender.execute("EXISTS", *keys) < len(keys):
            found = [await self._sender.execute("EXISTS", key) for key in keys]
            missing = [name for name, count in zip(names, found, strict=True) if count == 0]
        now = time.monotonic()
        self._missing_since = {name: self._missing_since.get(name, now) for name in missing}
        return {g for g, since in self._missing_since.items() if now - since >= GONE_AFTER_S}

    async def _send(self, reply_to: str, batch: list[Publication]) -> dict[str, str]:
        if len(batch) > 1:
            batch.sort(key=lambda item: item.ending is None)  # endings first: `scripts/publish.lua`
        keys = [self._keys.mailbox(self._model, reply_to), *self._model_keys]
        keys += keys_of_calls(self._keys, self._model, [item.claim.id for item in batch])
        items = [_to_item(item) for item in batch]
        arguments = named(*[item.events for item in batch], items=items, **self._common)
        verdicts = await self._sender.run(PUBLISH, keys, arguments)
        self.num_fenced += verdicts.count(b"fenced")
        return refusals([item.claim for item in batch], verdicts)


def _to_item(publication: Publication) -> dict[str, Any]:
    """The item of the publish script. A failure has no `index`, because it ends a call at any number of tokens."""
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
