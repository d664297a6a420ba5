"""Measure the overhead of gateway, Redis and worker, with an instant mock engine, compared with a bare FastAPI endpoint or
another checkout.

Both targets run on the same machine, and are measured alternately by the same client, which is this process. Every
number is a median of the turns, and ratios compare adjacent turns. Targets and client share the machine's cores.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from platform import machine, python_version
from statistics import median
from typing import Any

import httpx
import psutil
import uvloop
from rich.table import Table

from benchmarks.gateway.bare_endpoint import NUM_TOKENS
from benchmarks.gateway.client import CHAT, BenchError, Job, Result, run_job
from benchmarks.tables import Spread, in_figures, in_ms, in_turn, measuring, new_table, show
from loadtest.albums import NumberedUrls, noise_jpeg
from loadtest.fleet import HOST, free_port, run_fleet, run_server

BARE = "bare FastAPI"
FLEET = "fleet"
ROLES = ("gateway", "worker", "redis-server")
INSTANT = {
    "VLM_ENGINE__MOCK__VISION_S": "0",
    "VLM_ENGINE__MOCK__PREFILL_S_PER_TOKEN": "0",
    "VLM_ENGINE__MOCK__DECODE_S": "0",
}
MOST_WARMUP_S = 0.3
NUM_TURNS = 20  #: measurements per cell and checkout, after which the fleets are restarted
TEXT = ({"type": "text", "text": "Tell me about a lighthouse."},)


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


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """A kind of request to measure. `is_fixed`: the answer is always the same. `has_new_images`: see `Job`."""

    name: str
    content: Sequence[dict[str, Any]]
    stream: bool
    num_connections: int
    num_tokens: int = NUM_TOKENS
    is_fixed: bool = False
    has_new_images: bool = False


#: Results by cell and target. Results of equal index are from adjacent turns.
Measured = dict[Cell, dict[str, list[Result]]]


def run(seconds: float, rounds: int, connections: list[int], folder: Path | None) -> None:
    """Measure and print the tables. Raises: BenchError, ServerError, OSError, httpx.HTTPError."""
    cells = create_cells(connections)
    if folder is None:
        measured = measure(cells, seconds, rounds)
    else:
        measured = measure(cells[: 2 * len(connections)], seconds, NUM_TURNS, folder, rounds)
    show(*to_tables(measured))
    print(
        f"\n{rounds} rounds of {seconds:g} s, medians; {NUM_TOKENS} tokens; "
        f"{psutil.cpu_count()} cores, {machine()}, Python {python_version()}"
    )


def measure(
    cells: list[Cell],
    seconds: float,
    num_turns: int,
    folder: Path | None = None,
    num_starts: int = 1,
) -> Measured:
    """Measure the bare endpoint, or the fleet of the checkout in `folder`, and this checkout's fleet.

    The memory layout of a process affects its speed until it ends, so the targets are started `num_starts` times.
    """
    measured: Measured = {cell: {} for cell in cells}
    for _ in range(num_starts):
        other = run_bare() if folder is None else run_vlm_fleet(folder=folder)
        with other as first, run_vlm_fleet() as fleet:
            for cell in measuring(cells):
                for _, target in in_turn(num_turns, (first, fleet)):
                    results = measured[cell].setdefault(target.name, [])
                    results.append(measure_once(cell, target, seconds))
    return measured


def create_cells(connections: list[int]) -> list[Cell]:
    """Cells of text, of a new image in every request, and of one repeated image; whole and streamed."""
    image = {"type": "image_url", "image_url": {"url": NumberedUrls(noise_jpeg()).url(0)}}
    question = {"type": "text", "text": "What is in this image?"}
    return [
        Cell(
            f"{name}, {'streamed' if stream else 'whole'}",
            content,
            stream,
            number,
            is_fixed=not is_new,
            has_new_images=is_new,
        )
        for name, content, is_new in (
            ("text", TEXT, False),
            ("new 60 kB image", (image, question), True),
            ("repeated 60 kB image", (image, question), False),
        )
        for stream in (False, True)
        for number in connections
    ]


def measure_once(cell: Cell, target: Target, seconds: float) -> Result:
    """Measure one turn of one target."""
    body = {
        "model": target.model, "messages": [{"role": "user", "content": cell.content}], "max_tokens": cell.num_tokens,
        "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    text = None
    if cell.is_fixed:
        text = ask(target.port, CHAT, json=body)["choices"][0]["message"]["content"]
    job = Job(
        target.port,
        json.dumps(body | {"stream": cell.stream}),
        cell.num_connections,
        seconds,
        min(MOST_WARMUP_S, seconds / 5),
        cell.stream,
        cell.has_new_images,
        text,
    )
    before = target.cpu_s()
    result = uvloop.run(run_job(job))
    result.cpu_s = {role: used_s - before[role] for role, used_s in target.cpu_s().items()}
    return result


def ask(port: int, path: str, json: Any = None) -> dict[str, Any]:
    """The JSON that a server returns. Raises: httpx.HTTPError."""
    method = "GET" if json is None else "POST"
    url = f"http://{HOST}:{port}{path}"
    answer = httpx.request(method, url, json=json, timeout=60.0, trust_env=False)
    return answer.raise_for_status().json()


@contextmanager
def run_bare() -> Iterator[Target]:
    """Run the bare endpoint in a separate process."""
    port = free_port()
    with run_server(["-m", "benchmarks.gateway.bare_endpoint", str(port)], port) as server:
        yield Target(BARE, port, "bare", {"gateway": psutil.Process(server.process.pid)})


@contextmanager
def run_vlm_fleet(
    settings: Mapping[str, str] = INSTANT, folder: Path | None = None
) -> Iterator[Target]:
    """Run the fleet of the checkout in `folder` with its defaults and a mock engine; by default without delays."""
    if folder is not None and not (folder / "vlm.py").is_file():
        raise BenchError(f"--against {folder}: the folder is not a checkout of this project")
    with run_fleet(settings.get("VLM_ENGINE__KIND", "mock"), settings, folder) as server:
        model = ask(server.port, "/v1/models")["data"][0]["id"]
        family = psutil.Process(server.process.pid).children(recursive=True)
        processes = {role: _find(family, role) for role in ROLES}
        yield Target(str(folder.resolve() if folder else FLEET), server.port, model, processes)


def _find(family: list[psutil.Process], role: str) -> psutil.Process:
    alive = [p for p in family if p.status() != psutil.STATUS_ZOMBIE]
    found = [p for p in alive if p.name() == role or role in p.cmdline()]
    if len(found) != 1:
        raise BenchError(f"{len(found)} processes look like the {role}")
    return found[0]


def cpu_per_request(results: list[Result]) -> dict[str, float]:
    """CPU seconds per request of each process: the median of the turns."""
    return {
        role: median(result.cpu_s[role] / max(1, result.num_all) for result in results)
        for role in results[0].cpu_s
    }


def to_tables(measured: Measured) -> list[Table]:
    """One table per kind of request, with one row per number of connections and target.

    `times` compares the median latencies of adjacent turns; below 1 the second target is faster. `events` are the
    events per request: fewer than tokens if an overloaded server puts several tokens into one event.
    """
    columns = ["server", "clients", "req/s", "p50\nms", "p99\nms", "times", "events"]
    columns += ["CPU ms:\ngateway", "worker", "Redis"]
    tables: dict[str, Table] = {}
    for cell, both in measured.items():
        table = tables.setdefault(cell.name, new_table(cell.name, *columns))
        pairs = zip(*both.values(), strict=True)
        times = Spread.of([two.latency_s(0.5) / one.latency_s(0.5) for one, two in pairs])
        ratios = ("", f"{times.median:.3f}\n{times.low:.2f}-{times.high:.2f}")
        for (name, results), ratio in zip(both.items(), ratios, strict=True):
            table.add_row(
                name,
                str(cell.num_connections),
                in_figures(median(result.rate for result in results)),
                *(in_ms(median(x.latency_s(share) for x in results)) for share in (0.5, 0.99)),
                ratio,
                f"{median(x.num_events / max(1, x.num_all) for x in results):.0f}",
                *map(in_ms, cpu_per_request(results).values()),
            )
    return list(tables.values())
