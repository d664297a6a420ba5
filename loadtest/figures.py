"""The plots of a report, as plotly.js takes them: plain data, each with a title and a line that says how to read it.

Called by the report. One run shows its scenarios and percentiles; several runs are drawn over each other.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from loadtest.load_plan import Phase, level_at, phases
from loadtest.record import Latency, Record
from loadtest.report import percentile
from loadtest.result import Result, Sight, by_kind, counted, mean_stages_s, sights, values_of

MAX_POINTS = 1500
MAX_SLICES = 40
MAX_FAULTS = 5  # with a color of their own
OTHERS = "other failures"
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

Runs = Mapping[str, Result]
Point = tuple[float, float]
Trace = dict[str, Any]


class Figure(msgspec.Struct):
    """One plot. `data` and `layout` are plotly.js's."""

    title: str
    note: str
    data: list[Trace]
    layout: dict[str, Any]


def figures(runs: Runs) -> dict[str, list[Figure]]:
    """All plots that the runs have something for, by section."""
    sections = {
        "Load and answers": [
            throughput_by_load(runs),
            *(latency_by_load(runs, latency) for latency in ("TTFT", "E2E")),
            rates_over_time(runs),
            open_requests(runs),
        ],
        "Latencies": [
            *(latency_over_time(runs, latency) for latency in ("TTFT", "E2E")),
            *(distribution(runs, latency) for latency in ("TTFT", "TPOT", "ITL", "E2E")),
        ],
        "Stages": [stages(runs)],
        "Failures": [failures_over_time(runs)],
    }
    return {name: [one for one in found if one.data] for name, found in sections.items()}


def line(points: Sequence[Point], name: str, **changes: Any) -> Trace:
    """A line through points."""
    x, y = zip(*points, strict=True) if points else ((), ())
    return {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y} | changes


def label(runs: Runs, run: str, name: str) -> str:
    """What a trace is called; the run is named where there are several."""
    return f"{run}: {name}" if len(runs) > 1 else name


def axes(x: str, y: str = "", **changes: Any) -> dict[str, Any]:
    """The layout of a plot with these titles of its axes."""
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}} | changes


def log_ms(traces: Sequence[Trace], direction: str = "y") -> dict[str, Any]:
    """A logarithmic axis of milliseconds that fits the traces, with labels at round values.

    plotly.js itself labels a little more than a decade with digits, and equal values with all their places.
    """
    found = [value for trace in traces for value in trace[direction] if value > 0] or [1.0]
    low, high = min(found), max(found)
    if high < 1.1 * low:
        low, high = low / 1.1, high * 1.1
    shown = [value for value in round_values(low, high) if low <= value <= high]
    return {
        "type": "log",
        "title": {"text": "ms"},
        "range": [math.log10(low / 1.02), math.log10(high * 1.02)],
        "tickvals": shown,
        "ticktext": [f"{value:,g}" for value in shown],
    }


