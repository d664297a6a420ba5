"""What waiting costs: a request's commands on a Redis where many wait already, and memory of open streams.

The first drives both ends of the queue without HTTP, in this process; the second a fleet whose engine is slow.
"""

import asyncio
import json
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from statistics import median

import uvloop
from redis.asyncio import Redis
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.gateway.client import END_OF_HEAD
from benchmarks.gateway.run import HOST, BenchError, Target, run_vlm_fleet
from benchmarks.gateway.tables import in_figures, new_table
from shared.protocol import (
    Call,
    ChatMessage,
    Finished,
    FinishReason,
    Generate,
    SamplingParams,
    TextPart,
    Tokens,
    Usage,
    encode_events,
    seal,
)
from shared.queue.api import Limits, Publication, Reservation
from shared.queue.claims import RedisWorkerQueue
from shared.queue.submit import RedisGatewayQueue
from shared.redis.client import create_redis
from shared.redis.embedded import EmbeddedRedis
from shared.settings.tree import RedisSettings

GATEWAY = "bench"
TIMEOUT_S = 3600.0
SUBMITTED_AT_ONCE = 500
NUM_OUTPUT_TOKENS = 16
OPENED_AT_ONCE = 500
OPEN_WITHIN_S = 60.0
STEP_S = 2.0  #: of an engine whose answers do not end before the last stream is open
LONG_ANSWER = 1000  #: tokens
#: Descriptors of a process beside one for each stream.
SPARE_FILES = 100


@dataclass(frozen=True, slots=True)
class DepthCost:
    """A request at one depth: submitted, claimed, answered and ended."""

    depth: int
    redis_us: float  #: CPU of Redis
    took_us: float  #: from `submit` to the end, at the median


