"""The active requests of a worker, from their claim until they end or are dropped, and the outbox for their events.

The worker's loops call this module on the event loop; it does no I/O. Redis's CPU time depends on the number of
published items, so outputs of a request are merged before they are published. Answers that are not streamed are
published every `HOLD_S` and at their end, and streams of a busy worker every `STREAM_HOLD_S`.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from msgspec import Struct
from msgspec.structs import replace

from engines.base import (
    AdapterUnavailable,
    BadGrammar,
    EngineOutput,
    GrammarTooComplex,
    InvalidImage,
    PromptTooLong,
    RequestError,
    Tokenization,
)
from shared.protocol import (
    Call,
    CallEvent,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    Generate,
    Priority,
    Run,
    Scores,
    StageTimings,
    Started,
    Tokenize,
    Tokenized,
    Tokens,
    UnsupportedVersion,
    Usage,
    Vectors,
    decode_call,
    decode_log,
    encode_events,
    join_tokens,
)
from shared.queue.api import CLEARED_AFTER_TOKENS, Claim, Ending, Publication, shard_of
from worker.engine_thread import Added, EngineEvent, EngineThread
from worker.prepare.preparer import CannotContinue, ImageRefused, ImageUnavailable, Preprocessor

logger = logging.getLogger(__name__)

#: Maximum delay of tokens of an answer that is not streamed. Delayed tokens are lost if the worker dies.
HOLD_S = 0.25
#: Minimum time between two publications of a stream, if the worker runs at least `MIN_COALESCED_STREAMS`.
STREAM_HOLD_S = 0.05
MIN_COALESCED_STREAMS = 16
#: Vectors and scores up to this size are sent within their event, through log and mailbox; larger ones are stored.
MAX_INLINE_BYTES = 16 * 1024
LOOK_AGAIN_S = 0.25
_claim_numbers = count()

_CODES: tuple[tuple[type[RequestError], ErrorCode], ...] = (
    (CannotContinue, ErrorCode.WORKER_LOST),
    (ImageUnavailable, ErrorCode.IMAGE_UNAVAILABLE),
    (AdapterUnavailable, ErrorCode.ADAPTER_UNAVAILABLE),
    (InvalidImage, ErrorCode.INVALID_IMAGE),
    (PromptTooLong, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
    (BadGrammar, ErrorCode.INVALID_GRAMMAR),
    (GrammarTooComplex, ErrorCode.GRAMMAR_TOO_COMPLEX),
    (RequestError, ErrorCode.INVALID_REQUEST),
)
#: Failures that count against a version in a rollout. Refusals of wrong input and passed deadlines do not, because
#: clients can cause them. Failed tasks count, although wrong input may cause them too.
VERSION_FAULTS = (ErrorCode.ENGINE_FAILURE, ErrorCode.TASK_FAILED, ErrorCode.REQUEST_KILLS_WORKERS)


class _Draft(Struct):
    """Outputs of one request that are not published yet, and the events that follow them."""

    begun_at: float
    outputs: list[EngineOutput] = []
    events: list[CallEvent] = []


class Outbox:
    """Events to be published to one shard. `hold_s`: see `HOLD_S`.

    `published_at`: the time of the last publication of each open stream, shared by all outboxes of a worker.
    """

    def __init__(
        self, hold_s: float = HOLD_S, published_at: "dict[ActiveRequest, float] | None" = None
    ) -> None:
        self._hold_s = hold_s
        self._held: dict[ActiveRequest, _Draft] = {}  # delayed
        self._due: dict[ActiveRequest, _Draft] = {}
        self._published_at = {} if published_at is None else published_at
        self._timer: asyncio.TimerHandle | None = None  # for delayed streams
        # Requests with a terminal event that are not yet dropped.
        self._ended: set[ActiveRequest] = set()
        self._refusals: list[Publication] = []
        self._filled = asyncio.Event()

    def post(self, active: "ActiveRequest", outputs: Sequence[EngineOutput]) -> None:
        """Add outputs of a request; outputs after its end are dropped."""
        last = outputs[-1]
        is_end = last.finish_reason is not None or last.error is not None
        if active in self._ended:
            return
        now = time.monotonic()
        draft = self._due.get(active) or self._held.pop(active, None) or _Draft(now)
        draft.outputs += outputs
        if is_end:
            self._ended.add(active)
        elif not active.call.wants_stream and now - draft.begun_at < self._hold_s:
            self._held[active] = draft
            return
        elif (
            len(self._published_at) >= MIN_COALESCED_STREAMS
            and active not in self._due
            # The first tokens are not delayed.
            and (wait_s := self._published_at.get(active, 0.0) + STREAM_HOLD_S - now) > 0.0
        ):
            self._held[active] = draft
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(wait_s, self._release)
            return
        self._due[active] = draft
        self._filled.set()

    def end(self, active: "ActiveRequest", *events: CallEvent) -> None:
        """End a request with events that the engine did not create, unless it has ended."""
        if active not in self._ended:
            self._ended.add(active)
            draft = self._due.get(active) or self._held.pop(active, None) or _Draft(0.0)
            draft.events += events
            self._due[active] = draft
            self._filled.set()

    def _release(self) -> None:
        self._timer = None
        for active in [active for active in self._held if active.call.wants_stream]:
            self._due[active] = self._held.pop(active)
        self._filled.set()

    async def take(self) -> list[Publication]:
        """Wait until requests are due; returns one publication for each, with all its events."""
        while not self._due and not self._refusals:
            self._filled.clear()
            await self._filled.wait()
        drafts, self._due = self._due, {}
        publications, self._refusals = self._refusals, []
        now = time.monotonic()
        for active, draft in drafts.items():
            try:
                events = (*active.events(draft.outputs), *draft.events)
                if events:  # none if no output has tokens or text
                    publications.append(_publication(active, events))
            except Exception:  # an invalid output of the engine ends only its own request
                logger.exception("cannot publish the outputs of request %s", active.request_id)
                events = (active.failed(ErrorCode.ENGINE_FAILURE, "the output cannot be sent"),)
                publications.append(_publication(active, events))
                self._ended.add(active)
            if events and active.call.wants_stream and isinstance(events[-1], Tokens):
                self._published_at[active] = now
        return publications

    def refuse(self, refusal: Publication) -> None:
        self._refusals.append(refusal)
        self._filled.set()

    def drop(self, active: "ActiveRequest") -> None:
        self._held.pop(active, None)
        self._due.pop(active, None)
        self._published_at.pop(active, None)
        self._ended.discard(active)


class Outboxes:
    """One outbox for each shard, by name."""

    def __init__(self, shards: Iterable[str]) -> None:
        published_at: dict[ActiveRequest, float] = {}
        self.by_shard = {name: Outbox(published_at=published_at) for name in shards}
        first, *others = self.by_shard.values()
        self._only = None if others else first

    def shard(self, claim: Claim) -> str:
        """The shard that the claim's id names, or the first shard if the id names no known shard."""
        name = shard_of(claim.id)
        return name if name in self.by_shard else next(iter(self.by_shard))

    def of(self, claim: Claim) -> Outbox:
        return self._only or self.by_shard[self.shard(claim)]