def round_values(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten over some decades, powers over many; equal steps within less than one."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if high > 6 * low:
        factors = (1, 2, 5) if last - first <= 4 else (1,)
        return [
            float(f"{factor}e{power}") for power in range(first, last + 1) for factor in factors
        ]
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    number = math.floor(high / step) - math.ceil(low / step) + 1
    return [float(f"{(math.ceil(low / step) + i) * step:.6g}") for i in range(number)]


TIME = "seconds since the warm-up"


def slices(result: Result) -> list[Phase]:
    """The run in equal parts, each with some answers in it if there are any."""
    number = max(1, min(MAX_SLICES, int(result.plan.duration_s), len(counted(result)) // 8))
    length_s = result.plan.duration_s / number
    return [Phase(i * length_s, (i + 1) * length_s, 0.0) for i in range(number)]


def thin(points: Sequence[Point]) -> list[Point]:
    """Every so many-th point, about MAX_POINTS of them, and the highest of the many between."""
    step = math.ceil(len(points) / MAX_POINTS)
    if step < 2:
        return list(points)
    groups = [points[i : i + 10 * step] for i in range(0, len(points), 10 * step)]
    return sorted({*points[::step], *(max(group, key=lambda point: point[1]) for group in groups)})


def latency_over_time(runs: Runs, latency: Latency) -> Figure:
    """Percentiles of each slice of time; of a single run its requests as dots, too."""
    traces = []
    for run, result in runs.items():
        parts = [(p.phase, sorted(p.values_s(latency))) for p in sights(result, slices(result))]
        parts = [(phase, values) for phase, values in parts if values]
        if len(runs) == 1:
            answers = sorted(counted(result), key=lambda record: record.intended_at)
            dots = [(r.intended_at, 1e3 * v) for r in answers for v in r.values_s(latency)]
            marker = {"size": 4, "opacity": 0.3, "color": "#888"}
            traces += [line(thin(dots), "requests", mode="markers", marker=marker)] if dots else []
        for name, share in SHARES.items():
            points = [
                ((phase.start_s + phase.end_s) / 2, 1e3 * percentile(values, share))
                for phase, values in parts
            ]
            traces += [line(points, label(runs, run, name))] if points else []
    note = "A dot is a request at the moment when it was meant to be sent; of very many, some and the slowest."
    return Figure(f"{latency} over time", note, traces, axes(TIME, yaxis=log_ms(traces)))


def distribution(runs: Runs, latency: Latency) -> Figure:
    """The share of values below each value: of each scenario of one run, or of each of several runs."""
    groups: dict[str, list[Record]] = {}
    for run, result in runs.items():
        for record in counted(result):
            groups.setdefault(record.scenario if len(runs) == 1 else run, []).append(record)
    traces = []
    for name, records in sorted(groups.items()):
        if values := sorted(values_of(records, latency)):
            step = len(values) // MAX_POINTS + 1
            kept = [*range(step - 1, len(values), step), len(values) - 1]
            points = [(1e3 * values[i], 100 * (i + 1) / len(values)) for i in kept]
            traces.append(line([(1e3 * values[0], 0.0), *points], name))
    note = (
        "How many of the values are at most that long. Further left is faster, steeper is steadier."
    )
    return Figure(
        f"{latency}, distribution", note, traces, axes("", "%", xaxis=log_ms(traces, "x"))
    )


def rates_over_time(runs: Runs) -> Figure:
    """What was asked, answered and good in each slice of time."""
    traces = []
    for run, result in runs.items():
        plan, parts = result.plan, sights(result, slices(result))
        rates: dict[str, Callable[[Sight], float]] = {
            "asked": lambda sight: sight.offered_rate,
            "answered": lambda sight: sight.answered_rate,
        }
        if str(result.objective):
            rates["good"] = lambda sight: sight.good_rate
        for name, rate in rates.items():
            points = [((p.phase.start_s + p.phase.end_s) / 2, rate(p)) for p in parts]
            traces.append(line(points, label(runs, run, name)))
        if plan.loop == "open":
            instants = [*(part.phase.start_s for part in parts), plan.duration_s]
            planned = [(at_s, level_at(plan, at_s)) for at_s in instants]
            traces.append(line(planned, label(runs, run, "planned"), line={"dash": "dot"}))
    note = "Asked above answered: work piles up, or fails. Good: right, and within the objective."
    return Figure("Requests a second", note, traces, axes(TIME))


def open_requests(runs: Runs) -> Figure:
    """How many requests were open at each moment."""
    traces = []
    for run, result in runs.items():
        changes = [(record.intended_at, 1) for record in result.records]
        changes += [(record.ended_at, -1) for record in result.records]
        points: list[Point] = []
        number = 0
        for at_s, change in sorted(changes):
            number += change
            if 0 <= at_s <= result.plan.duration_s:
                points.append((at_s, number))
        if points:
            traces.append(line(thin(points), label(runs, run, "open"), line={"shape": "hv"}))
    note = "Meant to be sent and not answered yet. In an open loop it grows when the server is too slow."
    return Figure("Open requests", note, traces, axes(TIME))


def load_title(runs: Runs) -> str:
    """What the load is counted in."""
    loops = {result.plan.loop for result in runs.values()}
    return {"closed": "users", "open": "requests offered a second"}[min(loops)]


def throughput_by_load(runs: Runs) -> Figure:
    """What came back for what was offered, phase by phase."""
    traces = []
    for run, result in runs.items():
        parts = sorted(sights(result, phases(result.plan)), key=lambda part: part.phase.level)
        if len(parts) < 2:
            continue
        answered = [(part.phase.level, part.answered_rate) for part in parts]
        traces.append(line(answered, label(runs, run, "answered"), mode="lines+markers"))
        if str(result.objective):
            good = [(part.phase.level, part.good_rate) for part in parts]
            name = label(runs, run, f"good: {result.objective}")
            traces.append(line(good, name, mode="lines+markers"))
    note = (
        "Where the line bends the server is full; where good falls below answered it is too slow."
    )
    return Figure("Answers a second against load", note, traces, axes(load_title(runs)))


def latency_by_load(runs: Runs, latency: Latency) -> Figure:
    """The percentiles of a latency, phase by phase."""
    traces = []
    for run, result in runs.items():
        parts = sorted(sights(result, phases(result.plan)), key=lambda part: part.phase.level)
        found = [(part.phase.level, part.values_s(latency)) for part in parts]
        found = [(level, values) for level, values in found if values]
        for name, share in SHARES.items() if len(found) > 1 else ():
            points = [(level, 1e3 * percentile(values, share)) for level, values in found]
            traces.append(line(points, label(runs, run, name), mode="lines+markers"))
    layout = axes(load_title(runs), yaxis=log_ms(traces))
    return Figure(f"{latency} against load", "Each point is a step.", traces, layout)


def stages(runs: Runs) -> Figure:
    """Of each kind a bar of the mean time in each of the server's stages."""
    means = {
        label(runs, run, kind): found
        for run, result in runs.items()
        for kind, records in by_kind(counted(result)).items()
        if (found := mean_stages_s(records))
    }
    names = dict.fromkeys(name for found in means.values() for name in found)
    traces = [
        {"type": "bar", "orientation": "h", "name": name, "y": list(means)}
        | {"x": [1e3 * found.get(name, 0.0) for found in means.values()]}
        for name in names
    ]
    layout = axes("ms", barmode="stack", yaxis={"automargin": True, "autorange": "reversed"})
    note = "Where the server says that the time went, on average; the stages add up to its own end-to-end time."
    return Figure("Mean time of each stage", note, traces, layout)


def failures_over_time(runs: Runs) -> Figure:
    """How often what failed in each slice of time; the rarest count together."""
    counts: dict[str, Counter[float]] = {}
    failed = [
        (label(runs, run, record.error), run, record)
        for run, result in runs.items()
        for record in result.records
        if record.error
    ]
    ranked = [name for name, _ in Counter(name for name, _, _ in failed).most_common()]
    known = ranked if len(ranked) <= MAX_FAULTS else ranked[: MAX_FAULTS - 1]
    starts = {run: [part.start_s for part in slices(result)] for run, result in runs.items()}
    for name, run, record in failed:
        start_s = starts[run][max(0, bisect_right(starts[run], record.ended_at) - 1)]
        counts.setdefault(name if name in known else OTHERS, Counter())[start_s] += 1
    traces = [
        {"type": "bar", "name": f"{counts[name].total():,} x {name}"}
        | {"x": sorted(counts[name]), "y": [counts[name][at_s] for at_s in sorted(counts[name])]}
        for name in [*known, OTHERS]
        if name in counts
    ]
    note = "Failed requests in each slice of time."
    return Figure("Failures over time", note, traces, axes(TIME, barmode="stack"))
