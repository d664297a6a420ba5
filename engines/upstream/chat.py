"""An engine for any server of OpenAI's chat completions API.

The server applies the chat template and tokenizes, so outputs have no token ids: a request is retried only before its
first token.

Source: OpenAI API reference, "Create chat completion".
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engines.base import (
    Capabilities,
    Decode,
    EngineCall,
    EngineOutput,
    InvalidRequest,
    OpenAudio,
    OpenVideo,
    PreparedImage,
    can_decode_video,
)
from engines.core.runner import PixelLimits
from engines.text.tools import JsonEnd, to_openai
from engines.upstream.client import DONE, UpstreamClient
from engines.upstream.dialect import TokenUsage, refuse
from engines.upstream.media import MediaFile, data_url, to_jpegs, to_png, to_wav
from engines.upstream.settings import OpenAiSettings
from engines.upstream.streams import OpenRequest, StreamBroken, StreamEngine
from shared.protocol import (
    CallPiece,
    ChatMessage,
    ErrorCode,
    FinishReason,
    Generate,
    ImagePart,
    ImageRef,
    Priority,
    StageTimings,
    Usage,
)

#: Finish reasons by the server's names. All others, such as `content_filter`, count as `stop`.
_FINISH = {"length": FinishReason.LENGTH, "tool_calls": FinishReason.TOOL_CALLS}
#: Sampling parameters that are not in the API: a server might ignore them.
_UNSUPPORTED = (
    "top_k", "min_p", "repetition_penalty", "stop_token_ids", "keeps_stop", "allowed_token_ids", "logit_bias",
    "num_logprobs", "num_prompt_logprobs", "ignore_eos", "min_tokens", "skip_special_tokens", "returns_prompt_ids",
)  # fmt: skip


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Part(msgspec.Struct):
    text: str = ""


class _Delta(msgspec.Struct):
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: TokenUsage | None = None


_events = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class _OpenCall:
    """A function call whose arguments may be incomplete."""

    number: int
    name: str
    pieces: list[CallPiece]  #: not reported yet
    end: JsonEnd = field(default_factory=JsonEnd)


class ChatRequest(OpenRequest):
    def __init__(self, request_id: str, body: dict[str, Any], priority: Priority) -> None:
        super().__init__(request_id)
        self.priority = priority
        self.added_at = 0.0
        self._body = body
        self._first_token_at: float | None = None
        self._usage: Usage | None = None
        self._finish: FinishReason | None = None
        self._calls: dict[tuple[int, str | None], _OpenCall] = {}  # by the server's index and id
        self._latest: dict[int, _OpenCall] = {}  # by the server's index
        self._open_calls: list[_OpenCall] = []

    def body(self) -> dict[str, Any]:
        return self._body

    def can_continue(self) -> bool:
        return False

    @property
    def is_complete(self) -> bool:
        return self._finish is not None

    def fail(self, message: str, code: ErrorCode) -> EngineOutput:
        output = EngineOutput(self.request_id, self.num_tokens, error=message, error_code=code)
        output.usage, output.timings = self.usage, self._timings()
        return output

    @property
    def usage(self) -> Usage:
        """The server's usage; if it sends none, the number of deltas."""
        return self._usage or Usage(0, self.num_tokens)

    def read(self, data: bytes) -> list[EngineOutput]:
        if data == DONE:
            return self._end()
        event = _events.decode(data)
        if event.usage is not None:
            self._note_usage(event.usage)
        if not event.choices:
            return []
        choice = event.choices[0]
        if choice.finish_reason:
            self._finish = _FINISH.get(choice.finish_reason, FinishReason.STOP)
        output = None if choice.delta is None else self._output(choice.delta)
        return [] if output is None else [output]

    def _note_usage(self, usage: TokenUsage) -> None:
        prompt, answer = usage.prompt_tokens_details, usage.completion_tokens_details
        self._usage = Usage(
            usage.prompt_tokens,
            usage.completion_tokens,
            num_cached_tokens=(prompt and prompt.cached_tokens) or 0,
            num_reasoning_tokens=(answer and answer.reasoning_tokens) or 0,
            num_audio_tokens=(prompt and prompt.audio_tokens) or 0,
        )

    def _output(self, delta: _Delta) -> EngineOutput | None:
        text, reasoning = delta.content or "", delta.reasoning_content or delta.reasoning or ""
        if isinstance(text, list):
            text = "".join(part.text for part in text)
        for call in delta.tool_calls or ():
            self._add_call(call, call.function or _Function())
        if not (text or reasoning or delta.tool_calls):
            return None
        output = EngineOutput(
            self.request_id, self.num_tokens, text=text, reasoning=reasoning,
            calls=self._take_calls(), num_without_id=1, usage=None if self.is_started else self.usage,
        )  # fmt: skip
        if not self.is_started:
            self.is_started, self._first_token_at = True, time.perf_counter()
        self.num_tokens += 1
        return output

    def _add_call(self, delta: _Call, function: _Function) -> None:
        """Add a delta. Some servers send one index for all calls, others one id, and some repeat the name."""
        name, arguments = function.name or "", function.arguments or ""
        call = self._calls.get((delta.index, delta.id))
        if call is None and not (name and delta.id):
            call = self._latest.get(delta.index)
        is_next = call is not None and (name != call.name or (arguments and call.end.is_found))
        if (call is None and arguments) or (name and (call is None or is_next)):
            number = len(self._open_calls)
            call = _OpenCall(number, name, [CallPiece(number, name)])
            self._calls[delta.index, delta.id] = call
            self._open_calls.append(call)
        if call is not None:
            self._latest[delta.index] = call
            if arguments and not call.end.is_found:
                arguments = arguments[: call.end.find(arguments)]
                call.pieces.append(CallPiece(call.number, arguments=arguments))

    def _take_calls(self, *, is_end: bool = False) -> tuple[CallPiece, ...]:
        """New pieces. Pieces of a call wait until the calls before it are complete."""
        pieces: list[CallPiece] = []
        for call in self._open_calls:
            pieces += call.pieces
            call.pieces = []
            if not (call.end.is_found or is_end):
                break
        return tuple(pieces)

    def _end(self) -> list[EngineOutput]:
        if self._finish is None:
            raise StreamBroken("the stream has no finish_reason")
        if self._finish is FinishReason.STOP and self._open_calls:
            self._finish = FinishReason.TOOL_CALLS
        # `num_tokens` has counted deltas, which may contain several tokens; the usage has the true number.
        num_more = max(0, self.usage.num_output_tokens - self.num_tokens)
        output = EngineOutput(
            self.request_id, self.num_tokens, calls=self._take_calls(is_end=True), finish_reason=self._finish,
            num_without_id=num_more,
        )  # fmt: skip
        self.num_tokens += num_more
        output.usage, output.timings = self.usage, self._timings()
        return [output]

    def _timings(self) -> StageTimings:
        now = time.perf_counter()
        first = now if self._first_token_at is None else self._first_token_at
        return StageTimings(prefill_s=first - self.added_at, decode_s=now - first)


