"""Preparation of claimed calls for the engine: fetches and decodes images, renders and tokenizes prompts.

Images, media and long texts are prepared in separate thread pools, short texts on the event loop. Videos and audio are
decoded in other processes, and so are images unless `worker.decode_processes` is 0. Tenants are scheduled round-robin.
"""

import asyncio
import hashlib
import io
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, TypeVar

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
from shared.blobs.api import BlobsUnavailable
from shared.media import MEDIA
from shared.protocol import BlobRef, Call, Embed, Generate, Grammar, ImageRef, Run, Task, Tokenize
from shared.settings.limits import LimitSettings
from worker.prepare.video_pool import AUDIO_TOO_LONG, TOO_LONG, VideoPool

if TYPE_CHECKING:
    from shared.blobs.object_store import UrlBlobReader

logger = logging.getLogger(__name__)

MAX_PIXEL_CACHE_BYTES = 64 * 1024 * 1024
#: Up to this many characters, tokenizing on the event loop is faster than in a thread.
MAX_INLINE_CHARS = 2000
NUM_TEXT_THREADS = 2  #: separate threads: text does not wait for images
FETCH_PAUSE_S = 0.2
MAX_SEGMENT_S = 30.0  #: longest segment of audio that is transcribed
Result = TypeVar("Result")


class ImageUnavailable(RequestError):
    """The bytes of an image have expired."""


class CannotContinue(RequestError):
    """A lost worker has begun the answer, and the engine cannot continue it."""


class ImageRefused(RequestError):
    """An image of the request is invalid; `index` names it."""

    def __init__(self, index: int, cause: RequestError) -> None:
        super().__init__(str(cause))
        self.index = index
        self.cause = cause


@dataclass
class MediaCounts:
    """Totals of decoded videos and audio. Units: seconds."""

    length_s: float = 0.0
    decode_s: float = 0.0  #: CPU time of the decoders
    refusals: Counter[str] = field(default_factory=Counter)  #: by cause: "time", "file" or option


