"""Queues calls and delivers events from this gateway's mailbox to open requests.

One task reads the mailbox for all requests of the process, so ten thousand streams use one Redis connection. Other
tasks enforce deadlines, look up requests without recent events, and send cancellations in bounded batches.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from itertools import islice

import msgspec
from msgspec.structs import replace

from gateway.calls.open_call import ChoiceProgress, LookUp, OpenCall
from gateway.http.errors import KeyEnded
from shared.process import cancel
from shared.protocol import Call, CallEvent, ErrorCode, Failed, decode_events, decode_log, seal
from shared.queue.api import (
    Budget,
    DuplicateRequest,
    GatewayQueue,
    Mailbox,
    QueueRefused,
    QueueUnavailable,
    Submission,
    Submitted,
    UnknownBudget,
    shard_of,
)
from shared.telemetry.metrics import GatewayMetrics

_DEADLINE_PAUSE_S = 0.1
_LOOK_PAUSE_S = 0.25
_RESTART_PAUSE_S = 0.5
_DEADLINE_GRACE_S = 0.5  #: delay before the gateway enforces a deadline that the worker missed
_STOP_WITHIN_S = 2.0
MAX_LOOKS = 128  #: maximum requests per lookup
NO_LIMIT = 2**53
MAX_CANCELS = 256  #: maximum choices per cancellation
_LATE_MESSAGE = "The request exceeded its deadline: ask for fewer tokens, or retry later."
_LOST_MESSAGE = "The workers that ran the request were lost; retry."

logger = logging.getLogger(__name__)

Route = tuple[OpenCall, ChoiceProgress]  #: the receiver of a request's events, and its choice


@dataclass(eq=False)
class Dispatcher:
    """Queues requests as `OpenCall`s and delivers their events."""

    queue: GatewayQueue
    mailbox: Mailbox
    metrics: GatewayMetrics
    _: KW_ONLY
    silence_timeout_s: float
    #: Writes to Redis how much of a budget the tenant of a call has spent.
    restore_budget: Callable[[Call, Budget], Awaitable[None]]

    def __post_init__(self) -> None:
        self._routes: dict[str, list[Route]] = {}  # by request id; several if clients resume it
        #: Requests to cancel, with their deadlines. Keys: model, shard, and whether Redis lost the request.
        self._cancels: dict[tuple[str, str, bool], dict[str, float]] = {}
        self._has_cancels = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self.spawn(self._supervise(self._read_mailbox))
        self.spawn(self._supervise(self._enforce_deadlines))
        self.spawn(self._supervise(self._check_silent))
        self.spawn(self._supervise(self._keep_cancelling))

    async def stop(self) -> None:
        for call in {call for call, _ in self._all_routes()}:
            call.close()
        await cancel(*self._tasks)
        try:
            async with asyncio.timeout(_STOP_WITHIN_S):
                await self._send_cancels()
        except TimeoutError:
            num_left = sum(len(ids) for ids in self._cancels.values())
            logger.warning("cannot reach Redis to cancel %d requests", num_left)

    def has_open(self, model: str) -> bool:
        return any(call.model == model for call, _ in self._all_routes())

    def _all_routes(self) -> Iterator[Route]:
        return (route for routes in list(self._routes.values()) for route in list(routes))

    async def submit(
        self, calls: Sequence[Call], submission: Submission, grace_s: float = 0.0
    ) -> OpenCall:
        """Queue the calls of one request; `submission.choices` is ignored.

        With an affinity, the request may be reserved for the preferred worker for up to `grace_s`. If `submit` raises,
        no call stays queued.
        Raises: QueueRefused, QueueUnavailable, DuplicateRequest.
        """
        first = calls[0]
        await self.mailbox.open([first.model])  # the mailbox may have been closed meanwhile
        for each in calls:
            routes = self._routes.get(each.id, ())
            if any(not c.is_follower and not choice.is_finished for c, choice in routes):
                raise DuplicateRequest(f"request {each.id} is open")
        deadline_at = time.monotonic() + submission.timeout_s
        call = OpenCall(first.model, [each.id for each in calls], deadline_at, self._forget)
        call.tenant, call.is_resumable = first.tenant, first.is_resumable
        call.begins_by = math.inf
        self._add(call)
        call.charge = submission.charge
        try:
            submission = replace(submission, choices=[seal(each) for each in calls])
            submitted = await self._enqueue(first, submission)
        except BaseException as error:
            for choice in call.choices:
                choice.is_settled |= isinstance(error, QueueRefused)  # not queued: do not cancel
            call.close()
            raise
        call.begins_by = 0.0
        call.submitted = calls
        call.full_in_s = submitted.full_in_s
        if submitted.affinity:
            self.metrics.count("home_requests", submitted.affinity)
        if submitted.affinity == "home":
            asyncio.get_running_loop().call_later(grace_s, self._end_grace, call)
        return call

    async def _enqueue(self, first: Call, submission: Submission) -> Submitted:
        """Queue calls. If Redis has lost the tenant's budget, restore it first."""
        try:
            return await self.queue.submit(submission)
        except UnknownBudget:
            charge = submission.charge
            if charge is None or charge.budget is None:
                raise
            await self.restore_budget(first, charge.budget)
            return await self.queue.submit(submission)

    def _end_grace(self, call: OpenCall) -> None:
        """Return choices to the shared queue if the preferred worker has not started them."""
        waiting = [c.request_id for c in call.choices if c.attempt == 0 and not c.is_finished]
        if waiting:
            self.spawn(self._share(call.model, waiting))

    async def _share(self, model: str, request_ids: Sequence[str]) -> None:
        try:
            num_shared = await self.queue.share(model, request_ids)
        except QueueUnavailable as error:  # other workers can claim them after the lease expires
            logger.warning("cannot return reserved requests to the queue: %s", error)
        else:
            for _ in range(num_shared):
                self.metrics.count("home_requests", "shared")

    async def follow(
        self,
        model: str,
        request_id: str,
        *,
        listen: LookUp,
        timeout_s: float,
        begins_within_s: float,
    ) -> OpenCall:
        """Read the events of a resumable request from the first one; any gateway may have queued it.

        Closing the call does not cancel the request. `listen` subscribes this gateway and returns the state.
        `timeout_s` is the maximum duration if Redis has no shorter deadline. If Redis still does not know the
        request after `begins_within_s`, the call fails.
        Raises: QueueUnavailable.
        """
        await self.mailbox.open([model])
        now = time.monotonic()
        call = OpenCall(model, [request_id], now + timeout_s, self._forget)
        call.is_resumable = True
        call.listen = listen
        call.begins_by = now + begins_within_s
        [choice] = call.choices
        choice.has_gap = True
        self._add(call)
        try:
            await self._look_up([(call, choice)])
        except BaseException:
            call.close()
            raise
        return call

    def fail_all(self, message: str, tenants: Collection[str] | None = None) -> None:
        """Fail all open requests. With `tenants`, fail and cancel only their requests: their keys are invalid."""
        kind = Failed if tenants is None else KeyEnded
        for call, choice in self._all_routes():
            if tenants is None or call.tenant in tenants:
                call.is_resumable &= tenants is None
                call.fail(choice, ErrorCode.CANCELLED, message, kind)

    def on_gap(self, model: str) -> None:
        """Read the logs of a model's open requests again, because events may be missing."""
        for call, choice in self._all_routes():
            if call.model == model:
                choice.has_gap = True

    def on_lost(self, shard: str) -> None:
        """Look up the open requests of a shard that has been down for a long time."""
        for _, choice in self._all_routes():
            if shard_of(choice.request_id) == shard:
                choice.has_gap = True

    def _add(self, call: OpenCall) -> None:
        for choice in call.choices:
            self._add_route(call, choice)

    def _add_route(self, call: OpenCall, choice: ChoiceProgress) -> None:
        self._routes.setdefault(choice.request_id, []).append((call, choice))

    def _remove_route(self, call: OpenCall, choice: ChoiceProgress) -> None:
        routes = self._routes[choice.request_id]
        routes.remove((call, choice))
        if not routes:
            del self._routes[choice.request_id]

    def _forget(self, call: OpenCall) -> None:
        for choice in call.choices:
            self._remove_route(call, choice)
        self._cancel(call)

    def _cancel(self, call: OpenCall) -> None:
        if not call.is_resumable and (unsettled := call.unsettled_ids):
            self._cancel_ids(call, unsettled)

    def _cancel_ids(
        self, call: OpenCall, request_ids: Sequence[str], *, is_lost: bool = False
    ) -> None:
        for request_id in request_ids:
            waiting = self._cancels.setdefault((call.model, shard_of(request_id), is_lost), {})
            waiting[request_id] = call.deadline_at
        self._has_cancels.set()

    # Cancelling

    async def _keep_cancelling(self) -> None:
        while True:
            await self._has_cancels.wait()
            self._has_cancels.clear()
            await self._send_cancels()

    async def _send_cancels(self) -> None:
        """Send cancellations in bounded batches until they are delivered or the deadlines have passed."""
        num_late = 0
        while self._cancels:
            has_failed = False
            for key, waiting in list(self._cancels.items()):
                model, _, is_lost = key
                batch = list(islice(waiting, MAX_CANCELS))
                try:
                    await self.queue.cancel(model, batch, is_lost=is_lost)
                except QueueUnavailable:
                    # Give up only requests whose deadline has passed.
                    has_failed, now = True, time.monotonic()
                    batch = [each for each in batch if waiting[each] < now]
                    num_late += len(batch)
                for request_id in batch:
                    del waiting[request_id]
                if not waiting:
                    del self._cancels[key]
            if has_failed:
                await asyncio.sleep(_RESTART_PAUSE_S)
        if num_late:
            logger.warning("cannot reach Redis: %d requests ran to their deadlines", num_late)

    # Events

    async def _supervise(self, run: Callable[[], Awaitable[None]]) -> None:
        """Run a background loop, and restart it if it fails. Without it, requests would hang or miss deadlines."""
        while True:
            try:
                await run()
            except Exception:
                logger.critical("%s failed; restarting it", run.__name__, exc_info=True)
                for _, choice in self._all_routes():
                    choice.has_gap = True
                self._has_cancels.set()
            await asyncio.sleep(_RESTART_PAUSE_S)

    async def _read_mailbox(self) -> None:
        async for model, data in self.mailbox.events():
            try:
                events = decode_events(data)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                logger.error("cannot read events of model %s: %s", model, error)
                self.on_gap(model)
            else:
                self._deliver(events)

    def _deliver(self, events: Sequence[CallEvent]) -> None:
        num_dropped = 0
        for event in events:
            is_new = False
            for call, choice in self._routes.get(event.request_id, ()):
                try:
                    is_new |= call.deliver(choice, event)
                except Exception:
                    logger.exception("cannot deliver an event of request %s", event.request_id)
                    call.fail(choice, ErrorCode.WORKER_LOST, _LOST_MESSAGE)
            num_dropped += not is_new
        if num_dropped:
            self.metrics.record_dropped_events(num_dropped)

    async def _enforce_deadlines(self) -> None:
        """Enforce deadlines. Must not wait for Redis."""
        while True:
            await asyncio.sleep(_DEADLINE_PAUSE_S)
            now = time.monotonic()
            for call, choice in self._all_routes():
                if now > call.deadline_at + _DEADLINE_GRACE_S:
                    call.fail(choice, ErrorCode.DEADLINE_EXCEEDED, _LATE_MESSAGE)

    # Requests without recent events

    async def _check_silent(self) -> None:
        """Look up silent requests, shard by shard."""
        while True:
            await asyncio.sleep(_LOOK_PAUSE_S)
            now = time.monotonic()
            by_shard: dict[str, list[Route]] = {}
            for call, choice in self._all_routes():
                is_silent = choice.has_gap or now - choice.heard_at > self.silence_timeout_s
                if is_silent and not choice.is_finished:
                    by_shard.setdefault(shard_of(choice.request_id), []).append((call, choice))
            for routes in by_shard.values():
                with suppress(QueueUnavailable):  # the next iteration looks again
                    for start in range(0, len(routes), MAX_LOOKS):
                        await self._look_up(routes[start : start + MAX_LOOKS])

    async def _look_up(self, routes: Sequence[Route]) -> None:
        """Read the logs of requests again, and fail requests that no worker runs. Raises: QueueUnavailable."""
        results = await asyncio.gather(
            *(self._look_up_one(call, choice) for call, choice in routes), return_exceptions=True
        )
        unavailable: QueueUnavailable | None = None
        for (call, choice), error in zip(routes, results, strict=True):
            if isinstance(error, QueueUnavailable):
                unavailable = error
            elif isinstance(error, Exception):
                logger.error("cannot read the log of %s", choice.request_id, exc_info=error)
                call.fail(choice, ErrorCode.WORKER_LOST, _LOST_MESSAGE)
        if unavailable is not None:
            raise unavailable

    async def _look_up_one(self, call: OpenCall, choice: ChoiceProgress) -> None:
        model, request_id = call.model, choice.request_id
        if choice.is_split:
            return await self._resubmit(call, choice)
        look_up = call.listen or self.queue.state
        try:
            state = await look_up(model, request_id)
        except QueueUnavailable:
            if self.queue.is_lost(request_id) and call.can_resubmit(choice):
                return await self._resubmit(call, choice)
            raise
        if state is None and time.monotonic() < call.begins_by:
            return
        if state is None or state.attempt > 0:  # otherwise the log is empty
            call.replay(choice, decode_log(await self.queue.events(model, request_id)))
        else:
            choice.has_gap = False
        choice.heard_at = time.monotonic()
        if state is not None and state.state in ("queued", "running"):
            if call.is_follower:
                left_s = max(0.0, state.remaining_s)
                call.deadline_at = min(call.deadline_at, choice.heard_at + left_s)
        elif state is not None and state.state == "cancelled":
            call.fail(choice, ErrorCode.CANCELLED, "The request was cancelled.")
        elif state is None:
            await self._resubmit(call, choice)
        else:
            call.fail(choice, ErrorCode.WORKER_LOST, _LOST_MESSAGE)

    async def _resubmit(self, call: OpenCall, choice: ChoiceProgress) -> None:
        """Resubmit a choice after Redis lost it or its tokens. The choice continues after the tokens that arrived.

        Workers that still run the lost request cannot write to the new id. Limits do not apply to accepted requests.
        Raises: QueueUnavailable.
        """
        if not call.can_resubmit(choice):
            call.fail(choice, ErrorCode.WORKER_LOST, _LOST_MESSAGE)
            return
        lost = choice.request_id
        self._cancel_ids(call, [lost], is_lost=True)
        first = call.submitted[choice.index]
        name = f"{first.id.partition('@')[0]}.{len(call.resubmitted) + 1}"
        again = replace(first, id=name + self.queue.place(name, first.tenant, None, None))
        call.resubmitted.append((again.id, len(choice.token_ids)))
        logger.warning("Redis lost data of request %s; submitted it again as %s", lost, again.id)
        self._remove_route(call, choice)
        choice.resubmit(again.id)
        self._add_route(call, choice)
        choice.has_gap = True  # look it up again if the outcome of `submit` is unknown
        charge = call.charge and call.charge.of_call(choice.index, len(call.choices))
        if charge is not None and charge.budget is not None:
            charge = replace(charge, budget=replace(charge.budget, most=NO_LIMIT))
        left_s = max(0.0, call.deadline_at - time.monotonic())
        submission = Submission(
            [seal(again)], left_s, NO_LIMIT, charge=charge, earlier=choice.token_ids
        )
        await self._enqueue(again, submission)
        choice.has_gap = False
        if call.is_closed:
            self._cancel(call)

    def spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        """Run a coroutine in the background. `stop` cancels it."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