def _publication(active: "ActiveRequest", events: Sequence[CallEvent]) -> Publication:
    active.num_publications += 1
    number, num_tokens = active.num_publications, active.num_tokens
    publication = to_publication(active.claim, number, num_tokens, events)
    if isinstance(active.call.task, Run) and active.call.task.keep_s:
        publication = replace(publication, keep_s=active.call.task.keep_s)
    active.num_tokens += publication.num_new_tokens
    last = events[-1]
    active.is_uncounted = isinstance(last, Failed) and last.code not in VERSION_FAULTS
    return publication


def to_publication(
    claim: Claim, number: int, num_tokens: int, events: Sequence[CallEvent], dead_reason: str = ""
) -> Publication:
    """Encode events for the queue. `num_tokens`: number of output tokens before these events."""
    last, result = events[-1], b""
    ending: Ending | None = None
    if isinstance(last, (Finished, Failed)):
        ending = "finished" if isinstance(last, Finished) else "failed"
        events, result = _split_off_result(events)
    usage, num_new_tokens = None, 0
    for event in events:
        if isinstance(event, Tokens):
            num_new_tokens += event.num_tokens
        elif isinstance(event, (Started, Finished)):
            usage = (event.usage.num_prompt_tokens, event.usage.num_cached_tokens)
    encoded = encode_events(events)
    return Publication(
        claim, number, num_tokens, num_new_tokens, encoded, ending, dead_reason, result, usage=usage
    )


def _split_off_result(events: Sequence[CallEvent]) -> tuple[Sequence[CallEvent], bytes]:
    """Separate a large result, which precedes the terminal event, from the events."""
    event = events[-2] if len(events) > 1 else None
    if not isinstance(event, (Vectors, Scores)) or len(event.data) <= MAX_INLINE_BYTES:
        return events, b""
    return (*events[:-2], replace(event, data=b"", is_stored=True), events[-1]), event.data


