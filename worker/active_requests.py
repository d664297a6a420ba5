"""The requests that this worker has claimed, from take-off until they are ended or let go.

Called by the worker's loops, on the event loop. It must not know Redis: what is to be told goes into the
outbox, what comes in are claims.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from engines.base import EngineError, EngineOutput, InvalidImage, PromptTooLong
from shared.protocol import ErrorCode
from shared.queue.publication import Claim
from worker.active_request import Flight
from worker.engine_thread import Added, EngineThread, News
from worker.outbox import Outbox
from worker.prepare.preparer import ImageUnavailable, PictureRefused, Preprocessor
from worker.trace import FlightTracer

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.25

_CODES: tuple[tuple[type[EngineError], ErrorCode], ...] = (
    (ImageUnavailable, ErrorCode.IMAGE_UNAVAILABLE),
    (InvalidImage, ErrorCode.INVALID_IMAGE),
    (PromptTooLong, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
    (EngineError, ErrorCode.INVALID_REQUEST),
)


class Flights:
    """What is in the air. `changed` is set whenever room may have come or the last one may have landed."""

    def __init__(
        self,
        engine: EngineThread,
        preprocessor: Preprocessor,
        outbox: Outbox,
        max_num_seqs: int,
        begin: Callable[[Claim], Awaitable[bool]],
        tracer: FlightTracer | None = None,
    ) -> None:
        self._engine = engine
        self._preprocessor = preprocessor
        self._outbox = outbox
        self._max_num_seqs = max_num_seqs
        self._tracer = tracer
        self._begin = begin  # says that a suspect starts; whether it is still ours
        self._flights: dict[str, Flight] = {}  # by request id
        self._by_engine_id: dict[str, Flight] = {}
        self._parked: deque[Flight] = deque()  # claimed, to be started when the way is clear
        self.changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._flights)

    def all(self) -> list[Flight]:
        """All of them now."""
        return list(self._flights.values())

    def find(self, claim: Claim) -> Flight | None:
        """The flight of this very claim, if it is still in the air."""
        flight = self._flights.get(claim.request.request_id)
        return flight if flight is not None and flight.claim is claim else None

    def room(self) -> int:
        """How many more requests the engine can start soon; batch work makes way."""
        stats = self._engine.stats
        if self.is_held_up() or stats.num_waiting > stats.num_waiting_batch:
            return 0
        num_batch = sum(flight.is_batch for flight in self._flights.values())
        return max(0, self._max_num_seqs - len(self._flights) + num_batch)

    def batch_room(self) -> int:
        """How many more it can start without any that makes way."""
        if self.is_held_up() or self._engine.stats.num_waiting > 0:
            return 0
        return max(0, self._max_num_seqs - len(self._flights))

    def is_held_up(self) -> bool:
        """Whether a suspect runs alone, or waits to."""
        return bool(self._parked) or any(flight.is_alone for flight in self._flights.values())

    async def wait_for_change(self) -> None:
        """Until room may have come, or the last one may have landed; a step that says nothing changes it too."""
        self.changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_AGAIN_S):
                await self.changed.wait()

    def take_off(self, claims: Iterable[Claim]) -> None:
        """Begin to work on claims."""
        for claim in claims:
            earlier = self._flights.get(claim.request.request_id)
            if earlier is not None:  # it was taken from us, and its new owner lost it to us
                self.forget(earlier)
            flight = Flight.of(claim, time.monotonic())
            self._flights[flight.request_id] = flight
            self._by_engine_id[flight.engine_id] = flight
            self._parked.append(flight)
        if any(flight.claim.is_suspect for flight in self._parked):  # they wait for all others
            self._parked = deque(sorted(self._parked, key=lambda flight: flight.claim.is_suspect))
        self._start_parked()

    def _start_parked(self) -> None:
        """Start what may run."""
        while self._parked and self._may_start(self._parked[0].claim):
            flight = self._parked.popleft()
            flight.started_at = time.monotonic()
            flight.preparation = asyncio.create_task(self._prepare(flight))

    def _may_start(self, claim: Claim) -> bool:
        """A suspect begins alone or beside cleared ones: if it kills, it kills no other's first attempt."""
        started = [flight for flight in self._flights.values() if flight.started_at]
        if any(flight.is_alone for flight in started):
            return False
        if claim.is_last_chance:
            return not started
        return not claim.is_suspect or all(flight.claim.is_suspect for flight in started)

    async def _prepare(self, flight: Flight) -> None:
        try:
            if flight.claim.is_suspect and not await self._begin(flight.claim):
                self.let_go(flight, "taken back before it began")
                return
            request = await self._preprocessor.prepare(flight.claim, flight.engine_id)
        except EngineError as error:
            self._refuse(flight, error)
        except Exception:
            logger.exception("could not prepare request %s", flight.request_id)
            self.fail(flight, ErrorCode.ENGINE_FAILURE, "the request could not be prepared")
        else:
            self._engine.add(request)

    def hear(self, news: list[News]) -> None:
        """Take what the engine's thread has to say; what several steps said of a request is told at once."""
        outputs: dict[str, list[EngineOutput]] = {}
        for item in news:
            if isinstance(item, EngineOutput):
                outputs.setdefault(item.request_id, []).append(item)
            elif (flight := self._by_engine_id.get(item.request_id)) is None:
                continue
            elif isinstance(item, Added):
                flight.added_at = item.at
            else:
                self._refuse(flight, item.error)
        for engine_id, said in outputs.items():
            if (flight := self._by_engine_id.get(engine_id)) is not None:
                self._pass_on(flight, said)
        self.changed.set()
        if self._parked:  # whoever ran alone may be cleared now
            self._start_parked()

    def _pass_on(self, flight: Flight, outputs: list[EngineOutput]) -> None:
        """Post what the engine has said of a request, in its order."""
        for event in flight.events(outputs):
            self._outbox.post(flight, event)
        last = outputs[-1]
        if self._tracer is not None and last.timings is not None:
            outcome = "ok" if last.error is None else ErrorCode.ENGINE_FAILURE.value
            self._tracer.trace(flight, last.timings, outcome)
        if last.finish_reason is not None:  # the engine has forgotten it already
            del self._by_engine_id[flight.engine_id]

    def _refuse(self, flight: Flight, error: EngineError) -> None:
        cause = error.cause if isinstance(error, PictureRefused) else error
        code = next(code for kind, code in _CODES if isinstance(cause, kind))
        param = None
        if isinstance(error, PictureRefused):
            param = flight.place_of_picture(error.picture)
        elif isinstance(error, PromptTooLong):
            param = "messages"
        self.fail(flight, code, str(cause), param)

    def fail(self, flight: Flight, code: ErrorCode, message: str, param: str | None = None) -> None:
        """End a request in an error; it lands when that is published."""
        self._outbox.post(flight, flight.failed(code, message, param))
        self._tell(flight, code.value)
        self._stop_work(flight)

    def let_go(self, flight: Flight, why: str) -> None:
        """Stop work on a request that is not ours any more."""
        log = logger.info if why == "cancelled" else logger.warning
        log("request %s is no longer ours: %s", flight.request_id, why)
        self._tell(flight, why)
        self.forget(flight)

    def _tell(self, flight: Flight, outcome: str) -> None:
        if self._tracer is not None:
            self._tracer.trace(flight, None, outcome)

    def forget(self, flight: Flight) -> None:
        """Land: nothing more is done or said about it."""
        self._stop_work(flight)
        self._outbox.drop(flight)
        if self.find(flight.claim) is flight:
            del self._flights[flight.request_id]
        self.changed.set()
        self._start_parked()

    def _stop_work(self, flight: Flight) -> None:
        if flight in self._parked:
            self._parked.remove(flight)
        if flight.preparation is not None and flight.preparation is not asyncio.current_task():
            flight.preparation.cancel()
        if self._by_engine_id.pop(flight.engine_id, None) is not None:
            self._engine.abort(flight.engine_id)
