"""Multipart forms that arrive in pieces."""

import io
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.errors import InvalidRequest
from gateway.http.multipart import FormReader, read_form

TYPE = b"multipart/form-data; boundary=xy"
HEAD = b'content-disposition: form-data; name="file"; filename="a.txt"\r\ncontent-type: text/plain'
BODY = (
    b"preamble\r\n--xy\r\n" + HEAD + b"\r\n\r\n\r\n--x \r\n--\r\n"
    b'\r\n--xy\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n'
    b"\r\n--xy--\r\nepilogue\r\n\r\n"
)
FIELDS = [("file", "a.txt", b"\r\n--x \r\n--\r\n"), ("purpose", None, b"")]


def read(pieces: list[bytes]) -> list[tuple[str, str | None, bytes]]:
    form = FormReader(TYPE, io.BytesIO)
    for piece in pieces:
        form.feed(piece)
    return [(part.name, part.filename, part.data) for part in form.close()]


@given(st.lists(st.integers(0, len(BODY)), max_size=20))
def test_a_form_can_be_split_at_any_byte(places: list[int]):
    cuts = sorted({0, *places, len(BODY)})
    assert read([BODY[a:b] for a, b in pairwise(cuts)]) == FIELDS
    assert read([BODY[place : place + 1] for place in range(len(BODY))]) == FIELDS


PART = b"--xy\r\n" + HEAD + b"\r\n\r\n\r\n"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"--xy", b"--xy--", b"--xy\r\n", PART, PART + b"--xy", PART + b"--xy\r\n", BODY[:-20].replace(b"--xy--", b""),
        PART.replace(b"form-data", b"attachment") + b"--xy--", PART.replace(b"\r\ncontent", b"content") + b"--xy--",
        PART.replace(HEAD, HEAD + b"\r\nx: " + bytes(5000)) + b"--xy--", 17 * PART + b"--xy--",
        PART.replace(HEAD, b"no field") + b"--xy--", b"--xy--\r\n" + PART + b"--xy--",
    ],
)  # fmt: skip
def test_an_invalid_form_is_refused(body: bytes):
    with pytest.raises(InvalidRequest, match="not valid multipart/form-data of at most 16 parts"):
        read([body])


def test_sixteen_parts_are_read():
    assert len(read_form(16 * PART + b"--xy--", TYPE)) == 16
