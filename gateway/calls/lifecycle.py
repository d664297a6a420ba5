"""The lifecycle of a request, the same for every API.

    in:   admission, body, surface.read, model, capability, surface.plan, limits, images, queue
    out:  events, answer.whole or answer.frames, client; recorded once, refunded, closed

Checks are ordered from cheap to expensive. Every exit path closes the call, which cancels it on the workers unless
it is resumable. An API is a `gateway.calls.surface.Surface`.
"""

import asyncio
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gateway.calls.dispatcher import Dispatcher
from gateway.calls.hooks import Hooks
from gateway.calls.kept import KeptAnswers
from gateway.calls.key_limits import KeyLimits, Refunds, to_rates
from gateway.calls.models import ModelDirectory, find_affinity
from gateway.calls.open_call import ChoiceEvent, OpenCall
from gateway.calls.recorder import Recorder, body_timings, timing_headers
from gateway.calls.resume import STREAM_PATH, Resume, is_resumable
from gateway.calls.surface import AnswerHead, Plan, Reply, Request, Surface
from gateway.http.body import Admission, HeldBody, find_model_name, read_body
from gateway.http.endpoint import while_connected
from gateway.http.errors import (
    ApiError,
    InvalidRequest,
    NotFound,
    Overloaded,
    ServerError,
    invalid,
    to_api_error,
)
from gateway.http.exchange import JSON_HEADERS, Exchange, RequestContext
from gateway.media.loader import ImageLoader, ImageSource, LoadedImage
from shared.blobs.api import BlobStore
from shared.media import MEDIA
from shared.protocol import (
    Call,
    Generate,
    ImageRef,
    ModelCard,
    Scores,
    Task,
    Tokenize,
    Tokenized,
    Tokens,
    Vectors,
)
from shared.queue.api import QueueRefused, QueueUnavailable, Submission
from shared.settings.limits import LimitSettings
from shared.settings.tree import GatewaySettings
from shared.telemetry.metrics import GatewayMetrics

if TYPE_CHECKING:
    from shared.telemetry.spans import Tracer

_PACKAGE = b"x-vlm-package"
_WATCH_AFTER_S = 0.1  #: delay before checking whether the client has disconnected
_OTHER_PROMPTS_S = 0.5  #: maximum wait for events of the other prompts, after the first token
_LEAST_TIMEOUT_S = 0.1  #: minimum timeout of a request after its media are loaded
_MAX_INLINE_BYTES = 64 * 1024  #: more bytes of vectors are encoded in a thread
#: Images that are not released expire this long after the request's deadline.
_IMAGE_GRACE_S = 60.0
_FULL = ("queue_full", "open_tokens")  #: reasons of refusals by a model's full queue


