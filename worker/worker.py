"""The worker: claims requests that its engine can start, publishes what the engine says, keeps the leases.

One loop is one named coroutine; `run` starts them all. It must not know how an engine computes.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Literal

from redis.exceptions import RedisError

from engines.factory import LoadedEngine
from shared.protocol import ErrorCode
from shared.publication import Claim, Publication
from shared.redis_client import BLOCK_S
from shared.registry import Registry, WorkerRecord
from shared.request_claims import RequestClaims
from shared.settings import EngineSettings, WorkerSettings
from worker.absence import Absence
from worker.engine_thread import EngineBroken, EngineThread, News
from worker.flight_trace import FlightTracer
from worker.flights import Flights
from worker.outbox import Outbox
from worker.preprocess import Preprocessor
from worker.repeat import repeat

logger = logging.getLogger(__name__)

#: Requests that one read claims at most: the rest of a burst is left to workers that are idle too.
MAX_CLAIMS_PER_READ = 8
#: Interactive requests that pass batch work before the oldest of it, if it is old enough, queues among them.
PASSED_PER_AGED = 10
DEADLINE_CHECK_S = 0.25
REAP_EVERY_S = 600.0
MIN_RECORD_TTL_S = 5.0


class Worker:
    """One worker around one engine, from `run` until `stop`."""

    def __init__(
        self,
        worker_id: str,
        settings: WorkerSettings,
        engine_settings: EngineSettings,
        loaded: LoadedEngine,
        engine: EngineThread,
        claims: RequestClaims,
        registry: Registry,
        preprocessor: Preprocessor,
        tracer: FlightTracer | None = None,
    ) -> None:
        self.worker_id = worker_id
        self._settings = settings
        self._kind = engine_settings.kind
        self._max_num_seqs = engine_settings.max_num_seqs
        self._card = loaded.card
        self._engine = engine
        self.claims = claims
        self._registry = registry
        self._outbox = Outbox()
        self._flights = Flights(
            engine, preprocessor, self._outbox, engine_settings.max_num_seqs, self._begin, tracer
        )
        self._unsent: list[Publication] = []  # taken from the outbox, not yet answered by Redis
        self._absence = Absence()
        self._stopping = asyncio.Event()
        self._hurrying = asyncio.Event()
        self._batch_waits = asyncio.Event()
        self._num_passed = 0
        self._last_reap_at = time.monotonic()
        self._last_contact_at = 0.0

    # Life

    async def run(self) -> None:
        """Serve until `stop`, then finish or give back what runs. Raises: EngineBroken."""
        broken: EngineBroken | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                taking = [
                    tasks.create_task(self.claim_requests(), name="claim requests"),
                    tasks.create_task(self.claim_batch_work(), name="claim batch work"),
                    tasks.create_task(self.reclaim_requests(), name="reclaim requests"),
                ]
                keeping = [
                    tasks.create_task(self.publish_events(), name="publish events"),
                    tasks.create_task(self.renew_leases(), name="renew leases"),
                    tasks.create_task(self.enforce_deadlines(), name="enforce deadlines"),
                    tasks.create_task(self.announce(), name="announce"),
                    tasks.create_task(self._engine.wait_until_broken(), name="watch engine"),
                ]
                await self._stopping.wait()
                _cancel(taking)
                await asyncio.wait(taking)
                await self._give_back_strays()
                await self._drain()
                _cancel(keeping)
        except* EngineBroken as group:
            broken = next(e for e in group.exceptions if isinstance(e, EngineBroken))
        await self._leave(blame=broken is not None)
        if broken is not None:
            raise broken

    def stop(self) -> None:
        """Claim no more and end when all is done; a second call ends now and gives the rest back."""
        if self._stopping.is_set():
            self._hurrying.set()
        self._stopping.set()

    async def _give_back_strays(self) -> None:
        """Others take at once what was being claimed at this moment, rather than after a lease."""
        with suppress(RedisError):  # there is another try at the end
            await self.claims.give_back_strays([f.claim for f in self._flights.all()])

    async def _drain(self) -> None:
        logger.info("stopping; %d requests run", len(self._flights))
        waiting = {
            asyncio.create_task(self._wait_until_empty()),
            asyncio.create_task(self._hurrying.wait()),
        }
        _, pending = await asyncio.wait(
            waiting, timeout=self._settings.drain_s, return_when=asyncio.FIRST_COMPLETED
        )
        _cancel(pending)

    async def _wait_until_empty(self) -> None:
        while self._flights:
            await self._flights.wait_for_change()

    async def _leave(self, *, blame: bool) -> None:
        """Give back what is left, so that others continue it at once, and say goodbye."""
        flights = self._flights.all()
        for flight in flights:
            self._flights.forget(flight)
        with suppress(RedisError):
            released = await self.claims.release([f.claim for f in flights], blame=blame)
            if flights:
                logger.info("gave %d of %d requests back", released, len(flights))
            await self.claims.leave()
            await self._registry.withdraw(self.worker_id)

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests: not stopping, and in touch with Redis."""
        silent_s = time.monotonic() - self._last_contact_at
        return not self._stopping.is_set() and silent_s < self._record_ttl_s

    # Loops

    async def claim_requests(self) -> None:
        """Claim what the engine can start soon, and no more."""
        await repeat(self._claim_once, "claim requests")

    async def _claim_once(self) -> None:
        while (room := self._limit(self._flights.room())) == 0:
            await self._flights.wait_for_change()
        claims = await self.claims.read(room, BLOCK_S)
        self._flights.take_off(claims)
        if self.claims.entries.num_batch_left:
            await self._let_batch_work_in(len(claims))

    async def _let_batch_work_in(self, num_passed: int) -> None:
        """Wake the other loop; and of requests that pass batch work, let one in so many take an old one along."""
        self._batch_waits.set()
        self._num_passed += num_passed
        if self._num_passed >= PASSED_PER_AGED:
            self._num_passed = 0
            await self.claims.entries.age(self._settings.batch_age_s)

    async def claim_batch_work(self) -> None:
        """Claim batch work while nobody else waits for the room that there is."""
        await repeat(self._claim_batch_once, "claim batch work")

    async def _claim_batch_once(self) -> None:
        while not self.claims.entries.num_batch_left:
            self._batch_waits.clear()
            await self._batch_waits.wait()
        while (room := self._limit(self._flights.batch_room())) == 0:
            await self._flights.wait_for_change()
        self._flights.take_off(await self.claims.take(room))

    def _limit(self, room: int) -> int:
        """A few at a time, and none while a step drags on: others may be quicker."""
        started_at = self._engine.step_started_at
        if started_at is not None and time.monotonic() - started_at > self._settings.lease_s / 2:
            return 0
        return min(room, MAX_CLAIMS_PER_READ)

    def hear(self, news: list[News]) -> None:
        """Take what the engine's thread has to say."""
        self._flights.hear(news)

    async def reclaim_requests(self) -> None:
        """Take over what other workers, or lost replies, have left lying."""
        await repeat(self._reclaim_once, "reclaim requests", self._settings.heartbeat_s)

    async def _reclaim_once(self) -> None:
        await self.claims.entries.look_at_backlog()
        if self.claims.entries.num_batch_left:
            self._batch_waits.set()
        if room := self._limit(self._flights.room()):
            self._flights.take_off(await self.claims.reclaim(room))
        self._flights.take_off(await self.claims.reconcile())
        if time.monotonic() - self._last_reap_at > REAP_EVERY_S:
            self._last_reap_at = time.monotonic()
            await self.claims.reap()

    async def _begin(self, claim: Claim) -> bool:
        """Say that a suspect starts, after Redis is back if it is away. Returns whether it is still ours."""
        while True:
            try:
                return await self.claims.begin(claim)
            except RedisError as error:
                logger.warning("cannot begin %s: %s; trying on", claim.request.request_id, error)
                await asyncio.sleep(self._settings.heartbeat_s)

    async def publish_events(self) -> None:
        """Publish all that was said since the last publish; what Redis did not answer goes out again."""
        await repeat(self._publish_once, "publish events")

    async def _publish_once(self) -> None:
        self._unsent = self._unsent or await self._outbox.take()
        refused = await self.claims.publish(self._unsent)
        sent, self._unsent = self._unsent, []
        for publication in sent:
            flight = self._flights.find(publication.claim)
            if flight is None:
                continue
            if flight.request_id in refused:
                self._flights.let_go(flight, refused[flight.request_id])
            elif publication.terminal is not None:
                self._flights.forget(flight)

    async def renew_leases(self) -> None:
        """Keep the leases, however long a step takes that the watchdog allows. Learn what was cancelled."""
        await repeat(self._renew_once, "renew leases", self._settings.heartbeat_s)

    async def _renew_once(self) -> None:
        flights = self._flights.all()
        if not flights or self._is_wedged:
            return
        refused = await self.claims.renew([flight.claim for flight in flights])
        for flight in flights:
            if flight.request_id in refused and self._flights.find(flight.claim):
                self._flights.let_go(flight, refused[flight.request_id])
        await self._cancel_deserted()

    async def _cancel_deserted(self) -> None:
        """End what nobody waits for: the requests of gateways that are gone."""
        waited_for = [f for f in self._flights.all() if not f.claim.request.is_detached]
        names = {flight.claim.request.reply_to for flight in waited_for}
        gone = self._absence.note(await self.claims.publisher.listening(names), time.monotonic())
        deserted = [flight for flight in waited_for if flight.claim.request.reply_to in gone]
        if deserted:
            await self.claims.cancel([flight.claim for flight in deserted])
            for flight in deserted:
                self._flights.let_go(flight, "cancelled")

    @property
    def _is_wedged(self) -> bool:
        """Whether the present step takes longer than any may: should the process live on, others take over."""
        started_at = self._engine.step_started_at
        return started_at is not None and time.monotonic() - started_at > self._settings.watchdog_s

    async def enforce_deadlines(self) -> None:
        """End requests whose time is up."""
        while True:
            await asyncio.sleep(DEADLINE_CHECK_S)
            now = time.monotonic()
            for flight in self._flights.all():
                if now >= flight.deadline_at:
                    code, message = ErrorCode.DEADLINE_EXCEEDED, "the request's deadline passed"
                    self._flights.fail(flight, code, message)

    async def announce(self) -> None:
        """Tell the gateways that this worker is there, and how busy."""
        await repeat(self._announce_once, "announce this worker", self._settings.heartbeat_s)

    async def _announce_once(self) -> None:
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
            state=state,
        )
        await self._registry.announce(record, self._record_ttl_s)
        self._last_contact_at = time.monotonic()

    @property
    def _record_ttl_s(self) -> float:
        return max(MIN_RECORD_TTL_S, 3 * self._settings.heartbeat_s)


def _cancel(tasks: Iterable[asyncio.Task]) -> None:
    for task in tasks:
        task.cancel()
