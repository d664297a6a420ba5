"""One chat request over HTTP, timed by the client.

Called by the Locust users. It uses only the OpenAI wire format. `http.client` blocks the calling thread or, under
gevent, the calling greenlet. No layer is between the socket and the clock, so that arrival times are exact.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from itertools import pairwise
from typing import Any, Self
from urllib.parse import urlsplit

PATH = "/v1/chat/completions"
TIMINGS_HEADER = "x-vlm-timings"  # servers that do not support it report no stages
MAX_IDLE_S = 2.0  # then reconnect, because servers close idle connections


class AnswerError(Exception):
    """The answer is missing, malformed or incomplete. The message names the fault, without text of the answer."""


@dataclass(slots=True)
class Answer:
    """A complete answer and the arrival times of its chunks.

    Units: seconds since the request was sent; `sent_at` is a reading of `time.perf_counter`. `chunks`: arrival time
    and number of characters of each chunk with text. `stages_s`: stages that the server reports.
    """

    e2e_s: float
    text: str
    finish_reason: str
    usage: dict[str, Any]
    chunks: list[tuple[float, int]] = field(default_factory=list)
    stages_s: dict[str, float] = field(default_factory=dict)
    sent_at: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Output tokens, as the server counts them."""
        return self.usage["completion_tokens"]

    @property
    def ttft_s(self) -> float | None:
        """Time to the first text. A chunk that only names the role does not count. None: not streamed."""
        return self.chunks[0][0] if self.chunks else None

    @property
    def itl_s(self) -> list[float]:
        """Gaps between consecutive tokens; the gap before a chunk is divided among its tokens."""
        num_tokens = self.num_tokens - (self.finish_reason == "stop")  # without the end token
        counts = tokens_by_chunk([num_chars for _, num_chars in self.chunks], num_tokens)
        gaps = [after - before for (before, _), (after, _) in pairwise(self.chunks)]
        return [
            gap / count for gap, count in zip(gaps, counts[1:], strict=True) for _ in range(count)
        ]


def tokens_by_chunk(num_chars: list[int], num_tokens: int) -> list[int]:
    """Estimated tokens of each chunk: one, and a share of the remaining tokens in proportion to its length."""
    counts: list[int] = []
    num_more, total = max(0, num_tokens - len(num_chars)), sum(num_chars)
    given = seen = 0
    for length in num_chars:
        seen += length
        due = round(num_more * seen / total)
        counts.append(1 + due - given)
        given = due
    return counts


class ChatClient:
    """One keep-alive connection to one server."""

    def __init__(self, url: str, api_key: str = "", timeout_s: float = 60.0) -> None:
        address = urlsplit(url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ValueError(f"not an http URL: {url!r}")
        connect = HTTPSConnection if address.scheme == "https" else HTTPConnection
        self._connection = connect(address.hostname, address.port, timeout=timeout_s)
        self._prefix = address.path.rstrip("/").removesuffix("/v1")
        self._used_at = 0.0
        self._headers = {"content-type": "application/json", TIMINGS_HEADER: "true"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. The next request opens another one."""
        self._connection.close()

    def models(self) -> list[str]:
        """The chat models, without models that have no worker. Raises: AnswerError."""
        with _faults_end_the_connection(self._connection):
            self._request("GET", "/v1/models")
            models = _read_json(self._connection.getresponse())["data"]
        return [
            model["id"]
            for model in models
            if "generate" in model.get("tasks", ("generate",)) and model.get("num_workers", 1)
        ]

    def ask(self, body: dict[str, Any]) -> Answer:
        """Send one request and read its whole answer. Raises: AnswerError."""
        data = json.dumps(body).encode()
        with _faults_end_the_connection(self._connection):
            sent_at = time.perf_counter()
            self._request("POST", PATH, data)
            response = self._connection.getresponse()
            if body.get("stream"):
                answer = _read_stream(response, sent_at)
            else:
                answer = _to_answer(_read_json(response), sent_at)
            self._used_at, answer.sent_at = time.perf_counter(), sent_at
            return answer

    def _request(self, method: str, path: str, data: bytes | None = None) -> None:
        if time.perf_counter() - self._used_at > MAX_IDLE_S:
            self._connection.close()
        self._connection.request(method, self._prefix + path, data, self._headers)


@contextmanager
def _faults_end_the_connection(connection: HTTPConnection) -> Iterator[None]:
    """Convert errors of connection or format to AnswerError, and close the connection."""
    try:
        yield
    except AnswerError:
        connection.close()
        raise
    except (OSError, HTTPException) as error:
        connection.close()
        raise AnswerError(f"connection: {type(error).__name__}") from error
    except (LookupError, TypeError, ValueError) as error:
        connection.close()
        raise AnswerError(f"malformed answer: {type(error).__name__}: {error}") from error


def _read_json(response: HTTPResponse) -> dict[str, Any]:
    content = response.read()
    if response.status != HTTPStatus.OK:
        raise AnswerError(f"status {response.status}: {_error_code(content)}")
    return json.loads(content)


def _error_code(content: bytes) -> str:
    """The machine-readable part of an error body, so that equal faults are counted together."""
    try:
        error = json.loads(content)["error"]
        return str(error["code"] or error["type"])
    except (ValueError, KeyError, TypeError):
        return "not an OpenAI error"


def _to_answer(completion: dict[str, Any], sent_at: float) -> Answer:
    e2e_s = time.perf_counter() - sent_at
    [choice] = completion["choices"]
    text, reason = choice["message"]["content"], choice["finish_reason"]
    if not text or not reason:
        raise AnswerError("the answer lacks text or finish_reason")
    stages_s = _stages(completion.get("timings"))
    return Answer(e2e_s, text, reason, completion["usage"], stages_s=stages_s)


def _stages(timings: dict[str, float] | None) -> dict[str, float]:
    """The stages that the server reported, by name, in order."""
    entries = {name.removesuffix("_s"): seconds for name, seconds in (timings or {}).items()}
    entries.pop("e2e", None)
    return entries


def _read_stream(response: HTTPResponse, sent_at: float) -> Answer:
    if response.status != HTTPStatus.OK:
        _read_json(response)
    pieces: list[str] = []
    chunks: list[tuple[float, int]] = []
    reason, usage, timings, is_done, ended_at = "", {}, None, False, sent_at
    for ended_at, data in read_events(response):
        if is_done:
            raise AnswerError("the stream continues after [DONE]")
        if data == b"[DONE]":
            is_done = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise AnswerError(f"in the stream: {chunk['error']['code']}")
        usage = chunk.get("usage") or usage
        timings = chunk.get("timings") or timings
        for choice in chunk["choices"]:
            reason = choice["finish_reason"] or reason
            if choice["delta"].get("content"):
                pieces.append(choice["delta"]["content"])
                chunks.append((ended_at - sent_at, len(pieces[-1])))
    if not is_done:
        raise AnswerError("the stream ended without [DONE]")
    if not pieces or not reason or not usage:
        raise AnswerError("the stream lacks text, finish_reason or usage")
    e2e_s = ended_at - sent_at
    return Answer(e2e_s, "".join(pieces), reason, usage, chunks, _stages(timings))


def read_events(response: HTTPResponse) -> Iterator[tuple[float, bytes]]:
    """The arrival time (`time.perf_counter`) and the data of each server-sent event."""
    pending = b""
    while block := response.read1():
        arrived_at = time.perf_counter()
        *frames, pending = (pending + block).split(b"\n\n")
        for frame in frames:
            for line in frame.split(b"\n"):
                if line.startswith(b"data: "):
                    yield arrived_at, line.removeprefix(b"data: ")
