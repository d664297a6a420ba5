"""One open client request: the events of its choices, in order, without gap or duplicate.

The dispatcher delivers; one consumer receives.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from gateway.http.errors import ClientGone
from shared.protocol import (
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
from shared.queue.api import RequestState

ChoiceEvent = tuple[int, CallEvent]  #: which choice, and what happened to it


#: How a call of a model stands.
LookUp = Callable[[str, str], Awaitable[RequestState | None]]


class Gone(ClientGone):
    """The call was closed while its events were awaited."""


class ChoiceProgress:
    """What one choice has received. Lets through each output token once and in order.

    A higher attempt supersedes a lower one. What does not follow what came before is a gap: it is
    held back until the request's log, in which Redis keeps every event, has been read again. A
    later attempt may repeat tokens, if Redis lost its last writes: repeats are dropped if they are
    the same tokens; two answers are never spliced.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.attempt = 0
        self.has_started = False
        self.has_values = False
        self.has_gap = False
        self.is_finished = False
        self.is_settled = False  #: the fleet itself ended it, so that there is nothing to cancel
        self.token_ids: list[int] = []
        #: what was held back comes after so many tokens, or is the end after one less
        self._num_expected = 0
        self.heard_at = time.monotonic()

    def accept(self, event: CallEvent) -> CallEvent | None:
        """The event if it is new, a failure if it contradicts what came before, else None."""
        if self.is_finished or event.attempt < self.attempt:
            return None
        self.attempt = event.attempt
        return self._accept(event)

    def replay(self, log: Sequence[CallEvent]) -> list[CallEvent]:
        """What is new in the whole log: the accepted events of all attempts in order."""
        new: list[CallEvent] = []
        for event in log:
            self.attempt = max(self.attempt, event.attempt)
            accepted = None if self.is_finished else self._accept(event)
            if accepted is not None:
                new.append(accepted)
        # What came while the log was on its way may be later than the log.
        self.has_gap = not self.is_finished and self._num_expected > len(self.token_ids)
        return new

    def _accept(self, event: CallEvent) -> CallEvent | None:
        match event:
            case Tokens():
                return self._accept_delta(event)
            case Started():
                is_news, self.has_started = not self.has_started, True
                return event if is_news else None
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
                is_news, self.has_values = not self.has_values, True
                return event if is_news else None

    def _accept_delta(self, event: Tokens) -> CallEvent | None:
        num_known = len(self.token_ids) - event.index
        if num_known < 0:
            self._hold_back(event.index + event.num_tokens)
            return None
        token_ids = event.token_ids
        if event.num_without_id:  # equal to those of their attempt alone
            token_ids += (-event.attempt,) * event.num_without_id
        if num_known == 0:
            self.token_ids.extend(token_ids)
            return event
        known = self.token_ids[event.index : event.index + len(token_ids)]
        if tuple(known) == token_ids:
            return None
        return self.fail(
            ErrorCode.WORKER_LOST,
            "The worker was lost and the answer could not be continued; retry.",
        )

    def _hold_back(self, num_expected: int) -> None:
        self.has_gap = True
        self._num_expected = max(self._num_expected, num_expected)

    def fail(self, code: ErrorCode, message: str) -> Failed:
        """End this choice from our side."""
        self.is_finished = True
        return Failed(self.request_id, self.attempt, code, message)


class OpenCall:
    """The choices of one request.

    `close` is synchronous and idempotent; it cancels what still runs, unless that is resumable.
    Units: `deadline_at` is a reading of `time.monotonic`.
    """

    def __init__(
        self,
        model: str,
        request_ids: Sequence[str],
        deadline_at: float,
        on_close: Callable[["OpenCall"], None],
    ) -> None:
        self.model = model
        self.deadline_at = deadline_at
        self.choices = [ChoiceProgress(request_id) for request_id in request_ids]
        self.is_closed = False
        self.is_resumable = False  #: it goes on when it is closed
        self.listen: LookUp | None = None  #: of a follower: another call submitted it
        self.images: tuple[ImageRef, ...] = ()  #: of the request, where it submitted one
        self.begins_by = 0.0  #: until then Redis need not know its request
        self._on_close: list[Callable[[OpenCall], object]] = [on_close]
        self._pending: list[ChoiceEvent] = []
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_follower(self) -> bool:
        """Whether another call submitted it, and is what metrics count."""
        return self.listen is not None

    @property
    def has_pending(self) -> bool:
        """Whether `receive` would not have to wait."""
        return bool(self._pending)

    @property
    def unsettled_ids(self) -> list[str]:
        """The requests of choices that the fleet has not ended."""
        return [choice.request_id for choice in self.choices if not choice.is_settled]

    def settle(self) -> None:
        """Nobody works on it, so that there is nothing to cancel."""
        for choice in self.choices:
            choice.is_settled = True

    def deliver(self, choice: int, event: CallEvent) -> bool:
        """Take an event from a worker. Returns whether it was new."""
        progress = self.choices[choice]
        progress.heard_at = time.monotonic()
        accepted = progress.accept(event)
        if accepted is None:
            return False
        self._put(choice, accepted)
        return True

    def replay(self, choice: int, log: Sequence[CallEvent]) -> None:
        """Catch up with the log of a choice."""
        for event in self.choices[choice].replay(log):
            self._put(choice, event)

    def fail(self, choice: int, code: ErrorCode, message: str) -> None:
        """End a choice from our side: its deadline has passed, or its worker is gone."""
        if not self.choices[choice].is_finished:
            self._put(choice, self.choices[choice].fail(code, message))

    def _put(self, choice: int, event: CallEvent) -> None:
        self._pending.append((choice, event))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def receive(self, timeout_s: float | None = None) -> list[ChoiceEvent]:
        """All that has arrived since the last call; nothing only on time-out. Raises: Gone."""
        if not self._pending and not self.is_closed:
            await self._wait(timeout_s)
        if self.is_closed:
            raise Gone
        events, self._pending = self._pending, []
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
        """Forget the request; what still runs is cancelled. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self._pending.clear()
        self._wake()
        for callback in self._on_close:
            callback(self)

    def when_closed(self, callback: Callable[["OpenCall"], object]) -> None:
        """Call this too when it is closed; now, if it is."""
        if self.is_closed:
            callback(self)
        else:
            self._on_close.append(callback)
