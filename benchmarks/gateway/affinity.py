"""Cache hits and TTFT with and without prefix affinity: `vlm bench gateway --affinity WORKERS`.

Requests with images of a Zipf distribution arrive in an open loop. The mock engines take a time for each image that is
not cached. Load 1 is the rate at which a fleet without caches is saturated.
"""

import asyncio
import itertools
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import mean, median, quantiles

import httpx
import uvloop
from rich.table import Table

from benchmarks.gateway.client import CHAT
from benchmarks.gateway.run import BenchError, ask
from benchmarks.tables import in_ms, measuring, new_table
from loadtest.albums import NumberedUrls, noise_jpeg
from loadtest.fleet import HOST, free_port, run_server
from shared.redis.embedded import EmbeddedRedis

MODEL = "mock"
NUM_IMAGES = 4000
NUM_CACHED = 64  #: images in the cache of a worker
NUM_SEATS = 8
TOKENS_PER_IMAGE = 64
VISION_S, PREFILL_S_PER_TOKEN, DECODE_S, NUM_TOKENS = 0.135, 0.00012, 0.01, 8
MISS_S = 0.15  #: approximate vision and prefill time of an image that is not cached
GRACE_S = 0.125
LOAD = 0.8
NUM_REQUESTS = 1500  #: measured per round and setting
NUM_WARM = 700  #: sent before, to fill the caches
ENGINE = {
    "VLM_ENGINE__KIND": "mock",
    "VLM_ENGINE__MAX_NUM_SEQS": str(NUM_SEATS),
    "VLM_ENGINE__ENCODER_CACHE_BYTES": str(NUM_CACHED * TOKENS_PER_IMAGE * 1024),
    "VLM_ENGINE__MOCK__TOKENS_PER_IMAGE": str(TOKENS_PER_IMAGE),
    "VLM_ENGINE__MOCK__VISION_S": str(VISION_S),
    "VLM_ENGINE__MOCK__PREFILL_S_PER_TOKEN": str(PREFILL_S_PER_TOKEN),
    "VLM_ENGINE__MOCK__DECODE_S": str(DECODE_S),
}


@dataclass(slots=True)
class Served:
    """Results of one setting, of all rounds."""

    ttft_s: list[float] = field(default_factory=list)
    num_queries: int = 0
    num_hits: int = 0


@dataclass(frozen=True, slots=True)
class Fleet:
    """Ports of a fleet."""

    port: int
    worker_ports: Sequence[int]  #: their health ports


def run_affinity(num_workers: int, rounds: int) -> list[Table]:
    """Alternate measurements of both settings, each on a new fleet. Raises: BenchError."""
    served = {False: Served(), True: Served()}
    turns = [(number, is_on) for number in range(rounds) for is_on in (False, True)]
    for number, is_on in measuring(turns):
        with run_fleet(num_workers, GRACE_S if is_on else 0.0) as fleet:
            uvloop.run(drive(fleet, num_workers, Random(number), served[is_on]))
    table = new_table(
        f"{num_workers} workers, {LOAD:.0%} load, {NUM_IMAGES} images, {NUM_CACHED} cached by each",
        "TTFT in ms", "hits", "mean", "p50", "p95", "p99",
    )  # fmt: skip
    for is_on, name in (
        (False, "any worker"),
        (True, f"preferred worker, others after {GRACE_S * 1e3:g} ms"),
    ):
        of = served[is_on]
        cuts = quantiles(of.ttft_s, n=100)
        table.add_row(
            name, f"{of.num_hits / of.num_queries:.0%}",
            *(in_ms(value) for value in (mean(of.ttft_s), median(of.ttft_s), cuts[94], cuts[98])),
        )  # fmt: skip
    return [table]