@dataclass(eq=False)
class Preprocessor:
    """Prepares requests for one model."""

    _engine: Engine
    _blobs: "UrlBlobReader"
    _limits: LimitSettings
    _num_threads: int
    decode: Decode = decode_image
    videos: VideoPool | None = None
    #: loads an adapter by its digest, before its calls are prepared
    hold_adapter: Callable[[str], Awaitable[None]] | None = None

    def __post_init__(self) -> None:
        self._capabilities = self._engine.capabilities()
        self._image_threads = FairThreads(self._num_threads, "image")
        self._text_threads = FairThreads(NUM_TEXT_THREADS, "text")
        self._prepared = PixelCache(MAX_PIXEL_CACHE_BYTES)
        if self.videos is not None:
            self._video_threads = FairThreads(self.videos.num_processes, "video")
        self.media = MediaCounts()

    async def prepare(
        self,
        request: Call,
        engine_id: str,
        output_token_ids: tuple[int, ...] = (),
        num_published: int = 0,
        note_media: Callable[[float], None] | None = None,
    ) -> EngineInput | Tokenization:
        """The engine's input for a call, or the complete result of a tokenization. Raises: RequestError.

        `num_published`: output tokens that earlier attempts published, with or without ids. `note_media` gets the
        seconds that decoding took, if the request has a video or audio.
        """
        task, tenant = request.task, request.tenant
        num_chars = self._check(task, len(output_token_ids), num_published)
        if isinstance(task, Tokenize) and task.finds_segments:
            return Tokenization(segment_ends=await self._segment_ends(task.images[0], tenant))
        started = time.perf_counter()
        images = await asyncio.gather(
            *(self._image(index, image, tenant) for index, image in enumerate(task.images))
        )
        if note_media is not None and any(image.kind != "image" for image in task.images):
            note_media(time.perf_counter() - started)
        if request.adapter and self.hold_adapter is not None:
            await self.hold_adapter(request.adapter)
        if isinstance(task, Tokenize):
            made = await self._text_threads.run(tenant, lambda: self._engine.tokenize(task, images))
            return replace(made, frames=tuple(each.frames for each in images if each.frames))
        call = _to_engine_call(request, engine_id, output_token_ids)
        if isinstance(task, Run) and task.common is not None:
            data = await self._cached(task.common, "the session's common data", tenant)
            call = replace(call, common_data=data)
        if self._is_quick(task, num_chars):
            return self._engine.prepare(call, images)
        return await self._text_threads.run(tenant, lambda: self._engine.prepare(call, images))

    def prepare_at_once(
        self,
        request: Call,
        engine_id: str,
        output_token_ids: tuple[int, ...] = (),
        num_published: int = 0,
    ) -> EngineInput | None:
        """Like `prepare`, but returns None if that would be slow or would have to wait. Raises: RequestError."""
        task = request.task
        if task.images or request.adapter or isinstance(task, Tokenize):
            return None
        num_chars = self._check(task, len(output_token_ids), num_published)
        if not self._is_quick(task, num_chars):
            return None
        return self._engine.prepare(_to_engine_call(request, engine_id, output_token_ids), [])

    def _check(self, task: Task, num_output_tokens: int, num_published: int) -> int:
        """The length of all texts. Raises: RequestError if the engine cannot run the task, or a limit forbids it."""
        engine, num_chars = self._capabilities, sum([len(text) for text in task.texts()])
        if num_published and not (
            num_published == num_output_tokens and self._engine.can_continue(task)
        ):
            raise CannotContinue(
                "The worker was lost in the middle of the answer, and this model's engine cannot "
                "continue it: send the request again."
            )
        tag = type(task).__struct_config__.tag
        needs_engine = not (isinstance(task, Tokenize) and task.finds_segments)
        if needs_engine and tag not in engine.tasks:
            raise InvalidRequest(f"this model's engine does not offer the task {tag}", "model")
        check_limits(task, num_chars, self._limits)
        if isinstance(task, Generate) and task.grammar is not None:
            check_grammar(task.grammar, engine, self._limits)
        return num_chars

    def _is_quick(self, task: Task, num_chars: int) -> bool:
        """Whether preparing the task takes less time than a switch to another thread."""
        if not self._capabilities.prepares_quickly or num_chars > MAX_INLINE_CHARS:
            return False
        return not (isinstance(task, Generate) and task.grammar is not None)

    async def _image(self, index: int, image: ImageRef, tenant: str) -> PreparedImage:
        """Fetch and prepare an image, video or audio. Raises: ImageRefused."""
        key = salted_hash(_identity(image), tenant)
        prepare = self._prepare_image if image.kind == "image" else self._prepare_media
        try:
            return await self._prepared.get(key, lambda: prepare(key, image, tenant))
        except RequestError as error:
            raise ImageRefused(index, error) from error

    async def _prepare_image(
        self, key: str, image: ImageRef, tenant: str
    ) -> tuple[PreparedImage, int]:
        data = await self._fetch(image, "an image of the request", self._blobs.get)
        if len(data) > self._limits.max_image_bytes:
            raise InvalidImage(
                f"an image has {len(data)} bytes: send at most {self._limits.max_image_bytes}"
            )
        check_size(image, self._limits)
        prepare, decode = self._engine.prepare_image, self.decode
        content = await self._image_threads.run(tenant, lambda: prepare(data, image, decode))
        return PreparedImage(key, content), getattr(content, "nbytes", len(data))

    async def _prepare_media(
        self, key: str, image: ImageRef, tenant: str
    ) -> tuple[PreparedImage, int]:
        """Decode a video or audio. A video's hash covers its file and its frames, not how they were chosen."""
        file, engine = await self._media_file(image, tenant), self._engine

        def work() -> tuple[PreparedImage, int]:
            name, counts = key, None
            if image.kind == "audio":
                with file, self._counting() as videos, videos.open_audio(file, image) as media:
                    content = engine.prepare_audio(media)
            else:
                with file, self._counting() as videos, videos.open(file, image) as media:
                    content = engine.prepare_video(media)
                start_s = media.options.start_s  # `indices` are relative to it
                frames = f"{image.sha256} {start_s} {media.info} {media.indices} {media.size}"
                name = salted_hash(hashlib.sha256(frames.encode()).hexdigest(), tenant)
                counts = len(media.indices or ()), media.info.num_frames
            self.media.length_s += media.info.length_s
            return PreparedImage(name, content, counts), getattr(content, "nbytes", image.num_bytes)

        return await self._video_threads.run(tenant, work)

    async def _media_file(self, image: ImageRef, tenant: str) -> IO[bytes]:
        """The file of a video or audio; cached if only a part of it is used. Raises: InvalidImage, ImageUnavailable."""
        medium = MEDIA[image.kind]
        engine = self._capabilities
        is_taken = engine.max_audio_s > 0 if image.kind == "audio" else engine.takes_video
        if self.videos is None or not is_taken:
            raise InvalidImage(f"This model does not support {medium.plural}.")
        most = medium.max_bytes(self._limits)
        if image.num_bytes > most:
            raise InvalidImage(
                f"The {image.kind} has {image.num_bytes} bytes: send at most {most}."
            )
        name = f"the {image.kind} of the request"
        if image.end_s:
            return io.BytesIO(await self._cached(image, name, tenant))
        return await self._fetch(image, name, self._blobs.open)

    async def _segment_ends(self, image: ImageRef, tenant: str) -> tuple[float, ...]:
        """End times of segments that are short enough for the model. Raises: ImageRefused."""
        longest_s = min(MAX_SEGMENT_S, self._capabilities.max_audio_s)

        def find(file: IO[bytes]) -> tuple[float, ...]:
            with file, self._counting() as pool, pool.open_audio(file, image, longest_s) as audio:
                return audio.info.segment_ends

        try:
            file = await self._media_file(image, tenant)
            return await self._video_threads.run(tenant, lambda: find(file))
        except RequestError as error:
            raise ImageRefused(0, error) from error

    @contextmanager
    def _counting(self) -> Iterator[VideoPool]:
        """The decoders; counts their CPU time, and the refusals of the block."""
        assert self.videos is not None
        try:
            yield self.videos
        except InvalidImage as error:
            reason = "time" if str(error) in (TOO_LONG, AUDIO_TOO_LONG) else "file"
            self.media.refusals[error.param or reason] += 1
            raise
        finally:
            self.media.decode_s = self.videos.cpu_s

    async def _fetch(
        self, ref: BlobRef, what: str, read: Callable[[BlobRef], Awaitable[Result | None]]
    ) -> Result:
        """The content of a blob; retries while Redis fails. Raises: ImageUnavailable."""
        while True:
            try:
                data = await read(ref)
                break
            except BlobsUnavailable as error:
                logger.warning("cannot fetch %s: %s", what, error)
                await asyncio.sleep(FETCH_PAUSE_S)
        if data is None:
            raise ImageUnavailable(f"{what} is no longer stored; retry")
        return data

    async def _cached(self, ref: BlobRef, what: str, tenant: str) -> bytes:
        """The bytes of a blob that several requests use. Raises: ImageUnavailable."""

        async def fetch() -> tuple[bytes, int]:
            data = await self._fetch(ref, what, self._blobs.get)
            return data, len(data)

        return await self._prepared.get("bytes " + salted_hash(ref.sha256, tenant), fetch)

    def close(self) -> None:
        """End the threads; work that has not begun is dropped."""
        self._image_threads.close()
        if self.videos is not None:
            self._video_threads.close()
        self._text_threads.close()


