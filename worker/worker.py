"""The worker: claims requests, publishes the events of its engine, renews leases."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from redis.exceptions import RedisError

from engines.base import LoadedEngine
from shared.process import cancel
from shared.protocol import ErrorCode, StageTimings
from shared.queue.api import Claim, Publication, QueueUnavailable, WorkerQueue
from shared.queue.registry import Registry, WorkerRecord
from shared.redis.client import BLOCK_S
from shared.settings.tree import WorkerSettings
from shared.telemetry.tracing import NOT_FAILURES, Attributes, epoch_ns, lay_out
from worker.active_requests import ActiveRequest, ActiveRequests, Outboxes
from worker.adapters import WorkerAdapters
from worker.engine_thread import EngineBroken, EngineThread
from worker.prepare.preparer import Preprocessor

if TYPE_CHECKING:
    from shared.telemetry.spans import Tracer

_IN_REDIS: Attributes = {"vlm.queue": "redis"}
_IN_ENGINE: Attributes = {"vlm.queue": "engine"}

logger = logging.getLogger(__name__)

DEADLINE_CHECK_S = 0.25
MIN_RECORD_TTL_S = 5.0
#: Pause of an idle worker after a claim, so that the engine thread gets the GIL and starts.
ENGINE_FIRST_S = 0.001
#: Maximum number of requests per read, so that idle workers share a burst.
MAX_CLAIMS_PER_READ = 8
FIRST_PAUSE_S = 0.05  #: before the first retry after a Redis failure
LONGEST_PAUSE_S = 1.0


def trace(
    tracer: "Tracer | None", active: ActiveRequest, engine: StageTimings | None, outcome: str
) -> None:
    """Record the spans of an attempt, from the time in the queue until now, as children of the gateway's span."""
    request, waited_s = active.call, active.claim.waited_s
    if tracer is None or active.is_traced or request.trace_parent is None:
        return  # disabled, already exported, or not sampled
    active.is_traced = True
    now = time.monotonic()
    duration_s = waited_s + now - active.claimed_at
    span = tracer.begin(
        f"{type(request.task).__struct_config__.tag} {request.model}",
        "consumer",
        request.trace_parent,
        epoch_ns(duration_s),
    )
    if not span.is_recorded:
        return
    span.add(
        {
            "gen_ai.request.model": request.model,
            "vlm.request.id": request.id,
            "vlm.attempt": active.claim.attempt,
            "vlm.image.count": len(request.task.images),
            "vlm.outcome": outcome,
        }
    )
    error = None if outcome in NOT_FAILURES else outcome
    span.end(duration_s, lay_out(_durations(active, engine, now)), error)


def _durations(
    active: ActiveRequest, engine: StageTimings | None, now: float
) -> list[tuple[str, float, Attributes]]:
    """Durations of the stages that the request reached, in order. Units: seconds."""
    started_at = active.started_at or now
    rest_s = (active.added_at or now) - started_at - active.media_decode_s
    durations: list[tuple[str, float, Attributes]] = [
        ("queue", active.claim.waited_s + started_at - active.claimed_at, _IN_REDIS),
        ("media_decode", active.media_decode_s, {}),
        ("preprocess", rest_s, {}),
    ]
    if engine is not None:
        durations += [
            ("queue", engine.queue_s, _IN_ENGINE),
            ("vision", engine.vision_s, {}),
            ("prefill", engine.prefill_s, {}),
            ("decode", engine.decode_s, {}),
        ]
    return durations


