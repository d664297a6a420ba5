"""Parses `multipart/form-data` bodies strictly.

Source: RFC 7578.
"""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from typing import IO, Self

from gateway.http.errors import InvalidRequest, wrong_media_type

_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_MAX_PARTS = 16
_MAX_HEAD_BYTES = 4096
_BLANK = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class FormPart:
    """A field of a form. `filename` is None for a text field."""

    name: str
    filename: str | None
    file: IO[bytes]  #: the content

    @property
    def data(self) -> bytes:
        self.file.seek(0)
        return self.file.read()


def read_form(body: bytes, content_type: bytes) -> list[FormPart]:
    """The fields in order. Raises: InvalidRequest."""
    form = FormReader(content_type, io.BytesIO)
    form.feed(body)
    return form.close()


class FormReader:
    """Reads a form that arrives in pieces. A context manager that closes the files. All methods raise InvalidRequest."""

    def __init__(self, content_type: bytes, open_file: Callable[[], IO[bytes]]) -> None:
        """`open_file` returns the file to which the content of a part is written."""
        try:
            self._delimiter = b"\r\n--" + _boundary(content_type)
        except (TypeError, ValueError, LookupError, AttributeError):
            # The email package fails on a parameter that is present both plain and split (RFC 2231).
            raise _invalid() from None
        self._open_file = open_file
        self._parts: list[FormPart] = []
        self._unread = bytearray(b"\r\n")
        # headers of the current part; None before the first delimiter
        self._head: bytearray | None = None
        self._part: FormPart | None = None  # the part whose content arrives

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for part in self._parts:
            part.file.close()

    def feed(self, piece: bytes) -> None:
        self._unread += piece
        while (end := self._unread.find(self._delimiter)) >= 0:
            self._write(self._unread[:end])
            del self._unread[: end + len(self._delimiter)]
            if self._head is not None and self._part is None:
                raise _invalid()
            self._head, self._part = bytearray(), None
        num_certain = max(0, len(self._unread) - len(self._delimiter) + 1)
        self._write(self._unread[:num_certain])
        del self._unread[:num_certain]

    def close(self) -> list[FormPart]:
        """The fields in order, at the end of the body."""
        self._write(self._unread)
        if not self._parts or self._part is not None or not (self._head or b"").startswith(b"--"):
            raise _invalid()
        return self._parts

    def _write(self, data: bytearray) -> None:
        if self._head is None:
            return
        if self._part is not None:
            self._part.file.write(data)
            return
        num_before = len(self._head)
        self._head += data[: _MAX_HEAD_BYTES + 1 - num_before]
        head, blank, _ = self._head.partition(_BLANK)
        if blank and not head.startswith(b"--"):
            self._part = self._open_part(bytes(head))
            self._part.file.write(data[len(head) + len(_BLANK) - num_before :])
        elif len(self._head) > _MAX_HEAD_BYTES:
            raise _invalid()

    def _open_part(self, head: bytes) -> FormPart:
        if len(self._parts) == _MAX_PARTS:
            raise _invalid()
        try:
            part = FormPart(*_names(head), self._open_file())
        except (TypeError, ValueError, LookupError, AttributeError):
            raise _invalid() from None
        self._parts.append(part)
        return part


def _boundary(content_type: bytes) -> bytes:
    header = Message()
    header["content-type"] = content_type.decode("latin-1")
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/form-data" or boundary is None:
        raise wrong_media_type("Send the body with `Content-Type: multipart/form-data`.")
    if not _BOUNDARY.fullmatch(boundary):
        raise _invalid()
    return boundary.encode()


def _names(head: bytes) -> tuple[str, str | None]:
    if not head.startswith(b"\r\n"):
        raise _invalid()
    headers = Message()
    for line in head.removeprefix(b"\r\n").split(b"\r\n"):
        name, colon, value = line.partition(b":")
        if not colon:
            raise _invalid()
        headers[name.decode("latin-1").strip()] = value.decode("utf-8", "replace").strip()
    name = headers.get_param("name", header="content-disposition")
    if headers.get_content_disposition() != "form-data" or not isinstance(name, str):
        raise _invalid()
    return name, headers.get_filename()


def _invalid() -> InvalidRequest:
    message = f"The body is not valid multipart/form-data of at most {_MAX_PARTS} parts."
    return InvalidRequest(message, code="invalid_form")
