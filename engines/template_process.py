"""A chat template in a child process, which costs its worker nothing but the wait: at most a second or so of a prompt.

Called by `ChatTemplate` for templates that are not known. A child that takes too long or dies costs the one prompt,
and the next prompt starts another.
"""

import subprocess
import threading
import time
import weakref
from collections.abc import Mapping
from socket import socket

import msgspec

from engines import template_child
from engines.child_process import receive, start_child
from engines.template_child import ANSWER, OK, REFUSED, REQUEST
from engines.template_rendering import (
    Messages,
    TemplateFailure,
    TemplateRefusal,
    UnusableTemplate,
)

MAX_CPU_S = 0.5  #: of one prompt
_MAX_S = 5.0  #: of one prompt, on a busy machine
_START_S = 60.0
_MAX_BYTES = 512 * 1024 * 1024  #: address space of the child; idle, it takes a fifth
_MAX_ANSWER_BYTES = 256 * 1024 * 1024


class TemplateProcess:
    """A template in a child process. Raises: UnusableTemplate."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self._opening = msgspec.json.encode([source, variables])
        self._lock = threading.Lock()
        self._child: _Child | None = None
        try:
            self._start()
        except (EOFError, OSError):
            raise UnusableTemplate("the chat template takes too long to compile") from None

    def _start(self) -> "_Child":
        """A child that knows the template. Raises: UnusableTemplate, EOFError, OSError."""
        child = _Child()
        self._child = child
        status, text = child.ask(self._opening, _START_S)
        if status != OK:
            raise UnusableTemplate(text)
        return child

    def render(self, messages: Messages) -> str:
        """The text of a conversation. Raises: TemplateRefusal, TemplateFailure."""
        request = msgspec.json.encode(messages)
        with self._lock:
            try:
                child = self._child or self._start()
                status, text = child.ask(request, _MAX_S)
            except (EOFError, OSError, UnusableTemplate) as error:
                self._drop_child()
                raise TemplateFailure(type(error).__name__) from None
        if status == OK:
            return text
        raise TemplateRefusal(text) if status == REFUSED else TemplateFailure

    def _drop_child(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


class _Child:
    """One process; it ends with this object or with its parent."""

    def __init__(self) -> None:
        process, self._socket = start_child(
            template_child.__name__, _MAX_BYTES, round(MAX_CPU_S * 1000)
        )
        self.close = weakref.finalize(self, _end, process, self._socket)

    def ask(self, request: bytes, timeout_s: float) -> tuple[int, str]:
        """Status and text. Raises: EOFError, OSError (timeouts too) if the child is of no more use."""
        until = time.monotonic() + timeout_s
        self._socket.settimeout(timeout_s)
        self._socket.sendall(REQUEST.pack(len(request)) + request)
        status, num_bytes = ANSWER.unpack(receive(self._socket, ANSWER.size, until))
        if num_bytes > _MAX_ANSWER_BYTES:
            raise EOFError  # no answer of ours
        return status, receive(self._socket, num_bytes, until).decode(errors="replace")


def _end(process: subprocess.Popen[bytes], sock: socket) -> None:
    process.kill()
    process.wait()
    sock.close()