@dataclass(eq=False)
class Worker:
    worker_id: str
    _settings: WorkerSettings
    _kind: str
    _loaded: LoadedEngine
    _engine: EngineThread
    queues: Mapping[str, WorkerQueue]  #: by shard
    _registry: Registry
    _preprocessor: Preprocessor
    _tracer: "Tracer | None"
    _adapters: WorkerAdapters

    def __post_init__(self) -> None:
        self._max_num_seqs = self._loaded.engine.capabilities().max_num_seqs
        self._card = self._adapters.card
        self._outboxes = Outboxes(self.queues)
        self.active_requests = ActiveRequests(
            self._engine,
            self._preprocessor,
            self._outboxes,
            self._max_num_seqs,
            self._begin,
            partial(trace, self._tracer),
        )
        self._engine.on_events = self.active_requests.on_events
        self._stopping = asyncio.Event()
        self._hurrying = asyncio.Event()
        self._num_ended: dict[str, int] = {"finished": 0, "failed": 0}
        self._loops = [
            QueueLoops(
                self._settings,
                self.queues,
                name,
                self._engine,
                self.active_requests,
                self._outboxes,
                self._num_ended,
            )
            for name in self.queues
        ]
        self._last_contact_at = 0.0
        self._record_ttl_s = max(MIN_RECORD_TTL_S, 3 * self._settings.heartbeat_s)

    # Start and stop

    async def run(self) -> None:
        """Serve until `stop`, then finish or release the active requests. Raises: EngineBroken."""
        broken, every_s = None, self._settings.heartbeat_s
        try:
            async with asyncio.TaskGroup() as tasks:
                taking = [
                    tasks.create_task(loop) for each in self._loops for loop in each.claiming()
                ]
                keeping = [
                    *(tasks.create_task(loop) for each in self._loops for loop in each.keeping()),
                    tasks.create_task(self.enforce_deadlines(), name="enforce deadlines"),
                    tasks.create_task(repeat(self._announce, "announce this worker", every_s)),
                    tasks.create_task(self._engine.wait_until_broken(), name="watch engine"),
                    tasks.create_task(repeat(self._sync_adapters, "sync adapters", every_s)),
                ]
                await self._stopping.wait()
                await cancel(*taking)
                await self._release_unclaimed()
                await self._drain()
                await cancel(*keeping)
        except* EngineBroken as group:
            broken = next(e for e in group.exceptions if isinstance(e, EngineBroken))
        await self._leave(is_crash=broken is not None)
        if broken is not None:
            raise broken

    def stop(self) -> None:
        """Stop claiming, finish the active requests and end. A second call releases them and ends immediately."""
        if self._stopping.is_set():
            self._hurrying.set()
            self.active_requests.changed.set()
        self._stopping.set()

    async def _release_unclaimed(self) -> None:
        """Release requests that Redis assigned to this worker in lost replies, so that other workers can run them."""
        for loops in self._loops:
            with suppress(QueueUnavailable):  # `_leave` retries
                await loops.queue.leave(keep=[active.claim for active in loops.active()])

    async def _drain(self) -> None:
        logger.info("stopping; %d requests run", len(self.active_requests))
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_s):
                while self.active_requests and not self._hurrying.is_set():
                    await self.active_requests.wait_for_change()

    async def _leave(self, *, is_crash: bool) -> None:
        """Release the remaining requests to other workers, and withdraw this worker's record."""
        remaining = [(loops, [active.claim for active in loops.active()]) for loops in self._loops]
        for active in self.active_requests.all():
            self.active_requests.forget(active)
        for loops, claims in remaining:
            with suppress(QueueUnavailable):
                released = await loops.queue.release(claims, is_crash=is_crash)
                if claims:
                    logger.info("released %d of %d requests", released, len(claims))
                await loops.queue.leave()
        with suppress(QueueUnavailable, RedisError):
            await self._registry.withdraw(self.worker_id)

    @property
    def is_ready(self) -> bool:
        """Whether the worker accepts requests: it is not stopping, and Redis answered recently."""
        silent_s = time.monotonic() - self._last_contact_at
        return not self._stopping.is_set() and silent_s < self._record_ttl_s

    # Loops

    async def _begin(self, claim: Claim) -> bool:
        """Mark a possible poison request as started, once Redis answers. Returns whether this worker still owns it."""
        queue = self.queues[self._outboxes.shard(claim)]
        while True:
            try:
                return await queue.begin(claim)
            except QueueUnavailable as error:
                logger.warning("cannot begin %s: %s; retrying", claim.id, error)
                await asyncio.sleep(self._settings.heartbeat_s)

    async def enforce_deadlines(self) -> None:
        """Fail requests whose deadline has passed."""
        while True:
            await asyncio.sleep(DEADLINE_CHECK_S)
            now = time.monotonic()
            for active in self.active_requests.all():
                if now >= active.deadline_at:
                    code, message = ErrorCode.DEADLINE_EXCEEDED, "the request's deadline passed"
                    self.active_requests.fail(active, code, message)

    async def _sync_adapters(self) -> None:
        """Load the adapters of the registry, and announce changes immediately."""
        await self._adapters.sync()
        if (card := self._adapters.card) != self._card:
            self._card = card
            await self._announce()

    async def announce_first(self) -> None:
        """Announce this worker before it reports that it is ready, if Redis answers."""
        with suppress(QueueUnavailable, RedisError):
            await self._announce()

    async def _announce(self) -> None:
        stats = self._engine.stats
        state: Literal["ready", "draining"] = "draining" if self._stopping.is_set() else "ready"
        record = WorkerRecord(
            worker_id=self.worker_id,
            card=self._card,
            engine=self._kind,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            max_num_seqs=self._max_num_seqs,
            num_steps=stats.num_steps,
            num_finished=self._num_ended["finished"],
            num_failed=self._num_ended["failed"],
            state=state,
        )
        await self._registry.announce(record, self._record_ttl_s)
        self._last_contact_at = time.monotonic()


