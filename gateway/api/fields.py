"""What requests of every API have in common: field types, the priority, the error that names a field."""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from gateway.calls.surface import Totals
from gateway.http.body import unsupported
from gateway.http.errors import InvalidRequest
from shared.protocol import Priority
from shared.settings.limits import MAX_MODEL_CHARS, MAX_USER_CHARS

ModelName = Annotated[str, Meta(min_length=1, max_length=MAX_MODEL_CHARS)]
UserName = Annotated[str, Meta(max_length=MAX_USER_CHARS)]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
Ignored = Raw | UnsetType  #: checked to be JSON and otherwise skipped
Neutral = Raw | UnsetType  #: skipped too, and refused unless it asks for nothing
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Timings = dict[str, float] | UnsetType
#: For clients that cannot say `service_tier`; it goes before.
PRIORITY_HEADER = b"x-vlm-priority"
_MAX_NEUTRAL_BYTES = 256


class RequestStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all that clients send: immutable, without unknown fields."""


class EchoedStruct(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what clients also send back as an answer had it: further members change nothing."""


class IgnoredStreamFields(RequestStruct, frozen=True, kw_only=True):
    """Options of a stream that change nothing."""

    include_obfuscation: bool = False


class StreamOptions(IgnoredStreamFields, frozen=True, kw_only=True):
    """What a stream holds besides the answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  #: vLLM's: counts so far in every chunk


def check_stream_options(options: StreamOptions | None, is_streamed: bool | None) -> None:
    """Refuse options of a stream that is not asked for. Raises: InvalidRequest."""
    if options is not None and not is_streamed:
        raise invalid("stream_options", "it needs stream: send stream as true")


def asks_for_something(value: Neutral, neutral: tuple[bytes, ...] = ()) -> bool:
    """Whether an unsupported field holds more than null or one of `neutral`, compact JSON."""
    if value is UNSET:
        return False
    if len(memoryview(value)) > _MAX_NEUTRAL_BYTES:  # nothing is built of what is not small
        return True
    try:
        compact = msgspec.json.encode(msgspec.json.decode(value))
    except msgspec.DecodeError:  # a number out of range
        return True
    return compact not in (b"null", *neutral)


def check_neutral(
    request: object, neutral: Mapping[str, tuple[bytes, ...]], prefix: str = ""
) -> None:
    """Refuse what would change the answer and is not done here.

    `neutral`: JSON that asks for nothing, by field; null always does. Raises: InvalidRequest.
    """
    for name, values in neutral.items():
        if asks_for_something(getattr(request, name, UNSET), values):
            raise unsupported(prefix + name)


def find_priority(service_tier: str | None, headers: Mapping[bytes, bytes]) -> Priority:
    """What the header says, else the service tier. Raises: InvalidRequest."""
    name = headers.get(PRIORITY_HEADER)
    if name is None:
        return Priority.BATCH if service_tier == "flex" else Priority.INTERACTIVE
    for priority in Priority:
        if name == priority.value.encode():
            return priority
    raise invalid(PRIORITY_HEADER.decode(), "send interactive or batch")


def find_service_tier(asked: str | None, priority: Priority) -> str | UnsetType:
    """The tier that a request is served as, if it named one."""
    if asked is None:
        return UNSET
    return "flex" if priority is Priority.BATCH else "default"


def wants_timings(asked: bool | None, headers: Mapping[bytes, bytes]) -> bool:
    """Whether body or header ask for them."""
    return bool(asked) or headers.get(b"x-vlm-timings", b"").lower() in (b"true", b"1")


def timings_of(totals: Totals) -> Timings:
    """Each stage and the whole, where the client asked for them."""
    return UNSET if totals.timings is None else totals.timings


def invalid(param: str, problem: str, code: str = "invalid_value") -> InvalidRequest:
    """The error that names a field and says what to send instead."""
    return InvalidRequest(f"Invalid value for {param}: {problem}.", param=param, code=code)


def missing(param: str) -> InvalidRequest:
    """The error that names a field that must be there."""
    return InvalidRequest(f"Missing required field: {param}.", param=param, code="missing_field")
