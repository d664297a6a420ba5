"""Builds prompts from messages, and parses output tokens of an engine into text, reasoning and function calls.

An `Answer` depends only on its tokens, so a retried request continues after the output tokens of its earlier attempt.
Times are `time.perf_counter`, which is valid in one process only, so outputs contain durations.
"""

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct, field

from engines.base import (
    Adapter,
    AdapterUnavailable,
    Capabilities,
    Decode,
    Engine,
    EngineCall,
    EngineOutput,
    InvalidRequest,
    OpenAudio,
    OpenVideo,
    PreparedImage,
    PromptTooLong,
    Tokenization,
    check_token_ids,
)
from engines.core.runner import PixelLimits, Processor, PromptScore, TokenChoice
from engines.core.sequence import EngineRequest, Prompt
from engines.text.detokenizer import Detokenizer, Tokenizer, decode
from engines.text.reasoning import ReasoningDetokenizer
from engines.text.tools import CallReader
from shared.protocol import (
    ErrorCode,
    FinishReason,
    Generate,
    ImageRef,
    ModelCard,
    OutputLogprob,
    PromptLogprob,
    StageTimings,
    TextPart,
    Tokenize,
    TokenLogprob,
    Tools,
    Usage,
)

if TYPE_CHECKING:
    from engines.text.grammar import GrammarCompiler

Request = TypeVar("Request", bound=EngineRequest)
REPORT_EVERY_S = 0.05  #: interval between outputs of an answer that is not streamed
#: Interval between outputs of a stream per running request: with more requests, each stream has fewer outputs, because
#: every output costs CPU time in worker and gateway.
STREAM_INTERVAL_S = 0.001


