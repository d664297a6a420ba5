"""The gateway's side of the queue: submit calls, cancel them, read their state, and receive their events.

Concurrent commands share a write. A gateway's mailbox is one stream per model, to which workers post events; one reader
reads all streams.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from shared.process import cancel
from shared.protocol import Envelope, ErrorCode, Priority, Tokens, encode_events
from shared.queue.api import (
    Budget,
    Charge,
    DuplicateRequest,
    GatewayQueue,
    OpenRequest,
    QueueRefused,
    QueueStats,
    QueueUnavailable,
    Reason,
    RequestState,
    Reservation,
    Submission,
    Submitted,
    UnknownBudget,
)
from shared.queue.keys import (
    AFTER_DEADLINE_S,
    GROUP,
    LEFT_TTL_S,
    MAILBOX_TTL_S,
    MAX_MAILBOX_ENTRIES,
    QUEUE_TTL_S,
    RedisKeys,
    RedisStore,
    cancel_arguments,
    keys_of_calls,
    to_ms,
)
from shared.queue.scripts import (
    CANCEL,
    CRASH_TENANTS,
    FAIL,
    FORGET,
    FORGET_LOST,
    LISTEN,
    NOTE_SHARD,
    RAISE_SUMS,
    REFUND,
    SHARE,
    STATES,
    SUBMIT,
)
from shared.redis.client import (
    BLOCK_S,
    RedisLink,
    RedisSender,
    Script,
    named,
    redis_errors_as,
    retry_idempotent,
    with_ttl,
)

logger = logging.getLogger(__name__)

MAX_ENTRIES_PER_READ = 512  #: of a mailbox
LONGEST_PAUSE_S = 1.0  #: between two tries to read the mailbox
_MAX_FORGOTTEN = 100  #: expired entries dropped per script
#: Maximum of calls that one script cancels or reads. Redis serves other clients between two scripts.
_MAX_PER_SCRIPT = 100
#: Mark at the beginning of a charge, by `Charge.counts` (`count_usage.lua`).
_MARKS = {"request": "", "prompt": "*", "output": "+"}


@redis_errors_as(QueueUnavailable)
class RedisGatewayQueue(RedisStore, GatewayQueue):
    """The queues of all models."""

    async def submit(self, calls: Submission) -> Submitted:
        choices, affinity = calls.choices, calls.affinity
        keys, arguments = self._to_script(calls)
        verdict = await retry_idempotent(lambda: self._sender.run(SUBMIT, keys, arguments))
        if verdict[0] == b"queue_full" and await self._forget_lost(choices[0]):
            verdict = await retry_idempotent(lambda: self._sender.run(SUBMIT, keys, arguments))
        if verdict[0] == b"duplicate":
            raise DuplicateRequest(f"request {choices[0].id} exists already")
        if verdict[0] == b"no_budget":
            raise UnknownBudget(choices[0].tenant)
        if verdict[0] != b"ok":
            raise QueueRefused(cast("Reason", verdict[0].decode()), verdict[1] / 1000)
        return Submitted(
            "" if affinity is None else verdict[1].decode(),
            (verdict[2] / 1000, verdict[3] / 1000) if len(verdict) > 2 else None,
        )

    async def share(self, model: str, request_ids: Sequence[str]) -> int:
        keys = [self._keys.queue(model)]
        keys += [self._keys.request(model, request_id) for request_id in request_ids]
        return await self._run(SHARE, keys, group=GROUP, ids=list(request_ids))

    async def _forget_lost(self, refused: Envelope) -> bool:
        """Drop expired backlog entries. Returns True if any were dropped. Raises: RedisError."""
        if refused.priority is not Priority.BATCH:
            return False
        keys = (self._keys.backlog(refused.model),)
        arguments = named(requests=self._keys.requests(refused.model), count=_MAX_FORGOTTEN)
        return await self._sender.run(FORGET_LOST, keys, arguments) > 0

    def _to_script(self, calls: Submission) -> tuple[list[str], tuple[bytes, ...]]:
        choices, reservation = calls.choices, calls.reservation
        first, quota = choices[0], None
        raw, optional = [choice.payload for choice in choices], {}
        keys = [self._keys.queue(first.model), self._keys.backlog(first.model)]
        keys += [self._keys.request(choice.model, choice.id) for choice in choices]
        if reservation is not None:
            keys += _quota_keys(self._keys, reservation)
            quota = _quota_arguments(reservation)
        if calls.affinity is not None:
            optional["affinity"] = {
                "key": self._keys.preferred_worker(first.model, calls.affinity.name),
                "wakeups": self._keys.wakeups(first.model, ""),
                "num_workers": calls.affinity.num_workers,
                "num_seats": calls.affinity.num_seats,
            }
        if calls.charge is not None:
            optional |= _charge_arguments(self._keys, choices, calls.charge)
        if calls.earlier:
            raw.append(encode_events([Tokens(first.id, 0, 0, tuple(calls.earlier))]))
            optional["num_earlier"] = len(calls.earlier)
        arguments = named(
            *raw,
            nonce=os.urandom(8).hex(),
            group=GROUP,
            tenant=first.tenant,
            timeout_ms=to_ms(calls.timeout_s),
            keep_ms=to_ms(AFTER_DEADLINE_S),
            queue_ttl_ms=to_ms(QUEUE_TTL_S),
            reply_to=first.reply_to,
            is_batch=first.priority is Priority.BATCH,
            max_waiting=calls.max_waiting,
            ids=[choice.id for choice in choices],
            quota=quota,
            **optional,
        )
        return keys, arguments

    async def cancel(
        self, model: str, request_ids: Sequence[str], *, is_lost: bool = False
    ) -> None:
        for first in range(0, len(request_ids), _MAX_PER_SCRIPT):
            ids = request_ids[first : first + _MAX_PER_SCRIPT]
            await self._end(CANCEL, model, ids, is_lost=is_lost)

    async def _end(
        self, script: Script, model: str, request_ids: Sequence[str], **arguments: Any
    ) -> None:
        keys = [self._keys.queue(model), self._keys.backlog(model), self._keys.reservations(model)]
        keys += keys_of_calls(self._keys, model, request_ids)
        await self._run(script, keys, **cancel_arguments(self._keys, model), **arguments)

    async def refund(self, reservation: Reservation) -> bool:
        keys = [self._keys.rates(reservation.model, reservation.tenant)]
        keys += [self._keys.request(reservation.model, name) for name in reservation.request_ids]
        limit = reservation.limits.max_tenant_tokens_per_minute
        num_tokens = reservation.num_answer_tokens
        return await self._run(REFUND, keys, tokens_per_minute=limit, num_tokens=num_tokens) == 1

    async def fail_all(self, model: str, code: ErrorCode, message: str) -> int:
        num_failed = 0
        failure = {
            "code": code.value, "message": message, "mailboxes": self._keys.mailbox(model, ""),
            "max_entries": MAX_MAILBOX_ENTRIES,
        }  # fmt: skip
        for key in (self._keys.queue(model), self._keys.backlog(model)):
            start = b"-"
            while entries := await self._ask("XRANGE", key, start, "+", "COUNT", _MAX_PER_SCRIPT):
                ids = [fields[1].decode() for _, fields in entries if fields[0] == b"id"]
                if ids:
                    await self._end(FAIL, model, ids, failure={**failure, "ids": ids})
                num_failed += len(ids)
                start = b"(" + entries[-1][0]
        return num_failed

    async def crash_tenants(self, model: str, worker_id: str) -> frozenset[str]:
        keys = (
            self._keys.queue(model),
            self._keys.crash(model, worker_id),
            self._keys.left(model, worker_id),
        )
        names = await self._run(
            CRASH_TENANTS,
            keys,
            group=GROUP,
            worker=worker_id,
            requests=self._keys.requests(model),
            left_ttl_ms=to_ms(LEFT_TTL_S),
        )
        return frozenset(name.decode() for name in names)

    async def states(self, model: str, request_ids: Sequence[str]) -> list[RequestState | None]:
        found: list[RequestState | None] = []
        for first in range(0, len(request_ids), _MAX_PER_SCRIPT):
            ids = request_ids[first : first + _MAX_PER_SCRIPT]
            keys = [self._keys.request(model, request_id) for request_id in ids]
            found += [
                to_state(state, int(attempt), int(num_tokens), ttl_ms) if ttl_ms >= 0 else None
                for state, attempt, num_tokens, ttl_ms in await self._run(STATES, keys)
            ]
        return found

    async def open_requests(self, models: Collection[str], limit: int) -> list[OpenRequest]:
        streams = [
            (model, key)
            for model in models
            for key in (self._keys.queue(model), self._keys.backlog(model))
        ]
        reads = (self._ask("XREVRANGE", key, "+", "-", "COUNT", limit) for _, key in streams)
        entries = [
            (int(entry_id.partition(b"-")[0]), model, fields[1].decode())
            for (model, _), found in zip(streams, await asyncio.gather(*reads), strict=True)
            for entry_id, fields in found
            if fields[0] == b"id"  # a call, not a wakeup
        ]
        newest = sorted(entries, reverse=True)[:limit]
        fields = ("tenant", "state", "worker", "enqueued_ms", "tokens")
        reads = (
            self._ask("HMGET", self._keys.request(model, name), *fields)
            for _, model, name in newest
        )
        (seconds, _), *found = await asyncio.gather(self._ask("TIME"), *reads)
        requests = [
            OpenRequest(
                name, tenant.decode(), model, worker.decode() if state == b"running" else "",
                max(0.0, round(int(seconds) - int(since_ms) / 1000, 3)), int(num_tokens),
            )
            for (_, model, name), (tenant, state, worker, since_ms, num_tokens) in zip(newest, found, strict=True)
            if state in (b"queued", b"running")
        ]  # fmt: skip
        return sorted(requests, key=lambda each: each.age_s)

    async def usage(self, day: int, *, skips_down: bool) -> list[dict[str, int]]:
        found = await self._ask("HGETALL", f"{self._keys.spent}{day}")
        sums = zip(found[::2], found[1::2], strict=True)
        return [{name.decode(): int(value) for name, value in sums}] if found else []

    async def set_spent(self, call_id: str, tenant: str, budget: Budget, amount: int) -> None:
        key = self._keys.budget(tenant, budget.period)
        await self._run(RAISE_SUMS, [key], sums={"spent": amount}, ttl_ms=to_ms(budget.ttl_s))

    async def raise_usage(self, day: int, sums: Mapping[str, int]) -> None:
        began, counts = str(sums.get("", 0)), {name: sums[name] for name in sums if name}
        await self._run(RAISE_SUMS, [f"{self._keys.spent}{day}"], sums=counts, began=began)

    async def raise_spent(self, period: str, spent: Mapping[str, int]) -> None:
        for tenant, amount in spent.items():
            await self._run(RAISE_SUMS, [self._keys.budget(tenant, period)], sums={"spent": amount})

    async def events(self, model: str, request_id: str) -> list[bytes]:
        return await self._ask("LRANGE", self._keys.log(model, request_id), 0, -1)

    async def forget(self, model: str, request_id: str, *, failed_only: bool) -> None:
        keys = keys_of_calls(self._keys, model, [request_id])
        await self._run(FORGET, keys, failed_only=failed_only)

    async def listen(self, model: str, request_id: str, gateway_id: str) -> RequestState | None:
        found = await self._run(
            LISTEN, (self._keys.request(model, request_id),), gateway=gateway_id
        )
        return to_state(*found) if found else None

    async def confirm(self, model: str, request_ids: Sequence[str]) -> None:
        await self._confirm(*(("EXISTS", self._keys.request(model, each)) for each in request_ids))

    async def result(
        self, model: str, request_id: str, attempt: int, *, is_last: bool
    ) -> bytes | None:
        key = self._keys.result(model, request_id, attempt)
        found = await self._ask("GET", key)
        if is_last:
            with suppress(RedisError):  # the result also expires
                await self._sender.execute("DEL", key)
        return found

    async def stats(self, model: str) -> QueueStats:
        num_given, num_backlog, age_s = await asyncio.gather(
            self._ask("XLEN", self._keys.queue(model)),
            self._ask("XLEN", self._keys.backlog(model)),
            self._age_s(model),
        )
        return QueueStats(num_given + num_backlog, num_backlog, age_s)

    async def _age_s(self, model: str) -> float:
        queue = self._keys.queue(model)
        try:
            pending = await self._ask("XPENDING", queue, GROUP)
            begin = b"(" + pending[2] if pending[2] else "-"  # earlier entries are deleted
        except ResponseError:  # no worker has created the group
            begin = "-"
        entries = await self._ask("XRANGE", queue, begin, "+", "COUNT", 10)
        oldest = [entry_id for entry_id, fields in entries if fields[0] == b"id"]
        if not oldest:
            return 0.0
        seconds, microseconds = await self._ask("TIME")
        added_at = int(oldest[0].partition(b"-")[0]) / 1000
        return max(0.0, int(seconds) + int(microseconds) / 1e6 - added_at)

    async def servers(self) -> dict[str, dict[str, str]]:
        try:
            text: bytes = await self._sender.execute("INFO")
        except ResponseError:  # the ACL does not allow it
            return {"": {}}
        lines = text.decode().splitlines()
        return {"": dict(line.split(":", 1) for line in lines if ":" in line)}

    async def note_shard(self, name: str, until: float) -> None:
        """Record until when a shard may have requests (epoch seconds)."""
        arguments = {"name": name, "until": int(until), "ttl_ms": to_ms(QUEUE_TTL_S)}
        await self._run(NOTE_SHARD, (self._keys.shards,), **arguments)

    async def open(self) -> None:
        await self._sender.execute("TIME")


def to_state(state: bytes, attempt: int, num_tokens: int, ttl_ms: int) -> RequestState:
    name = state.decode()
    after_s = AFTER_DEADLINE_S if name in ("queued", "running") else 0.0
    return RequestState(name, attempt, num_tokens, ttl_ms / 1000 - after_s)


def _charge_arguments(
    keys: RedisKeys, choices: Sequence[Envelope], charge: Charge
) -> dict[str, Any]:
    if len(choices) == 1 and charge == Charge():
        return {}
    end, given = " ".join(f"{price:.9g}" for price in charge.prices) + " 0 ", {}
    if (budget := charge.budget) is not None:
        key = keys.budget(choices[0].tenant, budget.period)
        held = {"most": budget.most, "reserved": budget.reserved, "ttl_ms": to_ms(budget.ttl_s)}
        end, given = f"{end[:-2]}{budget.reserved} {key}", {"budget": {"key": key, **held}}
    of_calls = (charge.of_call(index, len(choices)) for index in range(len(choices)))
    charges = [f"{_MARKS[each.counts]}{each.num_images[0]} {end}" for each in of_calls]
    return {"charges": charges, **given}


def _quota_keys(keys: RedisKeys, reservation: Reservation) -> list[str]:
    model = reservation.model
    return [keys.reservations(model), keys.usage(model), keys.rates(model, reservation.tenant)]


def _quota_arguments(reservation: Reservation) -> dict[str, Any]:
    limits = reservation.limits
    return {
        "tenant": reservation.tenant,
        "num_tokens": reservation.num_tokens,
        "reserved_tokens": reservation.num_open_tokens,
        "max_tokens": limits.max_tokens,
        "max_tenant_requests": limits.max_tenant_requests,
        "requests_per_minute": limits.max_tenant_requests_per_minute,
        "tokens_per_minute": limits.max_tenant_tokens_per_minute,
    }


@redis_errors_as(QueueUnavailable)
class RedisMailbox:
    """The mailboxes of one gateway: a `Mailbox`.

    `on_gap(model)` is called if events of a model may be missing: the stream was trimmed, Redis lost the mailbox, or an
    entry cannot be read. `on_failure` is called when Redis does not answer. Once `is_needed(model)` is False, the
    model's mailbox is no longer read or renewed, until it is opened again.
    """

    def __init__(
        self,
        redis_blocking: Redis,
        prefix: str,
        gateway_id: str,
        on_gap: Callable[[str], None] = lambda model: None,
        is_needed: Callable[[str], bool] = lambda model: True,
        renew_every_s: float = MAILBOX_TTL_S / 6,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._keys = RedisKeys(prefix)
        self.gateway_id = gateway_id
        self._on_gap = on_gap
        self._is_needed = is_needed
        self._renew_every_s = renew_every_s
        self._on_failure = on_failure
        self._reader = RedisLink(redis_blocking)
        self._sender = RedisSender(redis_blocking)
        self._last_ids: dict[str, bytes] = {}  # by key: the last entry that was read
        self._models: dict[str, str] = {}  # by key
        self._opened = asyncio.Event()
        self._renewing: asyncio.Task[None] | None = None

    @property
    def models(self) -> set[str]:
        """The models whose mailboxes are open."""
        return set(self._models.values())

    async def open(self, models: Iterable[str]) -> None:
        """Create the mailboxes of these models, unless they are open."""
        for model in models:
            key = self._keys.mailbox(model, self.gateway_id)
            if key in self._last_ids:
                continue
            last_id = await self._create(key)
            if key not in self._last_ids:
                self._last_ids[key] = last_id
                self._models[key] = model
                self._reader.close()  # the next read includes this mailbox
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew_mailboxes(), name="renew mailboxes")
        if self._last_ids:
            self._opened.set()

    async def _create(self, key: str) -> bytes:
        """Post an entry without events, so that the stream exists. Returns its id."""
        command = with_ttl(key, to_ms(MAILBOX_TTL_S), "XADD", key, "*", "opened", "1")
        return await self._sender.execute(*command)

    async def events(self) -> AsyncIterator[tuple[str, bytes]]:
        """See `Mailbox.events`. After an outage it reports a gap: Redis may have lost its last writes."""
        pause_s, was_lost = 0.0, False
        while True:
            await self._opened.wait()
            keys = list(self._last_ids)
            try:
                await self._reader.connect()
                if was_lost:
                    await self._restore()
                    was_lost = False
                keys = list(self._last_ids)  # also mailboxes that were opened meanwhile
                if not keys:
                    continue
                reply = await self._read(keys)
                pause_s = 0.0
            except RedisError as error:
                if list(self._last_ids) == keys:  # else: interrupted by `open`
                    was_lost = True
                    self._on_failure()
                    logger.warning("cannot read the mailbox: %s", error)
                    await asyncio.sleep(pause_s)
                    pause_s = min(LONGEST_PAUSE_S, pause_s * 2 or 0.05)
                continue
            for key, entries in reply or ():
                name = key.decode()
                for entry_id, fields in entries:
                    if name not in self._last_ids:
                        break  # no call needs it now
                    self._last_ids[name] = entry_id
                    if fields[0] == b"events":
                        yield self._models[name], fields[1]
            await asyncio.sleep(0)  # receivers run before the next read is sent

    async def _read(self, keys: list[str]) -> list[tuple[bytes, list[tuple[bytes, list[bytes]]]]]:
        ids = [self._last_ids[key] for key in keys]
        command = ("XREAD", "COUNT", MAX_ENTRIES_PER_READ, "BLOCK", to_ms(BLOCK_S), "STREAMS")
        reply = await self._reader.execute(*command, *keys, *ids)
        for key, entries in reply or ():
            # Streams are trimmed from their oldest end: if the last read entry still exists, no later entry
            # is missing. Only a reader that is far behind needs this check.
            if len(entries) == MAX_ENTRIES_PER_READ and (name := key.decode()) in self._last_ids:
                model, last_id = self._models[name], self._last_ids[name]
                if not await self._reader.execute("XRANGE", name, last_id, last_id):
                    self._report_gap(model)
        return reply

    async def _restore(self) -> None:
        """Create the mailboxes that Redis lost, and report a gap for each model. Raises: RedisError."""
        for key, model in list(self._models.items()):
            if not await self._sender.execute("EXISTS", key):
                last_id = await self._create(key)
                if key in self._models:  # the mailbox may be closed by now
                    self._last_ids[key] = last_id
            self._on_gap(model)

    def _report_gap(self, model: str) -> None:
        logger.warning("events of model %s may be missing", model)
        self._on_gap(model)

    async def _renew_mailboxes(self) -> None:
        while True:
            await asyncio.sleep(self._renew_every_s)
            for key, model in list(self._models.items()):
                if not self._is_needed(model):
                    self._leave(key)
                    continue
                try:
                    await self._renew(key)
                except RedisError as error:
                    logger.warning("cannot renew the mailbox: %s", error)

    def _leave(self, key: str) -> None:
        del self._last_ids[key], self._models[key]
        if not self._last_ids:
            self._opened.clear()

    async def _renew(self, key: str) -> None:
        """Renew the stream and drop read entries. Create it again if Redis lost it."""
        if await self._sender.execute("PEXPIRE", key, to_ms(MAILBOX_TTL_S)):
            await self._sender.execute("XTRIM", key, "MINID", "~", self._last_ids[key])
            return
        self._last_ids[key] = await self._create(key)
        self._reader.close()
        self._report_gap(self._models[key])

    async def close(self) -> None:
        await cancel(self._renewing)
        if self._last_ids:
            with suppress(RedisError):
                await self._sender.execute("DEL", *self._last_ids)
        await self._sender.close()
        self._reader.close()