class ChatEngine(StreamEngine[ChatRequest]):
    """A model behind a server's chat completions API: messages in, text out."""

    def __init__(self, settings: OpenAiSettings, client: UpstreamClient, model: str) -> None:
        super().__init__("the upstream server", "/v1/chat/completions", {}, client)
        self._settings, self._model = settings, model

    def capabilities(self) -> Capabilities:
        return Capabilities(
            self._settings.max_num_seqs,
            decodes_images=True,
            takes_grammars=True,
            takes_video=self._settings.takes_videos and can_decode_video(),
            max_audio_s=math.inf if self._settings.takes_audio and can_decode_video() else 0.0,
        )

    def prepare_image(self, data: bytes, image: ImageRef, decode: Decode) -> bytes:
        limits = PixelLimits(image.min_pixels, image.max_pixels)
        return to_png(decode(data, (image.width, image.height)), limits)

    def prepare_video(self, video: OpenVideo) -> MediaFile:
        return to_jpegs(video)

    def prepare_audio(self, audio: OpenAudio) -> MediaFile:
        return to_wav(audio)

    def prepare(self, call: EngineCall, images: Sequence[PreparedImage]) -> ChatRequest:
        task = call.task
        assert isinstance(task, Generate)  # the worker checks the task against the capabilities
        _check(task)
        sampling = task.sampling
        body: dict[str, Any] = {
            "model": self._model, "messages": [_to_message(each, images) for each in task.messages], "stream": True,
            "stream_options": {"include_usage": True}, "temperature": sampling.temperature, "top_p": sampling.top_p,
            "seed": sampling.seed & (2**31 - 1),
        }  # fmt: skip
        if sampling.max_tokens is not None:
            body["max_tokens"] = sampling.max_tokens
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        for name in ("presence_penalty", "frequency_penalty"):
            if value := getattr(sampling, name):
                body[name] = value
        if task.tools is not None:
            body["tools"] = tools = [to_openai(function) for function in task.tools.functions]
            for tool, function in zip(tools, task.tools.functions, strict=True):
                tool["function"] |= {"strict": True} if function.is_strict else {}
            body["tool_choice"] = "required" if task.tools.is_required else "auto"
            if not task.tools.is_parallel:
                body["parallel_tool_calls"] = False
        if task.grammar is not None:
            schema = json.loads(task.grammar.source or "{}")
            form: dict[str, Any] = {"type": "json_object"}
            if schema not in ({}, True):
                named = {"name": "answer", "schema": schema, "strict": True}
                form = {"type": "json_schema", "json_schema": named}
            body["response_format"] = form
        return ChatRequest(call.request_id, body, call.priority)

    def _refuse(self, request: OpenRequest, status: int, message: str) -> list[EngineOutput]:
        """If the server rejects `reasoning_content`, send the request again without it."""
        if status < 500 and "reasoning_content" in message:
            sent = [each.pop("reasoning_content", "") for each in request.body()["messages"]]
            if any(sent):
                self._client.cancel(request.stream_id)
                self._send(request)
                return []
        return super()._refuse(request, status, message)

    def add(self, request: ChatRequest) -> None:
        self._check_id(request.request_id)
        request.added_at = time.perf_counter()
        self._send(request)


