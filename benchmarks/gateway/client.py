"""A fast closed-loop HTTP/1.1 client: a number of connections, each with one open request.

One client measures all targets, and a slow client would hide their differences. Every answer is checked, and an
incomplete answer ends the job.
"""

import asyncio
import base64
import json
import math
import re
import time
from dataclasses import dataclass, field
from itertools import count

from loadtest.albums import image_head
from loadtest.fleet import HOST

CHAT = "/v1/chat/completions"
GRACE_S = 60.0
MAX_PART_BYTES = 2**20  #: limit of an answer's head, or of a whole stream
END_OF_HEAD = b"\r\n\r\n"
END_OF_CHUNKS = b"\r\n0\r\n\r\n"
CONTENT_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)\r\n")
CONTENT = re.compile(rb'"content": ?("(?:[^"\\]|\\.)*")')
FINISH_REASON = re.compile(rb'"finish_reason": ?"([a-z_]+)"')
IMAGE_NUMBERS = count(1)


class BenchError(Exception):
    """An answer was wrong or missing, so the measurement is invalid."""


@dataclass(frozen=True, slots=True)
class Job:
    """The requests of one measurement, their target and their duration.

    `has_new_images`: each request has a new image: that of `body` with another number in its JPEG comment.
    `expected_text`: the answer, if it is always the same.
    """

    port: int
    body: str
    num_connections: int
    seconds: float
    warmup_s: float = 0.2
    stream: bool = False
    has_new_images: bool = False
    expected_text: str | None = None


@dataclass(slots=True)
class Result:
    """Complete answers of a job. Only `latencies_s` excludes the warm-up. `cpu_s`: by process of the target."""

    latencies_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    num_all: int = 0
    num_events: int = 0
    cpu_s: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.latencies_s) / self.seconds

    def latency_s(self, share: float) -> float:
        """The latency that a `share` of the requests did not exceed."""
        return sorted(self.latencies_s)[math.ceil(share * len(self.latencies_s)) - 1]


async def run_job(job: Job) -> Result:
    """Send requests for the duration of the job. Raises: OSError, BenchError."""
    recording_at = time.perf_counter() + job.warmup_s
    result = Result()
    async with asyncio.timeout(job.warmup_s + job.seconds + GRACE_S):
        connections = (_converse(job, recording_at, result) for _ in range(job.num_connections))
        await asyncio.gather(*connections)
    result.seconds = time.perf_counter() - recording_at
    return result


async def _converse(job: Job, recording_at: float, result: Result) -> None:
    """Send requests over one connection, one after the other, until the time is over and there is a result."""
    before, after = to_parts(job)
    reader, writer = await asyncio.open_connection(HOST, job.port, limit=MAX_PART_BYTES)
    try:
        until = recording_at + job.seconds
        while (sent_at := time.perf_counter()) < until or not result.latencies_s:
            head = image_head(next(IMAGE_NUMBERS)) if job.has_new_images else b""
            writer.writelines([before, base64.b64encode(head), after])
            answer = await _read_answer(reader)
            now = time.perf_counter()
            check_answer(answer, job)
            result.num_all += 1
            result.num_events += answer.count(b"\ndata: ")
            if now >= recording_at:
                result.latencies_s.append(now - sent_at)
    except EOFError:
        raise ConnectionError("the server closed the connection") from None
    finally:
        writer.close()


def to_parts(job: Job) -> tuple[bytes, bytes]:
    """The request's bytes before and after its changing number."""
    body = job.body.encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: {HOST}:{job.port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode()
    if not job.has_new_images:
        return head, body
    before, _, after = body.partition(base64.b64encode(image_head(0)))
    return head + before, after


async def _read_answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(END_OF_HEAD)
    if length := CONTENT_LENGTH.search(head):
        return head + await reader.readexactly(int(length[1]))
    return head + await reader.readuntil(END_OF_CHUNKS)


def check_answer(answer: bytes, job: Job) -> None:
    """Raises: BenchError for an answer that is not complete."""
    head, _, body = answer.partition(END_OF_HEAD)
    if not head.startswith(b"HTTP/1.1 200"):
        raise BenchError(f"{head[:30]!r}: {body[:200]!r}")
    if job.stream and not body.endswith(b"data: [DONE]\n\n" + END_OF_CHUNKS):
        raise BenchError("the stream has no [DONE]")
    if FINISH_REASON.findall(body) != [b"length"]:
        raise BenchError("the answer does not have the requested length")
    text = "".join(map(json.loads, CONTENT.findall(body)))
    if not text or job.expected_text not in (None, text):
        raise BenchError("the text differs from the expected text")
