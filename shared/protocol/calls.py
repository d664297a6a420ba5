"""Calls and model cards, and calls, events and cards as bytes: JSON by msgspec, readable in redis-cli."""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple, get_args

import msgspec

from shared.protocol.events import CallEvent, ErrorCode, Failed, Finished, FinishReason
from shared.protocol.tasks import Message, Report, Task

PROTOCOL_VERSION = 2


class UnsupportedVersion(Exception):
    """Gateway and worker have different protocol versions."""


def explain_versions(gateway: int, worker: int) -> str:
    older = "gateway" if gateway < worker else "worker"
    return f"the gateway speaks protocol {gateway}, the worker {worker}: update the {older}"


class Priority(StrEnum):
    """Batch requests use the capacity that interactive requests leave."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


class Call(Message, frozen=True, tag_field="version", tag=PROTOCOL_VERSION, omit_defaults=True):
    """One task for one model. The version is encoded first, and read before the rest."""

    id: str
    reply_to: str  #: id of the gateway, which names its mailbox
    model: str
    task: Task
    tenant: str = ""  #: owner of the caches and limits
    priority: Priority = Priority.INTERACTIVE
    trace_parent: str | None = None
    #: Whether results are streamed; otherwise the worker may hold them back.
    wants_stream: bool = True
    #: It continues without its gateway, and another gateway may return the answer.
    is_resumable: bool = False
    adapter: str = ""  #: digest of the LoRA adapter


class Envelope(NamedTuple):
    """A call for the queue, which does not decode `payload`."""

    id: str
    model: str
    reply_to: str
    tenant: str
    priority: Priority
    payload: bytes


#: Chat template variables that turn reasoning on and off.
THINKING_SWITCHES = frozenset({"enable_thinking", "thinking"})


class SamplingDefaults(Report, frozen=True, omit_defaults=True):
    """Sampling defaults of the checkpoint; None: unspecified. Fields of a request override them."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


class AdapterCard(Report, frozen=True, omit_defaults=True):
    """A LoRA adapter of a worker, or why it is not loaded."""

    name: str
    digest: str = ""  #: of its files; empty: not loaded
    created_at: int = 0  #: epoch seconds at which the worker loaded it
    revision: str = ""  #: in the fleet's list; empty: from the worker's settings
    error: str = ""


class ModelCard(Report, frozen=True):
    """A model and its capabilities, as in `/v1/models`.

    A card of another protocol version has only `name` and `version`.
    """

    name: str
    created_at: int  #: epoch seconds at which the worker loaded it
    max_model_len: int
    vocab_size: int
    supports_images: bool = True
    supports_video: bool = False
    image_tokens: int = 0  #: maximum per image, for quotas; 0: unknown
    max_image_pixels: int = 0  #: larger images are scaled down; 0: the processor decides
    tasks: tuple[str, ...] = ("generate",)  #: tags of the supported tasks
    dimensions: int = 0  #: of its vectors; 0: none
    shorter_dimensions: tuple[int, ...] = ()  #: supported truncated sizes
    prompts: tuple[str, ...] = ()  #: names of the prompts that can precede a text
    sampling: SamplingDefaults = SamplingDefaults()
    dtype: str = ""  #: empty: unknown
    quantization: str = ""  #: empty: none, or unknown
    format: str = ""  #: of its weights, such as `safetensors`
    reasoning: str = ""  #: how it delimits its reasoning; empty: none, or unknown
    always_thinks: bool = False  #: reasoning cannot be turned off
    template_options: tuple[str, ...] = ()  #: chat template variables that a request may set
    supports_grammars: bool = False  #: structured outputs
    adapters: tuple[AdapterCard, ...] = ()  #: each served as `name:adapter`
    parent: str = ""  #: base model of an adapter; they share a queue
    adapter: str = ""  #: digest of an adapter
    digest: str = ""  #: of the files that determine its vectors; empty: unknown
    package: str = ""  #: of a deployment: `name@digest`; empty: none
    version: int = PROTOCOL_VERSION  #: protocol version of its workers

    @property
    def queue(self) -> str:
        """The model whose queue has its calls."""
        return self.parent or self.name


