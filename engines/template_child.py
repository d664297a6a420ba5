"""A child process that renders the chat template of a checkpoint, which a stranger may have written.

It has no more memory and time than a prompt needs, and is ended by the system in the midst of one that takes more. On
a socket: a request is its length and JSON, first `[source, variables]`, then conversations; an answer is a status, a
length and a text.
"""

import json
import signal
import socket
import struct
import sys
from contextlib import suppress

from engines.child_process import receive, restrict
from engines.template_rendering import (
    CompiledTemplate,
    TemplateFailure,
    TemplateRefusal,
    UnusableTemplate,
)

REQUEST = struct.Struct(">I")  #: bytes that follow
ANSWER = struct.Struct(">BI")  #: status, bytes that follow
OK, REFUSED, FAILED = range(3)
#: A prompt has at most that many characters, and this many times the bytes of its conversation.
_BASE_CHARS = 65_536
_CHARS_RATIO = 2


def main() -> None:
    """Serve on the socket whose number is the first argument; then come memory and milliseconds of CPU time."""
    number, max_bytes, max_cpu_ms = (int(argument) for argument in sys.argv[1:4])
    restrict(max_bytes)
    with socket.socket(fileno=number) as sock, suppress(EOFError, OSError):
        _serve(sock, max_cpu_ms / 1000)


def _serve(sock: socket.socket, max_cpu_s: float) -> None:
    """Render until the parent hangs up. Raises: EOFError, OSError."""
    source, variables = json.loads(_next_request(sock))
    template = None
    status, text = OK, ""
    with _limited(max_cpu_s):
        try:
            template = CompiledTemplate(source, variables)
        except UnusableTemplate as error:
            status, text = REFUSED, str(error)
    _answer(sock, status, text)
    while template is not None:
        request = _next_request(sock)
        with _limited(max_cpu_s):
            status, text = _render(template, request)
        _answer(sock, status, text)


def _next_request(sock: socket.socket) -> bytes:
    [num_bytes] = REQUEST.unpack(receive(sock, REQUEST.size))
    return bytes(receive(sock, num_bytes))


def _answer(sock: socket.socket, status: int, text: str) -> None:
    data = text.encode(errors="replace")
    sock.sendall(ANSWER.pack(status, len(data)) + data)


class _limited:
    """A stretch of work after whose CPU time the system ends this process; no code of a template can stop it."""

    def __init__(self, max_cpu_s: float) -> None:
        self._max_cpu_s = max_cpu_s

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._max_cpu_s)

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _render(template: CompiledTemplate, request: bytes) -> tuple[int, str]:
    try:
        return OK, template.render(json.loads(request), _BASE_CHARS + _CHARS_RATIO * len(request))
    except TemplateRefusal as refusal:
        return REFUSED, str(refusal)
    except TemplateFailure:
        return FAILED, ""


if __name__ == "__main__":
    main()
