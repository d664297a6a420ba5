"""From a claim to what the engine takes: images fetched and prepared, then the whole call.

Work runs in threads, those of images and those of text, off the event loop and off the engine's thread; `decode` may
go to other processes. Tenants, told apart by their cache salts, take turns.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec.structs import replace

from engines.base import (
    Capabilities,
    Decode,
    Engine,
    EngineCall,
    EngineInput,
    InvalidImage,
    InvalidRequest,
    PreparedImage,
    RequestError,
    Tokenization,
)
from engines.image_decoder import decode_image
from shared.blobs.api import BlobStore, BlobsUnavailable
from shared.protocol import (
    BlobRef,
    Call,
    Embed,
    Generate,
    Grammar,
    ImageRef,
    Run,
    Task,
    Tokenize,
)
from shared.settings.limits import LimitSettings
from worker.prepare.fair_threads import FairThreads
from worker.prepare.pixel_cache import PixelCache

logger = logging.getLogger(__name__)

MAX_PIXEL_CACHE_BYTES = 64 * 1024 * 1024
#: Up to that many characters, tokenizing takes less time than handing it to another thread.
MAX_INLINE_CHARS = 2000
NUM_TEXT_THREADS = 2  #: of their own, so that text never waits behind images
FETCH_PAUSE_S = 0.2


class ImageUnavailable(RequestError):
    """The bytes of an image are not stored."""


class CannotContinue(RequestError):
    """The answer was begun by a worker that was lost, and the engine cannot go on with it."""


class ImageRefused(RequestError):
    """What is wrong with one of a request's images, and with which (by its index)."""

    def __init__(self, index: int, cause: RequestError) -> None:
        super().__init__(str(cause))
        self.index = index
        self.cause = cause


