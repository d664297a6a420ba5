"""CPU per streamed token of gateway, worker and Redis, beside the HTTP front of the server behind them.

Each round drives the server alone, and the fleet in front of it, with the same requests. The server's front is the process that
listens on its port; the processes that compute are not counted.
"""

import json
import platform
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import psutil
from rich.table import Table

from benchmarks.gateway.against import check_checkout
from benchmarks.gateway.client import Job
from benchmarks.gateway.run import (
    INSTANT,
    BenchError,
    Target,
    ask,
    measure,
    run_checked,
    run_vlm_fleet,
)
from benchmarks.gateway.tables import FLEET, ROLES, pairs
from benchmarks.tables import in_turn, new_table, show
from deploy.capacity import FleetFigures, write_figures
from loadtest.albums import noise_jpeg

FRONT = "server's front"
NUM_TOKENS = 100  #: per stream of the mock engine
PROMPT = "Tell me about a lighthouse."


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds of each process per token, and tokens per second of all streams."""

    cpu_s: dict[str, float]
    rate: float


def run(
    kind: str, model: str, url: str, streams: int, tokens: int, seconds: float, rounds: int
) -> None:
    """Measure and print tables; without a model, of the server's front alone. Raises: BenchError, ServerError."""
    settings = {
        "VLM_ENGINE__KIND": kind, "VLM_ENGINE__MODEL": model, "VLM_ENGINE__URL": url,
        "VLM_ENGINE__MAX_NUM_SEQS": str(streams),
    }  # fmt: skip
    with ExitStack() as stack:
        targets = [_find_front(url)]
        if model:
            targets.append(stack.enter_context(run_vlm_fleet(settings)))
        costs = _measure_in_turn(targets, streams, tokens, seconds, rounds)
    cpu = new_table(f"CPU per streamed token, {streams} streams", "process", "us")
    speed = new_table(f"Tokens per second, {streams} streams", "target", "tokens/s")
    for name, rounds_of in costs.items():
        for role in rounds_of[0].cpu_s:
            cpu.add_row(role, f"{median(each.cpu_s[role] for each in rounds_of) * 1e6:.1f}")
        speed.add_row(name, f"{median(each.rate for each in rounds_of):,.0f}")
    if model:
        pairs_of = list(zip(costs[FLEET], costs[FRONT], strict=True))
        ratio = median(sum(a.cpu_s.values()) / sum(b.cpu_s.values()) for a, b in pairs_of)
        cpu.add_row("fleet : front", f"{ratio:.2f}")
        speed.add_row("fleet : front", f"{median(a.rate / b.rate for a, b in pairs_of):.3f}")
    show(cpu, speed)


def run_tokens(streams: int, seconds: float, rounds: int, against: Path | None) -> Table:
    """CPU per token of streams of the mock engine, and in another checkout. Raises: BenchError."""
    costs = _token_costs(streams, seconds, rounds, against)
    table = new_table(f"us of CPU per streamed token, {streams} streams", "process", *costs)
    for role in ROLES:
        table.add_row(role, *(f"{found[role] * 1e6:.1f}" for found in costs.values()))
    return table


def _token_costs(
    streams: int, seconds: float, rounds: int, against: Path | None = None
) -> dict[str, dict[str, float]]:
    """CPU seconds of each process per token, at 50 tokens/s a stream, by checkout. Raises: BenchError."""
    settings = {
        **INSTANT, "VLM_ENGINE__MOCK__DECODE_S": "0.02", "VLM_ENGINE__MAX_NUM_SEQS": str(streams),
        "VLM_ENGINE__MOCK__NUM_OUTPUT_TOKENS": str(NUM_TOKENS),
    }  # fmt: skip
    if against is not None:
        check_checkout(against)
    folders = {"fleet": None} | ({} if against is None else {str(against): against})
    with ExitStack() as stack:
        fleets = [
            replace(stack.enter_context(run_vlm_fleet(settings, folder)), name=name)
            for name, folder in folders.items()
        ]
        costs = _measure_in_turn(fleets, streams, NUM_TOKENS, seconds, rounds)
    return {
        name: {role: median(each.cpu_s[role] for each in found) for role in ROLES}
        for name, found in costs.items()
    }


def write_fleet_figures(path: Path, seconds: float, rounds: int) -> None:
    """Measure the costs of a request, a streamed token and an image, and write them for `vlm plan`. Raises: BenchError."""
    measured = measure(seconds, rounds, [32])
    text, image = (
        next(fleet for cell, _, fleet in pairs(measured) if cell.body.is_new is is_new)
        for is_new in (False, True)
    )
    [token_s] = _token_costs(64, 5 * seconds, rounds).values()
    write_figures(
        path,
        FleetFigures(
            f"{psutil.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
            {role: text.cpu_of(role) for role in ROLES},
            token_s,
            {role: max(0.0, image.cpu_of(role) - text.cpu_of(role)) for role in ROLES},
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
    return Target(FRONT, port, model, {FRONT: psutil.Process(pids.pop())})


def _measure_in_turn(
    targets: list[Target], streams: int, tokens: int, seconds: float, rounds: int
) -> dict[str, list[Cost]]:
    """The rounds of each target. Raises: BenchError."""
    costs: dict[str, list[Cost]] = {target.name: [] for target in targets}
    for _, target in in_turn(rounds, targets):
        body = {
            "model": target.model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": tokens,
            "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        before = target.cpu_s()
        result = run_checked(Job(target.port, json.dumps(body), streams, seconds, stream=True))
        after = target.cpu_s()
        num_tokens = result.num_all * tokens
        cpu_s = {role: (after[role] - before[role]) / num_tokens for role in after}
        costs[target.name].append(Cost(cpu_s, result.num_requests * tokens / result.seconds))
    return costs