async def measure_depths(depths: Sequence[int], num_requests: int, rounds: int) -> list[DepthCost]:
    """The cost of a request at each depth: of a queue of its own in one Redis, `num_requests` in turn a round."""
    with (
        tempfile.TemporaryDirectory(prefix="vlm-bench-") as folder,
        EmbeddedRedis(Path(folder), 4 << 30) as server,
    ):
        settings = RedisSettings(url=server.url)
        redis, reading = create_redis(settings), create_redis(settings, blocking=True)
        gateway = RedisGatewayQueue(redis, "bench")
        workers = {depth: _worker(redis, reading, depth) for depth in depths}
        try:
            for depth, worker in workers.items():
                await worker.create_group()
                await _fill(gateway, depth)
                await _one_by_one(gateway, worker, depth, num_requests // 10)
            return await _in_turns(redis, gateway, workers, num_requests, rounds)
        finally:
            for end in (gateway, *workers.values()):
                await end.close()
            await redis.aclose()
            await reading.aclose()


def _worker(redis: Redis, reading: Redis, depth: int) -> RedisWorkerQueue:
    return RedisWorkerQueue(
        redis,
        reading,
        keys_prefix="bench",
        model=str(depth),
        worker_id="bench",
        lease_s=TIMEOUT_S,
        max_attempts=3,
        batch_age_s=TIMEOUT_S,
    )


async def _fill(gateway: RedisGatewayQueue, depth: int) -> None:
    for first in range(0, depth, SUBMITTED_AT_ONCE):
        some = range(first, min(depth, first + SUBMITTED_AT_ONCE))
        await asyncio.gather(*(_submit(gateway, depth) for _ in some))


async def _in_turns(
    redis: Redis,
    gateway: RedisGatewayQueue,
    workers: Mapping[int, RedisWorkerQueue],
    num_requests: int,
    rounds: int,
) -> list[DepthCost]:
    used_s: dict[int, list[float]] = {depth: [] for depth in workers}
    took_s: dict[int, list[float]] = {depth: [] for depth in workers}
    screen = Console(stderr=True)
    for _ in track(range(rounds), "measuring", console=screen, transient=True):
        for depth, worker in workers.items():
            before = await _cpu_s(redis)
            took_s[depth] += await _one_by_one(gateway, worker, depth, num_requests)
            used_s[depth].append((await _cpu_s(redis) - before) / num_requests)
    return [DepthCost(d, 1e6 * median(used_s[d]), 1e6 * median(took_s[d])) for d in workers]


async def _one_by_one(
    gateway: RedisGatewayQueue, worker: RedisWorkerQueue, depth: int, number: int
) -> list[float]:
    """One request in at the end, and the oldest out: the depth stays. Seconds of each."""
    took_s = []
    for _ in range(number):
        began_at = time.perf_counter()
        await _submit(gateway, depth)
        [claim] = await worker.read(1, 1.0)
        tokens = Tokens(claim.id, claim.attempt, 0, tuple(range(NUM_OUTPUT_TOKENS)), "word " * 16)
        usage = Usage(num_prompt_tokens=16, num_output_tokens=NUM_OUTPUT_TOKENS)
        finished = Finished(claim.id, claim.attempt, FinishReason.LENGTH, usage)
        events = encode_events((tokens, finished))
        await worker.publish([Publication(claim, 1, 0, NUM_OUTPUT_TOKENS, events, "finished")])
        took_s.append(time.perf_counter() - began_at)
    return took_s


async def _submit(gateway: RedisGatewayQueue, depth: int) -> None:
    model, request_id = str(depth), token_hex(8)
    message = ChatMessage("user", (TextPart("Tell me about a lighthouse."),))
    task = Generate((message,), SamplingParams(max_tokens=NUM_OUTPUT_TOKENS))
    num_tokens, counted = 16 + NUM_OUTPUT_TOKENS, Limits(max_tokens=1 << 40)
    reservation = Reservation(
        model, "", (request_id,), num_tokens, NUM_OUTPUT_TOKENS, num_tokens, counted
    )
    await gateway.submit(
        [seal(Call(request_id, GATEWAY, model, task))],
        timeout_s=TIMEOUT_S,
        max_waiting=1 << 30,
        reservation=reservation,
    )


async def _cpu_s(redis: Redis) -> float:
    info = await redis.info("cpu")
    return info["used_cpu_user"] + info["used_cpu_sys"]


@dataclass(frozen=True, slots=True)
class StreamCost:
    """Memory that each of so many open streams takes, in bytes, by process."""

    num_streams: int
    bytes_of: dict[str, float]


async def measure_streams(target: Target, num_streams: int) -> StreamCost:
    """Open streams one after the other, read the beginning of each, hold all. Raises: BenchError."""
    _raise_file_limit(num_streams + SPARE_FILES)
    body = json.dumps(
        {
            "model": target.model,
            "messages": [{"role": "user", "content": "Tell me about a lighthouse."}],
            "max_tokens": LONG_ANSWER,
            "stream": True,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {HOST}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode()
    writers: list[asyncio.StreamWriter] = []

    async def open_one() -> None:
        reader, writer = await asyncio.open_connection(HOST, target.port)
        writers.append(writer)
        writer.write(head + body)
        answer = await asyncio.wait_for(reader.readuntil(END_OF_HEAD), OPEN_WITHIN_S)
        if not answer.startswith(b"HTTP/1.1 200"):
            raise BenchError(f"a stream was refused: {answer[:40].decode(errors='replace')}")

    try:
        await open_one()  # what the first one costs more is not counted
        before = _memory(target)
        for first in range(0, num_streams, OPENED_AT_ONCE):
            some = range(first, min(num_streams, first + OPENED_AT_ONCE))
            await asyncio.gather(*(open_one() for _ in some))
        after = _memory(target)
    except TimeoutError:
        raise BenchError(f"a stream did not begin within {OPEN_WITHIN_S:.0f} s") from None
    finally:
        for writer in writers:
            writer.close()
    return StreamCost(num_streams, {r: (after[r] - before[r]) / num_streams for r in after})


def _raise_file_limit(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if wanted > hard:
        raise BenchError(f"{wanted} files are needed at once, and {hard} allowed: see `ulimit -Hn`")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def _memory(target: Target) -> dict[str, int]:
    return {role: process.memory_info().rss for role, process in target.processes.items()}


def to_depth_table(costs: Sequence[DepthCost]) -> Table:
    """A row for each depth, beside the shallowest."""
    table = new_table(
        "A request where others wait",
        "waiting",
        "Redis CPU, us",
        "submit to end, us",
        "Redis CPU, ratio",
    )
    for cost in costs:
        ratio = cost.redis_us / costs[0].redis_us
        table.add_row(
            f"{cost.depth:,}", in_figures(cost.redis_us), in_figures(cost.took_us), f"{ratio:.2f}"
        )
    return table


def to_stream_table(cost: StreamCost) -> Table:
    """A row for each process."""
    table = new_table(f"{cost.num_streams:,} open streams", "process", "kB a stream")
    for role, num_bytes in cost.bytes_of.items():
        table.add_row(role, in_figures(num_bytes / 1000))
    return table


def run_depths(depths: Sequence[int], num_requests: int = 300, rounds: int = 9) -> list[Table]:
    """The table of `vlm bench gateway --depth`."""
    return [to_depth_table(uvloop.run(measure_depths(sorted(depths), num_requests, rounds)))]


def run_streams(num_streams: int) -> list[Table]:
    """The table of `vlm bench gateway --streams`. Raises: BenchError."""
    slow = {
        "VLM_ENGINE__MOCK__DECODE_S": str(STEP_S),
        "VLM_ENGINE__MOCK__NUM_OUTPUT_TOKENS": str(LONG_ANSWER),
        "VLM_ENGINE__MAX_NUM_SEQS": str(num_streams + 1),
        "VLM_LIMITS__MAX_OPEN_REQUESTS": str(num_streams + SPARE_FILES),
        "VLM_LIMITS__MAX_QUEUE_DEPTH": str(num_streams + SPARE_FILES),
    }
    with run_vlm_fleet(slow) as target:
        return [to_stream_table(uvloop.run(measure_streams(target, num_streams)))]
