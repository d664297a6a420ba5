"""The wire between gateway and worker: calls out, events back. Everybody imports its names from here."""

from shared.protocol.call import Call, Envelope, Priority
from shared.protocol.card import ModelCard
from shared.protocol.codec import (
    decode_call,
    decode_card,
    decode_events,
    decode_log,
    encode,
    encode_call,
    encode_events,
    seal,
)
from shared.protocol.content import (
    BlobRef,
    ChatMessage,
    ImagePart,
    ImageRef,
    Message,
    Report,
    TextPart,
)
from shared.protocol.events import (
    CallEvent,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    OutputLogprob,
    StageTimings,
    Started,
    TokenLogprob,
    Tokens,
    Usage,
)
from shared.protocol.tasks import Generate, SamplingParams, Task
from shared.protocol.version import PROTOCOL_VERSION, UnsupportedVersion, explain_versions

__all__ = [
    "PROTOCOL_VERSION",
    "BlobRef",
    "Call",
    "CallEvent",
    "ChatMessage",
    "Envelope",
    "ErrorCode",
    "Failed",
    "FinishReason",
    "Finished",
    "Generate",
    "ImagePart",
    "ImageRef",
    "Message",
    "ModelCard",
    "OutputLogprob",
    "Priority",
    "Report",
    "SamplingParams",
    "StageTimings",
    "Started",
    "Task",
    "TextPart",
    "TokenLogprob",
    "Tokens",
    "UnsupportedVersion",
    "Usage",
    "decode_call",
    "decode_card",
    "decode_events",
    "decode_log",
    "encode",
    "encode_call",
    "encode_events",
    "explain_versions",
    "seal",
]
