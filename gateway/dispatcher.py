"""Between open client requests and the fleet: enqueues, hears this gateway's mailbox, and hands events out.

One reader task serves all requests of the process, so ten thousand open streams are one Redis connection. A second
task watches the clock: deadlines, and requests of which nothing was heard for long, whose state it looks up.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress

from gateway.generation import Generation
from shared.mailbox import Mailbox
from shared.metrics import GatewayMetrics
from shared.protocol import ErrorCode, GenerateEvent, GenerateRequest
from shared.request_queue import Bounds, QueueRefused, QueueUnavailable, RequestQueue

_WATCH_PAUSE_S = 0.25
_RESTART_PAUSE_S = 0.5
_DEADLINE_GRACE_S = 1.0  #: the fleet ends a request at its deadline; we do if it did not
_LATE_MESSAGE = "The request took too long."
_LOST_MESSAGE = "The request was lost by the servers that worked on it."

logger = logging.getLogger(__name__)


class Dispatcher:
    """Turns requests into `Generation`s and events into their deliveries."""

    def __init__(
        self,
        queue: RequestQueue,
        mailbox: Mailbox,
        metrics: GatewayMetrics,
        *,
        silence_timeout_s: float,
    ) -> None:
        self.queue = queue
        self.mailbox = mailbox
        self.metrics = metrics
        self.silence_timeout_s = silence_timeout_s
        self._open: dict[str, tuple[Generation, int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to read the mailbox and to watch the clock."""
        self._spawn(self._supervise(self._read_mailbox))
        self._spawn(self._supervise(self._watch))

    async def stop(self) -> None:
        """Cancel what is open and end all tasks."""
        for generation in {generation for generation, _ in self._open.values()}:
            generation.close()
        await asyncio.sleep(0)  # the cancellations' tasks begin
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def num_open(self) -> int:
        """Choices without a terminal event."""
        return len(self._open)

    async def submit(
        self, requests: Sequence[GenerateRequest], timeout_s: float, num_tokens: int, bounds: Bounds
    ) -> Generation:
        """Queue the choices of one request, each of which may come to so many tokens.

        Raises: QueueRefused, QueueUnavailable; then nothing stays queued.
        """
        generation = Generation(
            requests[0].model,
            [request.request_id for request in requests],
            time.monotonic() + timeout_s,
            self._forget,
        )
        generation.is_detached = requests[0].is_detached
        for index, request in enumerate(requests):
            self._open[request.request_id] = (generation, index)
        try:
            await self.queue.enqueue(
                requests, timeout_s=timeout_s, num_tokens=num_tokens, bounds=bounds
            )
        except QueueRefused:
            generation.settle()
            generation.close()
            raise
        except BaseException:
            generation.close()
            raise
        return generation

    def fail_all(self, message: str) -> None:
        """End everything that is open with an error."""
        for generation, choice in list(self._open.values()):
            generation.fail(choice, ErrorCode.CANCELLED, message)

    def on_gap(self, model: str) -> None:
        """Some of a model's events may be missing: the watch reads the logs of its open requests."""
        for generation, choice in self._open.values():
            if generation.model == model:
                generation.choices[choice].has_gap = True

    def _forget(self, generation: Generation) -> None:
        unsettled = generation.unsettled_ids
        for choice in generation.choices:
            self._open.pop(choice.request_id, None)
        if unsettled and not generation.is_detached:
            self._spawn(self._cancel(generation.model, unsettled))

    async def _cancel(self, model: str, request_ids: list[str]) -> None:
        try:
            await self.queue.cancel(model, request_ids)
        except QueueUnavailable:
            # Their deadlines end them in any case.
            logger.warning("cannot reach Redis to cancel %d requests", len(request_ids))

    async def _supervise(self, run: Callable[[], Awaitable[None]]) -> None:
        """Run one of our two loops for ever: without either, requests would hang or outlive their deadlines."""
        while True:
            try:
                await run()
            except Exception:
                logger.critical("%s broke off; starting it again", run.__name__, exc_info=True)
                for generation, choice in self._open.values():
                    generation.choices[choice].has_gap = True
            await asyncio.sleep(_RESTART_PAUSE_S)

    async def _read_mailbox(self) -> None:
        async for events in self.mailbox.events():
            self._deliver(events)

    def _deliver(self, events: Sequence[GenerateEvent]) -> None:
        num_dropped = 0
        for event in events:
            found = self._open.get(event.request_id)
            if found is None or not self._deliver_one(*found, event):
                num_dropped += 1
        if num_dropped:
            self.metrics.record_dropped_events(num_dropped)

    def _deliver_one(self, generation: Generation, choice: int, event: GenerateEvent) -> bool:
        try:
            return generation.deliver(choice, event)
        except Exception:
            logger.exception("cannot deliver an event of request %s", event.request_id)
            generation.fail(choice, ErrorCode.WORKER_LOST, _LOST_MESSAGE)
            return False

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_PAUSE_S)
            self._end_overdue()
            with suppress(QueueUnavailable):  # the next look is at a later turn
                await self._look_up_silent()

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for generation, choice in list(self._open.values()):
            if now > generation.deadline_at + _DEADLINE_GRACE_S:
                generation.fail(choice, ErrorCode.DEADLINE_EXCEEDED, _LATE_MESSAGE)

    async def _look_up_silent(self) -> None:
        now = time.monotonic()
        for generation, choice in list(self._open.values()):
            progress = generation.choices[choice]
            if now - progress.heard_at <= self.silence_timeout_s and not progress.has_gap:
                continue
            progress.heard_at = now
            try:
                await self._look_up(generation, choice)
            except QueueUnavailable:
                raise
            except Exception:
                logger.exception("cannot read the log of request %s", progress.request_id)
                generation.fail(choice, ErrorCode.WORKER_LOST, _LOST_MESSAGE)

    async def _look_up(self, generation: Generation, choice: int) -> None:
        """Read a request's log again; end it if nobody works on it any more. Raises: QueueUnavailable."""
        request_id = generation.choices[choice].request_id
        state = await self.queue.state(generation.model, request_id)
        generation.replay(choice, await self.queue.events(generation.model, request_id))
        if state is None or state.state not in ("queued", "running"):
            generation.fail(choice, ErrorCode.WORKER_LOST, _LOST_MESSAGE)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
