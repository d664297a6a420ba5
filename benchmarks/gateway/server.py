"""CPU per streamed token of gateway, worker and Redis, beside the HTTP front of the server behind them.

Each round drives the server alone, and the fleet in front of it, with the same requests. The server's front is the process that
listens on its port; the processes that compute are not counted.
"""

import json
import platform
from contextlib import ExitStack
from dataclasses import replace
from operator import truediv
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
from benchmarks.tables import new_table, show
from deploy.capacity import FleetFigures, write_figures
from loadtest.albums import noise_jpeg

FRONT = "server's front"
NUM_TOKENS = 100  #: per stream of the mock engine
PROMPT = "Tell me about a lighthouse."


def run(
    kind: str, model: str, url: str, streams: int, tokens: int, seconds: float, rounds: int
) -> None:
    """Measure and print tables; without a model, of the server's front alone. Raises: BenchError, ServerError."""
    settings = {
        "VLM_ENGINE__KIND": kind, "VLM_ENGINE__MODEL": model, "VLM_ENGINE__URL": url,
        "VLM_ENGINE__MAX_NUM_SEQS": str(streams),
    }  # fmt: skip
    costs: dict[str, list[dict[str, float]]] = {}
    rates: dict[str, list[float]] = {}
    with ExitStack() as stack:
        targets = [_find_front(url)]
        if model:
            targets.append(stack.enter_context(run_vlm_fleet(settings)))
        for number in range(rounds):
            for target in targets if number % 2 == 0 else targets[::-1]:
                found, rate = _measure(target, streams, tokens, seconds)
                costs.setdefault(target.name, []).append(found)
                rates.setdefault(target.name, []).append(rate)
    cpu = new_table(f"CPU per streamed token, {streams} streams", "process", "us")
    speed = new_table(f"Tokens per second, {streams} streams", "target", "tokens/s")
    for name, rounds_of in costs.items():
        for role in rounds_of[0]:
            cpu.add_row(role, f"{median(each[role] for each in rounds_of) * 1e6:.1f}")
        speed.add_row(name, f"{median(rates[name]):,.0f}")
    if model:
        front, fleet = ([sum(each.values()) for each in costs[name]] for name in (FRONT, FLEET))
        cpu.add_row("fleet : front", f"{median(map(truediv, fleet, front)):.2f}")
        ratio = median(map(truediv, rates[FLEET], rates[FRONT]))
        speed.add_row("fleet : front", f"{ratio:.3f}")
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
    costs: dict[str, list[dict[str, float]]] = {name: [] for name in folders}
    with ExitStack() as stack:
        fleets = [
            replace(stack.enter_context(run_vlm_fleet(settings, folder)), name=name)
            for name, folder in folders.items()
        ]
        for number in range(rounds):
            for fleet in fleets if number % 2 == 0 else fleets[::-1]:
                costs[fleet.name].append(_measure(fleet, streams, NUM_TOKENS, seconds)[0])
    return {
        name: {role: median(each[role] for each in found) for role in ROLES}
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


def _measure(
    target: Target, streams: int, tokens: int, seconds: float
) -> tuple[dict[str, float], float]:
    """CPU seconds per token of each process, and tokens per second of all streams. Raises: BenchError."""
    body = {
        "model": target.model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": tokens,
        "temperature": 0, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    before = target.cpu_s()
    result = run_checked(Job(target.port, json.dumps(body), streams, seconds, stream=True))
    after = target.cpu_s()
    costs = {role: (after[role] - before[role]) / (result.num_all * tokens) for role in after}
    return costs, result.num_requests * tokens / result.seconds
