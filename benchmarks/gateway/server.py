"""CPU per streamed token of gateway, worker and Redis, beside the HTTP front of the server behind them.

Each round drives the server alone, and the fleet in front of it, with the same requests. The server's front is the process that
listens on its port; the processes that compute are not counted.
"""

import base64
import json
import platform
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import httpx
import psutil
from rich.table import Table

from benchmarks.gateway.against import check_checkout
from benchmarks.gateway.client import Job
from benchmarks.gateway.run import (
    INSTANT,
    BenchError,
    Target,
    measure,
    noise_url,
    run_checked,
    run_vlm_fleet,
    show,
)
from benchmarks.gateway.tables import ROLES, pairs
from deploy.capacity import FleetFigures, write_figures

FRONT = "server's front"
NUM_TOKENS = 100  #: per stream of the mock engine
PROMPT = "Tell me about a lighthouse."


def run_alone(url: str, streams: int, tokens: int, seconds: float, rounds: int) -> None:
    """Measure the server's front without a fleet and print it. Raises: BenchError."""
    front = _find_front(url)
    costs = [_measure(front, streams, tokens, seconds)[0][FRONT] for _ in range(rounds)]
    table = Table("process", "us", title=f"CPU per streamed token, {streams} streams")
    table.add_row(FRONT, f"{median(costs) * 1e6:.1f}")
    show([table])


def run(
    kind: str, model: str, url: str, streams: int, tokens: int, seconds: float, rounds: int
) -> None:
    """Measure and print a table. Raises: BenchError."""
    settings = {
        "VLM_ENGINE__KIND": kind, "VLM_ENGINE__MODEL": model, "VLM_ENGINE__URL": url,
        "VLM_ENGINE__MAX_NUM_SEQS": str(streams),
    }  # fmt: skip
    costs: dict[str, list[dict[str, float]]] = {}
    rates: dict[str, list[float]] = {}
    with run_vlm_fleet(settings) as fleet:
        front = _find_front(url)
        for number in range(rounds):
            for target in (front, fleet) if number % 2 == 0 else (fleet, front):
                found, rate = _measure(target, streams, tokens, seconds)
                costs.setdefault(target.name, []).append(found)
                rates.setdefault(target.name, []).append(rate)
    show([
        _to_table(costs, front.name, fleet.name, streams),
        _to_rate_table(rates, front.name, fleet.name, streams),
    ])  # fmt: skip


def run_tokens(streams: int, seconds: float, rounds: int, against: Path | None) -> Table:
    """CPU per token of streams of the mock engine, and in another checkout. Raises: BenchError."""
    costs = _token_costs(streams, seconds, rounds, against)
    table = Table("process", *costs, title=f"us of CPU per streamed token, {streams} streams")
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
            len(base64.b64decode(noise_url().partition(",")[2])),
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
    try:
        listed = httpx.get(f"{url}/v1/models", trust_env=False).raise_for_status().json()
    except httpx.HTTPError as error:
        raise BenchError(f"{url}: {error}") from None
    return Target(FRONT, port, listed["data"][0]["id"], {FRONT: psutil.Process(pids.pop())})


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


def _to_table(
    costs: dict[str, list[dict[str, float]]], front: str, fleet: str, streams: int
) -> Table:
    table = Table(title=f"CPU per streamed token, {streams} streams", title_justify="left")
    table.add_column("process")
    table.add_column("us", justify="right")
    for name in (front, fleet):
        for role in costs[name][0]:
            cost = median(each[role] for each in costs[name])
            table.add_row(role, f"{cost * 1e6:.1f}")
    ratios = [
        sum(ours.values()) / sum(theirs.values())
        for ours, theirs in zip(costs[fleet], costs[front], strict=True)
    ]
    table.add_row("fleet : front", f"{median(ratios):.2f}", end_section=True)
    return table


def _to_rate_table(rates: dict[str, list[float]], front: str, fleet: str, streams: int) -> Table:
    table = Table(title=f"Tokens per second, {streams} streams", title_justify="left")
    table.add_column("target")
    table.add_column("tokens/s", justify="right")
    for name in (front, fleet):
        table.add_row(name, f"{median(rates[name]):,.0f}")
    ratios = [ours / theirs for ours, theirs in zip(rates[fleet], rates[front], strict=True)]
    table.add_row("fleet : front", f"{median(ratios):.3f}", end_section=True)
    return table
