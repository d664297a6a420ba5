"""`POST /v1/chat/completions`: the lean path from raw bytes to raw bytes.

A plain ASGI application: what FastAPI would do around an endpoint costs more than the work itself. Intake, then one
of two ways back, whole or streamed. Whatever ends a request, whoever leaves first, `Generation.close` runs and the
fleet hears of it.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType
from redis.exceptions import RedisError
from starlette.types import Receive, Scope, Send

from gateway.api.chat.reply import Reply, ReplyOptions, new_head, send_stream, send_whole
from gateway.api.chat.schemas import ChatCompletionRequest
from gateway.api.chat.sse import error_frame
from gateway.api.chat.translate import find_priority, find_service_tier
from gateway.calls.intake import Intake
from gateway.calls.models import OTHER
from gateway.calls.open_call import Generation, Gone
from gateway.calls.recorder import AnswerRecorder
from gateway.calls.request_log import log_request
from gateway.calls.request_trace import RequestTrace
from gateway.calls.resume import StreamRecord, Streams, detach, fingerprint, last_event_id
from gateway.calls.timings import StageClock
from gateway.http.admission import Admission, HeldBody
from gateway.http.context import RequestContext, context_of
from gateway.http.deferred import DeferredTasks
from gateway.http.errors import ApiError, Overloaded, unavailable, unexpected
from gateway.http.exchange import ClientGone, Exchange
from shared.protocol import ModelCard
from shared.queue.submit import DuplicateRequest, QueueUnavailable
from shared.settings.tree import GatewaySettings
from shared.telemetry.metrics import GatewayMetrics

if TYPE_CHECKING:
    from shared.telemetry.spans import Tracer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ChatRun:
    """One request on its way through. `model` is a label of the metrics, so only ever a known name."""

    clock: StageClock
    model: str = OTHER
    user: str | None = None
    service_tier: str | UnsetType = UNSET
    recorder: AnswerRecorder | None = None
    is_follower: bool = False  #: its answer is another request's, which is the one that is counted
    trace: RequestTrace | None = None
    created: int = field(
        default_factory=lambda: int(time.time())
    )  #: the answer's, in epoch seconds


class ChatCompletions:
    """The ASGI application of the chat route."""

    def __init__(
        self,
        settings: GatewaySettings,
        admission: Admission,
        intake: Intake,
        streams: Streams,
        metrics: GatewayMetrics,
        deferred_tasks: DeferredTasks,
        tracer: "Tracer | None",
        system_fingerprint: str,
    ) -> None:
        self.settings = settings
        self.admission = admission
        self.intake = intake
        self.streams = streams
        self.metrics = metrics
        self.deferred_tasks = deferred_tasks
        self.tracer = tracer
        self.system_fingerprint = system_fingerprint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; every way out is counted once."""
        context = context_of(scope)
        exchange = Exchange(receive, send)
        run = ChatRun(StageClock(context.received_at))
        if self.tracer is not None:
            run.trace = RequestTrace(self.tracer, context)
        error: ApiError | None = None
        outcome = "cancelled"
        try:
            with self.admission:
                await self._serve(run, exchange, context)
            outcome = "followed" if run.is_follower else "ok"
        except Exception as raised:
            error = to_api_error(raised)
        finally:
            outcome = self._outcome(error) or outcome
            if error is not None and error.model is not None:
                run.model = error.model
            self.metrics.record_outcome(run.model, outcome)
        if error is not None:
            await fail(exchange, error)
        run.clock.stop()
        if run.trace is not None:
            run.trace.end(run.model, outcome, exchange.status, run.clock, run.recorder)
        self.deferred_tasks.add(partial(_account, run, context, outcome, exchange.status))

    def _outcome(self, error: ApiError | None) -> str | None:
        if isinstance(error, Overloaded):
            self.metrics.record_rejection(error.reason)
            return "rejected"
        return error and error.code

    async def _serve(self, run: ChatRun, exchange: Exchange, context: RequestContext) -> None:
        options, generation = await self._take_in(run, exchange, context)
        self.deferred_tasks.run()  # of earlier requests, while a worker is busy with this one
        watcher = asyncio.create_task(close_when_gone(exchange, generation))
        run.is_follower = generation.is_follower
        recorder = AnswerRecorder(
            run.model,
            len(generation.choices),
            run.clock,
            None if generation.is_follower else self.metrics,
            context.priority,
            is_streamed=options.stream,
        )
        run.recorder = recorder
        reply = Reply(
            exchange=exchange,
            options=options,
            head=new_head(
                context.id, run.model, run.created, self.system_fingerprint, run.service_tier
            ),
            generation=generation,
            recorder=recorder,
        )
        try:
            if options.stream:
                await send_stream(reply, self.settings)
            else:
                await send_whole(reply)
        finally:
            generation.close()
            watcher.cancel()

    async def _take_in(
        self, run: ChatRun, exchange: Exchange, context: RequestContext
    ) -> tuple[ReplyOptions, Generation]:
        """Read and queue the request. Its body, images and all, is let go of before the answer begins."""
        with self.admission.hold_body() as held:
            request = await self.intake.read(exchange, context, held)
            run.model = self.intake.label(request.model)
            run.user = request.user
            context.priority = find_priority(request, context.headers)
            run.service_tier = find_service_tier(request, context.priority)
            if run.trace is not None:
                run.trace.describe(request)
            card = await self.intake.find_model(request.model)
            run.model = card.name
            options = reply_options(request, context)
            if detach(context, request):
                return await self._submit_detached(request, card, context, run, options, held)
            return options, await self.intake.submit(request, card, context, run.clock, held)

    async def _submit_detached(
        self,
        request: ChatCompletionRequest,
        card: ModelCard,
        context: RequestContext,
        run: ChatRun,
        options: ReplyOptions,
        held: HeldBody,
    ) -> tuple[ReplyOptions, Generation]:
        """Queue a request that outlives its connection, or follow it if it was sent before."""
        context.is_resumable = True
        options = replace(options, last_event_id=last_event_id(context))
        record = to_record(request, card.name, context, options, run.created)
        is_new = await self.streams.claim(context.id, record)
        if not is_new:
            found = await self.streams.find_same(context.id, record)
            run.created = found.created
            if await self.streams.is_known(context.id, found.model):
                return options, await self.streams.follow(context.id, found.model)
        try:
            return options, await self.intake.submit(request, card, context, run.clock, held)
        except DuplicateRequest:  # queued by a try that was told nothing of it, or that came first
            return options, await self.streams.follow(context.id, card.name)
        except QueueUnavailable:  # it may be queued: a retry finds out
            raise
        except BaseException:
            if is_new:
                await self.streams.forget(context.id)
            raise


