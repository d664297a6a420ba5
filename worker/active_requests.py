"""The requests that this worker has claimed, from their start until they end or are dropped.

Called by the worker's loops, on the event loop. It must not know Redis: what is to be told goes into the
outbox, what comes in are claims.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from engines.base import EngineOutput, InvalidImage, PromptTooLong, RequestError
from shared.protocol import ErrorCode
from shared.queue.api import Claim
from worker.active_request import ActiveRequest
from worker.engine_thread import Added, EngineEvent, EngineThread
from worker.outbox import Outbox
from worker.prepare.preparer import CannotContinue, ImageRefused, ImageUnavailable, Preprocessor
from worker.trace import RequestTracer
from worker.wire import Unreadable

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.25

_CODES: tuple[tuple[type[RequestError], ErrorCode], ...] = (
    (CannotContinue, ErrorCode.WORKER_LOST),
    (ImageUnavailable, ErrorCode.IMAGE_UNAVAILABLE),
    (InvalidImage, ErrorCode.INVALID_IMAGE),
    (PromptTooLong, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
    (RequestError, ErrorCode.INVALID_REQUEST),
)


class ActiveRequests:
    """The active requests. `changed` is set when room may have come, or the last one may have ended."""

    def __init__(
        self,
        engine: EngineThread,
        preprocessor: Preprocessor,
        outbox: Outbox,
        max_num_seqs: int,
        begin: Callable[[Claim], Awaitable[bool]],
        tracer: RequestTracer | None = None,
    ) -> None:
        self._engine = engine
        self._preprocessor = preprocessor
        self._outbox = outbox
        self._max_num_seqs = max_num_seqs
        self._tracer = tracer
        self._begin = begin  # says that a suspect starts; whether it is still ours
        self._active_requests: dict[str, ActiveRequest] = {}  # by request id
        self._by_engine_id: dict[str, ActiveRequest] = {}
        self._parked: deque[ActiveRequest] = deque()  # claimed, to be started when the way is clear
        self.changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._active_requests)

    def all(self) -> list[ActiveRequest]:
        """All of them now."""
        return list(self._active_requests.values())

    def find(self, claim: Claim) -> ActiveRequest | None:
        """The active request of this very claim, if it is still active."""
        active = self._active_requests.get(claim.id)
        return active if active is not None and active.claim is claim else None

    def room(self) -> int:
        """How many more requests the engine can start soon; batch work makes way."""
        stats = self._engine.stats
        if self.is_held_up() or stats.num_waiting > stats.num_waiting_batch:
            return 0
        num_batch = sum(active.is_batch for active in self._active_requests.values())
        return max(0, self._max_num_seqs - len(self._active_requests) + num_batch)

    def batch_room(self) -> int:
        """How many more it can start without any that makes way."""
        if self.is_held_up() or self._engine.stats.num_waiting > 0:
            return 0
        return max(0, self._max_num_seqs - len(self._active_requests))

    def is_held_up(self) -> bool:
        """Whether a suspect runs alone, or waits to."""
        return bool(self._parked) or any(
            active.is_alone for active in self._active_requests.values()
        )

    async def wait_for_change(self) -> None:
        """Until room may have come, or the last one may have ended; a step that says nothing changes it too."""
        self.changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_AGAIN_S):
                await self.changed.wait()

    def start(self, claims: Iterable[Claim]) -> None:
        """Begin to work on claims."""
        for claim in claims:
            earlier = self._active_requests.get(claim.id)
            if earlier is not None:  # it was taken from us, and its new owner lost it to us
                self.forget(earlier)
            try:
                active = ActiveRequest.of(claim, time.monotonic())
            except Unreadable as error:
                self._outbox.refuse(error.refusal)
                continue
            self._active_requests[active.request_id] = active
            self._by_engine_id[active.engine_id] = active
            self._parked.append(active)
        if any(active.claim.is_suspect for active in self._parked):  # they wait for all others
            self._parked = deque(sorted(self._parked, key=lambda active: active.claim.is_suspect))
        self._start_parked()

    def _start_parked(self) -> None:
        """Start what may run."""
        while self._parked and self._may_start(self._parked[0].claim):
            active = self._parked.popleft()
            active.started_at = time.monotonic()
            active.preparation = asyncio.create_task(self._prepare(active))

    def _may_start(self, claim: Claim) -> bool:
        """A suspect begins alone or beside cleared ones: if it kills, it kills no other's first attempt."""
        started = [active for active in self._active_requests.values() if active.started_at]
        if any(active.is_alone for active in started):
            return False
        if claim.is_last_chance:
            return not started
        return not claim.is_suspect or all(active.claim.is_suspect for active in started)

    async def _prepare(self, active: ActiveRequest) -> None:
        try:
            if active.claim.is_suspect and not await self._begin(active.claim):
                self.let_go(active, "taken back before it began")
                return
            request = await self._preprocessor.prepare(
                active.call, active.engine_id, active.output_token_ids
            )
        except RequestError as error:
            self._refuse(active, error)
        except Exception:
            logger.exception("could not prepare request %s", active.request_id)
            self.fail(active, ErrorCode.ENGINE_FAILURE, "the request could not be prepared")
        else:
            self._engine.add(request)

    def on_events(self, events: list[EngineEvent]) -> None:
        """Take what the engine's thread has to say; what several steps said of a request is told at once."""
        outputs: dict[str, list[EngineOutput]] = {}
        for item in events:
            if isinstance(item, EngineOutput):
                outputs.setdefault(item.request_id, []).append(item)
            elif (active := self._by_engine_id.get(item.request_id)) is None:
                continue
            elif isinstance(item, Added):
                active.added_at = item.at
            else:
                self._refuse(active, item.error)
        for engine_id, said in outputs.items():
            if (active := self._by_engine_id.get(engine_id)) is not None:
                self._pass_on(active, said)
        self.changed.set()
        if self._parked:  # whoever ran alone may be cleared now
            self._start_parked()

    def _pass_on(self, active: ActiveRequest, outputs: list[EngineOutput]) -> None:
        """Post what the engine has said of a request, in its order."""
        for event in active.events(outputs):
            self._outbox.post(active, event)
        last = outputs[-1]
        if self._tracer is not None and last.timings is not None:
            outcome = "ok" if last.error is None else ErrorCode.ENGINE_FAILURE.value
            self._tracer.trace(active, last.timings, outcome)
        if last.finish_reason is not None:  # the engine has forgotten it already
            del self._by_engine_id[active.engine_id]

    def _refuse(self, active: ActiveRequest, error: RequestError) -> None:
        cause = error.cause if isinstance(error, ImageRefused) else error
        code = next(code for kind, code in _CODES if isinstance(cause, kind))
        param = None
        if isinstance(error, ImageRefused):
            param = active.place_of_image(error.index)
        elif isinstance(error, PromptTooLong):
            param = "messages"
        self.fail(active, code, str(cause), param)

    def fail(
        self, active: ActiveRequest, code: ErrorCode, message: str, param: str | None = None
    ) -> None:
        """End a request in an error; it is dropped when that is published."""
        self._outbox.post(active, active.failed(code, message, param))
        self._tell(active, code.value)
        self._stop_work(active)

    def let_go(self, active: ActiveRequest, why: str) -> None:
        """Stop work on a request that is not ours any more."""
        log = logger.info if why == "cancelled" else logger.warning
        log("request %s is no longer ours: %s", active.request_id, why)
        self._tell(active, why)
        self.forget(active)

    def _tell(self, active: ActiveRequest, outcome: str) -> None:
        if self._tracer is not None:
            self._tracer.trace(active, None, outcome)

    def forget(self, active: ActiveRequest) -> None:
        """Land: nothing more is done or said about it."""
        self._stop_work(active)
        self._outbox.drop(active)
        if self.find(active.claim) is active:
            del self._active_requests[active.request_id]
        self.changed.set()
        self._start_parked()

    def _stop_work(self, active: ActiveRequest) -> None:
        if active in self._parked:
            self._parked.remove(active)
        if active.preparation is not None and active.preparation is not asyncio.current_task():
            active.preparation.cancel()
        if self._by_engine_id.pop(active.engine_id, None) is not None:
            self._engine.abort(active.engine_id)