@dataclass(kw_only=True, slots=True)
class Lifecycle:
    gateway_id: str
    settings: GatewaySettings
    limits: LimitSettings
    admission: Admission
    key_limits: KeyLimits
    models: ModelDirectory
    loader: ImageLoader
    blobs: BlobStore
    dispatcher: Dispatcher
    resume: Resume
    refunds: Refunds
    hooks: Hooks | None
    kept: KeptAnswers
    metrics: GatewayMetrics
    tracer: "Tracer | None"
    _holder_numbers: Iterator[int] = field(default_factory=itertools.count)

    async def serve(self, surface: Surface, exchange: Exchange) -> None:
        """Answer one request. Every exit path is recorded once."""
        context = exchange.context
        recorder = self._record(surface, context)
        error, is_answered, reply = None, False, None
        try:
            with self.admission:
                reply = await self._open(exchange, recorder)
                if reply is not None:
                    await self._answer(exchange, reply, recorder)
            is_answered = True
        except Exception as raised:
            error = to_api_error(raised)
        finally:
            recorder.count(error, is_answered=is_answered)
        if error is not None:
            await _fail(exchange, surface, error, reply)
        recorder.stop(exchange.status)
        if context.route:  # a line of a batch has no route
            self.metrics.record_http("POST", context.route, exchange.status)
        # Log in the next iteration of the event loop, because this iteration still sends the answer.
        asyncio.get_running_loop().call_soon(recorder.account, exchange.status)

    def _record(self, surface: Surface, context: RequestContext) -> Recorder:
        recorder = Recorder(surface, context, self.metrics)
        recorder.key = self.key_limits.key_name(context.tenant)
        if self.tracer is not None:
            recorder.trace(self.tracer)
        return recorder

    async def serve_stream(self, surfaces: Mapping[str, Surface], exchange: Exchange) -> None:
        """Answer a client that resumes a stream. Only the gateway of the original request records it."""
        context = exchange.context
        with self.admission:
            reply = await self.resume.reopen(context.path["id"], context, surfaces)
            try:
                recorder = Recorder(reply.surface, context, self.metrics)
                await self._answer(exchange, reply, recorder)
            except Exception as raised:
                if (error := to_api_error(raised)) is not None:
                    await _fail(exchange, reply.surface, error, reply)

    async def compute(
        self, surface: Surface, plan: Plan, card: ModelCard, context: RequestContext, held: HeldBody
    ) -> list[ChoiceEvent]:
        """Run a plan for an API that needs vectors or scores for its answer.

        Metrics, log and queue treat it as a separate request of `surface`. Cancellation releases its resources.
        Raises: ApiError, Gone.
        """
        context = replace(context, id=secrets.token_hex(16), received_at=time.perf_counter())
        recorder = self._record(surface, context)
        self.key_limits.restrict(context)
        plan = replace(plan, priority=context.at_most(plan.priority))
        recorder.model, recorder.priority = card.name, plan.priority
        recorder.num_prompts = plan.num_prompts
        error, is_answered = None, False
        try:
            if surface.task not in card.tasks:
                raise _wrong_task(surface, card)
            check_images(plan.images, surface.task, card, self.limits)
            events = await self._run(plan, card, recorder, held)
            is_answered = True
        except Exception as raised:
            error = to_api_error(raised)
            if error is None:
                raise
            raise error from None
        finally:
            recorder.count(error, is_answered=is_answered)
            recorder.stop(None)
            recorder.account(None)
            error = None  # the exception references this frame: break the reference cycle
        return events

    async def _run(
        self, plan: Plan, card: ModelCard, recorder: Recorder, held: HeldBody
    ) -> list[ChoiceEvent]:
        """Queue a plan and wait for all of its events. Raises: ApiError, Gone."""
        call = await self._submit(plan, card, recorder, held)
        try:
            recorder.begin(call, is_streamed=False)
            return await self._collect(call, recorder)
        finally:
            call.close()

    # Requests

    async def _open(self, exchange: Exchange, recorder: Recorder) -> Reply | None:
        """Read and queue the request, and free its body. Returns None if it is already answered."""
        with HeldBody(self.admission) as held:
            request = await self._read(exchange, recorder.surface, held)
            recorder.user = request.user
            recorder.describe(request)
            ask = partial(self._ask, request, exchange, recorder, held)
            return await self._ask_or_fall_back(ask, request.model, recorder)

    async def _ask_or_fall_back(
        self, ask: Callable[[str], Awaitable[Reply | None]], asked: str, recorder: Recorder
    ) -> Reply | None:
        """Queue a request to a model, or to its fallback while its queue is full or no worker serves it.

        Only text generation falls back, because vectors, scores and token counts of another model would be wrong. If
        the fallback refuses the request, its error is ignored, and the client gets the response of the original model.
        Fallbacks are not chained. Raises: as `ask`.
        """
        models, context, names = self.models, recorder.context, self.settings.fallbacks
        name = asked if asked in names else models.target(asked)
        other, side = names.get(name, ""), recorder.user or context.id
        is_possible = (
            other
            and recorder.surface.task == "generate"
            and context.route  # lines of a batch wait instead
            and models.may_use(context.tenant, other)
            and models.num_ready(other, side) > 0
        )
        if not is_possible:
            return await ask(asked)
        models.check_use(context.tenant, asked)
        refused = None
        if models.num_ready(asked, side) or models.is_at_rest(asked):
            try:
                return await ask(asked)
            except Overloaded as error:
                if error.reason not in _FULL:
                    raise
                refused = error.with_traceback(None)  # stack frames would retain the body
        model = recorder.model
        context.fallback_from = asked
        try:
            reply = await ask(other)
        except ApiError:
            recorder.model, context.fallback_from = model, ""
            if refused is not None:
                raise refused from None
            return await ask(asked)
        self.metrics.count("fallbacks", name, other)
        return reply

    async def _ask(
        self, request: Request, exchange: Exchange, recorder: Recorder, held: HeldBody, model: str
    ) -> Reply | None:
        """Queue a request to a model. Returns None if it is already answered."""
        surface, context = recorder.surface, recorder.context
        side = request.user or context.id
        card = await self.models.find(model, side, surface.task, context.tenant)
        recorder.model = self.models.label(card.name)
        if surface.task not in card.tasks:
            raise _wrong_task(surface, card)
        created = int(time.time())  # noqa: TID251
        head = AnswerHead(surface.id_prefix + context.id, created, card.name, card.package)
        if (body := surface.without_worker(request, head)) is not None:
            await exchange.answer(200, JSON_HEADERS, body)
            return None
        if surface.keeps_answers:
            request = await self._recall(surface, request, context)
        self.key_limits.restrict(context)
        plan = surface.plan(request, context, card)
        check_images(plan.images, surface.task, card, self.limits)
        if self.hooks is not None:
            self.key_limits.check(card.queue, context.tenant)
            plan = await self.hooks.before(plan, surface, card.name, context)
        if surface.cuts_audio:
            plan = await while_connected(self._cut_audio(plan, card, recorder, held), exchange)
        recorder.priority, recorder.num_prompts = plan.priority, plan.num_prompts
        submit = partial(self._submit, plan, card, recorder, held)
        if is_resumable(context, plan):
            head = replace(head, id=surface.id_prefix + context.id)  # is_resumable may change it
            limits = self.key_limits.limits(plan.priority, context.tenant)
            shard = self.dispatcher.queue.place(context.id, context.tenant, limits, None)
            reply = await self.resume.open(
                surface, request, plan, head, card.queue, context, shard, submit
            )
            if surface.keeps_answers and reply.call.images:
                try:
                    await self.kept.hold(reply.head.id, reply.call.images, self.resume.keep_s)
                except BaseException:
                    reply.call.close()
                    raise
            return reply
        answer = surface.answer(plan.options, head)
        call = await submit()
        return Reply(surface, call, answer, plan.is_streamed, plan.shows_timings, head)

    async def _cut_audio(
        self, plan: Plan, card: ModelCard, asking: Recorder, held: HeldBody
    ) -> Plan:
        """Ask a worker for the audio's segments. Returns the plan with a task per segment. Raises: ApiError, Gone."""
        began_at = time.perf_counter()
        context, surface = replace(asking.context, id=secrets.token_hex(16)), asking.surface
        recorder = Recorder(surface, context, self.metrics)
        sources = await self.kept.find_images(context.tenant, plan.images)
        loaded = await self._load_images(sources, recorder, held)
        plan = replace(plan, images=sources, loaded=loaded)
        [of] = plan.tasks
        assert isinstance(of, Generate)
        finding = replace(plan, tasks=[Tokenize(of, finds_segments=True)], is_streamed=False)
        events = await self._run(finding, card, recorder, held)
        asking.image_decode_s = time.perf_counter() - began_at
        [found] = [event for _, event in events if isinstance(event, Tokenized)]
        # `_run` has stored the media and closed the files. Media without data are not stored again.
        stored = [e if isinstance(e.data, bytes) else replace(e, data=None) for e in loaded]
        return surface.cut(replace(plan, loaded=stored), found.segment_ends)

    async def _recall(self, surface: Surface, request: Request, context: RequestContext) -> Request:
        """Add the previous answer to a request that continues it. Raises: NotFound, RecordsUnavailable."""
        name = surface.previous(request)
        if name is None:
            return request
        record = await self.kept.get(context.tenant, name)
        if record is None:
            message = (
                "The previous answer was not stored, or has expired: send the whole conversation."
            )
            code = "previous_response_not_found"
            raise NotFound(message, param="previous_response_id", code=code)
        return surface.with_previous(request, record)

    async def _keep(self, reply: Reply, context: RequestContext) -> None:
        """Store a complete answer before it is sent. Raises: RecordsUnavailable."""
        data = reply.surface.record(reply.answer)
        if data is None:
            return
        images: tuple[ImageRef, ...] | None = reply.call.images
        if reply.call.is_follower:  # the first reader may have disconnected before storing it
            images = await self.resume.images(reply.head.id.removeprefix(reply.surface.id_prefix))
            if images is None:
                return
        await self.kept.put(context.tenant, reply.head.id, data, images)

    async def _read(self, exchange: Exchange, surface: Surface, held: HeldBody) -> Request:
        context = exchange.context
        body = await read_body(
            exchange,
            held,
            self.limits,
            timeout_s=self.settings.body_timeout_s,
            max_commas=surface.max_commas,
            media_type=surface.body_type(context),
        )
        try:
            return surface.read(body, context)
        except ApiError as refused:
            refused.model = self.models.label(find_model_name(body))
            raise

    async def _submit(
        self, plan: Plan, card: ModelCard, recorder: Recorder, held: HeldBody, call_id: str = ""
    ) -> OpenCall:
        """Queue one call per task. `call_id`: id of a resumable call. Raises: ApiError, as `Dispatcher.submit`."""
        tenant = recorder.context.tenant
        self.key_limits.check(card.queue, tenant)
        if not plan.images:
            return await self._queue(plan, plan.tasks, card, recorder, call_id)
        sources = await self.kept.find_images(tenant, plan.images)
        task = type(plan.tasks[0]).__struct_config__.tag
        check_images(sources, str(task), card, self.limits)  # a file id may refer to a video
        lives_s = self.settings.request_timeout_s + _IMAGE_GRACE_S
        holder = f"{self.gateway_id}:{next(self._holder_numbers)}"
        release = partial(self.blobs.release, holder, [each.ref for each in sources if each.ref])
        try:
            images = plan.loaded or await self._load_images(sources, recorder, held)
            params = [source.param for source in sources]
            await self._store_images(images, params, holder, lives_s)
            refs = tuple(image.ref for image in images)
            located = [await self.blobs.locate(ref, lives_s) for ref in refs]
            # The request carries the pixel limit, so that every worker builds the same prompt.
            scaled = tuple(map(partial(_scaled, card), sources, located))
            tasks = [task.with_images(scaled) for task in plan.tasks]
            for place, (start_s, end_s) in enumerate(plan.audio_parts):
                part = [replace(ref, start_s=start_s, end_s=end_s) for ref in scaled]
                tasks[place] = tasks[place].with_images(part)
            if call_id and recorder.surface.keeps_answers:  # another gateway may store the answer
                await self.resume.note(recorder.context.id, images=refs)
            call = await self._queue(plan, tasks, card, recorder, call_id)
            call.images = refs
        except BaseException as error:
            may_run = call_id and isinstance(error, QueueUnavailable)
            if not may_run:
                release()
            raise
        if call_id:  # a worker may need the images after the client has disconnected
            self.resume.when_ended(call, release)
        else:
            call.when_closed(lambda _: release())
        return call

    async def _store_images(
        self, images: Sequence[LoadedImage], params: Sequence[str], holder: str, ttl_s: float
    ) -> None:
        """Store new images, and retain stored images. Raises: InvalidRequest that names a lost image."""
        distinct = {image.ref.sha256: image for image in images}
        puts = [
            self.blobs.put(image.data, holder, ttl_s=ttl_s, ref=image.ref)
            for image in distinct.values()
            if image.data is not None
        ]
        # If one fails, wait for the others: an image that is stored after the release stays until it expires.
        results = await asyncio.gather(*puts, return_exceptions=True)
        for image in images:
            image.close()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        for image, param in zip(images, params, strict=True):
            if image.data is None and not await self.blobs.hold(image.ref, holder, ttl_s=ttl_s):
                message = "An image, video or audio of the conversation is no longer stored: send it again."
                raise InvalidRequest(message, param=param, code="invalid_image")

    async def _load_images(
        self, sources: Sequence[ImageSource], recorder: Recorder, held: HeldBody
    ) -> list[LoadedImage]:
        began_at = time.perf_counter()
        try:
            images = await self.loader.load_all(sources, held.add)
        except InvalidRequest:
            self.metrics.count("images", "refused")
            raise
        finally:
            recorder.image_decode_s = time.perf_counter() - began_at
        for _ in images:
            self.metrics.count("images", "accepted")
        return images

    async def _queue(
        self, plan: Plan, tasks: Sequence[Task], card: ModelCard, recorder: Recorder, call_id: str
    ) -> OpenCall:
        context = recorder.context
        calls = [
            Call(
                id=call_id or f"{context.id}-{choice}",
                reply_to=self.gateway_id,
                model=card.queue,
                task=task,
                tenant=context.tenant,
                priority=plan.priority,
                trace_parent=context.trace_parent,
                wants_stream=plan.is_streamed,
                is_resumable=bool(call_id),
                adapter=card.adapter,
            )
            for choice, task in enumerate(tasks)
        ]
        affinity = find_affinity(self.models, self.settings.home_grace_s, calls[0])
        limits = self.key_limits.limits(plan.priority, context.tenant)
        if not call_id:
            shard = self.dispatcher.queue.place(context.id, context.tenant, limits, affinity)
            calls = [replace(call, id=call.id + shard) for call in calls] if shard else calls
        reservation = self.key_limits.reservation(calls, card, limits)
        recorder.submitted_at = time.perf_counter()
        left_s = self.settings.request_timeout_s - recorder.image_decode_s
        charge = self.key_limits.charge(calls, card, plan.num_prompts)
        limited = (self.key_limits.max_waiting(plan.priority), reservation, affinity, charge)
        submission = Submission((), max(_LEAST_TIMEOUT_S, left_s), *limited)
        try:
            call = await self.dispatcher.submit(calls, submission, self.settings.home_grace_s)
        except QueueRefused as refused:
            raise self.key_limits.to_error(refused, card.queue, context.tenant) from None
        if reservation is not None and call.full_in_s is not None:
            context.rates = to_rates(reservation.limits, call.full_in_s)
        if reservation is not None and reservation.limits.max_tenant_tokens_per_minute:
            call.when_closed(partial(self.refunds.add, reservation))
        return call

    # Answers

    async def _answer(self, exchange: Exchange, reply: Reply, recorder: Recorder) -> None:
        """Send the answer. Raises: ApiError, Gone, before or after the status line."""
        recorder.begin(reply.call, is_streamed=reply.is_streamed)
        call = reply.call
        watching: list[asyncio.Task[None]] = []

        async def close_when_gone() -> None:
            await exchange.wait_until_gone()
            call.close()

        def watch() -> None:
            watching.append(asyncio.create_task(close_when_gone()))

        # During quick answers, the client is not watched: that saves a task.
        timer = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, watch)
        try:
            if reply.is_streamed:
                await self._send_stream(exchange, reply, recorder)
            else:
                await self._send_whole(exchange, reply, recorder)
        finally:
            call.close()
            timer.cancel()
            for task in watching:
                task.cancel()

    async def _send_whole(self, exchange: Exchange, reply: Reply, recorder: Recorder) -> None:
        events = await self._collect(reply.call, recorder)
        if self.hooks is not None:
            events = await self.hooks.after(events, reply, exchange.context)
        e2e_s = recorder.elapsed_s()
        stages = recorder.stages(e2e_s)
        if reply.shows_timings:
            recorder.totals.timings = body_timings(stages, e2e_s)
        num_bytes = sum(len(event.data) for _, event in events if isinstance(event, Vectors))
        whole = partial(reply.answer.whole, events, recorder.totals)
        body = await asyncio.to_thread(whole) if num_bytes > _MAX_INLINE_BYTES else whole()
        if reply.surface.keeps_answers:
            await self._keep(reply, exchange.context)
        own = getattr(reply.answer, "headers", JSON_HEADERS)
        headers = [*own, *timing_headers(stages, e2e_s, is_whole=True)]
        if reply.head.package:
            headers.append((_PACKAGE, reply.head.package.encode()))
        await exchange.answer(200, headers, body)

    async def _collect(self, call: OpenCall, recorder: Recorder) -> list[ChoiceEvent]:
        """All events of a call, with their data. Raises: ApiError, Gone."""
        events: list[ChoiceEvent] = []
        while not recorder.is_complete:
            arrived = await call.receive()
            recorder.note(arrived)
            events += arrived
        for place, (index, event) in enumerate(events):
            if isinstance(event, Vectors | Scores) and event.is_stored:
                events[place] = index, await self._complete(event, call)
        return events

    async def _complete(self, event: Vectors | Scores, call: OpenCall) -> Vectors | Scores:
        """Add the data of vectors or scores, which is stored outside the queue. Raises: ServerError."""
        data = await self.dispatcher.queue.result(
            call.model, event.request_id, event.attempt, is_last=not call.is_resumable
        )
        if data is None:
            message = "The result of the request is no longer stored; retry."
            raise ServerError(message, code="result_unavailable", retry_after_s=1)
        return replace(event, data=data, is_stored=False)

    async def _receive_first(self, call: OpenCall, recorder: Recorder) -> list[ChoiceEvent]:
        """Wait for the first events before the status line, so that a prompt that is too long gets a 400."""
        num = 1 if recorder.surface.cuts_audio else recorder.num_prompts  # one segment is enough
        events: list[ChoiceEvent] = []
        until = time.monotonic() + self.settings.headers_after_s
        while (left_s := until - time.monotonic()) > 0:
            recorder.note(arrived := await call.receive(left_s))
            events += arrived
            if len({index * num // len(call.choices) for index, _ in events}) == num:
                break
            if any(isinstance(event, Tokens) for _, event in arrived):
                until = min(until, time.monotonic() + _OTHER_PROMPTS_S)
        return events

    async def _send_stream(self, exchange: Exchange, reply: Reply, recorder: Recorder) -> None:
        call, surface = reply.call, reply.surface
        events = await self._receive_first(call, recorder)
        headers = [*surface.stream_headers, *recorder.known_timing()]
        if reply.last_id is not None:
            headers.append((b"x-vlm-stream", (STREAM_PATH + reply.head.id).encode()))
        if reply.head.package:
            headers.append((_PACKAGE, reply.head.package.encode()))
        await exchange.start(200, headers)
        seen = list(events)
        while not recorder.is_complete:
            if not events:
                await exchange.write(surface.keep_alive)
            elif frames := reply.frames(events, None):
                await exchange.write(frames)
            events = await call.receive(self.settings.keep_alive_s)
            try:
                recorder.note(events)
            except ApiError:  # send the tokens that arrived with the failure first
                told = [each for each in events if isinstance(each[1], Tokens)]
                if frames := reply.frames(told, None):
                    await exchange.write(frames)
                raise
            if self.hooks is not None:
                seen += events
        if self.hooks is not None:
            await self.hooks.after(seen, reply, exchange.context)
        if reply.shows_timings:
            e2e_s = recorder.elapsed_s()
            recorder.totals.timings = body_timings(recorder.stages(e2e_s), e2e_s)
        frames = reply.frames(events, recorder.totals)
        if surface.keeps_answers:
            await self._keep(reply, exchange.context)
        await exchange.write(frames, is_last=True)


def check_images(
    images: Sequence[ImageSource], task: str, card: ModelCard, limits: LimitSettings
) -> None:
    """Check the number of media of each kind, and that the model accepts them. Raises: InvalidRequest."""
    if not images:
        return
    for kind, medium in MEDIA.items():
        given = [source for source in images if source.kind == kind]
        if given and not medium.is_taken(card):
            problem = f"this model does not support {medium.plural}; send text only"
            if kind == "video" and card.supports_images:
                problem = "this model does not support videos; send the frames as images"
            raise invalid(given[0].param, problem, code="unsupported_image")
        most = medium.max_count(limits)
        if kind == "image" and task != "generate":
            most = limits.max_input_images
        if len(given) > most:
            problem = f"send at most {most} {medium.plural} in all"
            raise invalid(given[most].param, problem, code="too_many_images")


def _scaled(card: ModelCard, source: ImageSource, ref: ImageRef) -> ImageRef:
    """An image, video or audio with the pixel limits for workers."""
    limits = filter(None, (source.max_pixels, card.max_image_pixels))
    most = min(limits, default=0)
    return replace(ref, min_pixels=source.min_pixels, max_pixels=most, param=source.param)


def _wrong_task(surface: Surface, card: ModelCard) -> InvalidRequest:
    offered = ", ".join(card.tasks)
    path = surface.path.replace("{name}", card.name)
    message = f"This model does not offer the task {surface.task}, which {path} needs; it offers: {offered}."
    return InvalidRequest(message, param="model", code="wrong_task")


async def _fail(exchange: Exchange, surface: Surface, error: ApiError, reply: Reply | None) -> None:
    """Report an error: by status if the answer has not begun, else in a last frame."""
    if exchange.status is None or reply is None:
        await exchange.fail(error, surface.error)
        return
    error.request_id = exchange.context.shown_id
    await exchange.write(surface.error_frame(error, reply.answer), is_last=True)
