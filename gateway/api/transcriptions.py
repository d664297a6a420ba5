"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`: transcribe or translate speech with an audio model.

The body is a form, or JSON with the file as a `data:` URL, an http(s) URL or the id of an uploaded file. The model
receives one user message: the audio and an instruction. A worker cuts a long file at quiet points. Each segment is a
separate call, and the cuts are the timestamps in the answer.

Source: OpenAI API reference, "Create transcription", "Create translation" and "Transcription stream events"; W3C,
"WebVTT".
"""

import re
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from operator import itemgetter
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from gateway.api.answers import encode, merge_tokens
from gateway.api.fields import (
    Ignored,
    ModelName,
    OpenAiSampling,
    RequestStruct,
    User,
    doc,
    find_priority,
    invalid,
    translate_sampling,
)
from gateway.api.generation import Conversation
from gateway.calls.open_call import ChoiceEvent
from gateway.calls.surface import Answer, AnswerHead, Frame, Plan, Surface, Totals
from gateway.http.errors import InvalidRequest
from gateway.http.exchange import JSON_HEADERS, Headers, RequestContext, sse_event
from gateway.http.multipart import read_form
from gateway.media.loader import ImageSource
from shared.protocol import CallEvent, Finished, Generate, ModelCard, Tokens
from shared.settings.limits import MAX_NAME_CHARS

FORM = b"multipart/form-data"
_TEXT_HEADERS: Headers = [(b"content-type", b"text/plain; charset=utf-8")]
_TRANSCRIBE = "Transcribe this audio word by word. Answer with the transcript only."
_TRANSLATE = "Translate the speech in this audio into English. Answer with the translation only."
_MAX_PROMPT_CHARS = 4096
_NUMBERS = ("temperature", "stream")  #: form fields that are a number or a boolean

#: Two characters of Chinese or Japanese, which have no spaces between sentences.
_UNSPACED = re.compile(r"[\u3000-\u30ff\u3400-\u9fff\uff00-\uffef]{2}")

Format = Literal["json", "text", "verbose_json", "srt", "vtt"]


class TranslationRequest(RequestStruct, frozen=True, kw_only=True):
    file: Annotated[str, doc("An audio file; in JSON, its URL or id.")]
    model: ModelName
    prompt: Annotated[
        Annotated[str, Meta(max_length=_MAX_PROMPT_CHARS)] | None,
        doc("Text that helps the model, such as names or the preceding sentence."),
    ] = None
    response_format: Format | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    user: User = None
    chunking_strategy: Ignored = UNSET

    def instruction(self, card: ModelCard) -> str:
        return _TRANSLATE


class TranscriptionRequest(TranslationRequest, frozen=True, kw_only=True):
    language: Annotated[
        Annotated[str, Meta(min_length=2, max_length=MAX_NAME_CHARS)] | None,
        doc("The language of the speech, such as `en`."),
    ] = None
    stream: bool | None = None
    timestamp_granularities: list[Literal["segment", "word"]] | None = None

    def instruction(self, card: ModelCard) -> str:
        text = card.transcription_prompt or _TRANSCRIBE
        return f"{text} The language is {self.language}." if self.language else text


class InputTokenDetails(msgspec.Struct):
    audio_tokens: int
    text_tokens: int


class TranscriptionUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: InputTokenDetails
    type: str = "tokens"
    seconds: float | UnsetType = UNSET  #: only in `verbose_json`, where `type` is "duration"


class TranscriptSegment(msgspec.Struct):
    """A segment of a transcript. Units: seconds."""

    id: int
    start: float
    end: float
    text: str


class Transcription(msgspec.Struct):
    """A transcript. The fields after `usage` are only in `verbose_json`. Units: seconds."""

    text: str
    usage: TranscriptionUsage
    task: Literal["transcribe", "translate"] | UnsetType = UNSET
    language: str | UnsetType = UNSET
    duration: float | UnsetType = UNSET
    segments: list[TranscriptSegment] | UnsetType = UNSET


class TranscriptDelta(msgspec.Struct):
    delta: str
    type: str = "transcript.text.delta"


class TranscriptDone(msgspec.Struct):
    text: str
    usage: TranscriptionUsage
    type: str = "transcript.text.done"


class TranscriptOptions(msgspec.Struct, frozen=True):
    format: Format = "json"
    task: Literal["transcribe", "translate"] = "transcribe"
    language: str = ""
    segment_ends: tuple[float, ...] = ()


class Translations(Surface):
    """Translate speech to English text."""

    name = "create_translation"
    path = "/v1/audio/translations"
    tag = "audio"
    task = "generate"
    id_prefix = "trans-"
    form_type = FORM.decode()
    options = TranscriptOptions
    request_type = TranslationRequest
    answer_type: type[msgspec.Struct] | None = Transcription
    traced = ("temperature",)
    cuts_audio = True

    def body_type(self, context: RequestContext) -> bytes:
        media_type, _, rest = context.headers.get(b"content-type", b"").lower().partition(b";")
        is_form = media_type.strip() == FORM and b"boundary" in rest
        return FORM if is_form else super().body_type(context)

    def read(self, body: bytes, context: RequestContext) -> Any:
        if self.body_type(context) != FORM:
            return super().read(body, context)
        fields = _fields(body, context.headers[b"content-type"])
        url = fields.get("file")
        if not isinstance(url, str):
            return super().read(encode(fields), context)
        # Add the file after decoding: to encode a large file as JSON would block the event loop.
        return replace(super().read(encode({**fields, "file": ""}), context), file=url)

    def plan(self, request: TranslationRequest, context: RequestContext, card: ModelCard) -> Plan:
        conversation = Conversation()
        audio = conversation.medium(ImageSource(request.file, "file", is_audio=True), "user")
        text = "\n".join(filter(None, (request.instruction(card), request.prompt)))
        conversation.add("user", [audio, conversation.text(text)])
        asked = OpenAiSampling(temperature=request.temperature or 0.0)
        sampling = translate_sampling(asked, self.limits, context, card.sampling)
        return Plan(
            [Generate(tuple(conversation.messages), sampling)],
            self.to_options(request),
            conversation.sources,
            is_streamed=bool(getattr(request, "stream", None)),
            priority=find_priority(None, context),
        )

    def to_options(self, request: Any) -> TranscriptOptions:
        return TranscriptOptions(request.response_format or "json", "translate", "english")

    def cut(self, plan: Plan, segment_ends: Sequence[float]) -> Plan:
        num_segments = len(segment_ends)
        if num_segments > (most := self.limits.max_audio_segments):
            raise invalid("file", f"send a shorter file; this one has more than {most} segments")
        assert isinstance(plan.options, TranscriptOptions)
        options = replace(plan.options, segment_ends=tuple(segment_ends))
        if num_segments == 1:
            return replace(plan, options=options)
        return replace(
            plan,
            tasks=[*plan.tasks] * num_segments,
            options=options,
            audio_parts=tuple(pairwise((0.0, *segment_ends))),
            num_prompts=num_segments,
        )

    def answer(self, options: TranscriptOptions, head: AnswerHead) -> Answer:
        return TranscriptAnswer(options)


class Transcriptions(Translations):
    """Transcribe speech."""

    name = "create_transcription"
    path = "/v1/audio/transcriptions"
    request_type = TranscriptionRequest
    chunk_type = TranscriptDone
    traced = ("stream", "temperature")

    def read(self, body: bytes, context: RequestContext) -> TranscriptionRequest:
        request: TranscriptionRequest = super().read(body, context)
        if request.stream and request.response_format not in (None, "json"):
            raise invalid(
                "response_format", "streams support json only; send json or stream: false"
            )
        if granularities := request.timestamp_granularities:
            if "word" in granularities:
                problem = "timestamps of words are not supported; send segment"
                raise invalid("timestamp_granularities", problem)
            if request.response_format != "verbose_json":
                problem = "send it with response_format verbose_json"
                raise invalid("timestamp_granularities", problem)
        return request

    def to_options(self, request: TranscriptionRequest) -> TranscriptOptions:
        language = request.language or "unknown"
        return TranscriptOptions(request.response_format or "json", "transcribe", language)


def _fields(body: bytes, content_type: bytes) -> dict[str, Any]:
    """The fields of a form, converted to those of a JSON body. Raises: InvalidRequest."""
    fields: dict[str, Any] = {}
    for part in read_form(body, content_type):
        name = part.name.removesuffix("[]")
        is_file, shown = name == "file", name[:MAX_NAME_CHARS]
        try:
            text = (b64encode(part.data) if is_file else part.data).decode()
        except UnicodeDecodeError:
            raise invalid(shown, "send text in UTF-8") from None
        value = f"data:audio/wav;base64,{text}" if is_file else text
        earlier = fields.get(name, [])
        if part.name != name and isinstance(earlier, list):
            fields[name] = [*earlier, value]
        elif name in fields:
            raise InvalidRequest(f"Send one {shown}.", param=shown, code="invalid_form")
        else:
            fields[name] = _plain_value(text) if name in _NUMBERS else value
    return fields


def _plain_value(text: str) -> Any:
    """Parse a number or a boolean of a form. Other text is returned unchanged."""
    try:
        return msgspec.json.decode(text.strip().lower(), type=float | bool)
    except msgspec.MsgspecError:
        return text


class TranscriptAnswer:
    def __init__(self, options: TranscriptOptions) -> None:
        self._options = options
        self._ends = options.segment_ends
        self._texts = [""] * max(1, len(self._ends))
        self._ended: set[int] = set()
        self._text = ""  # the segments before `_open`, and the sent part of segment `_open`
        self._open = 0  # index of the first segment that has not ended
        self._num_sent = 0  # sent characters of segment `_open`
        is_json = options.format in ("json", "verbose_json")
        self.headers = JSON_HEADERS if is_json else _TEXT_HEADERS

    def whole(self, events: Sequence[ChoiceEvent], totals: Totals) -> bytes:
        for index, event in events:
            self._add(index, event)
        options, text = self._options, self._text
        match options.format:
            case "text":
                return text.encode()
            case "srt":
                return self._captions("{number}\n", ",").encode()
            case "vtt":
                return ("WEBVTT\n\n" + self._captions("", ".")).encode()
        answer = Transcription(text, _usage(totals))
        if options.format == "verbose_json":
            answer.task, answer.language = options.task, options.language
            answer.duration = answer.usage.seconds = self._ends[-1]
            answer.usage.type = "duration"
            answer.segments = [
                TranscriptSegment(id_, start, end, text)
                for id_, ((start, end), text) in enumerate(self._segments())
            ]
        return encode(answer)

    def frames(self, events: Sequence[ChoiceEvent], totals: Totals | None) -> list[Frame]:
        frames: list[Frame] = []
        for index, event in merge_tokens(events):
            if delta := self._add(index, event):
                position = event.index + event.num_tokens if isinstance(event, Tokens) else 0
                frames.append((position, sse_event(encode(TranscriptDelta(delta)))))
        if totals is not None:
            done = TranscriptDone(self._text, _usage(totals))
            frames.append((totals.num_output_tokens + 1, sse_event(encode(done))))
        return frames

    def _add(self, index: int, event: CallEvent) -> str:
        """Add an event of a segment. Returns the text that can be sent now, in the order of segments."""
        if isinstance(event, Finished):
            self._ended.add(index)
        elif isinstance(event, Tokens):
            is_begun = self._texts[index] or not index
            self._texts[index] += event.text if is_begun else event.text.lstrip()
        num_before = len(self._text)
        while self._open < len(self._texts):
            text = self._texts[self._open]
            if text and not self._num_sent and self._text and _has_space(self._text[-1] + text[0]):
                self._text += " "
            self._text += text[self._num_sent :]
            self._num_sent = len(text)
            if self._open not in self._ended:
                break
            self._open, self._num_sent = self._open + 1, 0
        return self._text[num_before:]

    def _segments(self) -> list[tuple[tuple[float, float], str]]:
        return list(zip(pairwise((0.0, *self._ends)), self._texts, strict=True))

    def _captions(self, head: str, point: str) -> str:
        """Blocks of SRT or VTT. A text is one line, because an empty line ends a block."""
        shown = [(times, " ".join(text.split())) for times, text in self._segments()]
        is_vtt = not head
        return "".join(
            f"{head.format(number=number)}{_time(start, point)} --> {_time(end, point)}\n"
            f"{escape(text, quote=False) if is_vtt else text}\n\n"
            for number, ((start, end), text) in enumerate(filter(itemgetter(1), shown), 1)
        )


def _has_space(around: str) -> bool:
    """Whether to separate two segments by a space. `around`: the characters before and after it."""
    return not around[0].isspace() and not _UNSPACED.fullmatch(around)


def _time(seconds: float, point: str) -> str:
    """A time as hours:minutes:seconds with three decimals."""
    ms = round(seconds * 1000)
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}{point}{ms % 1000:03}"


def _usage(totals: Totals) -> TranscriptionUsage:
    prompt, num_output = totals.prompt, totals.num_output_tokens
    details = InputTokenDetails(prompt.num_audio_tokens, prompt.num_text_tokens)
    total = prompt.num_prompt_tokens + num_output
    return TranscriptionUsage(prompt.num_prompt_tokens, num_output, total, details)
