"""P6 with ten times the load that the fleet can serve: accepted requests are as fast as ever, others refused at once.

The long form (`make faults`) lasts a minute. The mock engine computes nothing, so its speed is the same everywhere.
"""

import asyncio
import json
import random
import time
from dataclasses import dataclass

import httpx
import pytest

from tests.faults.clients import body_of
from tests.faults.fleet import run_fleet
from tests.long import IS_LONG

NUM_SEATS = 4
NUM_TOKENS = 10  #: at 20 ms each; the fleet serves almost 20 requests per second
MAX_WAITING = 20  #: requests of about one second
OVERLOAD_S = 60.0 if IS_LONG else 2.0
AFTER_S = 15.0 if IS_LONG else 1.5

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True, slots=True)
class Shot:
    """One request: when it was sent (`time.monotonic`), its status, and its duration."""

    sent_at: float
    status: int
    seconds: float
    may_retry: bool  #: the response has `retry-after`


class LoadClient:
    """Sends one request repeatedly over persistent connections, with little CPU time of its own."""

    def __init__(self, url: str) -> None:
        self._address = (httpx.URL(url).host, httpx.URL(url).port)
        plain = {"stream": False, "logprobs": False}
        body = json.dumps({**body_of("one of many", NUM_TOKENS), **plain}).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode() + body
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def shoot(self, shots: list[Shot]) -> None:
        """Sends one request and reads the response."""
        sent_at = time.monotonic()
        reader, writer = (
            self._idle.pop() if self._idle else await asyncio.open_connection(*self._address)
        )
        writer.write(self._request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
        seconds = time.monotonic() - sent_at
        shots.append(Shot(sent_at, int(head.split()[1]), seconds, b"\r\nretry-after: " in head))
        self._idle.append((reader, writer))

    async def closed(self, num_at_a_time: int, for_s: float) -> list[Shot]:
        """Keeps this many requests open, to measure the capacity of the fleet."""
        shots, until = list[Shot](), time.monotonic() + for_s

        async def shoot_on() -> None:
            while time.monotonic() < until:
                await self.shoot(shots)

        await asyncio.gather(*(shoot_on() for _ in range(num_at_a_time)))
        return shots

    async def open(self, tasks: asyncio.TaskGroup, per_second: float, for_s: float) -> list[Shot]:
        """Sends this many requests per second at random times. Returns before the last responses have arrived."""
        shots, began_at, dice = list[Shot](), time.monotonic(), random.Random(0)
        due_at = began_at
        while due_at < began_at + for_s:
            await asyncio.sleep(max(0.0, due_at - time.monotonic()))
            tasks.create_task(self.shoot(shots))
            due_at += dice.expovariate(per_second)
        return shots

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
            await writer.wait_closed()


def seconds_of(shots: list[Shot], status: int) -> list[float]:
    """Returns the sorted durations of requests with this status."""
    return sorted(shot.seconds for shot in shots if shot.status == status)


def goodput_of(shots: list[Shot], since: float = 0.0, until: float = float("inf")) -> float:
    """Returns successful responses per second in a period. They arrive in groups of `NUM_SEATS`."""
    all_ends = (shot.sent_at + shot.seconds for shot in shots if shot.status == 200)
    ends = sorted(end for end in all_ends if since <= end < until)
    return (len(ends) - NUM_SEATS) / (ends[-1] - ends[NUM_SEATS - 1])


def quantile(values: list[float], ratio: float) -> float:
    """`values` must be sorted."""
    return values[min(len(values) - 1, int(ratio * len(values)))]


async def test_ten_times_overload(tmp_path):
    async with run_fleet(tmp_path, VLM_LIMITS__MAX_QUEUE_DEPTH=str(MAX_WAITING)) as fleet:
        await fleet.worker(VLM_ENGINE__MAX_NUM_SEQS=str(NUM_SEATS))
        await overload(LoadClient(fleet.url))
        await fleet.at_rest()


async def overload(client: LoadClient) -> None:
    """Overloads the fleet, and compares it with itself at a load that it can serve."""
    alone = await client.closed(1, 1.0 if IS_LONG else 0.3)
    usual = quantile(seconds_of(alone, 200), 0.5)
    capacity = goodput_of(await client.closed(2 * NUM_SEATS, 5.0 if IS_LONG else 0.8))
    began_at = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        shots = await client.open(tasks, 10 * capacity, OVERLOAD_S)
        ended_at = time.monotonic()
        after = await client.open(tasks, capacity / 2, AFTER_S)
    await client.close()

    goodput = goodput_of(shots, began_at, ended_at)
    served, refused = seconds_of(shots, 200), seconds_of(shots, 503)
    back_after_s = max(
        (s.sent_at + s.seconds - ended_at for s in after if s.seconds > 2 * usual), default=0.0
    )
    print(
        f"capacity {capacity:.1f}/s, offered {len(shots) / OVERLOAD_S:.0f}/s, goodput {goodput / capacity:.0%}, "
        f"served in {quantile(served, 0.5):.2f} s (p50) {quantile(served, 0.99):.2f} s (p99), "
        f"{len(refused)} refused in {quantile(refused, 0.5) * 1e3:.0f} ms (p50) "
        f"{quantile(refused, 0.99) * 1e3:.0f} ms (p99) {refused[-1] * 1e3:.0f} ms (most), "
        f"usual {usual:.2f} s again after {back_after_s:.1f} s"
    )
    assert {shot.status for shot in (*shots, *after)} <= {200, 503}
    assert all(shot.may_retry for shot in shots if shot.status == 503)
    # Measured one after another: other processes of the machine can affect each.
    assert goodput >= 0.8 * capacity
    assert quantile(refused, 0.5) < usual / 2
    assert quantile(refused, 0.99) < max(0.1, usual)
    assert quantile(served, 0.99) < usual + 2 * MAX_WAITING / capacity
    assert back_after_s < 10.0
