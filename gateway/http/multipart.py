"""Parses `multipart/form-data` bodies strictly.

Source: RFC 7578.
"""

import re
from dataclasses import dataclass
from email.message import Message

from gateway.http.errors import InvalidRequest, unsupported_media_type

_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_MAX_PARTS = 16
_MAX_HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class FormPart:
    """A field of a form. `filename` is None for a text field."""

    name: str
    filename: str | None
    data: bytes


def read_form(body: bytes, content_type: bytes) -> list[FormPart]:
    """The fields in order. Raises: InvalidRequest."""
    try:
        return _read_parts(body, content_type)
    except (TypeError, ValueError, LookupError, AttributeError):
        # An error of the email package for a parameter that exists both plain and split (RFC 2231).
        raise _invalid() from None


def _read_parts(body: bytes, content_type: bytes) -> list[FormPart]:
    header = Message()
    header["content-type"] = content_type.decode("latin-1")
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/form-data" or boundary is None:
        raise unsupported_media_type("Send the body with `Content-Type: multipart/form-data`.")
    if not _BOUNDARY.fullmatch(boundary):
        raise _invalid()
    delimiter = b"\r\n--" + boundary.encode()
    pieces = (b"\r\n" + body).split(delimiter, _MAX_PARTS + 2)
    if len(pieces) < 3 or not pieces[-1].startswith(b"--"):
        raise _invalid()
    return [_read_part(piece) for piece in pieces[1:-1]]


def _read_part(piece: bytes) -> FormPart:
    head, blank, data = piece.partition(b"\r\n\r\n")
    if not blank or not head.startswith(b"\r\n") or len(head) > _MAX_HEAD_BYTES:
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
    return FormPart(name, headers.get_filename(), data)


def _invalid() -> InvalidRequest:
    return InvalidRequest(
        f"The body is not valid multipart/form-data of at most {_MAX_PARTS} parts.",
        code="invalid_form",
    )
