"""What requests of every API have in common: field types, the priority, the error that names a field."""

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta

from gateway.http.errors import InvalidRequest
from shared.protocol import Priority
from shared.settings.limits import MAX_USER_CHARS

UserName = Annotated[str, Meta(max_length=MAX_USER_CHARS)]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
#: For clients that cannot say `service_tier`; it goes before.
PRIORITY_HEADER = b"x-vlm-priority"


def find_priority(service_tier: str | None, headers: Mapping[bytes, bytes]) -> Priority:
    """What the header says, else the service tier. Raises: InvalidRequest."""
    name = headers.get(PRIORITY_HEADER)
    if name is None:
        return Priority.BATCH if service_tier == "flex" else Priority.INTERACTIVE
    for priority in Priority:
        if name == priority.value.encode():
            return priority
    raise invalid(PRIORITY_HEADER.decode(), "send interactive or batch")


def invalid(param: str, problem: str, code: str = "invalid_value") -> InvalidRequest:
    """The error that names a field and says what to send instead."""
    return InvalidRequest(f"Invalid value for {param}: {problem}.", param=param, code=code)
