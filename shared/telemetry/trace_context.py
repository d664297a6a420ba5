"""The W3C header that ties our spans to the caller's, and the worker's to the gateway's.

Read at the door, carried in the request's record through Redis. Source: W3C Trace Context, section
3.2 (`traceparent`).
"""

import re

_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)


def parse_trace_parent(header: bytes) -> str | None:
    """The header in the words of version 00; None if it is malformed, and then to be ignored."""
    found = _PARENT.fullmatch(header)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    is_known = version != b"ff" and not (version == b"00" and more)
    if not (is_known and trace_id.strip(b"0") and span_id.strip(b"0")):
        return None
    return b"-".join((b"00", trace_id, span_id, flags)).decode()


def trace_id_of(trace_parent: str) -> str:
    """The trace's id, of a header that was parsed."""
    return trace_parent[3:35]
