"""Streams of a server with keep-alive connections, in chunks of any size."""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field

from engines.upstream.client import StreamEvent, UpstreamClient

HEAD = b"HTTP/1.1 200 x\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Server:
    """Sends the next of `answers` per request; None closes the connection in the middle of a chunk."""

    answers: list[list[bytes | None]]
    #: Sent after each response before the connection is closed; empty: the connection stays open.
    after: bytes = b""
    heads: list[bytes] = field(default_factory=list)
    num_connections: int = 0

    def serve(self, listener: socket.socket) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                connection, _ = listener.accept()
                self.num_connections += 1
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as received:
            while self._read(received) and self._answer(connection):
                pass

    def _read(self, received) -> bool:
        head = b"".join(iter(received.readline, b"\r\n")) if received.peek() else b""
        self.heads.append(head)
        received.read(int((re.findall(rb"(?i)content-length: *(\d+)", head) or [0])[0]))
        return bool(head)

    def _answer(self, connection: socket.socket) -> bool:
        if self.heads[-1].startswith(b"GET"):
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return True
        connection.sendall(HEAD)
        for piece in self.answers.pop(0):
            if piece is None:
                connection.sendall(b"40\r\ndata: cut")
                return False
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        connection.sendall(b"0\r\n\r\n" + self.after)
        return not self.after


@contextmanager
def connected(server: Server) -> Iterator[UpstreamClient]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=server.serve, args=(listener,), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with closing(UpstreamClient(url, "key", 4, 60.0, "/health")) as client:
            yield client


def ask(client: UpstreamClient, stream_id: str) -> list[StreamEvent]:
    """Returns all events of a stream, including the one that ended it early."""
    client.start(stream_id, "/generate", b"{}")
    events: list[StreamEvent] = []
    while not events or events[-1].kind == "data":
        events += client.receive(0.05)
    return events


def test_events_are_complete_in_any_chunks_and_connections_are_reused():
    pieces: list[bytes | None] = [b"data: one\n\nda", b"ta: t", b"wo\n\ndata:three\n\n: note\n"]
    server = Server([pieces, [b"\xef\xbb\xbfdata: four\r\n\r\n"]])
    with connected(server) as client:
        *first, _ = ask(client, "a")
        *second, _ = ask(client, "b")
    assert [event.data for event in first] == [b"one", b"two", b"three"]
    assert [(event.stream_id, event.data) for event in second] == [("b", b"four")]
    asked = [head for head in server.heads if head.startswith(b"POST /generate HTTP/1.1")]
    assert all(b"Bearer key" in head for head in asked)
    assert len(asked) == 2
    assert server.num_connections == 2  # one for streams, one for health checks


def test_a_truncated_response_is_reported_and_the_health_checked():
    server = Server([[b"data: one\n\n", None], [b"data: two\n\n"]])
    with connected(server) as client:
        first = ask(client, "a")
        second = ask(client, "b")
    assert [event.kind for event in first] == ["data", "broken"]
    assert [event.data for event in second[:-1]] == [b"two"]


def test_a_closed_or_misused_connection_is_not_reused():
    forged = b"HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\ndata: forged"
    server = Server([[b"data: one\n\n"], [b"data: two\n\n"]], after=forged)
    with connected(server) as client:
        found = [event.data for name in "ab" for event in ask(client, name)[:-1]]
    assert found == [b"one", b"two"]