def _account(run: ChatRun, context: RequestContext, outcome: str, status: int | None) -> None:
    """Count and log a request that has ended."""
    log_request(
        context,
        model=run.model,
        outcome=outcome,
        status=status,
        clock=run.clock,
        user=run.user,
        recorder=run.recorder,
    )
    if outcome == "ok" and run.recorder is not None:
        run.recorder.record()


def reply_options(request: ChatCompletionRequest, context: RequestContext) -> ReplyOptions:
    """How the client wants its answer."""
    wants_timings = context.headers.get(b"x-vlm-timings", b"").lower() in (b"true", b"1")
    stream_options = request.stream_options
    return ReplyOptions(
        stream=bool(request.stream),
        include_usage=stream_options is not None and stream_options.include_usage,
        with_logprobs=bool(request.logprobs),
        shows_timings=bool(request.timings) or wants_timings,
    )


def to_record(
    request: ChatCompletionRequest,
    model: str,
    context: RequestContext,
    options: ReplyOptions,
    created: int,
) -> StreamRecord:
    """What another gateway must know of a detached request."""
    tier = find_service_tier(request, context.priority)
    return StreamRecord(
        model=model,
        tenant=context.tenant,
        fingerprint=fingerprint(context, request),
        created=created,
        include_usage=options.include_usage,
        with_logprobs=options.with_logprobs,
        shows_timings=options.shows_timings,
        service_tier="" if tier is UNSET else tier,
    )


async def close_when_gone(exchange: Exchange, generation: Generation) -> None:
    """Close a generation when its client has left."""
    await exchange.wait_until_gone()
    generation.close()


def to_api_error(error: Exception) -> ApiError | None:
    """What to tell the client of an exception; None if it has left."""
    match error:
        case ClientGone() | Gone():
            return None
        case ApiError():
            return error
        case QueueUnavailable() | RedisError():
            return unavailable()
        case _:
            logger.error("a request failed", exc_info=error)
            return unexpected()


async def fail(exchange: Exchange, error: ApiError) -> None:
    """Tell the client: by a status before the answer has begun, by an event without `[DONE]` after."""
    if exchange.has_started:
        await exchange.write(error_frame(error), is_last=True)
    else:
        await exchange.answer(error.status, error.headers(), error.body())