class PromptingEngine(Engine[Request]):
    """An engine with a processor: chat template, tokenizer and images."""

    processor: Processor
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    _grammars: "GrammarCompiler | None"
    _adapters: dict[str, Adapter]  # by digest

    def capabilities(self) -> Capabilities:
        return Capabilities(
            self.max_num_seqs,
            tasks=("generate", "tokenize"),
            decodes_images=self.processor.decodes_images,
            prepares_quickly=self.processor.is_quick,
            takes_grammars=self._grammars is not None,
            takes_video=self.processor.takes_video,
            max_audio_s=self.processor.max_audio_s,
        )

    def prepare_image(self, data: bytes, image: ImageRef, decode: Decode) -> Any:
        limits = PixelLimits(image.min_pixels, image.max_pixels)
        return self.processor.process_image(decode(data, (image.width, image.height)), limits)

    def prepare_video(self, video: OpenVideo) -> Any:
        return self.processor.process_video(video)

    def prepare_audio(self, audio: OpenAudio) -> Any:
        return self.processor.process_audio(audio)

    def tokenize(self, task: Tokenize, images: Sequence[PreparedImage]) -> Tokenization:
        tokenizer = self.processor.tokenizer
        if task.of is None:
            check_token_ids(task.token_ids, self.vocab_size, "tokens")
            return Tokenization(text=decode(tokenizer, task.token_ids))
        prompt = self._build_prompt(task.of, images, self._choose_tools(task.of.tools))
        return Tokenization(
            prompt.token_ids,
            strings=[tokenizer.token_string(token_id) for token_id in prompt.token_ids]
            if task.with_strings
            else (),
        )

    def _choose_tools(self, tools: Tools | None) -> Tools | None:
        """The functions that the prompt lists."""
        raise NotImplementedError

    def _build_prompt(
        self, task: Generate, images: Sequence[PreparedImage], tools: Tools | None
    ) -> Prompt:
        prompt = task.prompt
        if prompt is None:
            pairs = [(image.image_hash, image.content) for image in images]
            return self.processor.build_prompt(
                task.messages, pairs, task.template_options, tools, task.ending
            )
        if isinstance(prompt, TextPart):
            return self.processor.encode_prompt(
                prompt.text, add_special_tokens=task.add_special_tokens
            )
        check_token_ids(prompt.token_ids, self.vocab_size, "prompt")
        return Prompt(list(prompt.token_ids))

    def _fields(self, call: EngineCall, prompt: Prompt, tools: Tools | None) -> dict[str, Any]:
        """The fields of a request that depend on its call and its prompt. Raises: AdapterUnavailable."""
        task, adapter = call.task, self._adapters.get(call.adapter)
        assert isinstance(task, Generate)
        if call.adapter and adapter is None:
            raise AdapterUnavailable("the adapter is no longer loaded", "model")
        return {
            "request_id": call.request_id,
            "prompt_token_ids": prompt.token_ids,
            "sampling": task.sampling,
            "images": prompt.images,
            "output_token_ids": call.output_token_ids,
            "cache_salt": call.tenant,
            "priority": call.priority,
            "is_streamed": call.is_streamed,
            "is_thinking": prompt.is_thinking,
            "is_raw": task.prompt is not None,
            "positions": prompt.positions,
            "adapter": adapter,
            "tool_format": None if tools is None else self.processor.tool_format,
        }

    def _check_request(self, request: EngineRequest) -> None:
        """Check lengths and token ids against the model. Raises: PromptTooLong, InvalidRequest."""
        num_prompt_tokens, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        if num_prompt_tokens + (max_tokens != 0) > self.max_model_len:
            raise PromptTooLong(
                f"the model's maximum context length is {self.max_model_len} tokens; the prompt has"
                f" {num_prompt_tokens} tokens{_of_media(request)}"
            )
        if num_prompt_tokens == 0:
            raise InvalidRequest("the prompt is empty: send at least one token", "prompt")
        ids = request.prompt_token_ids
        if max(ids) >= self.vocab_size:  # a token that only the tokenizer has, or an image slot
            runs = [(each.offset, run) for each in request.images for run in each.slot_runs]
            slots = {offset + slot for offset, run in runs for slot in range(*run)}
            ids = [token_id for place, token_id in enumerate(ids) if place not in slots]
        check_token_ids(ids, self.vocab_size, "prompt" if request.is_raw else "messages")
        check_token_ids(request.output_token_ids, self.vocab_size, "output_token_ids")
        sampling = request.sampling
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            check_token_ids(tuple(getattr(sampling, name)), self.vocab_size, name)
        if sampling.min_tokens and sampling.allowed_token_ids:
            ends = self.processor.tokenizer.eos_token_ids.union(sampling.stop_token_ids)
            if ends.issuperset(sampling.allowed_token_ids):
                raise InvalidRequest(
                    "allowed_token_ids has only stop tokens, which min_tokens forbids: add other tokens",
                    "allowed_token_ids",
                )

    def card(self, name: str, **fields: Any) -> ModelCard:
        processor = self.processor
        return super().card(
            name,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            image_tokens=processor.image_tokens,
            reasoning="" if processor.reasoning is None else processor.reasoning.form.name,
            template_options=tuple(sorted(processor.template_options)),
            **fields,
        )

    def _max_output_tokens(self, request: EngineRequest) -> int:
        """`max_tokens`, limited to the remaining context length."""
        space = self.max_model_len - len(request.prompt_token_ids)
        max_tokens = request.sampling.max_tokens
        return space if max_tokens is None else min(max_tokens, space)


def _of_media(request: EngineRequest) -> str:
    """Second part of the message of `PromptTooLong`: tokens of images, audio and videos, and a suggestion."""
    videos = [item for item in request.images if item.num_frames]
    counts = Counter[str]()
    for item in request.images:
        if not item.num_frames:
            counts["audio" if item.kind == "audio" else "images"] += item.num_tokens
    text = "".join(f", including {count} of its {kind}," for kind, count in counts.items())
    text += " and leaves no room for output"
    if videos:
        num_frames = sum(video.num_frames for video in videos)
        count = sum(video.num_tokens for video in videos)
        what = "video has" if len(videos) == 1 else f"{len(videos)} videos have"
        text += (
            f"; the {what} {num_frames} frames, {count} tokens: "
            "send fewer frames with a lower num_frames or fps"
        )
    return text


