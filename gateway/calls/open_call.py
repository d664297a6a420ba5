"""One open client request: the events of its choices, in order, without gap or duplicate.

The dispatcher delivers events; one consumer receives them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from gateway.http.errors import ClientGone
from shared.protocol import (
    Call,
    CallEvent,
    ErrorCode,
    Failed,
    Finished,
    ImageRef,
    Scores,
    Started,
    Tokenized,
    Tokens,
    Vectors,
)
from shared.queue.api import Charge, RequestState

#: Maximum resubmissions of a request per choice, after Redis lost data.
MAX_RESUBMITS = 3

ChoiceEvent = tuple[int, CallEvent]  #: index of the choice, and its event


#: Returns the state of a request. Arguments: model, request id.
LookUp = Callable[[str, str], Awaitable[RequestState | None]]


class Gone(ClientGone):
    """The call was closed while its events were awaited."""


class ChoiceProgress:
    """Progress of one choice. Passes each output token once and in order.

    A higher attempt supersedes a lower one. An event that does not follow the last one reveals a gap: events are held
    back until the request's log, which has all of them, has been read again. If Redis lost its last writes, a later
    attempt may repeat tokens: equal tokens are dropped, and the choice fails if they differ.
    """

    attempt = 0
    has_started = False
    has_values = False
    has_gap = False
    is_split = False  #: an event had known and new tokens, so the choice must be resubmitted
    is_finished = False
    is_settled = False  #: it has ended or was refused, and needs no cancellation
    _num_expected = 0  #: tokens up to the end of the last event that was held back

    def __init__(self, request_id: str, index: int = 0) -> None:
        self.request_id = request_id
        self.index = index  #: index of the choice in its request
        self.token_ids: list[int] = []
        self.heard_at = time.monotonic()

    def resubmit(self, request_id: str) -> None:
        """Expect the remaining answer under a new id."""
        self.request_id = request_id
        self.attempt = self._num_expected = 0
        self.has_gap = self.is_split = False

    def accept(self, event: CallEvent) -> CallEvent | None:
        """Accept an event. Returns it if it is new, a failure if it contradicts earlier events, else None."""
        if self.is_finished or event.attempt < self.attempt:
            return None
        self.attempt = event.attempt
        return self._accept(event)

    def replay(self, log: Sequence[CallEvent]) -> list[CallEvent]:
        """Accept the complete log. Returns its new events in order."""
        new: list[CallEvent] = []
        for event in log:
            self.attempt = max(self.attempt, event.attempt)
            accepted = None if self.is_finished else self._accept(event)
            if accepted is not None:
                new.append(accepted)
        # Events that arrived while the log was read may be later than the log.
        expects_more = self.is_split or self._num_expected > len(self.token_ids)
        self.has_gap = expects_more and not self.is_finished
        return new

    def _accept(self, event: CallEvent) -> CallEvent | None:
        match event:
            case Tokens():
                return self._accept_delta(event)
            case Started():
                is_new, self.has_started = not self.has_started, True
                return event if is_new else None
            case Finished():
                if event.usage.num_output_tokens > len(self.token_ids):
                    self._hold_back(event.usage.num_output_tokens + 1)
                    return None
                self.is_finished = self.is_settled = True
                return event
            case Failed():
                self.is_finished = self.is_settled = True
                return event
            case Vectors() | Scores() | Tokenized():
                is_new, self.has_values = not self.has_values, True
                return event if is_new else None

    def _accept_delta(self, event: Tokens) -> CallEvent | None:
        num_known = len(self.token_ids) - event.index
        if num_known < 0:
            self._hold_back(event.index + event.num_tokens)
            return None
        token_ids = event.token_ids
        if event.num_without_id:  # tokens without ids are comparable only within an attempt
            token_ids += (-event.attempt,) * event.num_without_id
        if num_known == 0:
            self.token_ids.extend(token_ids)
            return event
        known = tuple(self.token_ids[event.index : event.index + len(token_ids)])
        if known == token_ids:
            return None
        if known == token_ids[: len(known)]:
            self.is_split = self.has_gap = True
            return None
        message = "The worker was lost and the answer could not be continued; retry."
        return self.fail(ErrorCode.WORKER_LOST, message)

    def _hold_back(self, num_expected: int) -> None:
        self.has_gap = True
        self._num_expected = max(self._num_expected, num_expected)

    def fail(self, code: ErrorCode, message: str, kind: type[Failed] = Failed) -> Failed:
        self.is_finished = True
        return kind(self.request_id, self.attempt, code, message)


class OpenCall:
    """The choices of one request."""

    is_closed = False
    tenant = ""
    is_resumable = False  #: continues after `close`
    listen: LookUp | None = None  #: set if another call submitted the request
    images: tuple[ImageRef, ...] = ()  #: images of the submitted request
    submitted: Sequence[Call] = ()  #: one for each choice
    charge: Charge | None = None
    full_in_s: tuple[float, float] | None = None  #: see `shared.queue.api.Submitted`
    begins_by = 0.0  #: before this `time.monotonic`, a request that Redis lacks does not fail
    _waiter: asyncio.Future[None] | None = None

    def __init__(
        self,
        model: str,
        request_ids: Sequence[str],
        deadline_at: float,
        on_close: Callable[["OpenCall"], None],
    ) -> None:
        self.model = model
        self.deadline_at = deadline_at  #: reading of `time.monotonic`
        self.choices = [ChoiceProgress(each, index) for index, each in enumerate(request_ids)]
        #: Resubmitted calls: the id of each, and the number of earlier tokens that it continues.
        self.resubmitted: list[tuple[str, int]] = []
        self._on_close: list[Callable[[OpenCall], object]] = [on_close]
        self.pending: list[ChoiceEvent] = []  #: events that the consumer has not received

    @property
    def is_follower(self) -> bool:
        """Whether another call submitted the request. Metrics count followers separately."""
        return self.listen is not None

    @property
    def unsettled_ids(self) -> list[str]:
        """Ids of the choices that have not ended."""
        return [choice.request_id for choice in self.choices if not choice.is_settled]

    def can_resubmit(self, choice: ChoiceProgress) -> bool:
        """Whether a choice that Redis lost can be submitted again. Tokens without ids cannot be compared."""
        return (
            bool(self.submitted)
            and not self.is_closed
            and not self.is_resumable
            and not choice.is_finished
            and len(self.resubmitted) < MAX_RESUBMITS * len(self.choices)
            and min(choice.token_ids, default=0) >= 0
        )

    def deliver(self, choice: ChoiceProgress, event: CallEvent) -> bool:
        """Accept an event from a worker. Returns whether it was new."""
        choice.heard_at = time.monotonic()
        accepted = choice.accept(event)
        if accepted is None:
            return False
        self._put(choice, accepted)
        return True

    def replay(self, choice: ChoiceProgress, log: Sequence[CallEvent]) -> None:
        """Accept the new events of a choice's log."""
        for event in choice.replay(log):
            self._put(choice, event)

    def fail(
        self, choice: ChoiceProgress, code: ErrorCode, message: str, kind: type[Failed] = Failed
    ) -> None:
        """Fail a choice, unless it has finished."""
        if not choice.is_finished:
            self._put(choice, choice.fail(code, message, kind))

    def _put(self, choice: ChoiceProgress, event: CallEvent) -> None:
        self.pending.append((choice.index, event))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def receive(self, timeout_s: float | None = None) -> list[ChoiceEvent]:
        """Wait for events. Returns all events since the last call; none after a timeout. Raises: Gone."""
        if not self.pending and not self.is_closed:
            await self._wait(timeout_s)
        if self.is_closed:
            raise Gone
        events, self.pending = self.pending, []
        return events

    async def _wait(self, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = None if timeout_s is None else loop.call_later(timeout_s, self._wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def close(self) -> None:
        """Close the request, and cancel its unfinished choices unless it is resumable. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self.pending.clear()
        self._wake()
        for callback in self._on_close:
            callback(self)

    def when_closed(self, callback: Callable[["OpenCall"], object]) -> None:
        """Run `callback` when the call is closed, or now if it is closed already."""
        if self.is_closed:
            callback(self)
        else:
            self._on_close.append(callback)
