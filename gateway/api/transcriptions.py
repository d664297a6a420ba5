"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`: the text of speech, by a model that takes audio.

The body is a form, or JSON with the file as a `data:` URL, an http(s) URL or the id of an uploaded file. It is a chat
with one message: the audio and an instruction.

Source: OpenAI API reference, "Create transcription", "Create translation" and "Transcription stream events".
"""

from base64 import b64encode
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from gateway.api.answers import Blocks, encode, merge_tokens
from gateway.api.conversation import Conversation
from gateway.api.fields import (
    Ignored,
    ModelName,
    OpenAiSampling,
    RequestStruct,
    User,
    check_max_tokens,
    doc,
    find_priority,
    invalid,
    translate_sampling,
)
from gateway.calls.open_call import ChoiceEvent
from gateway.calls.surface import Answer, AnswerHead, Frame, Plan, Surface, Totals
from gateway.http.errors import InvalidRequest
from gateway.http.exchange import JSON_HEADERS, Headers, RequestContext, sse_event
from gateway.http.multipart import read_form
from shared.protocol import Generate, ModelCard, Tokens
from shared.settings.limits import MAX_NAME_CHARS

FORM = b"multipart/form-data"
_TEXT_HEADERS: Headers = [(b"content-type", b"text/plain; charset=utf-8")]
_TRANSCRIBE = "Transcribe this audio word by word. Answer with the transcript only."
_MAX_PROMPT_CHARS = 4096
_NUMBERS = ("temperature", "stream")  #: fields that are no texts

Format = Literal["json", "text"]


class TranslationRequest(RequestStruct, frozen=True, kw_only=True):
    file: Annotated[str, doc("An audio file; in JSON, its URL or id.")]
    model: ModelName
    prompt: Annotated[
        Annotated[str, Meta(max_length=_MAX_PROMPT_CHARS)] | None,
        doc("Text that helps the model, such as names or the sentence before."),
    ] = None
    response_format: Format | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    user: User = None
    chunking_strategy: Ignored = msgspec.UNSET

    @property
    def stream(self) -> bool | None:
        return None

    def instruction(self, card: ModelCard) -> str:
        text = "Translate the speech in this audio into English. Answer with the translation only."
        return f"{text}\n{self.prompt}" if self.prompt else text


class TranscriptionRequest(TranslationRequest, frozen=True, kw_only=True):
    language: Annotated[
        Annotated[str, Meta(min_length=2, max_length=MAX_NAME_CHARS)] | None,
        doc("The language of the speech, such as `en`."),
    ] = None
    stream: bool | None = None  # type: ignore[assignment]

    def instruction(self, card: ModelCard) -> str:
        text = card.transcription_prompt or _TRANSCRIBE
        if self.language:
            text += f" The language is {self.language}."
        return f"{text}\n{self.prompt}" if self.prompt else text


class InputTokenDetails(msgspec.Struct):
    audio_tokens: int
    text_tokens: int


class TranscriptionUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: InputTokenDetails
    type: str = "tokens"


class Transcription(msgspec.Struct):
    text: str
    usage: TranscriptionUsage


class TranscriptDelta(msgspec.Struct):
    delta: str
    type: str = "transcript.text.delta"


class TranscriptDone(msgspec.Struct):
    text: str
    usage: TranscriptionUsage
    type: str = "transcript.text.done"


class TranscriptOptions(msgspec.Struct, frozen=True):
    is_text: bool = False


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
    hints: ClassVar = {
        "response_format": "Send json or text: models of this server give no times, which verbose_json, srt and vtt need.",
    }

    def body_type(self, context: RequestContext) -> bytes:
        media_type, _, rest = context.headers.get(b"content-type", b"").lower().partition(b";")
        is_form = media_type.strip() == FORM and b"boundary" in rest
        return FORM if is_form else super().body_type(context)

    def read(self, body: bytes, context: RequestContext) -> Any:
        if self.body_type(context) == FORM:
            fields = _fields(body, context.headers[b"content-type"])
            body = encode(fields)
        return super().read(body, context)

    def plan(self, request: TranslationRequest, context: RequestContext, card: ModelCard) -> Plan:
        conversation = Conversation()
        instruction = request.instruction(card)
        parts = [conversation.audio(request.file, "file", "user"), conversation.text(instruction)]
        conversation.add("user", parts)
        sampling = translate_sampling(
            OpenAiSampling(temperature=request.temperature or 0.0),
            self.limits,
            context,
            card.sampling,
            max_tokens=check_max_tokens(None, "max_tokens", self.limits, context),
        )
        return Plan(
            [Generate(tuple(conversation.messages), sampling)],
            TranscriptOptions(request.response_format == "text"),
            conversation.sources,
            is_streamed=bool(request.stream),
            priority=find_priority(None, context),
        )

    def answer(self, options: TranscriptOptions, head: AnswerHead) -> Answer:
        return TranscriptAnswer(options, head)


class Transcriptions(Translations):
    """Transcribe speech."""

    name = "create_transcription"
    path = "/v1/audio/transcriptions"
    request_type = TranscriptionRequest
    chunk_type = TranscriptDone
    traced = ("stream", "temperature")

    def read(self, body: bytes, context: RequestContext) -> TranscriptionRequest:
        request: TranscriptionRequest = super().read(body, context)
        if request.stream and request.response_format == "text":
            raise invalid("response_format", "send json with stream")
        return request


def _fields(body: bytes, content_type: bytes) -> dict[str, Any]:
    """The fields of a form, as those of a JSON body. Raises: InvalidRequest."""
    fields: dict[str, Any] = {}
    for part in read_form(body, content_type):
        name = part.name.removesuffix("[]")
        if name in fields and not part.name.endswith("[]"):
            raise InvalidRequest(
                f"Send one {name[:MAX_NAME_CHARS]}.", param=name, code="invalid_form"
            )
        if name == "file":
            fields[name] = f"data:audio/wav;base64,{b64encode(part.data).decode()}"
            continue
        try:
            text = part.data.decode()
        except UnicodeDecodeError:
            raise invalid(name[:MAX_NAME_CHARS], "send text in UTF-8") from None
        fields[name] = _plain_value(text) if name in _NUMBERS else text
    return fields


def _plain_value(text: str) -> Any:
    """A number or a truth value, as forms spell it."""
    try:
        return msgspec.json.decode(text.strip().lower(), type=float | bool)
    except msgspec.MsgspecError:
        return text


class TranscriptAnswer:
    def __init__(self, options: TranscriptOptions, head: AnswerHead) -> None:
        self._options = options
        self._blocks = Blocks(head.id, with_thought=False)
        self.headers = _TEXT_HEADERS if options.is_text else JSON_HEADERS

    def whole(self, events: Sequence[ChoiceEvent], totals: Totals) -> bytes:
        self._blocks.add_all(events)
        text = self._blocks.text
        return (
            text.encode() if self._options.is_text else encode(Transcription(text, _usage(totals)))
        )

    def frames(self, events: Sequence[ChoiceEvent], totals: Totals | None) -> list[Frame]:
        frames: list[Frame] = []
        for _, event in merge_tokens(events):
            if not isinstance(event, Tokens):
                continue
            added = self._blocks.add(event)
            if text := "".join(piece for block, piece, _ in added if block.kind == "text"):
                delta = sse_event(encode(TranscriptDelta(text)))
                frames.append((event.index + event.num_tokens, delta))
        if totals is not None:
            done = TranscriptDone(self._blocks.text, _usage(totals))
            frames.append((totals.num_output_tokens + 1, sse_event(encode(done))))
        return frames


def _usage(totals: Totals) -> TranscriptionUsage:
    prompt, num_output = totals.prompt, totals.num_output_tokens
    num_audio = prompt.num_image_tokens  # of all media, which is the one file
    details = InputTokenDetails(num_audio, prompt.num_prompt_tokens - num_audio)
    total = prompt.num_prompt_tokens + num_output
    return TranscriptionUsage(prompt.num_prompt_tokens, num_output, total, details)