def _to_engine_call(request: Call, engine_id: str, output_token_ids: tuple[int, ...]) -> EngineCall:
    return EngineCall(
        engine_id, request.task, request.tenant, request.priority, request.wants_stream, output_token_ids,
        request.adapter,
    )  # fmt: skip


def _identity(image: ImageRef) -> str:
    """A hash of an image and its target size, of a video and its options, or of audio."""
    options = (image.min_pixels, image.max_pixels, image.video, image.start_s, image.end_s)
    if image.kind == "image" and not any(options):
        return image.sha256
    return hashlib.sha256(f"{image.sha256} {image.kind} {options}".encode()).hexdigest()


def salted_hash(sha256: str, tenant: str) -> str:
    """The cache key of an image; tenants share no entries."""
    if not tenant:
        return sha256
    return hashlib.sha256(f"{tenant}\0{sha256}".encode()).hexdigest()


def check_size(image: ImageRef, limits: LimitSettings) -> None:
    """Check the size again: the gateway may have other limits. Raises: InvalidImage."""
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
    """Raises: InvalidRequest if the engine has no grammars, or the grammar is too large."""
    if not engine.takes_grammars:
        raise InvalidRequest("this model's engine does not support grammars", grammar.param)
    is_lark = grammar.kind == "lark"
    most = limits.max_grammar_bytes if is_lark else limits.max_schema_bytes
    if len(grammar.source.encode()) > most:
        raise InvalidRequest(f"the grammar is too large: send at most {most} bytes", grammar.param)


