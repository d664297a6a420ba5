"""The plots of a report, as plotly.js data: throughput and latency by load and over time, and the stages."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from loadtest.load_plan import Phase, phases
from loadtest.record import Latency
from loadtest.report import percentile
from loadtest.result import Result, Sight, by_kind, counted, mean_stages_s, sights

MAX_SLICES = 40
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
SHOWN: tuple[Latency, ...] = ("TTFT", "E2E")

Trace = dict[str, Any]


class Figure(msgspec.Struct):
    """One plot with the `data` and `layout` of plotly.js."""

    title: str
    note: str
    data: list[Trace]
    layout: dict[str, Any]


def figures(result: Result) -> list[Figure]:
    loop = {"closed": "users", "open": "requests/s offered"}[result.plan.loop]
    by_load = sorted(sights(result, phases(result.plan)), key=lambda part: part.phase.level)
    over_time = sights(result, slices(result))
    found = [stages(result)]
    for parts, at, name, axis in (
        (by_load if len(by_load) > 1 else [], level_of, "against load", loop),
        (over_time, middle_of, "over time", "seconds after the warm-up"),
    ):
        found.append(rates(result, parts, at, f"Requests a second {name}", axis))
        found += [latencies(parts, latency, at, f"{latency} {name}", axis) for latency in SHOWN]
    return [figure for figure in found if figure.data]


def level_of(part: Sight) -> float:
    return part.phase.level


def middle_of(part: Sight) -> float:
    return (part.phase.start_s + part.phase.end_s) / 2


def slices(result: Result) -> list[Phase]:
    """Equal parts of the run, long enough to hold several answers each."""
    number = max(1, min(MAX_SLICES, int(result.plan.duration_s), len(counted(result)) // 8))
    length_s = result.plan.duration_s / number
    return [Phase(i * length_s, (i + 1) * length_s, 0.0) for i in range(number)]


def line(name: str, x: Sequence[float], y: Sequence[float]) -> Trace:
    return {"type": "scatter", "mode": "lines+markers", "name": name, "x": list(x), "y": list(y)}


def axes(x: str, y: str, **changes: Any) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}} | changes


def rates(
    result: Result, parts: Sequence[Sight], at: Callable[[Sight], float], title: str, axis: str
) -> Figure:
    shown: dict[str, Callable[[Sight], float]] = {
        "offered": lambda part: part.offered_rate,
        "answered": lambda part: part.answered_rate,
    }
    if str(result.objective):
        shown[f"good: {result.objective}"] = lambda part: part.good_rate
    traces = [
        line(name, [at(part) for part in parts], [rate(part) for part in parts])
        for name, rate in (shown.items() if parts else ())
    ]
    note = "The server is full where the answered rate stays below the offered rate."
    return Figure(title, note, traces, axes(axis, "requests/s"))


def latencies(
    parts: Sequence[Sight], latency: Latency, at: Callable[[Sight], float], title: str, axis: str
) -> Figure:
    """Percentiles of one latency in each part of the run."""
    values = [(at(part), sorted(part.values_s(latency))) for part in parts]
    values = [(x, values_s) for x, values_s in values if values_s]
    traces = [
        line(name, [x for x, _ in values], [1e3 * percentile(v, share) for _, v in values])
        for name, share in (SHARES.items() if values else ())
    ]
    return Figure(title, "Percentiles of answered requests.", traces, axes(axis, "ms"))


def stages(result: Result) -> Figure:
    means = {
        kind: found
        for kind, records in by_kind(counted(result)).items()
        if (found := mean_stages_s(records))
    }
    names = dict.fromkeys(name for found in means.values() for name in found)
    traces = [
        {"type": "bar", "orientation": "h", "name": name, "y": list(means)}
        | {"x": [1e3 * found.get(name, 0.0) for found in means.values()]}
        for name in names
    ]
    layout = axes("ms", "", barmode="stack", yaxis={"automargin": True, "autorange": "reversed"})
    note = "The stages that the server reports add up to its end-to-end time."
    return Figure("Mean time of each stage", note, traces, layout)
