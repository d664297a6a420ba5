"""The queue against a model: any order of calls, crashes, lost replies and restarts, on real servers.

The model stores the state, attempt, failures and tokens of each request. After every step Redis must agree with it,
each log must contain every token once and in order, and some worker must still find every live request. The long form
(`make faults`) runs more and longer sequences.
"""

import asyncio
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis import Redis as SyncRedis
from redis.exceptions import ConnectionError as RedisConnectionError

import shared.redis.embedded
from shared.protocol import ErrorCode, Failed, Finished, Priority, Tokens, decode_events, seal
from shared.queue.api import (
    CLEARED_AFTER_TOKENS,
    Affinity,
    Budget,
    Charge,
    Claim,
    DuplicateRequest,
    QueueRefused,
    QueueUnavailable,
    Submission,
)
from shared.queue.gateway import RedisGatewayQueue
from shared.queue.keys import GROUP, RedisKeys
from shared.queue.scripts import CLAIM
from shared.queue.worker import LOSSES_PER_ATTEMPT, RedisWorkerQueue, split_replies
from shared.redis.client import RedisLink, RedisSender, create_redis
from shared.redis.embedded import EmbeddedRedis
from shared.settings.tree import RedisSettings
from tests.factories_queue import (
    GATEWAY,
    MODEL,
    Clock,
    enqueue,
    make_delta,
    make_finished,
    make_request,
    publication,
    reserve,
    tokens_of,
    wait_until_written,
)
from tests.long import IS_LONG

MAX_ATTEMPTS = 3
MAX_LOSSES = LOSSES_PER_ATTEMPT * MAX_ATTEMPTS
WORKERS = ("a", "b")
#: Tenant t: an output token costs 3, and an open call reserves 5.
BUDGET = Budget("2026-11", most=10**12, reserved=5, ttl_s=600)
CHARGES = {"": None, "t": Charge(prices=(1.0, 1.0, 3.0, 1.0), budget=BUDGET)}
#: One worker with capacity for all requests.
AFFINITY = Affinity("an-image", num_workers=1, num_seats=1000)


class PatientRedis(RedisSettings):
    """Long timeouts: a busy disk can block Redis for seconds, and a call that timed out has an unknown result."""

    command_timeout_s: ClassVar[float] = 60.0


@dataclass(slots=True)
class Modelled:
    """The expected state of a request in Redis."""

    is_batch: bool = False
    num_possible: int = 1  #: tokens reserved for it
    tenant: str = ""
    state: str = "queued"
    attempt: int = 0
    failures: int = 0
    losses: int = 0  #: lost workers, including those that do not count as crashes
    num_claimed_tokens: int = 0  #: output tokens at its last claim
    has_begun: bool = False
    num_tokens: int = 0
    is_late: bool = False
    sets_preferred: bool = False  #: whether the worker that claims it becomes the preferred one
    is_counted: bool = True
    is_first: bool = True  #: whether it is the first of its request's choices
    #: worker whose read claimed it, if the reply was lost
    lost_by: RedisWorkerQueue | None = None

    @property
    def is_live(self) -> bool:
        return self.state in ("queued", "running")

    def claim(self, worker: RedisWorkerQueue) -> None:
        if self.state == "running" and self.has_begun and self.lost_by is not worker:
            self.losses += 1
            is_cleared = self.num_tokens - self.num_claimed_tokens >= CLEARED_AFTER_TOKENS
            self.failures += not (self.failures and is_cleared)
        self.lost_by = None
        self.state, self.attempt = "running", self.attempt + 1
        self.num_claimed_tokens = self.num_tokens
        self.has_begun = self.failures == 0

    def verdict(self, attempt: int) -> str:
        if self.state == "cancelled":
            return "cancelled"
        if attempt != self.attempt or self.state == "queued":
            return "fenced"
        return "ok" if self.state == "running" else "ended"


@dataclass(slots=True, eq=False)
class Hand:
    """A claim as a worker remembers it; the worker can be a zombie."""

    worker: RedisWorkerQueue
    claim: Claim
    num_tokens: int
    number: int = 0

    @property
    def id(self) -> str:
        return self.claim.id


