"""The lines of a batch's files: requests in, results out.

Source: OpenAI API reference, "The request input object", "The request output object".
"""

import hashlib
from itertools import islice
from typing import Annotated

import msgspec
from msgspec import Meta, Raw

#: Maximum number of reported errors of a file.
MAX_ERRORS = 100
_MAX_CUSTOM_ID_CHARS = 512


class LineError(msgspec.Struct, frozen=True):
    """An error in a line. `line`: from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class _Line(msgspec.Struct, frozen=True):
    custom_id: Annotated[str, Meta(min_length=1, max_length=_MAX_CUSTOM_ID_CHARS)]
    method: str
    url: str
    body: Raw


class _Streams(msgspec.Struct, frozen=True):
    stream: bool | None = None


class _Response(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: Raw


class _Error(msgspec.Struct, frozen=True):
    code: str
    message: str


class _Result(msgspec.Struct, frozen=True):
    id: str
    custom_id: str
    response: _Response | None
    error: _Error | None


class BatchLine(msgspec.Struct, frozen=True):
    """A request of a batch. `number`: from 0; `body`: JSON."""

    number: int
    custom_id: str
    body: bytes


_decoder = msgspec.json.Decoder(_Line)
_streams_decoder = msgspec.json.Decoder(_Streams)


def split_lines(data: bytes) -> list[memoryview]:
    """Lines that are not blank, without copies."""
    view, lines, start = memoryview(data), [], 0
    while start < len(data):
        end = data.find(b"\n", start)
        end = len(data) if end < 0 else end
        if data[start:end].strip():
            lines.append(view[start:end])
        start = end + 1
    return lines


def read_line(line: memoryview, number: int) -> BatchLine:
    found = _decoder.decode(line)
    return BatchLine(number, found.custom_id, bytes(found.body))


def check_lines(data: bytes, endpoint: str, max_lines: int) -> tuple[int, list[LineError]]:
    lines = split_lines(data)
    if not lines:
        return 0, [
            LineError("empty_file", "The file has no requests: send one JSON object a line.")
        ]
    if len(lines) > max_lines:
        message = f"The file has {len(lines)} requests: send at most {max_lines} in a batch."
        return len(lines), [LineError("too_many_requests", message)]
    seen: set[str] = set()
    found = (_check_line(line, number, endpoint, seen) for number, line in enumerate(lines, 1))
    return len(lines), list(islice(filter(None, found), MAX_ERRORS))


def _check_line(line: memoryview, number: int, endpoint: str, seen: set[str]) -> LineError | None:
    try:
        str(line, "utf-8")
        found = _decoder.decode(line)
    except msgspec.ValidationError:
        return LineError(
            "invalid_request",
            "Send custom_id (1 to 512 characters), method, url and body in each line.",
            line=number,
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return LineError("invalid_json_line", "The line is not valid JSON in UTF-8.", line=number)
    if found.custom_id in seen:
        message = "Another line has this custom_id: send a unique custom_id in each line."
        return LineError("duplicate_custom_id", message, "custom_id", number)
    seen.add(found.custom_id)
    if found.method != "POST":
        return LineError("invalid_method", "Send POST as method.", "method", number)
    if found.url != endpoint:
        message = f"The url is not the batch's endpoint: send {endpoint}."
        return LineError("invalid_url", message, "url", number)
    return _check_body(found.body, number)


def _check_body(body: Raw, number: int) -> LineError | None:
    try:
        if _streams_decoder.decode(body).stream:
            return LineError(
                "invalid_request",
                "A batch does not stream: leave out stream.",
                "body.stream",
                number,
            )
    except msgspec.ValidationError:  # validated by the endpoint
        if not bytes(body).lstrip().startswith(b"{"):
            return LineError("invalid_request", "Send an object as body.", "body", number)
    return None


def to_result(batch_id: str, line: BatchLine, status: int, request_id: str, body: bytes) -> bytes:
    response = _Response(status, request_id, Raw(body))
    return msgspec.json.encode(
        _Result(result_id(batch_id, line.number), line.custom_id, response, None)
    )


def to_failure(batch_id: str, line: BatchLine, code: str, message: str) -> bytes:
    """The output line of a request that got no response."""
    result_of = result_id(batch_id, line.number)
    return msgspec.json.encode(_Result(result_of, line.custom_id, None, _Error(code, message)))


def result_id(batch_id: str, number: int) -> str:
    """The id of a result: a function of batch and line."""
    return "batch_req_" + hashlib.sha256(f"{batch_id} {number}".encode()).hexdigest()[:32]


class LineResult(msgspec.Struct, frozen=True):
    """The result of a line. `data`: a line of one of the output files. Parts are groups of results."""

    number: int
    is_completed: bool
    data: bytes
