"""Compares the CPU time per streamed token of gateway, worker and Redis with that of a server's HTTP front.

Each round measures the server alone, and the fleet in front of it, with the same requests. The server's front is the
process that listens on its port; its compute processes are not counted.
"""

import platform
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import psutil
from rich.table import Table

from benchmarks.gateway.client import BenchError, Result
from benchmarks.gateway.run import (
    INSTANT,
    TEXT,
    Cell,
    Target,
    ask,
    cpu_per_request,
    create_cells,
    measure_once,
    run_vlm_fleet,
)
from benchmarks.tables import in_turn, new_table
from deploy.capacity import FleetFigures, write_figures
from loadtest.albums import noise_jpeg

NUM_TOKENS = 100  #: tokens per stream of the mock engine
#: Settings of the mock engine: 50 tokens/s per stream.
PACED = INSTANT | {"VLM_ENGINE__MOCK__DECODE_S": "0.02"}


def measure_server(
    kind: str, model: str, url: str, streams: int, tokens: int, seconds: float, rounds: int
) -> Table:
    """Without a model, measure only the server's front. Raises: BenchError, ServerError, OSError, httpx.HTTPError."""
    settings = {
        "VLM_ENGINE__KIND": kind, "VLM_ENGINE__MODEL": model, "VLM_ENGINE__URL": url,
        "VLM_ENGINE__MAX_NUM_SEQS": str(streams),
    }  # fmt: skip
    with ExitStack() as stack:
        targets = [_find_front(url)]
        if model:
            targets.append(stack.enter_context(run_vlm_fleet(settings)))
        return _measure(targets, streams, tokens, seconds, rounds)


def measure_tokens(streams: int, seconds: float, rounds: int, against: Path | None) -> Table:
    """Measure streams of the mock engine, also in another checkout. Raises: the errors of `measure_server`."""
    settings = PACED | {"VLM_ENGINE__MAX_NUM_SEQS": str(streams)}
    folders = [None] if against is None else [against, None]
    with ExitStack() as stack:
        fleets = [stack.enter_context(run_vlm_fleet(settings, folder)) for folder in folders]
        return _measure(fleets, streams, NUM_TOKENS, seconds, rounds)


def _measure(
    targets: list[Target], streams: int, tokens: int, seconds: float, rounds: int
) -> Table:
    """One row per target. Ratios compare with the first target; CPU time is that of all processes."""
    cell = Cell("", TEXT, True, streams, tokens)
    found: dict[str, list[Result]] = {target.name: [] for target in targets}
    for _, target in in_turn(rounds, targets):
        found[target.name].append(measure_once(cell, target, seconds))
    columns = ["tokens/s", "ratio", "us of CPU per token", "ratio", "of each process"]
    table = new_table(f"{streams} streams of {tokens} tokens", "server", *columns)
    rates = [median(result.rate for result in results) * tokens for results in found.values()]
    costs = [cpu_per_request(results) for results in found.values()]
    sums = [sum(cost.values()) for cost in costs]
    for name, rate, cost, total in zip(found, rates, costs, sums, strict=True):
        each = (f"{role} {1e6 * cpu_s / tokens:.1f}" for role, cpu_s in cost.items())
        table.add_row(
            name, f"{rate:,.0f}", f"{rate / rates[0]:.3f}", f"{1e6 * total / tokens:.1f}",
            f"{total / sums[0]:.2f}", ", ".join(each),
        )  # fmt: skip
    return table


def write_fleet_figures(path: Path, seconds: float, rounds: int) -> None:
    """Measure the costs of a request, a streamed token and an image, and write them for `vlm plan`."""
    text, _, image, *_ = create_cells([32])
    stream = Cell("", TEXT, True, 64, NUM_TOKENS)
    settings = PACED | {"VLM_ENGINE__MAX_NUM_SEQS": "64"}
    with run_vlm_fleet() as fleet, run_vlm_fleet(settings) as paced:
        turns = [(text, fleet, seconds), (image, fleet, seconds), (stream, paced, 5 * seconds)]
        found: dict[Cell, list[Result]] = {text: [], image: [], stream: []}
        for _, turn in in_turn(rounds, turns):
            found[turn[0]].append(measure_once(*turn))
    request_s, with_image_s, stream_s = map(cpu_per_request, found.values())
    write_figures(
        path,
        FleetFigures(
            f"{psutil.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
            request_s,
            {role: cpu_s / NUM_TOKENS for role, cpu_s in stream_s.items()},
            {role: max(0.0, cpu_s - request_s[role]) for role, cpu_s in with_image_s.items()},
            len(noise_jpeg()),
        ),
    )


def _find_front(url: str) -> Target:
    """The process that listens on the server's port. Raises: BenchError."""
    port = urlsplit(url).port
    pids = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,)
    } - {None}
    if port is None or len(pids) != 1:
        raise BenchError(f"{len(pids)} processes of this machine listen at {url}")
    model = ask(port, "/v1/models")["data"][0]["id"]
    return Target("server's front", port, model, {"front": psutil.Process(pids.pop())})
