"""What is known of a request before its body is read."""

import hashlib

from msgspec import Struct, field

#: Where the middleware puts it in the scope.
SCOPE_KEY = "vlm.context"
_MAX_IGNORED = 10


class RequestContext(Struct):
    """Notes on one HTTP request. Units: `received_at` is a reading of `time.perf_counter`."""

    id: str  #: ours, 128 random bits; names the request in the queue
    headers: dict[bytes, bytes]  #: names in lower case; of repeated ones the last
    received_at: float
    client_id: str | None = None  #: the client's own `x-request-id`, where it sent a sane one
    tenant: str = ""
    route: str = ""  #: the template of the path, where an API of models serves it
    trace_parent: str | None = None  #: W3C: the caller's span, then the one that we made below it
    #: What stands for the names in an API's path.
    path: dict[str, str] = field(default_factory=dict)
    #: Whether an unknown field of the body is an error (`VLM_GATEWAY__UNKNOWN_FIELDS`).
    refuses_unknown_fields: bool = False
    #: Fields of the request without an effect, for `x-vlm-ignored`.
    ignored: list[str] = field(default_factory=list)

    def ignore(self, name: str) -> None:
        """Note a field without an effect."""
        if name not in self.ignored and len(self.ignored) < _MAX_IGNORED:
            self.ignored.append(name)


def short_hash(name: str) -> str:
    """A short name for a user or a tenant: a pseudonym, not a secret."""
    return hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
