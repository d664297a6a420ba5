"""An engine for embeddings and scores: a step computes one batch of inputs.

The model turns tasks into rows in any thread, and computes rows in the engine's thread.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.base import (
    Capabilities,
    Decode,
    Engine,
    EngineCall,
    EngineOutput,
    EngineStats,
    InvalidRequest,
    PreparedImage,
    Tokenization,
)
from engines.pooling.batch import ResultCache, Row, Waiting, cache_key
from engines.pooling.settings import PoolingSettings
from shared.protocol import (
    Embed,
    ErrorCode,
    FinishReason,
    ImageRef,
    ModelCard,
    Priority,
    Rerank,
    StageTimings,
    Task,
    TextPart,
    Tokenize,
    Usage,
)

#: Maximum number of rows of a step, even if they are short.
MAX_ROWS_PER_STEP = 512
#: Number of steps of waiting work that the engine accepts, so that each step is full.
STEPS_AHEAD = 2


class PoolingModel:
    """A model of texts, and of images if it decodes them."""

    #: Tags of supported tasks.
    tasks: tuple[str, ...] = ("embed",)
    #: Size of its vectors; 0: none.
    dimensions: int = 0
    #: Sizes to which vectors may be truncated.
    shorter_dimensions: tuple[int, ...] = ()
    #: Prompts before a text, by name.
    prompts: Mapping[str, str] = {}
    decodes_images = False
    #: The tokenizer: a `Texts`, or an object with at least its methods `encode` and `decode`. Thread-safe.
    texts: Any

    def process_image(self, data: bytes, image: ImageRef, decode: Decode) -> Any:
        """Process an image for `rows`. Thread-safe. Raises: InvalidImage, InvalidRequest."""
        raise InvalidRequest("this model does not support images")

    def rows(self, task: Task, images: Sequence[PreparedImage]) -> list[Row]:
        """One row for each input, in order. Thread-safe. Raises: RequestError."""
        if isinstance(task, Rerank):
            rows = [self.pair(task, index) for index in range(len(task.documents))]
            dimensions, is_normalized = 0, not task.is_raw
        else:
            assert isinstance(task, Embed)
            rows = [self.row(task, index, images) for index in range(len(task.inputs))]
            dimensions, is_normalized = task.dimensions or self.dimensions, task.is_normalized
        for row in rows:
            row.dimensions, row.is_normalized = dimensions, is_normalized
        return rows

    def row(self, task: Embed, index: int, images: Sequence[PreparedImage]) -> Row:
        """One input of an embedding. Raises: RequestError."""
        words = self.texts.words(task, index)
        return Row(words, len(words.ids), identity=words.identity)

    def pair(self, task: Rerank, index: int) -> Row:
        """One document of a reranking. Raises: RequestError."""
        words = self.texts.pair(task, index)
        return Row(words, len(words.ids), identity=words.identity)

    def compute(self, rows: Sequence[Row]) -> None:
        """Set the result, or the error, of each row."""
        raise NotImplementedError

    def memory_bytes(self) -> dict[str, int]:
        return {"weights": 0}

    def close(self) -> None:
        """Free the device."""


@dataclass(eq=False, slots=True)
class PoolingInput:
    request_id: str
    priority: Priority
    rows: list[Row]
    added_at: float = 0.0
    first_step_at: float = 0.0
    image_s: float = 0.0  #: time of steps with images
    num_left: int = 0
    num_cached_tokens: int = 0

    @property
    def usage(self) -> Usage:
        return Usage(
            sum(row.num_tokens - row.num_padding for row in self.rows),
            num_image_tokens=sum(row.num_image_tokens for row in self.rows),
            num_cached_tokens=self.num_cached_tokens,
        )


class PoolingEngine(Engine[PoolingInput]):
    """Batches the inputs of all calls over a `PoolingModel`; batch work runs when no other work waits.

    Results are cached per tenant, and equal rows of a step are computed once.
    """

    def __init__(
        self,
        model: PoolingModel,
        settings: PoolingSettings,
        startup_s: Mapping[str, float] | None = None,
    ) -> None:
        self._model = model
        self._settings = settings
        self._startup_s = dict(startup_s or {})
        self._calls: dict[str, PoolingInput] = {}
        self._owners: dict[Row, PoolingInput] = {}  # calls of waiting rows
        self._waiting = {priority: Waiting() for priority in Priority}
        self._results = ResultCache(settings.result_cache_bytes, settings.result_cache_s)
        self._answered: list[PoolingInput] = []  # calls answered from the cache
        self._has_just_answered = False
        self._num_steps = 0
        self._num_queries = 0
        self._num_hits = 0

    def capabilities(self) -> Capabilities:
        return Capabilities(
            self._settings.max_calls,
            tasks=(*self._model.tasks, "tokenize"),
            decodes_images=self._model.decodes_images,
            prepares_quickly=True,
        )

    def prepare_image(self, data: bytes, image: ImageRef, decode: Decode) -> Any:
        return self._model.process_image(data, image, decode)

    def prepare(self, call: EngineCall, images: Sequence[PreparedImage]) -> PoolingInput:
        task = call.task
        if isinstance(task, Embed):
            dimensions = task.dimensions or self._model.dimensions
            # Checked again: a gateway may have an older card.
            if dimensions not in (self._model.dimensions, *self._model.shorter_dimensions):
                raise InvalidRequest(f"the model has no vectors of size {dimensions}", "dimensions")
            if task.prompt_name and task.prompt_name not in self._model.prompts:
                raise InvalidRequest("the model has no prompt of this name", "prompt_name")
        rows = self._model.rows(task, images)
        if self._results.is_on:
            for row in rows:
                row.cache_key = cache_key(call.tenant, row)
        return PoolingInput(call.request_id, call.priority, rows)

    def tokenize(self, task: Tokenize, images: Sequence[PreparedImage]) -> Tokenization:
        if task.of is None:
            return Tokenization(text=self._model.texts.decode(task.token_ids))
        prompt = task.of.prompt
        if not isinstance(prompt, TextPart):
            raise InvalidRequest("this model does not support messages: send prompt", task.of.param)
        token_ids, strings = self._model.texts.encode(
            prompt.text, add_special_tokens=task.of.add_special_tokens
        )
        return Tokenization(token_ids, strings=strings if task.with_strings else ())

    def add(self, request: PoolingInput) -> None:
        if request.request_id in self._calls:
            raise InvalidRequest(f"request {request.request_id} is running already")
        if not request.rows:
            raise InvalidRequest("the request has no inputs: send at least one")
        request.added_at, request.num_left = time.perf_counter(), len(request.rows)
        self._calls[request.request_id] = request
        for row in request.rows:
            self._num_queries += bool(row.cache_key)
            if self._take_cached(row, request):
                request.num_left -= 1
            else:
                self._owners[row] = request
                self._waiting[request.priority].add(row)
        if request.num_left == 0:
            self._answered.append(request)

    def _take_cached(self, row: Row, call: PoolingInput) -> bool:
        """Set the row's result from the cache. Returns whether it was there."""
        found = self._results.find(row.cache_key) if row.cache_key else None
        if found is None:
            return False
        row.result = found
        self._note_hit(row, call)
        return True

    def _note_hit(self, row: Row, call: PoolingInput) -> None:
        self._num_hits += 1
        call.num_cached_tokens += row.num_tokens - row.num_padding

    def abort(self, request_id: str) -> None:
        request = self._calls.pop(request_id, None)
        if request is None:
            return
        if request in self._answered:
            self._answered.remove(request)
        for row in request.rows:
            if self._owners.pop(row, None) is not None:
                self._waiting[request.priority].remove(row)

    def step(self) -> list[EngineOutput]:
        """Compute one batch and finish complete calls. Calls answered from the cache alternate with batches."""
        self._num_steps += 1
        is_idle = not any(self._waiting.values())
        if self._answered and (is_idle or not self._has_just_answered):
            self._has_just_answered = True
            answered, self._answered = self._answered, []
            return [self._finish(call) for call in answered]
        self._has_just_answered = False
        waiting = next(waiting for waiting in self._waiting.values() if waiting)
        rows = waiting.take(self._settings.max_batch_tokens, MAX_ROWS_PER_STEP)
        calls = [self._owners.pop(row) for row in rows]
        began_at = time.perf_counter()
        self._compute(rows, calls)
        took_s = time.perf_counter() - began_at
        for call in dict.fromkeys(calls):
            call.first_step_at = call.first_step_at or began_at
            call.image_s += took_s if rows[0].kind == "image" else 0.0
        for call in calls:
            call.num_left -= 1
        return [self._finish(call) for call in dict.fromkeys(calls) if call.num_left == 0]

    def _compute(self, rows: Sequence[Row], calls: Sequence[PoolingInput]) -> None:
        """Set the results of rows. Of equal rows, only the first is computed."""
        firsts: dict[Row | bytes, Row] = {}
        for row, call in zip(rows, calls, strict=True):
            if row.cache_key not in firsts and not self._take_cached(row, call):
                firsts[row.cache_key or row] = row
        if firsts:
            self._model.compute(list(firsts.values()))
        for row, call in zip(rows, calls, strict=True):
            first = firsts.get(row.cache_key, row)
            if first is not row:
                row.result, row.error = first.result, first.error
                self._note_hit(row, call)
            elif row.cache_key and not row.error:
                self._results.keep(row.cache_key, row.result)

    def _finish(self, call: PoolingInput) -> EngineOutput:
        del self._calls[call.request_id]
        now = time.perf_counter()
        computed_s = now - (call.first_step_at or now)
        output = EngineOutput(call.request_id, usage=call.usage)
        output.dimensions = call.rows[0].dimensions
        output.timings = StageTimings(
            queue_s=(call.first_step_at or now) - call.added_at,
            vision_s=call.image_s,
            prefill_s=computed_s - call.image_s,
        )
        output.error = next((row.error for row in call.rows if row.error), None)
        if output.error is None:
            output.finish_reason = FinishReason.STOP
            output.values = b"".join([row.result for row in call.rows])
        else:
            output.error_code = ErrorCode.INVALID_REQUEST
        return output

    def has_work(self) -> bool:
        return bool(self._answered) or any(self._waiting.values())

    def stats(self) -> EngineStats:
        """Calls count as running while the waiting work fits into `STEPS_AHEAD` steps."""
        num_tokens = sum(waiting.num_tokens for waiting in self._waiting.values())
        is_full = num_tokens >= STEPS_AHEAD * self._settings.max_batch_tokens
        num_calls = len(self._calls)
        num_batch = sum(call.priority is Priority.BATCH for call in self._calls.values())
        return EngineStats(
            num_running=0 if is_full else num_calls,
            num_waiting=num_calls if is_full else 0,
            num_waiting_batch=num_batch if is_full else 0,
            num_steps=self._num_steps,
            num_result_queries=self._num_queries,
            num_result_hits=self._num_hits,
            result_cache_bytes=self._results.num_bytes,
            memory_bytes={
                **self._model.memory_bytes(),
                "result_cache": self._results.num_bytes,
            },
            startup_s=self._startup_s,
        )

    def card(self, name: str, **fields: Any) -> ModelCard:
        model = self._model
        return super().card(
            name,
            supports_images=model.decodes_images,
            dimensions=model.dimensions,
            shorter_dimensions=model.shorter_dimensions,
            prompts=tuple(model.prompts),
            **fields,
        )

    def close(self) -> None:
        self._model.close()
