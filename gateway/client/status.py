"""A fleet at a glance, for the terminal: models, workers, queues, rates and the time of each stage.

Called by `vlm status`. A stranger to the server: it reads what any client may, `/readyz`, `/v1/models` and `/metrics`.
"""

import math
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

_BAR_CELLS = 24
_LATENCIES = {
    "TTFT": "vlm_time_to_first_token_seconds",
    "TPOT": "vlm_time_per_output_token_seconds",
    "E2E": "vlm_request_duration_seconds",
}

Labels = frozenset[tuple[str, str]]


class StatusError(Exception):
    """The gateway does not tell; the message says why."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a gateway says of itself at one moment, `at` on the monotonic clock."""

    at: float
    state: str
    models: list[dict[str, Any]]
    series: dict[tuple[str, Labels], float]


def parse_metrics(text: str) -> dict[tuple[str, Labels], float]:
    """Prometheus text as values by series name and labels, in the text's order."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Period:
    """What happened between two snapshots, or since the gateway's start where there is no first one."""

    def __init__(self, first: Snapshot | None, last: Snapshot) -> None:
        self.first = first
        self.last = last

    @property
    def length_s(self) -> float | None:
        """Seconds between the snapshots; None: since the start."""
        return None if self.first is None else self.last.at - self.first.at

    def grown(self, name: str, **labels: str) -> float:
        """By how much all series of this name with these labels have grown together."""
        return sum(self._growths(name, labels).values())

    def now(self, name: str, **labels: str) -> float:
        """The sum of a gauge's series with these labels."""
        wanted = labels.items()
        found = self.last.series.items()
        return sum(value for (series, held), value in found if series == name and wanted <= held)

    def mean(self, name: str, **labels: str) -> float:
        """The mean of a histogram's observations; NaN without any."""
        count = self.grown(f"{name}_count", **labels)
        return self.grown(f"{name}_sum", **labels) / count if count else math.nan

    def quantile(self, ratio: float, name: str, **labels: str) -> float:
        """A quantile of a histogram's observations, interpolated inside its bucket; NaN without any."""
        counts = [(0.0, 0.0)]
        for held, growth in self._growths(f"{name}_bucket", labels).items():
            counts.append((float(dict(held)["le"]), growth))
        wanted = ratio * counts[-1][1]
        for (low, below), (high, count) in pairwise(sorted(counts)):
            if count >= wanted and count > below:
                if math.isinf(high):
                    return low
                return low + (high - low) * (wanted - below) / (count - below)
        return math.nan

    def values_of(self, label: str, name: str) -> list[str]:
        """The values that a label has, in the order of the metrics."""
        found = [dict(held)[label] for series, held in self.last.series if series == name]
        return list(dict.fromkeys(found))

    def _growths(self, name: str, labels: dict[str, str]) -> dict[Labels, float]:
        before = self.first.series if self.first else {}
        wanted = labels.items()
        return {
            held: value - before.get((series, held), 0.0)
            for (series, held), value in self.last.series.items()
            if series == name and wanted <= held
        }


def to_screen(url: str, period: Period) -> Group:
    """The whole screen."""
    state = period.last.state
    head = Text.assemble(
        f"{url} is ", ("ready", "green") if state == "ready" else (f"not ready ({state})", "red bold"),
        f", {period.now('vlm_open_requests'):.0f} requests open; ", _span(period.length_s),
    )  # fmt: skip
    tables = (to_models(period), "", to_latencies(period), "", to_stages(period))
    return Group(head, "", *tables)


def _span(length_s: float | None) -> str:
    return "since its start" if length_s is None else f"the last {length_s:.1f} s"


def to_models(period: Period) -> Table:
    """A row a model: who works on it, what waits, and how much was done."""
    per = "" if period.length_s is None else "/s"
    table = _new_table("model", "workers", "queue", f"answers{per}", f"others{per}", f"tokens{per}")
    for model in period.last.models:
        name = model["id"]
        answers = period.grown("vlm_requests_total", model=name, outcome="ok")
        others = period.grown("vlm_requests_total", model=name) - answers
        tokens = period.grown("vlm_generation_tokens_total", model=name)
        queue = period.now("vlm_queue_depth", model=name)
        rates = (_rate(count, period.length_s) for count in (answers, others, tokens))
        table.add_row(name, str(model.get("num_workers", "?")), f"{queue:.0f}", *rates)
    return table


def to_latencies(period: Period) -> Table:
    """A row a model: the median and the 95th percentile of each latency."""
    columns = [f"{latency} {quantile}" for latency in _LATENCIES for quantile in ("p50", "p95")]
    table = _new_table("model", *columns)
    for model in period.last.models:
        name = model["id"]
        times = (
            period.quantile(ratio, metric, model=name)
            for metric in _LATENCIES.values()
            for ratio in (0.5, 0.95)
        )
        table.add_row(name, *map(_time, times))
    return table


def _new_table(first: str, *others: str) -> Table:
    table = Table(first, box=None, pad_edge=False, header_style="dim")
    for column in others:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def to_stages(period: Period) -> Table:
    """A row a stage: its mean and its share of the whole, all models together."""
    name = "vlm_request_stage_seconds"
    table = _new_table("stage", "mean", "share")
    table.add_column()
    total = period.grown(f"{name}_sum")
    for stage in period.values_of("stage", f"{name}_sum"):
        ratio = period.grown(f"{name}_sum", stage=stage) / total if total else 0.0
        bar = "█" * round(ratio * _BAR_CELLS)
        table.add_row(stage, _time(period.mean(name, stage=stage)), f"{ratio:.0%}", bar)
    return table


def _rate(count: float, length_s: float | None) -> str:
    return f"{count:.0f}" if length_s is None else f"{count / length_s:.1f}"


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def read_snapshot(client: httpx.Client) -> Snapshot:
    """Ask the gateway. Raises: StatusError."""
    try:
        ready, models, metrics = (
            client.get(p) for p in ("/readyz?workers=1", "/v1/models", "/metrics")
        )
    except httpx.HTTPError as error:
        raise StatusError(f"nothing answers at {client.base_url}: {error}") from None
    if models.status_code == 401:
        raise StatusError("the gateway wants an API key: --api-key, or VLM_API_KEY")
    if not models.is_success or not metrics.is_success:
        raise StatusError(f"{client.base_url} is no gateway of ours, or too old a one")
    series = parse_metrics(metrics.text)
    return Snapshot(time.monotonic(), ready.json()["status"], models.json()["data"], series)


def run_status(url: str, api_key: str | None, watch_s: float | None) -> None:
    """Show the fleet once, or anew every `watch_s` until Ctrl-C. Raises: StatusError."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    console = Console(highlight=False)
    with httpx.Client(base_url=url, headers=headers, timeout=5.0, trust_env=False) as client:
        last = read_snapshot(client)
        screen = to_screen(url, Period(None, last))
        if watch_s is None:
            console.print(screen)
            return
        with suppress(KeyboardInterrupt), Live(screen, console=console, auto_refresh=False) as live:
            while True:
                time.sleep(watch_s)
                first, last = last, read_snapshot(client)
                live.update(to_screen(url, Period(first, last)), refresh=True)
