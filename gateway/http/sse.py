"""Server-sent events: the framing of a streamed answer, whatever it says.

JSON has no raw line breaks, so no text of a model can break a frame.
Source: WHATWG HTML, "Server-sent events".
"""

from gateway.http.errors import Headers

HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies must pass chunks on at once.
    (b"x-accel-buffering", b"no"),
]
KEEP_ALIVE = b": keep-alive\n\n"
#: How streams of OpenAI's APIs end.
DONE = b"data: [DONE]\n\n"


def frame(data: bytes, event: bytes = b"") -> bytes:
    """One event: JSON, and its name where the API names events."""
    if event:
        return b"event: " + event + b"\ndata: " + data + b"\n\n"
    return b"data: " + data + b"\n\n"


def numbered_last(frames: bytes, id_: int) -> bytes:
    """Frames with names that belong together: the last has the id, so that less than all is nothing."""
    begin = frames.rfind(b"\n\nevent: ")
    begin = 0 if begin < 0 else begin + 2
    return frames[:begin] + numbered(frames[begin:], id_)


def numbered(frame: bytes, id_: int) -> bytes:
    """The frame under an id, which a client that reconnects sends as `Last-Event-ID`."""
    return b"id: %d\n" % id_ + frame
