"""An engine in one file that accepts messages and uses no tokenizer, scheduler or image processor of the project.

A real engine could call llama.cpp or a remote server. This one answers with the words of the last message, one per
step. It counts tokens without knowing their IDs, and cannot continue an answer of another worker.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from engines.base import (
    Capabilities,
    Engine,
    EngineCall,
    EngineOutput,
    EngineStats,
    InvalidRequest,
    LoadedEngine,
    PreparedImage,
    Progress,
    PromptTooLong,
)
from engines.registry import EngineKind
from engines.settings import EngineSettings
from shared.protocol import FinishReason, ModelCard, Priority, StageTimings, TextPart, Usage

MAX_MODEL_LEN = 1000


class ToySettings(EngineSettings):
    """The settings of every engine, and one more."""

    greeting: str = ""


@dataclass
class ToyInput:
    """A prepared request: the words of the answer, and how many were emitted."""

    request_id: str
    priority: Priority
    words: list[str]
    usage: Usage
    finish_reason: FinishReason
    added_at: float = field(default_factory=time.perf_counter)
    num_emitted: int = 0


class ToyEngine(Engine[ToyInput]):
    """Emits one word per step for each request."""

    def __init__(self, settings: ToySettings) -> None:
        self._settings = settings
        self._running: dict[str, ToyInput] = {}
        self._num_steps = 0

    def capabilities(self) -> Capabilities:
        return Capabilities(self._settings.max_num_seqs)

    def prepare(self, call: EngineCall, images: Sequence[PreparedImage]) -> ToyInput:
        sampling = call.task.sampling
        if sampling.stop or sampling.logit_bias or sampling.num_logprobs is not None:
            message = "the toy does not support stop, logit_bias and logprobs: leave them out"
            raise InvalidRequest(message, param="sampling")
        parts = call.task.messages[-1].parts
        words = " ".join(part.text for part in parts if isinstance(part, TextPart)).split()
        if len(words) >= MAX_MODEL_LEN:
            raise PromptTooLong(f"{len(words)} words: send fewer than {MAX_MODEL_LEN}")
        sizes = [f"{len(image.content)}-bytes" for image in images]
        answer = [*self._settings.greeting.split(), *sizes, *words]
        words_out = answer[: sampling.max_tokens]
        reason = FinishReason.STOP if words_out == answer else FinishReason.LENGTH
        return ToyInput(call.request_id, call.priority, words_out, Usage(len(words)), reason)

    def add(self, request: ToyInput) -> None:
        if request.request_id in self._running:
            raise InvalidRequest(f"request id {request.request_id!r} is in use")
        self._running[request.request_id] = request

    def abort(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def step(self) -> list[EngineOutput]:
        self._num_steps += 1
        return [self._emit(request) for request in tuple(self._running.values())]

    def _emit(self, request: ToyInput) -> EngineOutput:
        index = request.num_emitted
        request.num_emitted += 1
        text = f" {request.words[index]}"
        output = EngineOutput(request.request_id, index, text=text, num_without_id=1)
        if index == 0:
            output.usage = request.usage
        if request.num_emitted == len(request.words):
            del self._running[request.request_id]
            output.finish_reason = request.finish_reason
            output.usage = Usage(request.usage.num_prompt_tokens, request.num_emitted)
            output.timings = StageTimings(decode_s=time.perf_counter() - request.added_at)
        return output

    def has_work(self) -> bool:
        return bool(self._running)

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self._running), num_steps=self._num_steps)

    def close(self) -> None:
        self._running.clear()


def create(settings: ToySettings, progress: Progress | None) -> LoadedEngine:
    """Creates the engine; nothing is loaded."""
    card = ModelCard(settings.served_name or "toy", int(time.time()), MAX_MODEL_LEN, 1000)
    return LoadedEngine(ToyEngine(settings), card)


TOY = EngineKind(ToySettings, create)