@dataclass(eq=False)
class QueueLoops:
    """The loops of one shard: claim as many requests as the engine has room for, publish events, renew leases."""

    _settings: WorkerSettings
    _queues: Mapping[str, WorkerQueue]
    _name: str
    _engine: EngineThread
    _active_requests: ActiveRequests
    _outboxes: Outboxes
    _num_ended: dict[str, int]

    def __post_init__(self) -> None:
        self.queue = self._queues[self._name]
        self._others = self._queues.keys() - {self._name}
        self._outbox = self._outboxes.by_shard[self._name]
        self._unsent: list[Publication] = []  # taken from the outbox, not yet answered by Redis
        self._batch_waits = asyncio.Event()
        self._renewed_at = time.monotonic()

    def claiming(self) -> tuple[Coroutine[None, None, None], ...]:
        return (
            repeat(self._claim_once, "claim requests"),
            repeat(self._claim_batch_once, "claim batch work"),
            repeat(self._reclaim_once, "reclaim requests", self._settings.heartbeat_s),
        )

    def keeping(self) -> tuple[Coroutine[None, None, None], ...]:
        """The loops that run until the last request has ended."""
        return (
            repeat(self._publish_once, "publish events"),
            repeat(self._renew_once, "renew leases", self._settings.heartbeat_s),
        )

    def active(self) -> list[ActiveRequest]:
        all_, shard = self._active_requests.all(), self._outboxes.shard
        return [active for active in all_ if shard(active.claim) == self._name]

    async def _claim_once(self) -> None:
        while (room := self._limit(self._active_requests.room())) == 0:
            await self._active_requests.wait_for_change()
        claims = await self.queue.read(room, BLOCK_S)
        # Reads of other shards may have used the capacity meanwhile.
        room = self._active_requests.room() if self._others else len(claims)
        claims, excess = claims[:room], claims[room:]
        was_idle = not self._active_requests
        self._active_requests.start(claims)
        await self.queue.release(excess)
        if self.queue.num_backlog:
            self._batch_waits.set()
        if was_idle and claims:
            await self._active_requests.wait_for_change(ENGINE_FIRST_S)

    async def _claim_batch_once(self) -> None:
        while not self.queue.num_backlog:
            self._batch_waits.clear()
            await self._batch_waits.wait()
        while (room := self._limit(self._active_requests.batch_room())) == 0:
            await self._active_requests.wait_for_change()
        self._active_requests.start(await self.queue.take(room))

    def _limit(self, room: int) -> int:
        """Limit a claim to a few requests, or to none during a long step, because other workers may be faster."""
        if self._engine.is_stuck(self._settings.lease_s / 2):
            return 0
        return min(-(-room // (1 + len(self._others))), MAX_CLAIMS_PER_READ)

    async def _reclaim_once(self) -> None:
        """Take over requests of lost workers, and requests that Redis assigned to this worker in lost replies.

        Takes over one request at a time, so that other workers can try other possible poison requests. While no lease
        has expired, only one worker per heartbeat scans for expired leases.
        """
        until = time.monotonic() + self._settings.heartbeat_s
        _, may_scan = await asyncio.gather(self._reconcile(), self._may_scan())
        if not may_scan:
            return
        while self._limit(self._active_requests.room()) and (claims := await self.queue.reclaim(1)):
            self._active_requests.start(claims)
            await self.queue.end_scan()
            while self._active_requests.is_held_up() and time.monotonic() < until:
                await self._active_requests.wait_for_change()

    async def _reconcile(self) -> None:
        self._active_requests.start(await self.queue.reconcile())
        if self.queue.num_backlog:
            self._batch_waits.set()

    async def _may_scan(self) -> bool:
        has_room = self._limit(self._active_requests.room()) > 0
        # Less than a heartbeat, so that one worker scans at each heartbeat.
        return has_room and await self.queue.take_scan(0.9 * self._settings.heartbeat_s)

    async def _publish_once(self) -> None:
        """Publish the events since the last call, and retry those that Redis did not acknowledge."""
        self._unsent = self._unsent or await self._outbox.take()
        if not self._others:  # a shard that is down must not delay events of others
            self._engine.hold()  # no other events can be published during this call
        try:
            refused = await self.queue.publish(self._unsent)
        finally:
            if not self._others:
                self._engine.release()
        sent, self._unsent = self._unsent, []
        for publication in sent:
            active = self._active_requests.find(publication.claim)
            if active is None:
                continue
            if active.request_id in refused:
                self._active_requests.drop(active, refused[active.request_id])
            elif publication.ending is not None:
                if not active.is_uncounted:
                    self._num_ended[publication.ending] += 1
                self._active_requests.forget(active)

    async def _renew_once(self) -> None:
        """Renew the leases unless the current step hangs; the reply names cancelled requests."""
        active_requests = self.active()
        if not active_requests or self._engine.is_stuck(self._settings.watchdog_s):
            self._renewed_at = time.monotonic()
            return
        claims = [active.claim for active in active_requests]
        try:
            refused, deserted = await asyncio.gather(
                self.queue.renew(claims),
                # Cancel the requests of gateways that have stopped.
                self.queue.cancel_deserted(
                    [active.claim for active in active_requests if not active.call.is_resumable]
                ),
            )
        except QueueUnavailable:
            # If the shard has been down for longer than a lease, free the slots of its requests for other shards.
            if self._others and time.monotonic() - self._renewed_at > self._settings.lease_s:
                for active in active_requests:
                    self._active_requests.drop(active, "its shard is down")
                await self.queue.release(claims)
            raise
        self._renewed_at = time.monotonic()
        for active in active_requests:
            if active.request_id in refused and self._active_requests.find(active.claim):
                self._active_requests.drop(active, refused[active.request_id])
        for claim in deserted:
            if (active := self._active_requests.find(claim)) is not None:
                self._active_requests.drop(active, "cancelled")


async def repeat(body: Callable[[], Awaitable[None]], name: str, every_s: float = 0.0) -> None:
    """Run `body` every `every_s` seconds. While Redis fails, retry it with exponential backoff."""
    pause_s = 0.0
    while True:
        try:
            await body()
        except (QueueUnavailable, RedisError) as error:
            if pause_s == 0.0:
                logger.warning("cannot %s: %s; retrying", name, error)
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2 or FIRST_PAUSE_S)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            continue
        if pause_s:
            logger.warning("can %s again", name)
            pause_s = 0.0
        if every_s:
            await asyncio.sleep(every_s)
