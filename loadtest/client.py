"""One chat request over HTTP, timed as its client feels it.

Called by the Locust users. It knows the OpenAI wire format and nothing of the server behind it. Plain
`http.client`: blocking where the caller blocks, cooperative under gevent, and nothing between the socket
and the clock, so that an arrival is stamped when the bytes arrive.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

PATH = "/v1/chat/completions"


class AnswerError(Exception):
    """The request was not answered completely; the message says what was wrong, without the answer."""


@dataclass(slots=True)
class Answer:
    """A complete answer and when its parts arrived.

    Units: seconds since the request was sent; `text_at` has one entry per chunk with text.
    """

    e2e_s: float
    text: str
    finish_reason: str
    usage: dict[str, Any]
    text_at: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Output tokens, as the server counts them."""
        return self.usage["completion_tokens"]

    @property
    def ttft_s(self) -> float | None:
        """Until the first text; a chunk that only names the role does not count. None: not streamed."""
        return self.text_at[0] if self.text_at else None

    @property
    def itl_s(self) -> list[float]:
        """Gaps between consecutive tokens.

        When chunks carried several tokens each, which gap held how many is unknown; the gaps are then
        shared out evenly, so that their sum and number stay true.
        """
        gaps = [
            after - before for before, after in zip(self.text_at, self.text_at[1:], strict=False)
        ]
        if not gaps or self.num_tokens <= len(self.text_at):
            return gaps
        num_gaps = self.num_tokens - 1
        return [sum(gaps) / num_gaps] * num_gaps


class ChatClient:
    """One keep-alive connection to one server."""

    def __init__(self, url: str, api_key: str = "", timeout_s: float = 60.0) -> None:
        address = urlsplit(url)
        if address.scheme != "http" or not address.hostname:
            raise ValueError(f"not an http URL: {url!r}")
        self._connection = HTTPConnection(address.hostname, address.port or 80, timeout=timeout_s)
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        self._connection.close()

    def models(self) -> list[str]:
        """The models on offer. Raises: AnswerError."""
        with _faults_end_the_connection(self._connection):
            self._connection.request("GET", "/v1/models", headers=self._headers)
            return [model["id"] for model in _read_json(self._connection.getresponse())["data"]]

    def ask(self, body: dict[str, Any]) -> Answer:
        """Send one request and read its whole answer. Raises: AnswerError."""
        data = json.dumps(body).encode()
        with _faults_end_the_connection(self._connection):
            sent_at = time.perf_counter()
            self._connection.request("POST", PATH, data, self._headers)
            response = self._connection.getresponse()
            if body.get("stream"):
                return _read_stream(response, sent_at)
            return _to_answer(_read_json(response), time.perf_counter() - sent_at)


@contextmanager
def _faults_end_the_connection(connection: HTTPConnection) -> Iterator[None]:
    """Turn every fault of connection or format into AnswerError; the next request starts afresh."""
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


def _to_answer(completion: dict[str, Any], e2e_s: float) -> Answer:
    [choice] = completion["choices"]
    text, reason = choice["message"]["content"], choice["finish_reason"]
    if not text or not reason:
        raise AnswerError("the answer has no text or no end")
    return Answer(e2e_s, text, reason, completion["usage"])


def _read_stream(response: HTTPResponse, sent_at: float) -> Answer:
    if response.status != HTTPStatus.OK:
        _read_json(response)
    pieces: list[str] = []
    text_at: list[float] = []
    reason, usage, is_done, ended_at = "", {}, False, sent_at
    for ended_at, data in read_events(response):
        if is_done:
            raise AnswerError("the stream goes on after [DONE]")
        if data == b"[DONE]":
            is_done = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise AnswerError(f"in the stream: {chunk['error']['code']}")
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            reason = choice["finish_reason"] or reason
            if choice["delta"].get("content"):
                pieces.append(choice["delta"]["content"])
                text_at.append(ended_at - sent_at)
    if not is_done:
        raise AnswerError("the stream ended without [DONE]")
    if not pieces or not reason or not usage:
        raise AnswerError("the stream lacks text, an end or its usage")
    return Answer(ended_at - sent_at, "".join(pieces), reason, usage, text_at)


def read_events(response: HTTPResponse) -> Iterator[tuple[float, bytes]]:
    """Each server-sent event's data with its arrival; comments and other fields are skipped.

    Units: arrivals in seconds of `time.perf_counter`. Events that came in one read share one arrival.
    """
    pending = b""
    while block := response.read1():
        arrived_at = time.perf_counter()
        *frames, pending = (pending + block).split(b"\n\n")
        for frame in frames:
            for line in frame.split(b"\n"):
                if line.startswith(b"data: "):
                    yield arrived_at, line.removeprefix(b"data: ")
