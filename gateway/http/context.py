"""What is known of a request before its body is read."""

from msgspec import Struct, field

#: Where the middleware puts it in the scope.
SCOPE_KEY = "vlm.context"


class RequestContext(Struct):
    """Notes on one HTTP request. Units: `received_at` is a reading of `time.perf_counter`."""

    id: str  #: ours, 128 random bits; names the request in the queue
    headers: dict[bytes, bytes]  #: names in lower case; of repeated ones the last
    received_at: float
    client_id: str | None = None  #: the client's own `x-request-id`, where it sent a sane one
    tenant: str = ""
    trace_parent: str | None = None  #: W3C: the caller's span, then the one that we made below it
    #: What stands for the names in an API's path.
    path: dict[str, str] = field(default_factory=dict)
