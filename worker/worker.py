"""The worker: claims requests that its engine can start, publishes what the engine says, keeps the leases.

One loop is one named coroutine; `run` starts them all. It must not know how an engine computes.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Literal

from redis.exceptions import RedisError

from engines.base import EngineError, InvalidImage, PromptTooLong
from engines.factory import LoadedEngine
from shared.protocol import ErrorCode
from shared.publication import Claim, Publication
from shared.redis_client import BLOCK_S
from shared.registry import Registry, WorkerRecord
from shared.request_claims import RequestClaims
from shared.settings import EngineSettings, WorkerSettings
from worker.engine_thread import Added, EngineBroken, EngineThread, News, Rejected
from worker.flight import Flight
from worker.outbox import Outbox
from worker.preprocess import ImageUnavailable, Preprocessor
from worker.repeat import repeat

logger = logging.getLogger(__name__)

#: Requests that one read claims at most: the rest of a burst is left to workers that are idle too.
MAX_CLAIMS_PER_READ = 8
DEADLINE_CHECK_S = 0.25
REAP_EVERY_S = 600.0
MIN_RECORD_TTL_S = 5.0

_CODES: tuple[tuple[type[EngineError], ErrorCode], ...] = (
    (ImageUnavailable, ErrorCode.IMAGE_UNAVAILABLE),
    (InvalidImage, ErrorCode.INVALID_IMAGE),
    (PromptTooLong, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
    (EngineError, ErrorCode.INVALID_REQUEST),
)


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
    ) -> None:
        self.worker_id = worker_id
        self._settings = settings
        self._kind = engine_settings.kind
        self._max_num_seqs = engine_settings.max_num_seqs
        self._card = loaded.card
        self._engine = engine
        self.claims = claims
        self._registry = registry
        self._preprocessor = preprocessor
        self._flights: dict[str, Flight] = {}  # by request id
        self._by_engine_id: dict[str, Flight] = {}
        self._parked: deque[Flight] = deque()  # claimed, to be started when the way is clear
        self._outbox = Outbox()
        self._unsent: list[Publication] = []  # taken from the outbox, not yet answered by Redis
        self._changed = asyncio.Event()  # room, flights or the engine's queue may have changed
        self._stopping = asyncio.Event()
        self._hurrying = asyncio.Event()
        self._last_num_steps = 0
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
            self._changed.clear()
            await self._changed.wait()

    async def _leave(self, *, blame: bool) -> None:
        """Give back what is left, so that others continue it at once, and say goodbye."""
        flights = list(self._flights.values())
        for flight in flights:
            self._forget(flight)
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
        while (room := self._room()) == 0:
            self._changed.clear()
            await self._changed.wait()
        self._take_off(await self.claims.read(min(room, MAX_CLAIMS_PER_READ), BLOCK_S))

    async def reclaim_requests(self) -> None:
        """Take over what other workers, or lost replies, have left lying."""
        await repeat(self._reclaim_once, "reclaim requests", self._settings.heartbeat_s)

    async def _reclaim_once(self) -> None:
        if room := self._room():
            self._take_off(await self.claims.reclaim(min(room, MAX_CLAIMS_PER_READ)))
        self._take_off(await self.claims.reconcile())
        if time.monotonic() - self._last_reap_at > REAP_EVERY_S:
            self._last_reap_at = time.monotonic()
            await self.claims.reap()

    async def publish_events(self) -> None:
        """Publish all that was said since the last publish; what Redis did not answer goes out again."""
        await repeat(self._publish_once, "publish events")

    async def _publish_once(self) -> None:
        self._unsent = self._unsent or await self._outbox.take()
        refused = await self.claims.publish(self._unsent)
        sent, self._unsent = self._unsent, []
        for publication in sent:
            request_id = publication.claim.request.request_id
            flight = self._flights.get(request_id)
            if flight is None or flight.claim is not publication.claim:
                continue
            if request_id in refused:
                self._let_go(flight, refused[request_id])
            elif publication.terminal is not None:
                self._forget(flight)

    async def renew_leases(self) -> None:
        """Keep the leases while the engine moves; a wedged one loses them. Learn what was cancelled."""
        await repeat(self._renew_once, "renew leases", self._settings.heartbeat_s)

    async def _renew_once(self) -> None:
        num_steps = self._engine.stats.num_steps
        is_stuck = self._engine.is_stepping and num_steps == self._last_num_steps
        self._last_num_steps = num_steps
        flights = list(self._flights.values())
        if is_stuck or not flights:
            return
        refused = await self.claims.renew([flight.claim for flight in flights])
        for flight in flights:
            if flight.request_id in refused and self._is_current(flight):
                self._let_go(flight, refused[flight.request_id])

    async def enforce_deadlines(self) -> None:
        """End requests whose time is up."""
        while True:
            await asyncio.sleep(DEADLINE_CHECK_S)
            now = time.monotonic()
            for flight in list(self._flights.values()):
                if now >= flight.deadline_at:
                    self._fail(flight, ErrorCode.DEADLINE_EXCEEDED, "the request's deadline passed")

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

    # Flights

    def _room(self) -> int:
        """How many more requests the engine can start soon."""
        stats = self._engine.stats
        started_at = self._engine.step_started_at
        is_slow = (
            started_at is not None and time.monotonic() - started_at > self._settings.lease_s / 2
        )
        if self._parked or self._has_solo() or stats.num_waiting > 0 or is_slow:
            return 0
        return max(0, self._max_num_seqs - len(self._flights))

    def _has_solo(self) -> bool:
        return any(flight.claim.is_last_chance for flight in self._flights.values())

    def _take_off(self, claims: Iterable[Claim]) -> None:
        for claim in claims:
            earlier = self._flights.get(claim.request.request_id)
            if earlier is not None:  # our own, whose lease we let run out
                self._forget(earlier)
            flight = Flight.of(claim, time.monotonic())
            self._flights[flight.request_id] = flight
            self._by_engine_id[flight.engine_id] = flight
            self._parked.append(flight)
        self._start_parked()

    def _start_parked(self) -> None:
        """Start what may run. A request on its last chance runs alone: if it kills, it kills no other."""
        while self._parked:
            num_started = len(self._flights) - len(self._parked)
            is_solo_running = num_started > 0 and any(
                flight.claim.is_last_chance and flight.started_at
                for flight in self._flights.values()
            )
            if is_solo_running or (self._parked[0].claim.is_last_chance and num_started > 0):
                return
            flight = self._parked.popleft()
            flight.started_at = time.monotonic()
            flight.preparation = asyncio.create_task(self._prepare(flight))

    async def _prepare(self, flight: Flight) -> None:
        try:
            request = await self._preprocessor.prepare(flight.claim, flight.engine_id)
        except EngineError as error:
            self._refuse(flight, error)
        except Exception:
            logger.exception("could not prepare request %s", flight.request_id)
            self._fail(flight, ErrorCode.ENGINE_FAILURE, "the request could not be prepared")
        else:
            self._engine.add(request)

    def hear(self, news: list[News]) -> None:
        """Take what the engine's thread has to say."""
        for item in news:
            flight = self._by_engine_id.get(item.request_id)
            if flight is None:
                continue
            if isinstance(item, Added):
                flight.added_at = item.at
            elif isinstance(item, Rejected):
                self._refuse(flight, item.error)
            else:
                for event in flight.events(item):
                    self._outbox.post(flight, event)
        self._changed.set()

    def _refuse(self, flight: Flight, error: EngineError) -> None:
        code = next(code for kind, code in _CODES if isinstance(error, kind))
        self._fail(flight, code, str(error))

    def _fail(self, flight: Flight, code: ErrorCode, message: str) -> None:
        """End a request in an error."""
        self._outbox.post(flight, flight.failed(code, message))
        self._stop_work(flight)

    def _let_go(self, flight: Flight, why: str) -> None:
        """Stop work on a request that is not ours any more."""
        log = logger.info if why == "cancelled" else logger.warning
        log("request %s is no longer ours: %s", flight.request_id, why)
        self._forget(flight)

    def _forget(self, flight: Flight) -> None:
        self._stop_work(flight)
        self._outbox.drop(flight)
        if self._is_current(flight):
            del self._flights[flight.request_id]
        self._changed.set()
        self._start_parked()

    def _stop_work(self, flight: Flight) -> None:
        if flight in self._parked:
            self._parked.remove(flight)
        if flight.preparation is not None and flight.preparation is not asyncio.current_task():
            flight.preparation.cancel()
        if self._by_engine_id.pop(flight.engine_id, None) is not None:
            self._engine.abort(flight.engine_id)

    def _is_current(self, flight: Flight) -> bool:
        return self._flights.get(flight.request_id) is flight


def _cancel(tasks: Iterable[asyncio.Task]) -> None:
    for task in tasks:
        task.cancel()
