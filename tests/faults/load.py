"""Load for a fleet under test: clients that cost little, so that what is measured is the fleet.

Two kinds: as many at a time (closed), which finds out what the fleet can do, and so many a second whatever comes of
them (open), which is how strangers come.
"""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.faults.processes import MODEL

STATUS_LINE = b"HTTP/1.1 "


@dataclass(frozen=True, slots=True)
class Shot:
    """One request: when it was sent (`time.monotonic`), what it got, how long that took."""

    sent_at: float
    status: int
    seconds: float
    may_retry: bool  #: the answer says when to come back


@dataclass(slots=True)
class Shots:
    """What came of many."""

    all: list[Shot] = field(default_factory=list)

    def seconds(self, status: int) -> list[float]:
        """How long those with this status took, in order."""
        return sorted(shot.seconds for shot in self.all if shot.status == status)

    def rate(self, status: int, since: float, until: float, group: int) -> float:
        """Answers a second with this status within a time. They come in groups: from one's end to another's."""
        all_ends = (shot.sent_at + shot.seconds for shot in self.all if shot.status == status)
        ends = sorted(end for end in all_ends if since <= end < until)
        return (len(ends) - group) / (ends[-1] - ends[group - 1])


def quantile(values: list[float], ratio: float) -> float:
    """Of sorted values."""
    return values[min(len(values) - 1, int(ratio * len(values)))]


class LoadClient:
    """Sends one request again and again over connections that are kept."""

    def __init__(self, url: str, num_tokens: int) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._address = (parts.hostname, parts.port)
        body = json.dumps({
            "model": MODEL, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0,
            "messages": [{"role": "user", "content": "one of many"}],
        }).encode()  # fmt: skip
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._request = head.encode() + body
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def shoot(self, shots: Shots) -> None:
        """One request and its answer."""
        sent_at = time.monotonic()
        reader, writer = (
            self._idle.pop() if self._idle else await asyncio.open_connection(*self._address)
        )
        writer.write(self._request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
        seconds = time.monotonic() - sent_at
        status = int(head[len(STATUS_LINE) :][:3])
        shots.all.append(Shot(sent_at, status, seconds, b"\r\nretry-after: " in head))
        self._idle.append((reader, writer))

    async def closed(self, num_at_a_time: int, for_s: float) -> Shots:
        """So many at a time."""
        shots, until = Shots(), time.monotonic() + for_s

        async def shoot_on() -> None:
            while time.monotonic() < until:
                await self.shoot(shots)

        await asyncio.gather(*(shoot_on() for _ in range(num_at_a_time)))
        return shots

    async def open(self, per_second: float, for_s: float) -> Shots:
        """So many a second, at random moments; the answers of the last ones may come after the return."""
        shots, began_at, dice = Shots(), time.monotonic(), random.Random(0)
        due_at = began_at
        while due_at < began_at + for_s:
            await asyncio.sleep(max(0.0, due_at - time.monotonic()))
            task = asyncio.create_task(self.shoot(shots))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            due_at += dice.expovariate(per_second)
        return shots

    async def wait(self) -> None:
        """Until every answer is there. Raises: what went wrong with one."""
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """Hang up."""
        for _, writer in self._idle:
            writer.close()
            await writer.wait_closed()
