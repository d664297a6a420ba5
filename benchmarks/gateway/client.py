"""A closed-loop HTTP/1.1 client that costs little: so many connections, each with one request on the way.

The same for every target: a client that takes long itself would hide what it measures. Every answer is checked to be
complete; one that is not ends the job. It can do only what the benchmark needs: POST,
keep-alive, content-length or chunked.
"""

import asyncio
import base64
import json
import math
import re
import time
from dataclasses import dataclass, field
from typing import cast

from loadtest.albums import image_head
from loadtest.fleet import HOST

CHAT = "/v1/chat/completions"
GRACE_S = 60.0
END_OF_HEAD = b"\r\n\r\n"
END_OF_STREAM = b"data: [DONE]\n\n\r\n0\r\n\r\n"
CONTENT_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)\r\n")
CONTENT = re.compile(rb'"content": ?("(?:[^"\\]|\\.)*")')
FINISH_REASON = re.compile(rb'"finish_reason": ?"([a-z_]+)"')


@dataclass(frozen=True, slots=True)
class Job:
    """What to send, where, and for how long.

    `image_at` is where in the body an image's base64 begins, if each request shall show a new one;
    `expected_text` is the answer, if it is always the same.
    """

    port: int
    body: str
    num_connections: int
    seconds: float
    warmup_s: float = 0.2
    stream: bool = False
    image_at: int | None = None
    first_number: int = 0
    expected_text: str | None = None


@dataclass(slots=True)
class Result:
    """What came of it. `num_all` and `num_events` count the warm-up too, the rest does not."""

    num_requests: int = 0
    num_all: int = 0
    seconds: float = 0.0
    p50_s: float = 0.0
    p99_s: float = 0.0
    num_events: int = 0


@dataclass(slots=True)
class Load:
    """The state that all connections of one job share."""

    job: Job
    done: asyncio.Future[None]
    recording_at: float
    ending_at: float
    parts: tuple[bytes, bytes]
    number: int
    transports: list[asyncio.Transport] = field(default_factory=list)
    num_busy: int = 0
    num_all: int = 0
    num_events: int = 0
    latencies_s: list[float] = field(default_factory=list)

    def next_request(self) -> list[bytes]:
        """The bytes of the next request; a new image costs the encoding of its first bytes."""
        before, after = self.parts
        if self.job.image_at is None:
            return [before, after]
        self.number += 1
        return [before, base64.b64encode(image_head(self.number)), after]

    def record(self, sent_at: float, now: float, answer: bytes) -> None:
        """Count a complete answer, and the server-sent events that it came in."""
        self.num_all += 1
        self.num_events += answer.count(b"\ndata: ")
        if sent_at >= self.recording_at:
            self.latencies_s.append(now - sent_at)

    def retire(self, error: Exception | None = None) -> None:
        """A connection has no more to do; the last one, or a fault, ends the job."""
        self.num_busy -= 1
        if self.done.done():
            return
        if error is not None:
            self.done.set_exception(error)
        elif self.num_busy == 0:
            self.done.set_result(None)


class Connection(asyncio.Protocol):
    """One keep-alive connection: sends, reads the answer to its end, checks it, sends again."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._received = b""
        self._end = -1  # of the answer, once its length is known
        self._sent_at = 0.0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no such base class
        self._load.transports.append(self._transport)
        self._load.num_busy += 1
        self._send()

    def _send(self) -> None:
        self._received, self._end = b"", -1
        self._sent_at = time.perf_counter()
        self._transport.writelines(self._load.next_request())

    def data_received(self, data: bytes) -> None:
        """Gather the answer; when it is complete, go on or end."""
        self._received += data
        if not self._is_complete():
            return
        now = time.perf_counter()
        fault = check_answer(self._received, self._load.job)
        if fault:
            self._load.retire(ValueError(fault))
            return
        self._load.record(self._sent_at, now, self._received)
        if now < self._load.ending_at:
            self._send()
        else:
            self._load.retire()

    def _is_complete(self) -> bool:
        if self._load.job.stream and self._received.startswith(b"HTTP/1.1 200"):
            return self._received.endswith(b"\r\n0\r\n\r\n")
        if self._end < 0:
            head = self._received.find(END_OF_HEAD)
            length = CONTENT_LENGTH.search(self._received) if head >= 0 else None
            if length is None:
                return False
            self._end = head + len(END_OF_HEAD) + int(length[1])
        return len(self._received) >= self._end

    def connection_lost(self, exc: Exception | None) -> None:
        """The server ended a connection that still waited for its answer."""
        if not self._load.done.done() and not self._is_complete():
            self._load.retire(ConnectionError("the server closed the connection"))


def check_answer(answer: bytes, job: Job) -> str:
    """What is wrong with the answer; empty: nothing."""
    head, _, body = answer.partition(END_OF_HEAD)
    if not head.startswith(b"HTTP/1.1 200"):
        return f"{head[:30].decode(errors='replace')}: {body[:200].decode(errors='replace')}"
    if job.stream and not body.endswith(END_OF_STREAM):
        return "the stream has no [DONE]"
    if FINISH_REASON.findall(body) != [b"length"]:
        return "the answer is not as long as was asked for"
    text = "".join(map(json.loads, CONTENT.findall(body)))
    if not text or job.expected_text not in (None, text):
        return "the text is not the expected one"
    return ""


async def run_job(job: Job) -> Result:
    """Keep the target busy for the time that the job names. Raises: OSError, ValueError for a wrong answer."""
    now = time.perf_counter()
    loop = asyncio.get_running_loop()
    recording_at = now + job.warmup_s
    load = Load(
        job,
        loop.create_future(),
        recording_at,
        recording_at + job.seconds,
        to_parts(job),
        job.first_number,
    )
    try:
        async with asyncio.timeout(job.warmup_s + job.seconds + GRACE_S):
            for _ in range(job.num_connections):
                await loop.create_connection(lambda: Connection(load), HOST, job.port)
            await load.done
    finally:
        for transport in load.transports:
            transport.abort()
    took_s = time.perf_counter() - recording_at
    found_s = sorted(load.latencies_s) or [math.nan]
    p50_s, p99_s = (found_s[math.ceil(share * len(found_s)) - 1] for share in (0.5, 0.99))
    return Result(len(load.latencies_s), load.num_all, took_s, p50_s, p99_s, load.num_events)


def to_parts(job: Job) -> tuple[bytes, bytes]:
    """The request's bytes before and after the part that changes."""
    body = job.body.encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: {HOST}:{job.port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode()
    if job.image_at is None:
        return head, body
    after = job.image_at + len(base64.b64encode(image_head(0)))
    return head + body[: job.image_at], body[after:]