@contextmanager
def losing_first_reply(link: type, method: str) -> Iterator[list[Any]]:
    """Makes the next call of the method run and raise; appends its reply to the list."""
    call, lost = getattr(link, method), []

    async def lose_first(*arguments: Any) -> Any:
        reply = await call(*arguments)
        if lost:
            return reply
        lost.append(reply)
        raise RedisConnectionError("its reply was lost")

    with patch.object(link, method, lose_first):
        yield lost


def of_one(things: Callable[[Any], Sequence[Any]], **drawn: Any) -> Callable[[Any], Any]:
    """A rule that is applied to one of these things, if there are any.

    The drawn values do not depend on their number, because a pause of the computer can change it.
    """

    def decorate(step: Callable[..., None]) -> Any:
        def run(machine: Any, number: int, **more: Any) -> None:
            found = things(machine)
            step(machine, found[number % len(found)], **more)

        run.__name__ = step.__name__
        return precondition(things)(rule(number=st.integers(0, 63), **drawn)(run))

    return decorate


of_a_hand = partial(of_one, lambda machine: machine.hands)
of_a_request = partial(of_one, lambda machine: sorted(machine.requests))


class QueueMachine(RuleBasedStateMachine):
    """One queue, two worker names, any number of requests."""

    def __init__(self, server: EmbeddedRedis) -> None:
        super().__init__()
        self.server = server
        self.runner = asyncio.Runner()
        self.prefix = f"m{uuid4().hex[:10]}"
        self.keys = RedisKeys(self.prefix)
        self.clock = Clock()
        self.patch = patch("shared.queue.worker.time", self.clock)
        self.patch.start()
        self.requests: dict[str, Modelled] = {}
        self.hands: list[Hand] = []
        self.preferred: str | None = None  #: the preferred worker of `AFFINITY`
        self.has_flushed = False  #: one flush is enough: nothing before it can have an effect
        self.has_restarted = False
        self.run(self._open())

    def run(self, coroutine):
        return self.runner.run(coroutine)

    async def _open(self) -> None:
        options = PatientRedis(url=self.server.url)
        self.redis, self.blocking = create_redis(options), create_redis(options, blocking=True)
        self.queue = RedisGatewayQueue(self.redis, self.prefix)
        self.closers = [self.queue.close]
        self.workers = {name: self._worker(name) for name in WORKERS}

    def _worker(self, name: str) -> RedisWorkerQueue:
        worker = RedisWorkerQueue(
            self.redis, self.blocking, keys_prefix=self.prefix, model=MODEL, worker_id=name,
            lease_s=60.0, max_attempts=MAX_ATTEMPTS, batch_age_s=60.0, unknown_after_s=0.0,
        )  # fmt: skip
        self.closers.append(worker.close)
        return worker

    @initialize()
    def begin(self) -> None:
        self._look_again()
        self._make_mailbox()
        self.run(self.workers["a"].create_group())

    def _look_again(self) -> None:
        self.eye = SyncRedis(unix_socket_path=str(self.server.socket_path))

    def _make_mailbox(self) -> None:
        self.eye.xadd(self.keys.mailbox(MODEL, GATEWAY), {"opened": "1"})
        self.eye.expire(self.keys.mailbox(MODEL, GATEWAY), 600)

    # The gateway

    @rule(
        repeats=st.integers(1, 2),
        priority=st.sampled_from(Priority),
        count=st.integers(1, 2),
        num_tokens=st.integers(1, 9),
        tenant=st.sampled_from(["", "t"]),
        shares=st.booleans(),
    )
    def enqueue(self, repeats, priority, count, num_tokens, tenant, shares) -> None:
        """If `repeats` is above 1, the reply of the first try is lost."""
        shares = shares and priority is not Priority.BATCH
        choices = [make_request(priority=priority, tenant=tenant) for _ in range(count)]
        sealed = [seal(choice) for choice in choices]
        reservation = reserve(*choices, num_tokens=num_tokens, max_tokens=10_000)
        affinity = AFFINITY if shares else None
        self.run(self.queue.set_spent(choices[0].id, "t", BUDGET, 0))
        submitting = self.queue.submit(
            Submission(sealed, 600, 1000, reservation, affinity, CHARGES[tenant])
        )
        expected = self._affinity_outcome() if shares else ""
        with losing_first_reply(RedisSender, "run") if repeats > 1 else nullcontext([]) as lost:
            outcome = self.run(submitting).affinity
        assert len(lost) == repeats - 1
        is_reserved = expected == "home"
        assert outcome == ("busy" if lost and shares and not is_reserved else expected)
        if is_reserved:
            assert self._unread() == set()
        for choice in choices:
            self.requests[choice.id] = Modelled(
                priority is Priority.BATCH, num_tokens, tenant,
                sets_preferred=shares and not is_reserved, is_first=choice is choices[0],
            )  # fmt: skip
            entry, aside = self.eye.hmget(self.keys.request(MODEL, choice.id), "entry", "aside")
            assert aside == (entry if is_reserved else None)

    @of_a_request(repeats=st.integers(1, 2))
    def share(self, name, repeats: int) -> None:
        """The grace time has passed: a request that its preferred worker has not claimed is available to all."""
        request, key = self.requests[name], self.keys.request(MODEL, name)
        entry, aside = self.eye.hmget(key, "entry", "aside")
        waits = request.state == "queued" and request.attempt == 0 and entry == aside is not None
        for number in range(repeats):
            found = self.run(self.queue.share(MODEL, [name, "unknown"]))
            assert found == (waits and number == 0)
        request.sets_preferred |= waits
        if waits and self._has_group() and not request.is_late:
            assert name in self._unread()

    @precondition(lambda self: any(r.is_live for r in self.requests.values()))
    @rule(priority=st.sampled_from(Priority), num_tokens=st.integers(1, 9))
    def enqueue_too_much(self, priority: Priority, num_tokens: int) -> None:
        """A refused request leaves no key in Redis."""
        request = make_request(priority=priority)
        most = sum(r.num_possible for r in self.requests.values() if r.is_live)
        with pytest.raises(QueueRefused, match="open_tokens"):
            self.run(enqueue(self.queue, request, num_tokens=num_tokens, max_tokens=most))

    @of_a_request()
    def enqueue_a_known_id(self, name) -> None:
        request = make_request(id=name)
        with pytest.raises(DuplicateRequest):
            self.run(enqueue(self.queue, request))

    @of_a_request(is_lost=st.booleans())
    def cancel(self, name, is_lost: bool) -> None:
        self.run(self.queue.cancel(MODEL, [name, "unknown"], is_lost=is_lost))
        request = self.requests[name]
        if request.is_live:
            request.state, request.is_counted = "cancelled", not is_lost

    @of_a_request()
    def pass_the_deadline(self, name) -> None:
        self.eye.hset(self.keys.request(MODEL, name), "deadline_ms", "1")
        self.requests[name].is_late = True

    # Workers

    @rule(name=st.sampled_from(WORKERS), count=st.integers(1, 3))
    def read(self, name: str, count: int) -> None:
        self._take(name, self.run(self.workers[name].read(count, 0.001)))

    @rule(name=st.sampled_from(WORKERS))
    def lose_the_wakeups(self, name: str) -> None:
        """The stream of wakeups has expired because the worker was paused for long."""
        self.eye.delete(self.keys.wakeups(MODEL, name))

    @rule(name=st.sampled_from(WORKERS))
    def leave(self, name: str) -> None:
        """The worker drains: its unclaimed requests are released, and no more are reserved for it."""
        worker = self.workers[name]
        keep = [hand.claim for hand in self.hands if hand.worker is worker]
        kept = {claim.entry_id for claim in keep}
        left = self._pending(name) - kept
        for request_id, request in self.requests.items():
            fields = self.eye.hmget(self.keys.request(MODEL, request_id), "entry", "worker")
            if fields[0] in left and request.state == "running":
                if fields[1] == name.encode():
                    request.state = "queued"
                request.lost_by = None
        self.run(worker.leave(keep))
        assert self._pending(name) <= kept
        assert not self.eye.exists(self.keys.wakeups(MODEL, name))

    @rule(name=st.sampled_from(WORKERS), count=st.integers(1, 3))
    def take(self, name: str, count: int) -> None:
        """Batch requests are taken only if no interactive request is waiting."""
        unread, backlog = self._unread(), self._backlog()
        claims = self.run(self.workers[name].take(count))
        taken = {claim.id for claim in claims}
        assert taken.isdisjoint(backlog) or taken >= unread
        self._take(name, claims)

    @rule()
    def let_the_oldest_batch_work_in(self) -> None:
        if self._has_group():
            self.run(self.workers["a"].entries.take(0, 1e-3))

    @rule(name=st.sampled_from(WORKERS), count=st.integers(1, 3), repeats=st.integers(1, 2))
    def reclaim(self, name: str, count: int, repeats: int) -> None:
        """If the reply of a claim is lost, repeating it with the same nonce is not a second attempt."""
        with losing_first_reply(RedisSender, "run") if repeats > 1 else nullcontext():
            claims = self.run(self.workers[name].reclaim(count))
        self._take(name, claims)

    @rule(name=st.sampled_from(WORKERS))
    def reconcile(self, name: str) -> None:
        self.clock.pass_time(10.0)
        self._take(name, self.run(self.workers[name].reconcile()))

    @rule(name=st.sampled_from(WORKERS))
    def lose_the_delivery_of_an_entry(self, name: str) -> None:
        if self._has_group():
            self.eye.xreadgroup(GROUP, name, {self.keys.queue(MODEL): ">"}, count=1)

    @rule(name=st.sampled_from(WORKERS), count=st.integers(1, 3))
    def lose_the_reply_of_a_read(self, name: str, count: int) -> None:
        """Redis claims requests for the worker, but the worker does not receive the reply."""
        if not self._has_group():
            return
        worker = self.workers[name]
        self.eye.script_load(CLAIM.source)
        with losing_first_reply(RedisLink, "exchange") as lost, pytest.raises(QueueUnavailable):
            self.run(worker.read(count, 0.001))
        [(*_, answers)] = lost  # wakeups can be acknowledged before
        entries, replies = split_replies(answers)
        for entry_id, (_, request_id) in entries:
            request = self.requests.get(request_id.decode())
            if request is not None and replies[entry_id][0] != b"unknown":
                request.claim(worker)
                request.lost_by = worker
                self._note_preferred(name, request)

    @of_a_hand()
    def begin_to_run(self, hand) -> None:
        is_ours = self._verdict(hand) == "ok"
        assert self.run(hand.worker.begin(hand.claim)) == is_ours
        if is_ours:
            self.requests[hand.id].has_begun = True

    @of_a_hand(count=st.integers(1, 3), repeats=st.integers(1, 2))
    def publish(self, hand, count: int, repeats: int) -> None:
        tokens = range(hand.num_tokens, hand.num_tokens + count)
        events = (make_delta(hand.claim, hand.num_tokens, *tokens),)
        if self._say(hand, events, repeats) == "ok":
            self.requests[hand.id].num_tokens += count
            hand.num_tokens += count

    @of_a_hand(fails=st.booleans(), repeats=st.integers(1, 2))
    def finish(self, hand, fails: bool, repeats: int) -> None:
        event = (
            Failed(hand.id, hand.claim.attempt, ErrorCode.ENGINE_FAILURE, "")
            if fails
            else make_finished(hand.claim, hand.num_tokens)
        )
        if self._say(hand, (event,), repeats) == "ok":
            self.requests[hand.id].state = "failed" if fails else "finished"
            self.hands.remove(hand)

    def _say(self, hand: Hand, events, repeats: int) -> str:
        """Publishes events, twice if `repeats` is 2, as after a lost reply. Returns the verdict of the model."""
        verdict = self._verdict(hand)
        endings = {Finished: "finished", Failed: "failed"}
        if verdict == "ended" and endings.get(type(events[-1])) == self.requests[hand.id].state:
            verdict = "repeated"  # the same end was published before
        hand.number += 1
        said = publication(hand.claim, hand.number, hand.num_tokens, *events)
        for _ in range(repeats):
            refused = self.run(hand.worker.publish([said]))
            assert refused == ({} if verdict in ("ok", "repeated") else {hand.id: verdict})
        if verdict != "ok":
            self.hands.remove(hand)
        return verdict

    @of_a_hand()
    def renew(self, hand) -> None:
        """Entries of this worker get fresh leases; entries of other workers are unchanged."""
        hands = {h.id: h for h in self.hands if h.worker is hand.worker} | {hand.id: hand}
        verdicts = {name: self._verdict(each) for name, each in hands.items()}
        before = {name: self._lease(each.claim.entry_id) for name, each in hands.items()}
        refused = self.run(hand.worker.renew([each.claim for each in hands.values()]))
        assert refused == {name: verdict for name, verdict in verdicts.items() if verdict != "ok"}
        for name, each in hands.items():
            lease, after = before[name], self._lease(each.claim.entry_id)
            if verdicts[name] == "ok":
                assert after is not None
                assert self.workers[after["consumer"].decode()] is hand.worker
                assert after["time_since_delivered"] < 60_000
            else:
                assert (lease and lease["consumer"]) == (after and after["consumer"])

    @of_a_hand()
    def pause_beyond_the_lease(self, hand) -> None:
        """The worker is paused or disconnected: its requests can be taken over, and it can continue as a zombie."""
        self._expire_lease(hand.claim.entry_id)

    @rule(name=st.sampled_from(WORKERS))
    def crash(self, name: str) -> None:
        """Replaces the process by a new one with the same name, without its state."""
        gone, self.workers[name] = self.workers[name], self._worker(name)
        self.hands = [hand for hand in self.hands if hand.worker is not gone]

    @of_a_hand(is_crash=st.booleans())
    def release(self, hand, is_crash: bool) -> None:
        is_ours = self._verdict(hand) == "ok"
        assert self.run(hand.worker.release([hand.claim], is_crash=is_crash)) == is_ours
        if is_ours and not is_crash:
            self.requests[hand.id].state = "queued"
        self.hands.remove(hand)

    # Redis

    @precondition(lambda self: not self.has_flushed)
    @rule()
    def flush(self) -> None:
        self.has_flushed = True
        for key in self.eye.scan_iter(f"{self.prefix}:*"):
            self.eye.delete(key)
        self._make_mailbox()
        self.requests.clear()
        self.preferred = None

    @rule()
    def forget_scripts(self) -> None:
        self.eye.script_flush()

    @precondition(lambda self: not self.has_restarted)
    @rule()
    def restart(self) -> None:
        """Kills Redis after its acknowledged writes are in its file."""
        self.has_restarted = True
        assert self.server.pid is not None
        wait_until_written(self.eye)
        os.kill(self.server.pid, signal.SIGKILL)
        self.server.stop()
        self.server.start()
        self.eye.close()
        self._look_again()
        self.run(asyncio.sleep(0.01))  # lets the connections notice that they are closed

    # Invariants

    @invariant()
    def reservations_are_those_of_live_requests(self) -> None:
        """Each live request is counted once. Calls that have ended are counted until the next submit."""
        live = [(n, r) for n, r in self.requests.items() if r.is_live]
        reservations = self.eye.zrange(self.keys.reservations(MODEL), 0, -1)
        open_ones = self.eye.zrangebyscore(self.keys.reservations(MODEL), 1, "+inf")
        assert sorted(open_ones) == sorted(
            f"{r.num_possible} {r.tenant} {n}".encode() for n, r in live
        )
        sums: Counter[str] = Counter()
        for reservation in reservations:
            tokens, tenant, _ = reservation.decode().split(" ")
            sums["tokens"] += int(tokens)
            sums[f"tokens:{tenant}"] += int(tokens)
            sums[f"requests:{tenant}"] += 1
        usage = self.eye.hgetall(self.keys.usage(MODEL))
        assert {name.decode(): int(value) for name, value in usage.items()} == sums

    @invariant()
    def usage_is_that_of_ended_requests(self) -> None:
        """Each ended request is counted once, and its reserved budget is released."""
        counted: Counter[str] = Counter()
        for key in self.eye.scan_iter(f"{self.keys.spent}*"):
            sums = self.eye.hgetall(key)
            counted.update({name.decode(): int(value) for name, value in sums.items() if name})
        expected: Counter[str] = Counter()
        for request in self.requests.values():
            if not request.is_live and request.is_counted:
                owner = f"{request.tenant} {MODEL}"
                expected[f"requests {owner}"] += request.is_first
                expected[f"output {owner}"] += request.num_tokens
                expected[f"cost {owner}"] += 3 * request.num_tokens * (request.tenant == "t")
        for kind in ("requests", "output", "cost"):
            for tenant in ("", "t"):
                name = f"{kind} {tenant} {MODEL}"
                if name.startswith("cost t"):
                    expected[name] += counted[f"input t {MODEL}"]  # input of finished requests only
                assert counted[name] == expected[name], name
        reserved = self.eye.hget(self.keys.budget("t", BUDGET.period), "reserved")
        live = [r for r in self.requests.values() if r.is_live and r.tenant == "t"]
        assert int(reserved or 0) == BUDGET.reserved * len(live)

    @invariant()
    def redis_agrees(self) -> None:
        """States agree, and each token is in the log, and was posted, once and in order."""
        posted: dict[str, list] = {}
        for _, fields in self.eye.xrange(self.keys.mailbox(MODEL, GATEWAY)):
            for event in decode_events(fields.get(b"events", b"[]")):
                posted.setdefault(event.request_id, []).append(event)
        # Entry IDs of the two streams can be equal, so an ID alone does not identify the stream.
        streams = (self.keys.queue(MODEL), self.keys.backlog(MODEL))
        entries = [fields for stream in streams for _, fields in self.eye.xrange(stream)]
        waits = {fields[b"id"].decode() for fields in entries if b"id" in fields}
        for name, request in self.requests.items():
            key = self.keys.request(MODEL, name)
            record = self.eye.hmget(key, "state", "attempt", "failures", "tokens", "backlog")
            state, attempt, failures, num_tokens, backlog = (field.decode() for field in record)
            found = (state, int(attempt), int(failures), int(num_tokens))
            expected = (request.state, request.attempt, request.failures, request.num_tokens)
            assert found == expected, name
            assert not backlog or (request.is_batch and request.attempt == 0), name
            assert (name in waits) == request.is_live, f"{name} is lost, or stays"
            log = self.eye.lrange(self.keys.log(MODEL, name), 0, -1)
            self._check_events(request, posted.get(name, []), log)
        for key in self.eye.scan_iter(f"{self.prefix}:*", count=1000):
            assert self.eye.pttl(key) != -1, f"{key} never expires"
        affinity = self.eye.get(self.keys.preferred_worker(MODEL, AFFINITY.name))
        assert affinity == (None if self.preferred is None else self.preferred.encode())

    def _check_events(self, request: Modelled, events: list, log: list[bytes]) -> None:
        if request.state != "cancelled":
            assert list(decode_events(b"[" + b",".join(log) + b"]")) == events
            tokens = [t for e in events if isinstance(e, Tokens) for t in e.token_ids]
            assert tokens == list(range(request.num_tokens))
        ends = [e for e in events if isinstance(e, Finished | Failed)]
        assert len(ends) == (request.state in ("finished", "failed"))
        assert not ends or events[-1] is ends[0]

    def teardown(self) -> None:
        """After any sequence, a healthy worker ends every live request."""
        try:
            self._end_all()
        finally:
            self.run(self._close())
            self.runner.close()
            self.eye.close()
            self.patch.stop()

    def _end_all(self) -> None:
        survivor = self._worker("survivor")
        self.workers["survivor"] = survivor
        self.run(survivor.create_group())
        while any(request.is_live for request in self.requests.values()):
            for entry_id in self._pending():
                self._expire_lease(entry_id)
            before = len(self.hands)
            self._take("survivor", self.run(survivor.reclaim(100)))
            self._take("survivor", self.run(survivor.read(100, 0.001)))
            self._take("survivor", self.run(survivor.take(100)))
            for hand in self.hands[before:]:
                end = make_finished(hand.claim, hand.num_tokens)
                assert self._say(hand, (end,), 1) == "ok"
                self.requests[hand.id].state = "finished"
            del self.hands[before:]
        self.redis_agrees()
        self.usage_is_that_of_ended_requests()

    async def _close(self) -> None:
        for close in self.closers:
            await close()
        await self.redis.aclose()
        await self.blocking.aclose()

    # Helpers

    def _unread(self) -> set[str]:
        """Returns the requests in the queue that no worker has read and that can still run."""
        if not self._has_group():
            return set()
        [group] = self.eye.xinfo_groups(self.keys.queue(MODEL))
        unread = self.eye.xrange(self.keys.queue(MODEL), min=b"(" + group["last-delivered-id"])
        names = {fields[b"id"].decode() for _, fields in unread if b"id" in fields}
        return {name for name in names if not self.requests[name].is_late}

    def _affinity_outcome(self) -> str:
        """Returns the expected outcome of submitting a request with `AFFINITY` now."""
        if self.preferred is None:
            return "new"
        if self.eye.xlen(self.keys.queue(MODEL)) > len(self._pending()) or not self._has_group():
            return "busy"
        return "home" if self.eye.exists(self.keys.wakeups(MODEL, self.preferred)) else "gone"

    def _note_preferred(self, name: str, request: Modelled) -> None:
        if request.sets_preferred:
            self.preferred = name

    def _pending(self, name: str | None = None) -> set[bytes]:
        """Returns the entries that Redis lists as pending, of one worker or of all."""
        if not self._has_group():
            return set()
        pending = self.eye.xpending_range(self.keys.queue(MODEL), GROUP, "-", "+", 100, name)
        return {entry["message_id"] for entry in pending}

    def _backlog(self) -> set[str]:
        entries = self.eye.xrange(self.keys.backlog(MODEL))
        return {fields[b"id"].decode() for _, fields in entries}

    def _verdict(self, hand: Hand) -> str:
        request = self.requests.get(hand.id)
        return "gone" if request is None else request.verdict(hand.claim.attempt)

    def _expire_lease(self, entry_id: bytes) -> None:
        """Makes the entry's lease expire: its holder has been silent for an hour."""
        self.clock.pass_time(3600.0)
        if entry := self._lease(entry_id):
            queue, owner = self.keys.queue(MODEL), entry["consumer"]
            self.eye.xclaim(queue, GROUP, owner, 0, [entry_id], idle=3_600_000, justid=True)

    def _lease(self, entry_id: bytes) -> dict[str, Any] | None:
        """Returns the pending record of an entry: its consumer and idle time."""
        if not self._has_group():
            return None
        queue = self.keys.queue(MODEL)
        return next(iter(self.eye.xpending_range(queue, GROUP, entry_id, entry_id, 1)), None)

    def _has_group(self) -> bool:
        """Returns whether the consumer group exists; it is lost with the queue."""
        queue = self.keys.queue(MODEL)
        return bool(self.eye.exists(queue) and self.eye.xinfo_groups(queue))

    def _take(self, name: str, claims: list[Claim]) -> None:
        """Records the claims of a worker, and the requests that were failed instead."""
        for claim in claims:
            request = self.requests[claim.id]
            assert request.is_live
            request.claim(self.workers[name])
            self._note_preferred(name, request)
            assert (claim.attempt, claim.failures) == (request.attempt, request.failures)
            assert tokens_of(claim) == tuple(range(request.num_tokens))
            assert not request.is_late
            assert request.failures < MAX_ATTEMPTS
            self.hands.append(Hand(self.workers[name], claim, request.num_tokens))
        with self.eye.pipeline(transaction=False) as pipe:
            for request_id in self.requests:
                pipe.hget(self.keys.request(MODEL, request_id), "state")
            states = pipe.execute()
        for request, state in zip(self.requests.values(), states, strict=True):
            if state == b"failed" and request.is_live:
                request.claim(self.workers[name])
                self._note_preferred(name, request)
                is_exhausted = request.failures == MAX_ATTEMPTS or request.losses >= MAX_LOSSES
                assert request.is_late or is_exhausted
                request.state = "failed"


@pytest.fixture(scope="module")
def own_server(redis_program) -> Iterator[EmbeddedRedis]:
    """A server that the test can kill."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory("-vlm-model") as folder:
        patch.setattr(shared.redis.embedded, "find_redis_server", lambda: redis_program)
        with EmbeddedRedis(Path(folder)) as server:
            yield server


@pytest.mark.timeout(3600 if IS_LONG else 300)
def test_any_order_of_calls_and_faults_keeps_every_request(own_server):
    run_state_machine_as_test(
        lambda: QueueMachine(own_server),
        settings=settings(
            max_examples=100 if IS_LONG else 8,
            stateful_step_count=50 if IS_LONG else 20,
            suppress_health_check=list(HealthCheck),
            database=None,
            phases=(Phase.generate,),
            print_blob=True,
        ),
    )