@contextmanager
def run_fleet(num_workers: int, grace_s: float) -> Iterator[Fleet]:
    """Redis, workers and a gateway, one process each. Raises: ServerError."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="vlm-bench-"))
        redis = stack.enter_context(EmbeddedRedis(Path(folder)))
        common = {"VLM_REDIS__URL": redis.url, "VLM_GATEWAY__HOME_GRACE_S": str(grace_s)}

        def start(port: int) -> object:
            settings = {**common, **ENGINE, "VLM_WORKER__HEALTH_PORT": str(port)}
            worker = run_server(["-m", "vlm", "worker"], port, environment=settings)
            return stack.enter_context(worker)

        ports = [free_port() for _ in range(num_workers)]
        with ThreadPoolExecutor(num_workers) as pool:
            list(pool.map(start, ports))
        port = free_port()
        command = ["-m", "vlm", "gateway", "--host", HOST, "--port", str(port)]
        stack.enter_context(run_server(command, port, environment=common))
        while len(ask(port, "/v1/models")["data"]) == 0:
            time.sleep(0.1)
        time.sleep(1.5)  # the gateway lists workers every second
        yield Fleet(port, ports)


async def drive(fleet: Fleet, num_workers: int, random: Random, served: Served) -> None:
    """Fill the caches, then measure. Raises: BenchError."""
    urls = NumberedUrls(noise_jpeg(1000))
    images = [urls.url(number) for number in range(NUM_IMAGES)]
    weights = list(itertools.accumulate(1 / rank for rank in range(1, NUM_IMAGES + 1)))
    rate = LOAD * num_workers / MISS_S
    numbers = itertools.count()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
    async with httpx.AsyncClient(
        base_url=f"http://{HOST}:{fleet.port}", limits=limits, timeout=60.0, trust_env=False
    ) as client:
        for is_warm, count in ((False, NUM_WARM), (True, NUM_REQUESTS)):
            before = await _counts(fleet)
            tasks = []
            due_at = time.perf_counter()
            for image in random.choices(images, cum_weights=weights, k=count):
                due_at += random.expovariate(rate)
                await asyncio.sleep(max(0.0, due_at - time.perf_counter()))
                tasks.append(asyncio.create_task(_ask(client, image, next(numbers))))
            times_s = await asyncio.gather(*tasks)
            if is_warm:
                after = await _counts(fleet)
                served.ttft_s += times_s
                served.num_queries += round(after[0] - before[0])
                served.num_hits += round(after[1] - before[1])


async def _ask(client: httpx.AsyncClient, image: str, number: int) -> float:
    """TTFT in seconds. The text precedes the image, so that requests share no prefix. Raises: BenchError."""
    content = [
        {"type": "text", "text": f"{number:08d}"},
        {"type": "image_url", "image_url": {"url": image}},
    ]
    body = {
        "model": MODEL, "stream": True, "max_tokens": NUM_TOKENS, "temperature": 0,
        "messages": [{"role": "user", "content": content}],
    }  # fmt: skip
    began_at, first_at = time.perf_counter(), None
    async with client.stream("POST", CHAT, json=body) as answer:
        if answer.status_code != 200:
            raise BenchError((await answer.aread()).decode(errors="replace"))
        async for line in answer.aiter_lines():
            if first_at is None and re.search(r'"content": ?"[^"]', line):
                first_at = time.perf_counter()
    if first_at is None:
        raise BenchError("the answer has no text")
    return first_at - began_at


async def _counts(fleet: Fleet) -> tuple[float, float]:
    """Lookups and hits of the encoder caches of all workers."""
    num_queries = num_hits = 0.0
    async with httpx.AsyncClient(timeout=30.0, trust_env=False) as client:
        for port in fleet.worker_ports:
            text = (await client.get(f"http://{HOST}:{port}/metrics")).text
            num_queries += _value(text, "vlm_encoder_cache_queries_total")
            num_hits += _value(text, "vlm_encoder_cache_hits_total")
    return num_queries, num_hits


def _value(text: str, name: str) -> float:
    found = re.search(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    if found is None:
        raise BenchError(f"a worker has no metric {name}")
    return float(found[1])