class Answer(Struct, eq=False):
    """The answer to one request: text, stop strings, reasoning, function calls, logprobs, usage and timings."""

    request_id: str
    tokenizer: Tokenizer
    detokenizer: Detokenizer
    num_prompt_tokens: int
    prompt_token_ids: tuple[int, ...]  #: empty unless the request asks for them
    num_image_tokens: int
    num_audio_tokens: int
    hidden_token_ids: frozenset[int]  #: stop tokens that are not part of the text
    added_at: float
    num_tokens: int = 0  #: output tokens so far, including those of earlier attempts
    num_cached_tokens: int = 0
    scheduled_at: float | None = None
    first_token_at: float | None = None
    vision_s: float = 0.0
    is_announced: bool = False  #: whether an output with the usage was created
    undecided: list[TokenChoice] = field(default_factory=list)
    """Tokens that are not reported yet, because they may be part of a reasoning marker."""
    is_streamed: bool = True
    holds_tokens: bool = False  #: whether an output can contain the tokens of several steps
    held: list[TokenChoice] = field(default_factory=list)  #: reported with later tokens
    reported_at: float = 0.0

    @classmethod
    def begin(cls, request: EngineRequest, processor: Processor) -> "Answer":
        """Create the answer of a request; it continues after the output tokens of earlier attempts."""
        sampling = request.sampling
        answer = cls(
            request.request_id,
            processor.tokenizer,
            _create_detokenizer(request, processor),
            len(request.prompt_token_ids),
            tuple(request.prompt_token_ids) if sampling.returns_prompt_ids else (),
            sum(image.num_tokens for image in request.images if image.kind != "audio"),
            sum(image.num_tokens for image in request.images if image.kind == "audio"),
            frozenset(() if sampling.keeps_stop else sampling.stop_token_ids),
            time.perf_counter(),
            is_streamed=request.is_streamed,
            # A stop string ends the answer, so each token is searched without delay.
            holds_tokens=not sampling.stop,
        )
        if request.output_token_ids:
            answer.output([TokenChoice(token_id) for token_id in request.output_token_ids])
            answer.first_token_at, answer.is_announced = None, False
            answer.num_tokens = len(request.output_token_ids)
            answer.undecided.clear()
        return answer

    @property
    def is_stopped(self) -> bool:
        return self.detokenizer.is_stopped

    @property
    def usage(self) -> Usage:
        return Usage(
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_tokens,
            num_image_tokens=self.num_image_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_reasoning_tokens=self.detokenizer.num_reasoning_tokens,
            num_audio_tokens=self.num_audio_tokens,
        )

    def announce(self) -> EngineOutput:
        """An output without a token; it contains the usage unless an earlier output did."""
        return self._with_usage(EngineOutput(self.request_id, self.num_tokens))

    def _with_usage(self, output: EngineOutput) -> EngineOutput:
        if not self.is_announced:
            self.is_announced = True
            output.usage, output.prompt_token_ids = self.usage, self.prompt_token_ids
        return output

    def prompt_output(
        self, token_ids: Sequence[int], scores: Sequence[PromptScore]
    ) -> EngineOutput:
        """An output with prompt logprobs. `token_ids` begin with the whole prompt."""
        output = self.announce()
        output.prompt_logprobs = tuple(
            PromptLogprob(
                score.position,
                token_id := token_ids[score.position],
                self._token_logprob(token_id, score.logprob),
                score.rank,
                tuple((rival[0], self._token_logprob(*rival)) for rival in score.top),
            )
            for score in scores
        )
        return output

    def add(
        self,
        tokens: Sequence[TokenChoice],
        reason: FinishReason | None,
        now: float,
        num_running: int = 1,
    ) -> EngineOutput | None:
        """Add the tokens of a step. Returns None if they are reported later, with further tokens.

        `num_running`: requests that the engine runs.
        """
        is_due = reason is not None or self.first_token_at is None or not self.holds_tokens
        if not is_due:
            every_s = REPORT_EVERY_S
            if self.is_streamed:
                every_s = min(every_s, num_running * STREAM_INTERVAL_S)
            if now < self.reported_at + every_s:
                self.held += tokens
                return None
        self.reported_at = now
        return self.output([*self._take_held(), *tokens] if self.held else tokens, reason)

    def flush(self) -> EngineOutput:
        """Report the tokens that were held back."""
        return self.output(self._take_held())

    def _take_held(self) -> list[TokenChoice]:
        held, self.held = self.held, []
        return held

    def output(
        self, tokens: Sequence[TokenChoice], reason: FinishReason | None = None
    ) -> EngineOutput:
        """Add tokens up to a stop string. `reason`: the finish reason if the last token ends the answer."""
        detokenizer, text = self.detokenizer, ""
        token_ids: list[int] = []
        logprobs: list[OutputLogprob] = []
        for choice in tokens:
            if choice.token_id not in self.hidden_token_ids:
                text += detokenizer.append(choice.token_id)
            if self.undecided or detokenizer.is_undecided or choice.logprob is not None:
                self.undecided.append(choice)
                if not detokenizer.is_undecided:
                    self._decide(token_ids, logprobs)
            else:
                token_ids.append(choice.token_id)
            if detokenizer.is_stopped:
                reason = FinishReason.STOP
                break
        if reason is not None:
            text += detokenizer.finish()
            self._decide(token_ids, logprobs)
            if detokenizer.is_stopped:
                reason = FinishReason.STOP
        return self._emit(token_ids, text, logprobs, reason)

    def output_bytes(self, data: bytes, num_tokens: int) -> EngineOutput:
        """Add tokens whose bytes are known, but not their ids."""
        token_ids: list[int] = []
        logprobs: list[OutputLogprob] = []
        text = self.detokenizer.append_bytes(data)
        self._decide(token_ids, logprobs)
        reason = FinishReason.STOP if self.is_stopped else None
        if reason is not None:
            text += self.detokenizer.finish()
        return self._emit(token_ids, text, logprobs, reason, num_tokens)

    def _emit(
        self, token_ids: list[int], text: str, logprobs: list[OutputLogprob], reason: FinishReason | None,
        num_without_id: int = 0,
    ) -> EngineOutput:  # fmt: skip
        """An output with usage, reasoning and calls. Counts its tokens."""
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        detokenizer = self.detokenizer
        output = EngineOutput(self.request_id, self.num_tokens, tuple(token_ids), text)
        output.logprobs, output.num_without_id = tuple(logprobs), num_without_id
        self.num_tokens += len(token_ids) + num_without_id
        self._with_usage(output)
        if detokenizer.reasoning:
            output.reasoning, detokenizer.reasoning = detokenizer.reasoning, ""
        if detokenizer.pieces:
            output.calls, detokenizer.pieces = tuple(detokenizer.pieces), []
        return output if reason is None else self._end(output, reason)

    def _decide(self, token_ids: list[int], logprobs: list[OutputLogprob]) -> None:
        for choice in self.undecided:
            token_ids.append(choice.token_id)
            if choice.logprob is not None and self.detokenizer.is_content:
                chosen = self._token_logprob(choice.token_id, choice.logprob)
                top = tuple(self._token_logprob(*rival) for rival in choice.top_logprobs)
                logprobs.append(OutputLogprob(chosen=chosen, top=top))
        self.undecided.clear()

    def end(self, reason: FinishReason) -> EngineOutput:
        """The last output of an answer whose text is complete."""
        return self._end(EngineOutput(self.request_id, self.num_tokens), reason)

    def fail(self, message: str, code: ErrorCode) -> EngineOutput:
        """The last output of a request that cannot be continued."""
        output = self.flush() if self.held else EngineOutput(self.request_id, self.num_tokens)
        output.error, output.error_code = message, code
        output.usage, output.timings = self.usage, self._timings()
        return output

    def _end(self, output: EngineOutput, reason: FinishReason) -> EngineOutput:
        is_call = reason is FinishReason.STOP and self.detokenizer.has_called
        output.finish_reason = FinishReason.TOOL_CALLS if is_call else reason
        output.stopped_by = self.detokenizer.stopped_by
        output.usage, output.timings = self.usage, self._timings()
        return output

    def _timings(self) -> StageTimings:
        """The stages of a request that ends now; they add up to its time in the engine."""
        now = time.perf_counter()
        scheduled_at = now if self.scheduled_at is None else self.scheduled_at
        first_token_at = now if self.first_token_at is None else self.first_token_at
        return StageTimings(
            queue_s=scheduled_at - self.added_at,
            vision_s=self.vision_s,
            prefill_s=max(first_token_at - scheduled_at - self.vision_s, 0.0),
            decode_s=now - first_token_at,
        )

    def _token_logprob(self, token_id: int, logprob: float) -> TokenLogprob:
        return TokenLogprob.of(self.tokenizer.token_bytes(token_id), logprob)


def _create_detokenizer(request: EngineRequest, processor: Processor) -> Detokenizer:
    sampling, reasoning = request.sampling, processor.reasoning
    options: dict[str, Any] = {
        "stop": sampling.stop,
        "keeps_stop": sampling.keeps_stop,
        "calls": None if request.tool_format is None else CallReader(request.tool_format),
        "spelled": {} if request.tool_format is None else processor.spelled,
        "keeps_specials": not sampling.skip_special_tokens,
    }
    if reasoning is None or request.is_raw:
        return Detokenizer(processor.tokenizer, **options)
    options["is_thinking"] = request.is_thinking
    return ReasoningDetokenizer(processor.tokenizer, reasoning, **options)