class Preprocessor:
    """Prepares requests for one model."""

    def __init__(
        self,
        engine: Engine,
        blobs: BlobStore,
        limits: LimitSettings,
        num_threads: int,
        max_cache_bytes: int = MAX_PIXEL_CACHE_BYTES,
        decode: Decode = decode_image,
        hold_adapter: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """`hold_adapter` is called with the digest of an adapter before a call that has it is prepared."""
        self._engine = engine
        self._hold_adapter = hold_adapter
        self._capabilities = engine.capabilities()
        self._blobs = blobs
        self._limits = limits
        self._image_threads = FairThreads(num_threads, "image")
        self._text_threads = FairThreads(NUM_TEXT_THREADS, "text")
        self._prepared = PixelCache(max_cache_bytes)
        self._decode = decode

    async def prepare(
        self,
        request: Call,
        engine_id: str,
        output_token_ids: tuple[int, ...] = (),
        num_published: int = 0,
    ) -> EngineInput | Tokenization:
        """The engine's input for a call, known to it as `engine_id`, or all that the call asks for.

        Raises: RequestError. `num_published` output tokens went out before, of which some may have no id.
        """
        ready = self.prepare_at_once(request, engine_id, output_token_ids, num_published)
        if ready is not None:
            return ready
        task, tenant = request.task, request.tenant
        images = await asyncio.gather(
            *(self._image(index, image, tenant) for index, image in enumerate(task.images))
        )
        if request.adapter and self._hold_adapter is not None:
            await self._hold_adapter(request.adapter)
        if isinstance(task, Tokenize):
            return await self._text_threads.run(tenant, lambda: self._engine.tokenize(task, images))
        call = _to_engine_call(request, engine_id, output_token_ids)
        if isinstance(task, Run) and task.common is not None:
            call = replace(call, common_data=await self._common_data(task.common, tenant))
        if self._is_quick(task, sum([len(text) for text in task.texts()])):
            return self._engine.prepare(call, images)
        return await self._text_threads.run(tenant, lambda: self._engine.prepare(call, images))

    def prepare_at_once(
        self,
        request: Call,
        engine_id: str,
        output_token_ids: tuple[int, ...] = (),
        num_published: int = 0,
    ) -> EngineInput | None:
        """What `prepare` makes where that is quick and waits for nothing, else None. Raises: RequestError."""
        task = request.task
        num_chars = sum([len(text) for text in task.texts()])
        self._check(task, num_chars, len(output_token_ids), num_published)
        waits = task.images or request.adapter or isinstance(task, Tokenize)
        if waits or not self._is_quick(task, num_chars):
            return None
        return self._engine.prepare(_to_engine_call(request, engine_id, output_token_ids), [])

    def _check(
        self, task: Task, num_chars: int, num_output_tokens: int, num_published: int
    ) -> None:
        """Whether this engine may and can run it. Raises: RequestError."""
        engine = self._capabilities
        if num_published and not (
            num_published == num_output_tokens and self._engine.can_continue(task)
        ):
            raise CannotContinue(
                "The worker was lost in the middle of the answer, and this model's engine cannot "
                "continue it: send the request again."
            )
        tag = type(task).__struct_config__.tag
        if tag not in engine.tasks:
            raise InvalidRequest(f"this model's engine does not offer the task {tag}", "model")
        check_limits(task, num_chars, self._limits)
        if isinstance(task, Generate) and task.grammar is not None:
            check_grammar(task.grammar, engine, self._limits)

    def _is_quick(self, task: Task, num_chars: int) -> bool:
        """Whether the engine prepares it in less time than a thread would be told of it."""
        if not self._capabilities.prepares_quickly or num_chars > MAX_INLINE_CHARS:
            return False
        return not (isinstance(task, Generate) and task.grammar is not None)

    async def _image(self, index: int, image: ImageRef, tenant: str) -> PreparedImage:
        """An image as the engine wants it. Raises: ImageRefused."""
        image_hash = salted_hash(_identity(image), tenant)
        try:
            content = await self._prepared.get(
                image_hash, lambda: self._prepare_image(image, tenant)
            )
        except RequestError as error:
            raise ImageRefused(index, error) from error
        return PreparedImage(image_hash, content)

    async def _prepare_image(self, image: ImageRef, tenant: str) -> tuple[Any, int]:
        data = await self._fetch(image)
        if len(data) > self._limits.max_image_bytes:
            raise InvalidImage(
                f"an image has {len(data)} bytes: send at most {self._limits.max_image_bytes}"
            )
        check_size(image, self._limits)
        prepare, decode = self._engine.prepare_image, self._decode
        content = await self._image_threads.run(tenant, lambda: prepare(data, image, decode))
        return content, getattr(content, "nbytes", len(data))

    async def _fetch(self, image: BlobRef, what: str = "an image of the request") -> bytes:
        """The bytes of a blob; waits out an outage of Redis. Raises: ImageUnavailable."""
        while True:
            try:
                data = await self._blobs.get(image)
                break
            except BlobsUnavailable as error:
                logger.warning("cannot fetch %s: %s", what, error)
                await asyncio.sleep(FETCH_PAUSE_S)
        if data is None:
            raise ImageUnavailable(f"{what} is no longer stored; retry")
        return data

    async def _common_data(self, ref: BlobRef, tenant: str) -> bytes:
        """The common data of a session; kept for its other tasks. Raises: ImageUnavailable."""

        async def fetch() -> tuple[bytes, int]:
            data = await self._fetch(ref, "the session's common data")
            return data, len(data)

        return await self._prepared.get("common " + salted_hash(ref.sha256, tenant), fetch)

    def close(self) -> None:
        """End the threads; work that has not begun is dropped."""
        self._image_threads.close()
        self._text_threads.close()


def _to_engine_call(request: Call, engine_id: str, output_token_ids: tuple[int, ...]) -> EngineCall:
    return EngineCall(
        engine_id,
        request.task,
        request.tenant,
        request.priority,
        output_token_ids,
        request.adapter,
    )


def _identity(image: ImageRef) -> str:
    """An image, and the size that it is scaled to."""
    if not (image.min_pixels or image.max_pixels):
        return image.sha256
    scaled = f"{image.sha256} {image.min_pixels} {image.max_pixels}"
    return hashlib.sha256(scaled.encode()).hexdigest()


def salted_hash(sha256: str, tenant: str) -> str:
    """An image's identity in the caches: tenants with different salts share nothing."""
    if not tenant:
        return sha256
    return hashlib.sha256(f"{tenant}\0{sha256}".encode()).hexdigest()


def check_size(image: ImageRef, limits: LimitSettings) -> None:
    """Look again at a size that a gateway with other settings may have let through. Raises: InvalidImage."""
    short, long = sorted((image.width, image.height))
    if (
        long > limits.max_image_side
        or long * short > limits.max_image_pixels
        or long > short * limits.max_image_aspect
    ):
        raise InvalidImage(
            f"An image of {image.width} x {image.height} is too large or too narrow: send at most "
            f"{limits.max_image_pixels} pixels, {limits.max_image_side} on a side, and an aspect ratio "
            f"of at most {limits.max_image_aspect:g}:1."
        )


def check_grammar(grammar: Grammar, engine: Capabilities, limits: LimitSettings) -> None:
    """Raises: InvalidRequest for a grammar that the engine would ignore, or that no gateway should have let through."""
    if not engine.takes_grammars:
        raise InvalidRequest("this model's engine cannot hold answers to a grammar", grammar.param)
    is_lark = grammar.kind == "lark"
    most = limits.max_grammar_bytes if is_lark else limits.max_schema_bytes
    if len(grammar.source.encode()) > most:
        raise InvalidRequest(f"send at most {most} bytes", grammar.param)


def check_limits(task: Task, num_chars: int, limits: LimitSettings) -> None:
    """Look again at what a gateway with other settings may have let through; `num_chars`: of its text.

    Raises: InvalidRequest.
    """
    for what, count, most in _bounds(task, num_chars, limits):
        if count > most:
            raise InvalidRequest(f"the request has {count} {what}: send at most {most}")


def _bounds(task: Task, num_chars: int, limits: LimitSettings) -> tuple[tuple[str, int, int], ...]:
    """What is counted of a task, how much of it there is, and how much there may be."""
    if isinstance(task, Generate):
        sampling = task.sampling
        return (
            ("messages", len(task.messages), limits.max_messages),
            ("text characters", num_chars, limits.max_text_chars),
            ("images", len(task.images), limits.max_images),
            ("output tokens", sampling.max_tokens or 0, limits.max_output_tokens),
            ("stop strings", len(sampling.stop), limits.max_stop_strings),
            ("stop token ids", len(sampling.stop_token_ids), limits.max_stop_token_ids),
            ("allowed token ids", len(sampling.allowed_token_ids), limits.max_allowed_token_ids),
            ("biased tokens", len(sampling.logit_bias), limits.max_logit_bias),
            ("logprobs", sampling.num_logprobs or 0, limits.max_top_logprobs),
            ("prompt logprobs", sampling.num_prompt_logprobs or 0, limits.max_top_logprobs),
        )
    if isinstance(task, Tokenize):
        own = ("token ids", len(task.token_ids), limits.max_input_tokens)
        return (own,) if task.of is None else (own, *_bounds(task.of, num_chars, limits))
    if isinstance(task, Run):
        return (("bytes", len(bytes(task.input)), limits.max_task_bytes),)
    if isinstance(task, Embed):
        num_items, most = len(task.inputs), limits.max_inputs
    else:
        num_items, most = len(task.documents), limits.max_documents
    return (
        ("inputs", num_items, most),
        ("text characters", num_chars, limits.max_input_chars),
        ("images", len(task.images), limits.max_input_images),
    )
