"""The price of the way: HTTP, Redis, worker and an instant mock engine, beside a bare FastAPI endpoint.

Called by `vlm bench gateway`. Both targets run at the same time on the same machine and take turns under the
same client, which is this process; every number is the median of the rounds. All share the machine's cores.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import psutil
import uvloop
from rich.console import Console
from rich.progress import track

from loadtest.albums import QUESTIONS
from loadtest.bare_endpoint import NUM_TOKENS
from loadtest.client import AnswerError, ChatClient
from loadtest.comparison import (
    BARE,
    FLEET,
    ROLES,
    Body,
    Cell,
    Measured,
    Samples,
    to_cpu_table,
    to_goals,
    to_tables,
)
from loadtest.fleet import Server, ServerError, free_port, run_fleet, run_server
from loadtest.http_load import Job, Result, run_job
from loadtest.images import noise_jpeg, numbered, to_data_url
from loadtest.machine import machine, measure_round_trip_s
from loadtest.report import show
from loadtest.scenarios import image_part, text_part, to_body

IMAGE_BYTES = 60_000
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
    """An answer was wrong or missing, so that the numbers would mean nothing."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server under test and its processes by role."""

    name: str
    server: Server
    model: str
    processes: dict[str, psutil.Process]

    def cpu_s(self) -> dict[str, float]:
        """CPU time that each process has used so far."""
        times = {role: process.cpu_times() for role, process in self.processes.items()}
        return {role: used.user + used.system for role, used in times.items()}


def run(seconds: float, rounds: int, connections: list[int], markdown: bool) -> None:
    """Measure and print the tables; ends the process with 1 if that was not possible."""
    try:
        measured = measure(seconds, rounds, connections)
    except (BenchError, ServerError, AnswerError) as error:
        sys.exit(f"the benchmark stopped: {error}")
    show([*to_tables(measured), to_cpu_table(measured), to_goals(measured)], markdown)
    print(f"\n{rounds} rounds of {seconds:g} s, medians; {NUM_TOKENS} tokens; {machine()}")
    print(
        f"A byte to a sleeping process and back takes {measure_round_trip_s() * 1e6:.0f} us here."
    )


def measure(seconds: float, rounds: int, connections: list[int]) -> Measured:
    """Measure every cell on both targets, in turns. Raises: BenchError, ServerError, AnswerError."""
    cells = [
        Cell(body, stream, number)
        for body in create_bodies()
        for stream in (False, True)
        for number in connections
    ]
    measured: Measured = {}
    screen = Console(stderr=True)
    with run_bare() as bare, run_vlm_fleet() as fleet:
        # The order within a pair alternates, so that a drift of the machine favours neither.
        turns = [
            (cell, target)
            for number in range(rounds)
            for cell in cells
            for target in ((bare, fleet) if number % 2 == 0 else (fleet, bare))
        ]
        # The client is this process: the screen takes little of its time.
        for cell, target in track(
            turns, "measuring", console=screen, transient=True, refresh_per_second=1
        ):
            samples = measured.setdefault((cell, target.name), Samples())
            measure_cell(cell, target, seconds, samples)
    return measured


def create_bodies() -> list[Body]:
    """Text, a new image with every request, and the same image again and again."""
    image = image_part(to_data_url(numbered(noise_jpeg(IMAGE_BYTES), 0)))
    question = text_part(QUESTIONS[0])
    return [
        Body("text", [text_part("Tell me about a lighthouse.")]),
        Body("new 60 kB image", [image, question], is_new=True),
        Body("repeated 60 kB image", [image, question]),
    ]


def measure_cell(cell: Cell, target: Target, seconds: float, samples: Samples) -> None:
    """One round of one cell on one target. Raises: BenchError, AnswerError."""
    job = create_job(cell, target, seconds, next(FIRST_NUMBERS))
    before = target.cpu_s() | {"client": time.process_time()}
    result = run_checked(job)
    after = target.cpu_s() | {"client": time.process_time()}
    samples.results.append(result)
    samples.cpu_s.append({role: after[role] - before[role] for role in after})


def run_checked(job: Job) -> Result:
    """Do one job. Raises: BenchError when an answer was wrong."""
    result = uvloop.run(run_job(job))
    if result.error:
        raise BenchError(result.error)
    return result


def create_job(cell: Cell, target: Target, seconds: float, first_number: int) -> Job:
    """The client's orders. One request tells what the answer is, where it is always the same."""
    body = to_body(target.model, cell.body.content, NUM_TOKENS, stream=False)
    with ChatClient(target.server.url) as chat:
        answer = chat.ask(body)
    if answer.num_tokens != NUM_TOKENS:
        raise BenchError(f"{target.name} answers with {answer.num_tokens} tokens")
    text = json.dumps(body | {"stream": cell.stream})
    return Job(
        port=target.server.port,
        body=text,
        num_connections=cell.num_connections,
        seconds=seconds,
        warmup_s=min(MOST_WARMUP_S, seconds / 5),
        stream=cell.stream,
        image_at=text.index("base64,") + len("base64,") if cell.body.is_new else None,
        first_number=first_number,
        expected_text=None if cell.body.is_new else answer.text,
    )


@contextmanager
def run_bare() -> Iterator[Target]:
    """The bare endpoint in a process of its own."""
    port = free_port()
    with run_server(["-m", "loadtest.bare_endpoint", str(port)], port, "/readyz") as server:
        process = psutil.Process(server.process.pid)
        yield Target(BARE, server, "bare", {"bare": process})


@contextmanager
def run_vlm_fleet() -> Iterator[Target]:
    """The fleet on an engine that takes no time, otherwise with its default settings."""
    with run_fleet("mock", INSTANT) as server:
        with ChatClient(server.url) as chat:
            model = chat.models()[0]
        family = psutil.Process(server.process.pid).children(recursive=True)
        yield Target(FLEET, server, model, {role: _find(family, role) for role in ROLES})


def _find(family: list[psutil.Process], role: str) -> psutil.Process:
    found = [process for process in family if _plays(process, role)]
    if len(found) != 1:
        raise BenchError(f"{len(found)} processes look like the {role}")
    return found[0]


def _plays(process: psutil.Process, role: str) -> bool:
    return process.name() == role or role in process.cmdline()