def check_limits(task: Task, num_chars: int, limits: LimitSettings) -> None:
    """Check the limits again: the gateway's may differ. `num_chars`: length of all texts. Raises: InvalidRequest."""
    for what, count, most in _bounds(task, num_chars, limits):
        if count > most:
            raise InvalidRequest(f"the request has {count} {what}: send at most {most}")


def _bounds(task: Task, num_chars: int, limits: LimitSettings) -> tuple[tuple[str, int, int], ...]:
    """The limited quantities of a task: name, count and limit."""
    if isinstance(task, Generate):
        sampling = task.sampling
        kinds = [image.kind for image in task.images]
        media = MEDIA.items() if kinds else ()
        return (
            ("messages", len(task.messages), limits.max_messages),
            ("text characters", num_chars, limits.max_text_chars),
            *[(each.plural, kinds.count(kind), each.max_count(limits)) for kind, each in media],
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


class PixelCache:
    """A bounded cache of prepared images by hash. Concurrent requests for one image prepare it once."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        self._being_made: dict[str, asyncio.Task[Any]] = {}
        self._num_waiting: Counter[asyncio.Task[Any]] = Counter()

    async def get(self, image_hash: str, make: Callable[[], Awaitable[tuple[Any, int]]]) -> Any:
        """The pixels of a hash. If they are not cached, `make` returns them and their bytes. Raises: as `make`."""
        if image_hash in self._kept:
            self._kept.move_to_end(image_hash)
            return self._kept[image_hash][0]
        task = self._being_made.get(image_hash)
        if task is None:
            task = asyncio.create_task(self._make(image_hash, make))
            task.add_done_callback(_retrieve)
            self._being_made[image_hash] = task
        self._num_waiting[task] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._num_waiting[task] -= 1
            if not self._num_waiting[task]:  # it has ended, or all requests for it were cancelled
                task.cancel()
                del self._num_waiting[task], self._being_made[image_hash]

    async def _make(self, image_hash: str, make: Callable[[], Awaitable[tuple[Any, int]]]) -> Any:
        pixels, num_bytes = await make()
        if num_bytes > self._max_bytes:  # it would evict all others
            return pixels
        self._kept[image_hash] = (pixels, num_bytes)
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            _, (_, dropped_bytes) = self._kept.popitem(last=False)
            self._num_bytes -= dropped_bytes
        return pixels


def _retrieve(task: "asyncio.Future[Any]") -> None:
    """Retrieve the exception: without a waiter, asyncio would log it."""
    if not task.cancelled():
        task.exception()


class FairThreads:
    """A thread pool that schedules waiting work of tenants round-robin. Used by one event loop."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_free = num_threads
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, tenant: str, work: Callable[[], Result]) -> Result:
        """Run a tenant's work in a thread. Raises: what `work` raises."""
        await self._acquire(tenant)
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        running.add_done_callback(self._ended)
        return await asyncio.shield(running)  # the thread continues after a cancellation

    async def _acquire(self, tenant: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was scheduled
                self._release()
            raise

    def _ended(self, running: "asyncio.Future[Result]") -> None:
        _retrieve(running)
        self._release()

    def _release(self) -> None:
        while self._waiting:
            tenant, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns  # last in the order
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
