"""A scripted OpenAI server: the bytes that it sends, their times, and the requests that it received."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.http_server import Handler, serve_http

WORDS = ["one ", "two ", "three "]


class FakeServer:
    """Answers every chat request by its script; records the bodies and the times of the pieces."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.connections: set[tuple[str, int]] = set()
        self.status = 200
        self.pause_s = 0.0  #: before an answer
        #: Pieces of a stream: bytes to send, or seconds to wait.
        self.pieces: list[bytes | float] | None = None
        self.completion: Any = completion()
        self.models: list[dict[str, Any]] = [{"id": "fake"}]
        self.sent_at: list[float] = []


def completion(**changes: Any) -> dict[str, Any]:
    """Returns a complete answer."""
    message = {"role": "assistant", "content": "".join(WORDS)}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    usage = {"prompt_tokens": 5, "completion_tokens": len(WORDS), "total_tokens": 8}
    return {"id": "chatcmpl-1", "choices": [choice], "usage": usage, **changes}


def event(data: Any) -> bytes:
    """Returns one server-sent event."""
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def chunk(content: str | None = None, finish_reason: str | None = None, **fields: Any) -> bytes:
    """Returns one chunk of a streamed answer."""
    delta = {} if content is None else {"content": content}
    choices = [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
    return event({"choices": choices, "usage": None, **fields})


def stream(pause_s: float = 0.0) -> list[bytes | float]:
    """Returns a complete streamed answer, with a pause before each word."""
    words = [piece for word in WORDS for piece in (pause_s, chunk(word))]
    usage = {"prompt_tokens": 5, "completion_tokens": len(WORDS)}
    end = [chunk(finish_reason="length"), chunk(choices=[], usage=usage), event(b"[DONE]")]
    return [chunk(""), *words, *end]


@contextmanager
def run_fake_server() -> Iterator[FakeServer]:
    """Runs a server on a free port."""
    fake = FakeServer()
    with serve_http(_Handler, fake=fake) as fake.url:
        yield fake


class _Handler(Handler):
    protocol_version = "HTTP/1.1"
    fake: FakeServer

    def do_GET(self) -> None:
        self.fake.paths.append(self.path)
        self._send_json(self.fake.status, {"data": self.fake.models})

    def handle(self) -> None:
        with suppress(ConnectionError):  # a client can disconnect at any time
            super().handle()

    def do_POST(self) -> None:
        body = json.loads(self.body())
        self.fake.bodies.append(body)
        self.fake.paths.append(self.path)
        self.fake.connections.add(self.client_address)
        time.sleep(self.fake.pause_s)  # time to first token, which the client must measure
        if body.get("stream") and self.fake.status == 200:
            self._send_stream(stream() if self.fake.pieces is None else self.fake.pieces)
        else:
            self._send_json(self.fake.status, self.fake.completion)

    def _send_json(self, status: int, value: Any) -> None:
        self.answer(status, json.dumps(value).encode())

    def _send_stream(self, pieces: list[bytes | float]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for piece in pieces:
            if isinstance(piece, float):
                time.sleep(piece)
                continue
            self.fake.sent_at.append(time.perf_counter())
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")
