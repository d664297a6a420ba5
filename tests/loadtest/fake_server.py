"""An OpenAI server made of a script: which bytes to send, when, and what it was asked."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = ["one ", "two ", "three "]


class FakeServer:
    """Answers every chat request by its script; keeps the bodies, and when it sent each piece."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.connections: set[tuple[str, int]] = set()
        self.status = 200
        self.pause_s = 0.0  #: before an answer
        #: Of a stream: bytes to send, seconds to wait.
        self.pieces: list[bytes | float] | None = None
        self.completion: Any = completion()
        self.models: list[dict[str, Any]] = [{"id": "fake"}]
        self.sent_at: list[float] = []


def completion(**changes: Any) -> dict[str, Any]:
    """A whole answer."""
    message = {"role": "assistant", "content": "".join(WORDS)}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    usage = {"prompt_tokens": 5, "completion_tokens": len(WORDS), "total_tokens": 8}
    return {"id": "chatcmpl-1", "choices": [choice], "usage": usage, **changes}


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def chunk(content: str | None = None, finish_reason: str | None = None, **fields: Any) -> bytes:
    """One chunk of a streamed answer."""
    delta = {} if content is None else {"content": content}
    choices = [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
    return event({"choices": choices, "usage": None, **fields})


def stream(pause_s: float = 0.0) -> list[bytes | float]:
    """A whole streamed answer, a pause before each word."""
    words = [piece for word in WORDS for piece in (pause_s, chunk(word))]
    usage = {"prompt_tokens": 5, "completion_tokens": len(WORDS)}
    end = [chunk(finish_reason="length"), chunk(choices=[], usage=usage), event(b"[DONE]")]
    return [chunk(""), *words, *end]


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # users come all at once


@contextmanager
def run_fake_server(port: int = 0) -> Iterator[FakeServer]:
    """Serve on a port, 0: a free one, until the end."""
    with _Server(("127.0.0.1", port), _Handler) as httpd:
        httpd.fake = FakeServer(httpd.server_port)  # type: ignore[attr-defined]
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield httpd.fake  # type: ignore[attr-defined]
        finally:
            httpd.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    @property
    def fake(self) -> FakeServer:
        return self.server.fake  # type: ignore[attr-defined]

    def do_GET(self) -> None:
        self.fake.paths.append(self.path)
        self._send_json(self.fake.status, {"data": self.fake.models})

    def handle(self) -> None:
        with suppress(ConnectionError):  # a client may leave whenever it likes
            super().handle()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.fake.bodies.append(body)
        self.fake.paths.append(self.path)
        self.fake.connections.add(self.client_address)
        time.sleep(self.fake.pause_s)  # the fake model's thinking, which the client has to notice
        if body.get("stream") and self.fake.status == 200:
            self._send_stream(stream() if self.fake.pieces is None else self.fake.pieces)
        else:
            self._send_json(self.fake.status, self.fake.completion)

    def _send_json(self, status: int, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

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

    def log_message(self, *_: Any) -> None:
        pass
