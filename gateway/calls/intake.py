"""A request's way in: from its body to queued requests, with every check on the way.

The order is from cheap to dear: headers, JSON, parameters, model, images, Redis. It must not know how the answer
goes back.
"""

import itertools
import random
import time

from gateway.api.chat.schemas import ChatCompletionRequest
from gateway.api.chat.translate import (
    check_model,
    check_stream_options,
    check_supported,
    num_choices,
    split_choices,
    translate_messages,
    translate_sampling,
)
from gateway.calls.dispatcher import Dispatcher
from gateway.calls.key_limits import KeyLimits, PossibleTokens, possible_tokens
from gateway.calls.models import ModelDirectory
from gateway.calls.open_call import Generation
from gateway.calls.refunds import Refunds, Reservation
from gateway.calls.timings import StageClock
from gateway.http.admission import HeldBody
from gateway.http.body import decode_request, find_model_name, read_body
from gateway.http.context import RequestContext
from gateway.http.errors import ApiError, InvalidRequest
from gateway.http.exchange import Exchange
from gateway.images.loader import ImageLoader, ImageSource, LoadedImage
from shared.blobs.store import ImageStore
from shared.protocol import Call, Generate, ModelCard
from shared.queue.submit import QueueRefused, QueueUnavailable
from shared.settings.limits import LimitSettings
from shared.settings.tree import GatewaySettings
from shared.telemetry.metrics import GatewayMetrics

#: Images that nobody releases outlive their request's deadline by that much.
_IMAGE_GRACE_S = 60.0


class Intake:
    """Reads, checks and queues chat requests."""

    def __init__(
        self,
        gateway_id: str,
        settings: GatewaySettings,
        limits: LimitSettings,
        *,
        key_limits: KeyLimits,
        models: ModelDirectory,
        loader: ImageLoader,
        image_store: ImageStore,
        dispatcher: Dispatcher,
        refunds: Refunds,
        metrics: GatewayMetrics,
    ) -> None:
        self.gateway_id = gateway_id
        self.settings = settings
        self.limits = limits
        self.key_limits = key_limits
        self.models = models
        self.loader = loader
        self.image_store = image_store
        self.dispatcher = dispatcher
        self.refunds = refunds
        self.metrics = metrics
        self._holder_numbers = itertools.count()

    async def read(
        self, exchange: Exchange, context: RequestContext, held: HeldBody
    ) -> ChatCompletionRequest:
        """The request in its own words. Raises: InvalidRequest, Overloaded, ClientGone."""
        body = await read_body(
            exchange.receive,
            context,
            held,
            self.limits,
            timeout_s=self.settings.body_timeout_s,
        )
        try:
            request = decode_request(body)
            check_supported(request)
            check_stream_options(request)
        except ApiError as refused:
            refused.model = self.models.label(find_model_name(body))
            raise
        return request

    def label(self, model: str) -> str:
        """What a model that is asked for is called in metrics."""
        return self.models.label(model)

    async def find_model(self, name: str) -> ModelCard:
        """The model that is asked for. Raises: NotFound, RedisError."""
        return await self.models.find(name)

    async def submit(
        self,
        request: ChatCompletionRequest,
        card: ModelCard,
        context: RequestContext,
        clock: StageClock,
        held: HeldBody,
    ) -> Generation:
        """Queue one request per choice. Raises: InvalidRequest, Overloaded, RedisError, QueueUnavailable."""
        self.key_limits.check(card.name, context.tenant)
        count = num_choices(request, self.limits)
        sampling = translate_sampling(request, self.limits, seed=random.getrandbits(64))
        conversation = translate_messages(request.messages, self.limits)
        check_model(conversation, sampling, card)
        images = await self._load_images(conversation.sources, clock, held)
        generate = Call(
            id=context.id,
            reply_to=self.gateway_id,
            model=card.name,
            task=Generate(
                tuple(conversation.messages), sampling, tuple(image.ref for image in images)
            ),
            tenant=context.tenant,
            priority=context.priority,
            trace_parent=context.trace_parent,
            is_resumable=context.is_resumable,
            wants_stream=bool(request.stream),
        )
        requests = split_choices(generate, count)
        possible = possible_tokens(generate, card)
        if not images:
            return await self._enqueue(requests, possible, clock)
        data_by_digest = {image.ref.sha256: image.data for image in images}
        digests = list(data_by_digest)  # the bytes need not live as long as the request
        holder = f"{self.gateway_id}:{next(self._holder_numbers)}"
        try:
            ttl_s = self.settings.request_timeout_s + _IMAGE_GRACE_S
            await self.image_store.put_all(data_by_digest.items(), ttl_s, holder)
            generation = await self._enqueue(requests, possible, clock)
        except BaseException as error:
            may_run = context.is_resumable and isinstance(error, QueueUnavailable)
            if not may_run:
                self.image_store.release_soon(digests, holder)
            raise
        if not context.is_resumable:  # else a worker may need them yet
            generation.when_closed(lambda _: self.image_store.release_soon(digests, holder))
        return generation

    async def _enqueue(
        self, requests: list[Call], possible: PossibleTokens, clock: StageClock
    ) -> Generation:
        clock.submitted_at = time.perf_counter()
        first = requests[0]
        bounds = self.key_limits.bounds(first.priority)
        timeout_s = self.settings.request_timeout_s
        try:
            generation = await self.dispatcher.submit(requests, timeout_s, possible.total, bounds)
        except QueueRefused as refused:
            raise self.key_limits.to_error(refused, first.model, first.tenant) from None
        if bounds.max_tenant_tokens_per_minute:
            taken = Reservation(
                first.model,
                first.tenant,
                tuple(request.id for request in requests),
                possible.num_answer_tokens,
                bounds.max_tenant_tokens_per_minute,
            )
            generation.when_closed(lambda _: self.refunds.add(taken))
        return generation

    async def _load_images(
        self, sources: list[ImageSource], clock: StageClock, held: HeldBody
    ) -> list[LoadedImage]:
        if not sources:
            return []
        began_at = time.perf_counter()
        try:
            images = await self.loader.load_all(sources, held.add)
        except InvalidRequest:
            self.metrics.record_image("refused")
            raise
        finally:
            clock.image_decode_s = time.perf_counter() - began_at
        for _ in images:
            self.metrics.record_image("accepted")
        return images
