"""What messages are made of, and references to the blobs beside them."""

from typing import Literal

import msgspec


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what gateways send: frozen and strict, so that nothing a client asks for is overlooked."""


class Report(msgspec.Struct, frozen=True):
    """Base of what workers send: frozen, and fields that newer workers add are ignored."""


class TextPart(Message, frozen=True, tag_field="type", tag="text"):
    """Ordinary text; special tokens spelled inside it stay text."""

    text: str


class ImagePart(Message, frozen=True, tag_field="type", tag="image"):
    """One image: an index into the images of the task."""

    image: int


class TokensPart(Message, frozen=True, tag_field="type", tag="tokens"):
    """Token ids of the model's own vocabulary, special ones included."""

    token_ids: tuple[int, ...]


class ToolCall(Message, frozen=True):
    """A function that the assistant has called. Its `arguments` are JSON, as far as it has written such."""

    id: str
    name: str
    arguments: str


class ChatMessage(Message, frozen=True, omit_defaults=True):
    """One turn of the conversation; those of role `tool` are what a call came to."""

    role: Literal["system", "user", "assistant", "tool"]
    parts: tuple[TextPart | ImagePart, ...]
    reasoning: str = ""  #: what the assistant thought before it said this
    tool_calls: tuple[ToolCall, ...] = ()  #: what the assistant called behind it
    tool_call_id: str = ""  #: of the call that this is the result of


class Function(Message, frozen=True, omit_defaults=True):
    """A function that the model may call."""

    name: str
    parameters: str  #: a JSON schema
    description: str = ""
    is_strict: bool = False  #: keywords that cannot be kept are an error


class Tools(Message, frozen=True, omit_defaults=True):
    """What the model may call, or has to."""

    functions: tuple[Function, ...]
    is_required: bool = False  #: the answer is a call
    is_parallel: bool = True  #: it may be several


class BlobRef(Message, frozen=True):
    """Bytes beside the queue, by their SHA-256 (hex)."""

    sha256: str
    num_bytes: int


class ImageRef(BlobRef, frozen=True, omit_defaults=True):
    """An image by the blob of its encoded bytes. Units: pixels."""

    media_type: str
    width: int
    height: int
    min_pixels: int = 0  #: to which it is scaled up for the model; 0: the model's own
    max_pixels: int = 0  #: to which it is scaled down for the model; 0: the model's own
