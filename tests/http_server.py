"""HTTP servers of the standard library on loopback, for simulated services."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Sends complete bodies and logs nothing."""

    disable_nagle_algorithm = True

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["content-length"]))

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # clients connect concurrently


@contextmanager
def serve_http(handler: type[Handler], port: int = 0, **attributes: Any) -> Iterator[str]:
    """Runs a server; yields its URL. Port 0 selects a free one. `attributes`: of its handlers."""
    server = _Server(("127.0.0.1", port), type("Handler", (handler,), attributes))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