class Unreadable(Exception):
    """The payload of a call cannot be decoded; `refusal` is the publication that ends the call."""

    def __init__(self, refusal: Publication) -> None:
        super().__init__(refusal.dead_reason)
        self.refusal = refusal


def read_claim(claim: Claim) -> tuple[Call, list[Tokens]]:
    """Decode the call and the output of earlier attempts. Raises: Unreadable."""
    try:
        call, log = decode_call(claim.payload), decode_log(claim.log)
    except UnsupportedVersion as error:
        raise _refuse(claim, ErrorCode.UNSUPPORTED_VERSION, str(error)) from error
    except Exception as error:  # an invalid payload must end only this request, not the worker
        logger.error("cannot read request %s: %r", claim.id, error)
        message = "the worker cannot read the request"
        raise _refuse(claim, ErrorCode.INVALID_REQUEST, message, "unreadable") from error
    return call, [event for event in log if isinstance(event, Tokens)]


def _refuse(claim: Claim, code: ErrorCode, message: str, dead_reason: str = "") -> Unreadable:
    failed = Failed(claim.id, claim.attempt, code, message)
    return Unreadable(to_publication(claim, 1, 0, (failed,), dead_reason or code.value))


class ActiveRequest(Struct, eq=False):
    claim: Claim
    request_id: str  #: the request's id on the wire
    #: Id in the engine, unique per claim: after a failover of Redis, two claims may have the same attempt number.
    engine_id: str
    call: Call
    output_token_ids: tuple[int, ...]  #: ids of the tokens that earlier attempts published
    num_published: int  #: tokens published by earlier attempts, including those without an id
    claimed_at: float
    deadline_at: float
    started_at: float = 0.0  #: when its preparation began; 0 while it is parked
    media_decode_s: float = 0.0  #: decoding of media, a part of the preparation
    added_at: float = 0.0  #: when the engine accepted it
    num_tokens: int = 0  #: output tokens published so far
    num_publications: int = 0
    is_uncounted: bool = False  #: whether it failed with a code that is not in `VERSION_FAULTS`
    is_announced: bool = False  #: whether `Started` was posted
    is_traced: bool = False  #: whether its spans were recorded
    preparation: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, claim: Claim, now: float) -> "ActiveRequest":
        """The request of a new claim. Raises: Unreadable."""
        call, events = read_claim(claim)
        token_ids = tuple([token_id for event in events for token_id in event.token_ids])
        num_published = sum([event.num_tokens for event in events])
        deadline_at = now + claim.remaining_s
        engine_id = f"{claim.id}@{claim.attempt}.{next(_claim_numbers)}"
        of_claim = (claim, claim.id, engine_id, call, token_ids, num_published, now, deadline_at)
        return cls(*of_claim, num_tokens=num_published)

    @property
    def is_alone(self) -> bool:
        """Whether it must run alone, because it may be a poison request."""
        num_new_tokens = self.num_tokens - self.num_published
        return self.claim.may_be_poison and num_new_tokens < CLEARED_AFTER_TOKENS

    def note_media(self, seconds: float) -> None:
        self.media_decode_s = seconds

    def failed(self, code: ErrorCode, message: str, param: str | None = None) -> Failed:
        return Failed(self.request_id, self.claim.attempt, code, message, param)

    def _grammar_param(self) -> str | None:
        task = self.call.task
        grammar = task.grammar if isinstance(task, Generate) else None
        return "tools" if grammar is None else grammar.param

    def events(self, outputs: Sequence[EngineOutput]) -> list[CallEvent]:
        """The events of consecutive outputs, with all tokens merged into one event."""
        request_id, attempt = self.request_id, self.claim.attempt
        events: list[CallEvent] = []
        if not outputs:
            return events
        first, last = outputs[0], outputs[-1]
        if first.usage is not None and first.error is None and not self.is_announced:
            self.is_announced = True
            events.append(Started(request_id, attempt, first.usage, first.prompt_token_ids))
        said = [
            o for o in outputs if o.token_ids or o.text or o.num_without_id or o.prompt_logprobs
        ]
        if said:
            events.append(join_tokens(request_id, attempt, said))
        if last.error is not None:
            is_of_grammar = last.error_code is ErrorCode.GRAMMAR_TOO_COMPLEX
            param = self._grammar_param() if is_of_grammar else None
            events.append(self.failed(last.error_code, last.error, param))
        elif last.finish_reason is not None:
            assert last.usage is not None
            if last.values:
                if last.dimensions:
                    events.append(Vectors(request_id, attempt, last.dimensions, last.values))
                else:
                    events.append(Scores(request_id, attempt, last.values))
            timings = self.timings(last.timings or StageTimings())
            ended = (last.finish_reason, last.usage, timings, last.stopped_by)
            events.append(Finished(request_id, attempt, *ended))
        return events

    def timings(self, engine: StageTimings) -> StageTimings:
        """The engine's stage times, plus the times before the engine."""
        parked_s = self.started_at - self.claimed_at
        return replace(
            engine,
            queue_s=self.claim.waited_s + parked_s + engine.queue_s,
            media_decode_s=self.media_decode_s,
            preprocess_s=self.added_at - self.started_at - self.media_decode_s,
        )