def _check(task: Generate) -> None:
    """Raises: InvalidRequest for parameters that the API does not have."""
    grammar, has_options = task.grammar, bool(task.template_options)
    for is_wrong, what, param in (
        (task.prompt is not None, "supports chat only: send messages", "prompt"),
        (task.ending != "answer", "cannot continue the last message", "continue_final_message"),
        (has_options, "does not support chat template variables", "chat_template_kwargs"),
        (
            grammar and grammar.kind != "json",
            "supports JSON schemas only",
            grammar and grammar.param,
        ),
    ):
        if is_wrong:
            raise InvalidRequest(f"this model's engine {what}", param)
    refuse(task.sampling, "this model's engine", *_UNSUPPORTED)


def _to_message(message: ChatMessage, images: Sequence[PreparedImage]) -> dict[str, Any]:
    content: list[dict[str, Any]] = [
        _to_part(images[part.image].content)
        if isinstance(part, ImagePart)
        else {"type": "text", "text": part.text}
        for part in message.parts
    ]
    is_text = all(part["type"] == "text" for part in content)
    text = "".join(part["text"] for part in content) if is_text else ""
    shown: dict[str, Any] = {"role": message.role, "content": text if is_text else content}
    if message.reasoning:
        shown["reasoning_content"] = message.reasoning
    if message.tool_calls:
        shown["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.tool_calls
        ]
    if message.role == "tool":
        shown["tool_call_id"] = message.tool_call_id
    return shown


def _to_part(content: bytes | MediaFile) -> dict[str, Any]:
    kind, url = "image", data_url(content)
    if isinstance(content, MediaFile):
        kind = content.kind
    if kind == "audio":
        data = url.partition(",")[2]
        return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
