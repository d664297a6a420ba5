"""The price of the way: HTTP, Redis, worker and an instant mock engine, beside a bare FastAPI endpoint.

Both targets run at the same time on the same machine and take turns under the
same client, which is this process; every number is the median of the rounds. All share the machine's cores.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from platform import machine, python_version
from typing import Any

import httpx
import psutil
import uvloop

from benchmarks.gateway.bare_endpoint import NUM_TOKENS
from benchmarks.gateway.client import CHAT, Job, Result, run_job
from benchmarks.gateway.tables import (
    BARE,
    FLEET,
    ROLES,
    Body,
    Cell,
    Measured,
    Samples,
    to_cpu_table,
    to_tables,
)
from benchmarks.tables import in_turn, measuring, show
from loadtest.albums import NumberedUrls, noise_jpeg
from loadtest.fleet import HOST, free_port, run_fleet, run_server

INSTANT = {
    "VLM_ENGINE__MOCK__VISION_S": "0",
    "VLM_ENGINE__MOCK__PREFILL_S_PER_TOKEN": "0",
    "VLM_ENGINE__MOCK__DECODE_S": "0",
    "VLM_ENGINE__MOCK__NUM_OUTPUT_TOKENS": str(2 * NUM_TOKENS),
}
MOST_WARMUP_S = 0.3
#: Of new images: a million for each job.
FIRST_NUMBERS = count(10**6, 10**6)


class BenchError(Exception):
    """An answer was wrong or missing: the numbers would mean nothing."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server under test and its processes by role."""

    name: str
    port: int
    model: str
    processes: dict[str, psutil.Process]

    def cpu_s(self) -> dict[str, float]:
        """CPU time that each process has used so far."""
        times = {role: process.cpu_times() for role, process in self.processes.items()}
        return {role: used.user + used.system for role, used in times.items()}


def run(seconds: float, rounds: int, connections: list[int]) -> None:
    """Measure and print the tables. Raises: BenchError."""
    measured = measure(seconds, rounds, connections)
    show(*to_tables(measured), to_cpu_table(measured))
    print(
        f"\n{rounds} rounds of {seconds:g} s, medians; {NUM_TOKENS} tokens; "
        f"{psutil.cpu_count()} cores, {machine()}, Python {python_version()}"
    )


def measure(seconds: float, rounds: int, connections: list[int]) -> Measured:
    """Measure every cell on both targets, in turns. Raises: BenchError."""
    cells = [
        Cell(body, stream, number)
        for body in create_bodies()
        for stream in (False, True)
        for number in connections
    ]
    measured: Measured = {}
    with run_bare() as bare, run_vlm_fleet() as fleet:
        turns = [(cell, target) for cell in cells for target in (bare, fleet)]
        for _, (cell, target) in measuring(list(in_turn(rounds, turns))):
            samples = measured.setdefault((cell, target.name), Samples())
            measure_cell(cell, target, seconds, samples)
    return measured


def create_bodies() -> list[Body]:
    """Text, a new image with every request, and the same image again and again."""
    image = {"type": "image_url", "image_url": {"url": NumberedUrls(noise_jpeg()).url(0)}}
    question = {"type": "text", "text": "What is in this image?"}
    return [
        Body("text", [{"type": "text", "text": "Tell me about a lighthouse."}]),
        Body("new 60 kB image", [image, question], is_new=True),
        Body("repeated 60 kB image", [image, question]),
    ]


def measure_cell(cell: Cell, target: Target, seconds: float, samples: Samples) -> None:
    """One round of one cell on one target. Raises: BenchError."""
    job = create_job(cell, target, seconds, next(FIRST_NUMBERS))
    before = target.cpu_s() | {"client": time.process_time()}
    result = run_checked(job)
    after = target.cpu_s() | {"client": time.process_time()}
    samples.results.append(result)
    samples.cpu_s.append({role: after[role] - before[role] for role in after})


def run_checked(job: Job) -> Result:
    """Do one job. Raises: BenchError when an answer was wrong."""
    try:
        return uvloop.run(run_job(job))
    except (OSError, ValueError) as error:
        raise BenchError(f"{type(error).__name__}: {error}") from None


def create_job(cell: Cell, target: Target, seconds: float, first_number: int) -> Job:
    """The client's orders. One request tells what the answer is, where it is always the same."""
    warmup_s = min(MOST_WARMUP_S, seconds / 5)
    body = {
        "model": target.model,
        "messages": [{"role": "user", "content": cell.body.content}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
    }
    answer = ask(target.port, CHAT, body)
    if answer["usage"]["completion_tokens"] != NUM_TOKENS:
        raise BenchError(f"{target.name} answers with {answer['usage']}")
    text = json.dumps(body | {"stream": cell.stream})
    return Job(
        port=target.port,
        body=text,
        num_connections=cell.num_connections,
        seconds=seconds,
        warmup_s=warmup_s,
        stream=cell.stream,
        image_at=text.index("base64,") + len("base64,") if cell.body.is_new else None,
        first_number=first_number,
        expected_text=None if cell.body.is_new else answer["choices"][0]["message"]["content"],
    )


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a server answers, as JSON. Raises: BenchError."""
    method = "GET" if body is None else "POST"
    try:
        answer = httpx.request(
            method, f"http://{HOST}:{port}{path}", json=body, timeout=60.0, trust_env=False
        )
        return answer.raise_for_status().json()
    except httpx.HTTPError as error:
        raise BenchError(str(error)) from None


@contextmanager
def run_bare() -> Iterator[Target]:
    """The bare endpoint in a process of its own."""
    port = free_port()
    with run_server(["-m", "benchmarks.gateway.bare_endpoint", str(port)], port) as server:
        yield Target(BARE, port, "bare", {"bare": psutil.Process(server.process.pid)})


@contextmanager
def run_vlm_fleet(
    settings: Mapping[str, str] = INSTANT, folder: Path | None = None
) -> Iterator[Target]:
    """The fleet with its defaults, of the checkout in `folder`, on an engine that takes no time."""
    with run_fleet(settings.get("VLM_ENGINE__KIND", "mock"), settings, folder) as server:
        model = ask(server.port, "/v1/models")["data"][0]["id"]
        family = psutil.Process(server.process.pid).children(recursive=True)
        yield Target(FLEET, server.port, model, {role: _find(family, role) for role in ROLES})


def _find(family: list[psutil.Process], role: str) -> psutil.Process:
    alive = [p for p in family if p.status() != psutil.STATUS_ZOMBIE]
    found = [p for p in alive if p.name() == role or role in p.cmdline()]
    if len(found) != 1:
        raise BenchError(f"{len(found)} processes look like the {role}")
    return found[0]