#: Records the spans of an ended request from the engine's stage times (None if it did not run) and the outcome.
Trace = Callable[[ActiveRequest, StageTimings | None, str], None]


@dataclass(slots=True)
class ActiveRequests:
    """The requests of one worker. `changed` is set when capacity may be free or the last request may have ended."""

    _engine: EngineThread
    _preprocessor: Preprocessor
    _outboxes: Outboxes
    _max_num_seqs: int
    _begin: Callable[[Claim], Awaitable[bool]]  #: marks a possible poison request as started
    _trace: Trace
    _active_requests: dict[str, ActiveRequest] = field(default_factory=dict)  #: by request id
    _by_engine_id: dict[str, ActiveRequest] = field(default_factory=dict)
    _poison_candidates: set[ActiveRequest] = field(default_factory=set)  #: possible poison requests
    #: Claimed requests that cannot start yet, because they or running requests may be poison requests.
    _parked: deque[ActiveRequest] = field(default_factory=deque)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __len__(self) -> int:
        return len(self._active_requests)

    def all(self) -> list[ActiveRequest]:
        return list(self._active_requests.values())

    def find(self, claim: Claim) -> ActiveRequest | None:
        active = self._active_requests.get(claim.id)
        return active if active is not None and active.claim is claim else None

    def room(self) -> int:
        """How many more requests the engine can start soon. Batch requests can be preempted, and do not count."""
        stats = self._engine.stats
        if self.is_held_up() or stats.num_waiting > stats.num_waiting_batch:
            return 0
        priorities = [active.call.priority for active in self._active_requests.values()]
        return max(0, self._max_num_seqs - priorities.count(Priority.INTERACTIVE))

    def batch_room(self) -> int:
        """How many more requests the engine can start without preempting batch requests."""
        if self.is_held_up() or self._engine.stats.num_waiting > 0:
            return 0
        return max(0, self._max_num_seqs - len(self._active_requests))

    def is_held_up(self) -> bool:
        return bool(self._parked) or any(active.is_alone for active in self._poison_candidates)

    async def wait_for_change(self, longest_s: float = LOOK_AGAIN_S) -> None:
        """Wait until capacity may be free or the last request may have ended."""
        self.changed.clear()
        timer = asyncio.get_running_loop().call_later(longest_s, self.changed.set)
        try:
            await self.changed.wait()
        finally:
            timer.cancel()

    def start(self, claims: Iterable[Claim]) -> None:
        """Start claims, or park them until they may start."""
        for claim in claims:
            earlier = self._active_requests.get(claim.id)
            if earlier is not None:  # it was claimed again; the newer attempt counts
                if earlier.claim.attempt > claim.attempt:
                    continue
                self.forget(earlier)
            try:
                active = ActiveRequest.of(claim, time.monotonic())
            except Unreadable as error:
                self._outboxes.of(claim).refuse(error.refusal)
                continue
            self._active_requests[active.request_id] = active
            self._by_engine_id[active.engine_id] = active
            self._parked.append(active)
            if claim.may_be_poison:
                self._poison_candidates.add(active)
        if self._poison_candidates:  # they start after all others
            self._parked = deque(
                sorted(self._parked, key=lambda active: active.claim.may_be_poison)
            )
        self._start_parked()

    def _start_parked(self) -> None:
        while self._parked and self._may_start(self._parked[0].claim):
            active = self._parked.popleft()
            active.started_at = time.monotonic()
            if active.claim.may_be_poison or not self._prepare_at_once(active):
                active.preparation = asyncio.create_task(self._prepare(active))

    def _may_start(self, claim: Claim) -> bool:
        """Whether a claim may start: possible poison requests never run beside requests that no crash interrupted."""
        if not self._poison_candidates:
            return True
        started = [active for active in self._active_requests.values() if active.started_at]
        if any(active.is_alone for active in started):
            return False
        if claim.is_last_chance:
            return not started
        return not claim.may_be_poison or all(active.claim.may_be_poison for active in started)

    def _prepare_at_once(self, active: ActiveRequest) -> bool:
        """Prepare a request and add it to the engine. Returns False if the preparation would wait."""
        try:
            request = self._preprocessor.prepare_at_once(
                active.call, active.engine_id, active.output_token_ids, active.num_published
            )
            if request is None:
                return False
            self._engine.add(request, is_patient=not active.call.wants_stream)
        except Exception as error:
            self._refuse(active, error)
        return True

    async def _prepare(self, active: ActiveRequest) -> None:
        try:
            if active.claim.may_be_poison and not await self._begin(active.claim):
                self.drop(active, "another worker took it over before it began")
                return
            request = await self._preprocessor.prepare(
                active.call,
                active.engine_id,
                active.output_token_ids,
                active.num_published,
                active.note_media,
            )
            if isinstance(request, Tokenization):
                self._answer(active, request)
            else:
                self._engine.add(request, is_patient=not active.call.wants_stream)
        except Exception as error:
            self._refuse(active, error)

    def _answer(self, active: ActiveRequest, made: Tokenization) -> None:
        task = active.call.task
        assert isinstance(task, Tokenize)
        active.added_at = time.monotonic()
        name = (active.request_id, active.claim.attempt)
        token_ids = tuple(made.token_ids) if task.with_ids else ()
        tokenized = Tokenized(
            *name,
            len(made.token_ids),
            token_ids,
            tuple(made.strings),
            made.text,
            made.segment_ends,
            made.frames,
        )
        finished = Finished(*name, FinishReason.STOP, Usage(0), active.timings(StageTimings()))
        self._outboxes.of(active.claim).end(active, tokenized, finished)
        self._trace(active, None, "ok")
        self._by_engine_id.pop(active.engine_id, None)

    def on_events(self, events: list[EngineEvent]) -> None:
        """Handle events of the engine thread; a request's events of several steps are merged."""
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
        if self._parked:  # the request that ran alone may be cleared now
            self._start_parked()

    def _pass_on(self, active: ActiveRequest, outputs: list[EngineOutput]) -> None:
        """Post the outputs of a request in order."""
        self._outboxes.of(active.claim).post(active, outputs)
        last = outputs[-1]
        if last.timings is not None:
            outcome = "ok" if last.error is None else last.error_code.value
            self._trace(active, last.timings, outcome)
        if last.finish_reason is not None:  # the engine has removed it
            del self._by_engine_id[active.engine_id]
            self._engine.note_end(active.engine_id)

    def _refuse(self, active: ActiveRequest, error: Exception) -> None:
        if not isinstance(error, RequestError):
            logger.error("could not prepare request %s", active.request_id, exc_info=error)
            self.fail(active, ErrorCode.ENGINE_FAILURE, "the request could not be prepared")
            return
        cause = error.cause if isinstance(error, ImageRefused) else error
        code = next(code for kind, code in _CODES if isinstance(cause, kind))
        param = error.param
        if isinstance(error, ImageRefused):
            names = (active.call.task.images[error.index].param, cause.param)
            param = ".".join(filter(None, names)) or None
        elif param is None and isinstance(error, PromptTooLong):
            param = active.call.task.param if isinstance(active.call.task, Generate) else None
        self.fail(active, code, str(cause), param)

    def fail(
        self, active: ActiveRequest, code: ErrorCode, message: str, param: str | None = None
    ) -> None:
        """End a request with an error; the request is dropped when the error was published."""
        self._outboxes.of(active.claim).end(active, active.failed(code, message, param))
        self._trace(active, None, code.value)
        self._stop_work(active)

    def drop(self, active: ActiveRequest, why: str) -> None:
        """Stop a request that another worker owns, or that was cancelled."""
        log = logger.info if why == "cancelled" else logger.warning
        log("request %s no longer belongs to this worker: %s", active.request_id, why)
        self._trace(active, None, why)
        self.forget(active)

    def forget(self, active: ActiveRequest) -> None:
        """Stop a request and drop its events."""
        self._stop_work(active)
        self._outboxes.of(active.claim).drop(active)
        self._poison_candidates.discard(active)
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