class _Versioned(msgspec.Struct):
    """The common field of calls and cards of every version; version 1 omitted it."""

    version: int = 1


class _AnyCard(_Versioned, kw_only=True):
    name: str


class _AnyEvent(Report, frozen=True):
    """The common fields of events of every version."""

    type: str
    request_id: str
    attempt: int


_version_decoder = msgspec.json.Decoder(_Versioned)
_call_decoder = msgspec.json.Decoder(Call)
_events_decoder = msgspec.json.Decoder(tuple[CallEvent, ...])
_event_decoder = msgspec.json.Decoder(CallEvent)
_any_events_decoder = msgspec.json.Decoder(tuple[msgspec.Raw, ...])
_any_event_decoder = msgspec.json.Decoder(_AnyEvent)
_any_card_decoder = msgspec.json.Decoder(_AnyCard)
_card_decoder = msgspec.json.Decoder(ModelCard)
_encoder = msgspec.json.Encoder()
_EVENT_TYPES = {kind.__struct_config__.tag for kind in get_args(CallEvent)}
#: How calls of this version begin. A call without a version is of version 1, even if its fields match.
_CALL_HEAD = b'{"version":%d,' % PROTOCOL_VERSION

encode = _encoder.encode


def encode_call(call: Call) -> bytes:
    """The bytes of a call, which begin with the version."""
    return _encoder.encode(call)


def seal(call: Call) -> Envelope:
    """Encode a call for the queue."""
    return Envelope(
        call.id, call.model, call.reply_to, call.tenant, call.priority, encode_call(call)
    )


def decode_call(data: bytes) -> Call:
    """Raises: UnsupportedVersion, msgspec.MsgspecError."""
    if not data.startswith(_CALL_HEAD):
        version = _version_decoder.decode(data).version
        if version != PROTOCOL_VERSION:
            raise UnsupportedVersion(explain_versions(version, PROTOCOL_VERSION))
    return _call_decoder.decode(data)


def encode_events(events: Iterable[CallEvent]) -> bytes:
    """Encode events for a log: JSON objects, separated by commas."""
    return b",".join([_encoder.encode(event) for event in events])


def decode_log(log: Sequence[bytes]) -> tuple[CallEvent, ...]:
    """Decode the items of a log. Raises: msgspec.MsgspecError."""
    return decode_events(b"[" + b",".join(log) + b"]") if log else ()


def decode_events(data: bytes) -> tuple[CallEvent, ...]:
    """Decode a mailbox entry; additions of newer workers are ignored. Raises: msgspec.MsgspecError."""
    try:
        return _events_decoder.decode(data)
    except msgspec.ValidationError:
        events = [_decode_newer(raw) for raw in _any_events_decoder.decode(data)]
        return tuple(event for event in events if event is not None)


def _decode_newer(raw: msgspec.Raw) -> CallEvent | None:
    """Map an event of a newer worker to known ones: None for an unknown kind, a generic end for an unknown reason."""
    try:
        return _event_decoder.decode(raw)
    except msgspec.ValidationError:
        event = _any_event_decoder.decode(raw)
        fields = msgspec.json.decode(raw)
        if event.type == "failed" and _is_unknown(fields.get("code"), ErrorCode):
            return msgspec.convert({**fields, "code": ErrorCode.ENGINE_FAILURE}, Failed)
        if event.type == "finished" and _is_unknown(fields.get("finish_reason"), FinishReason):
            return msgspec.convert({**fields, "finish_reason": FinishReason.STOP}, Finished)
        if event.type in _EVENT_TYPES:
            raise
        return None


def _is_unknown(word: object, known: type[StrEnum]) -> bool:
    return isinstance(word, str) and word not in set(known)


def decode_card(data: bytes) -> ModelCard:
    """Raises: msgspec.MsgspecError."""
    card = _any_card_decoder.decode(data)
    if card.version != PROTOCOL_VERSION:
        return ModelCard(card.name, 0, 0, 0, version=card.version)
    return _card_decoder.decode(data)
