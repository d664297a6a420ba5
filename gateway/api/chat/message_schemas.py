"""The messages of a chat request as structs: turns, their texts and their images.

Strict: an unknown field is an error. It must not know the rest of a request.

Source: OpenAI API reference, "Create chat completion".
"""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from shared.settings.limits import MAX_NAME_CHARS

Ignored = Raw | UnsetType  #: checked to be JSON and otherwise skipped
Neutral = Raw | UnsetType  #: skipped too, and refused by `asks_for_something` unless it is neutral

_MAX_NEUTRAL_BYTES = 256

Detail = Literal["auto", "low", "high"]


def asks_for_something(field: Neutral, neutral: tuple[bytes, ...] = ()) -> bool:
    """Whether a field that is not supported holds more than null or one of `neutral`, compact JSON."""
    if field is UNSET:
        return False
    if len(memoryview(field)) > _MAX_NEUTRAL_BYTES:  # nothing is built of what is not small
        return True
    try:
        compact = msgspec.json.encode(msgspec.json.decode(field))
    except msgspec.DecodeError:  # a number out of range
        return True
    return compact not in (b"null", *neutral)


class RequestStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all that clients send: immutable, without unknown fields."""


class IgnoredImageFields(RequestStruct, frozen=True, kw_only=True):
    """Hints on a image that change no answer: each model has its own resolution."""

    detail: Detail = "auto"


class ImageUrl(IgnoredImageFields, frozen=True, kw_only=True):
    """Where a image is: a `data:` URL, or an http(s) one where the operator allows it."""

    url: str


class IgnoredPartFields(RequestStruct, frozen=True, kw_only=True):
    """Cache hints that some clients attach to parts; they change no answer."""

    cache_control: Ignored = UNSET
    prompt_cache_breakpoint: Ignored = UNSET


class TextContent(IgnoredPartFields, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """A piece of text."""

    text: str


class ImageContent(IgnoredPartFields, frozen=True, kw_only=True, tag_field="type", tag="image_url"):
    """A image; many clients send the URL bare."""

    image_url: ImageUrl | str


class InputTextContent(
    IgnoredPartFields, frozen=True, kw_only=True, tag_field="type", tag="input_text"
):
    """Text as the Responses API spells it."""

    text: str


class InputImageContent(
    IgnoredPartFields, frozen=True, kw_only=True, tag_field="type", tag="input_image"
):
    """A image as the Responses API spells it."""

    image_url: str
    detail: Detail = "auto"


ContentPart = TextContent | ImageContent | InputTextContent | InputImageContent


class IgnoredMessageFields(RequestStruct, frozen=True, kw_only=True):
    """Fields of a turn that change no answer."""

    name: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None
    annotations: Ignored = UNSET
    refusal: str | None = None


class ChatMessageParam(IgnoredMessageFields, frozen=True, kw_only=True):
    """One turn. Assistant turns may be echoed with all the empty fields that an answer had."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ContentPart], Meta(min_length=1)]
    audio: Neutral = UNSET
    function_call: Neutral = UNSET
    tool_calls: Neutral = UNSET
