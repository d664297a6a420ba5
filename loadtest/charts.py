"""The plots of a report, each with its title, its legend and a line that says how to read it.

Called by the report. What is drawn comes from a result; how it looks from the page's style sheet.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from loadtest.load_plan import Phase, level_at, phases
from loadtest.record import Latency, Record
from loadtest.report import percentile
from loadtest.result import Result, Sight, counted, sights, values_of
from loadtest.svg import Axis, Chart, Point, linear_axis, log_axis

MAX_DOTS = 1500
MAX_CURVE_POINTS = 200
MOST_SLICES = 40
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
MAX_LINE_POINTS = 500
MOST_FAULTS = 5  # with a color of their own
OTHERS = "other failures"


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot in its place on the page. `legend`: names by their style."""

    title: str
    svg: str
    note: str
    legend: dict[str, str]

    def to_html(self) -> str:
        """The figure's markup."""
        keys = "".join(
            f'<li class="{style}">{escape(name)}</li>' for style, name in self.legend.items()
        )
        return (
            f"<figure><h3>{escape(self.title)}</h3><ul class=keys>{keys}</ul>{self.svg}"
            f"<figcaption>{escape(self.note)}</figcaption></figure>"
        )


def in_time(seconds: float) -> str:
    """A duration as a label."""
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"


def time_axis(result: Result) -> Axis:
    """The run from the end of its warm-up."""
    return Axis(0.0, result.plan.duration_s, "seconds since the warm-up")


def slices(result: Result) -> list[Phase]:
    """The run in equal parts, each with some answers in it if there are any."""
    number = max(1, min(MOST_SLICES, int(result.plan.duration_s), len(counted(result)) // 8))
    length_s = result.plan.duration_s / number
    return [Phase(i * length_s, (i + 1) * length_s, 0.0) for i in range(number)]


def latency_over_time(result: Result, latency: Latency) -> Figure | None:
    """Requests as dots, and the percentiles of each slice of time."""
    parts = [
        (
            part.phase,
            [
                (r.intended_at, value)
                for r in part.asked
                if not r.error
                for value in r.values_s(latency)
            ],
        )
        for part in sights(result, slices(result))
    ]
    parts = [(phase, dots) for phase, dots in parts if dots]
    if not parts:
        return None
    y = log_axis([value for _, dots in parts for _, value in dots], "", in_time)
    chart = Chart(time_axis(result), y)
    shown = thin([dots for _, dots in parts])
    chart.dots(shown, "dim")
    ordered = [(phase, sorted(value for _, value in dots)) for phase, dots in parts]
    for index, (name, share) in enumerate(SHARES.items()):
        points = [
            ((phase.start_s + phase.end_s) / 2, percentile(values, share))
            for phase, values in ordered
        ]
        chart.line(points, f"c{index}", name)
    title = f"{latency} over time"
    number = sum(len(dots) for _, dots in parts)
    note = "Each dot is a request at the moment when it was meant to be sent. Logarithmic."
    if len(shown) < number:
        note += f" Dots: {len(shown):,} of {number:,}, the slowest of each slice of time among them; lines: all."
    return Figure(
        title, chart.to_svg(title), note, {f"c{i}": name for i, name in enumerate(SHARES)}
    )


def thin(groups: Sequence[Sequence[Point]]) -> list[Point]:
    """Every so many-th point, so that about MAX_DOTS are left, and the highest of each group."""
    everything = [point for group in groups for point in group]
    step = math.ceil(len(everything) / MAX_DOTS)
    if step < 2:
        return everything
    return sorted({*everything[::step], *(max(group, key=_height) for group in groups)})


def peaks(points: Sequence[Point]) -> list[Point]:
    """The highest of every so many that follow each other, so that at most MAX_LINE_POINTS are left."""
    size = math.ceil(len(points) / MAX_LINE_POINTS) or 1
    return [max(points[i : i + size], key=_height) for i in range(0, len(points), size)]


def _height(point: Point) -> float:
    return point[1]


def distribution(result: Result, latency: Latency) -> Figure | None:
    """Of each scenario the share of values below each value."""
    groups: dict[str, list[Record]] = {}
    for record in counted(result):
        groups.setdefault(record.scenario, []).append(record)
    values = {name: sorted(values_of(group, latency)) for name, group in sorted(groups.items())}
    values = {name: found for name, found in values.items() if found}
    if not values:
        return None
    usual = [value for found in values.values() for value in found[len(found) // 100 :]]
    x = log_axis(usual, "", in_time)
    chart = Chart(x, Axis(0.0, 1.0, write=lambda share: f"{share:.0%}"))
    for index, (name, found) in enumerate(values.items()):
        chart.line(list(curve(found)), f"c{index}", name)
    title = f"{latency}, distribution"
    note = (
        "How many of the values are at most that long. Further left is faster, steeper is steadier."
    )
    return Figure(
        title, chart.to_svg(title), note, {f"c{i}": name for i, name in enumerate(values)}
    )


def curve(ordered: Sequence[float]) -> Iterator[Point]:
    """The cumulative distribution of ordered values."""
    step = len(ordered) // MAX_CURVE_POINTS + 1
    yield ordered[0], 0.0
    for index in range(step - 1, len(ordered), step):
        yield ordered[index], (index + 1) / len(ordered)
    yield ordered[-1], 1.0


def rates_over_time(result: Result) -> Figure:
    """What was asked, answered and good in each slice of time."""
    rates: dict[str, Callable[[Sight], float]] = {
        "asked": lambda sight: sight.offered_rate,
        "answered": lambda sight: sight.answered_rate,
        "good": lambda sight: sight.good_rate,
    }
    if not str(result.objective):
        del rates["good"]
    parts = sights(result, slices(result))
    lines = {
        name: [((part.phase.start_s + part.phase.end_s) / 2, rate(part)) for part in parts]
        for name, rate in rates.items()
    }
    plan = result.plan
    planned = [(part.phase.start_s, level_at(plan, part.phase.start_s)) for part in parts]
    if plan.loop == "open":
        lines["planned"] = [*planned, (plan.duration_s, level_at(plan, plan.duration_s))]
    highest = [value for line in lines.values() for _, value in line]
    chart = Chart(time_axis(result), linear_axis(highest, ""))
    styles = {"asked": "c0", "answered": "c1", "good": "c2", "planned": "dashed"}
    for name, line in lines.items():
        chart.line(line, styles[name], name)
    title = "Requests a second"
    note = "Asked above answered: work piles up, or fails. Good: right, and within the objective."
    return Figure(title, chart.to_svg(title), note, {styles[name]: name for name in lines})


def open_requests(result: Result) -> Figure:
    """How many requests were on their way at each moment."""
    changes = [(record.intended_at, 1) for record in result.records]
    changes += [(record.ended_at, -1) for record in result.records]
    points: list[Point] = []
    number = 0
    for at_s, change in sorted(changes):
        number += change
        if 0 <= at_s <= result.plan.duration_s:
            points.append((at_s, number))
    chart = Chart(time_axis(result), linear_axis([value for _, value in points], ""))
    shown = peaks(points)
    chart.line(shown, "c0")
    title = "Requests on their way"
    note = "Meant to be sent and not answered yet. In an open loop it grows when the server is too slow."
    if len(shown) < len(points):
        note += f" {len(shown):,} of {len(points):,} moments, peaks among them."
    return Figure(title, chart.to_svg(title), note, {})


def throughput_by_load(result: Result) -> Figure | None:
    """What came back for what was offered, phase by phase."""
    parts = [(part.phase.level, part) for part in sights(result, phases(result.plan))]
    if len(parts) < 2:
        return None
    answered = [(level, sight.answered_rate) for level, sight in parts]
    good = [(level, sight.good_rate) for level, sight in parts]
    chart = Chart(load_axis(result), linear_axis([rate for _, rate in answered], ""))
    legend = {"c1": "answered"}
    if result.plan.loop == "open":
        end = min(chart.x.high, chart.y.high)
        chart.line([(0.0, 0.0), (end, end)], "dashed")
        legend["dashed"] = "all that was offered"
    draw_marked(chart, answered, "c1", "answered")
    if str(result.objective):
        draw_marked(chart, good, "c2", "good")
        legend["c2"] = f"good: {result.objective}"
    title = "Answers a second against load"
    note = (
        "Where the line bends the server is full; where good falls below answered it is too slow."
    )
    return Figure(title, chart.to_svg(title), note, legend)


def latency_by_load(result: Result, latency: Latency) -> Figure | None:
    """The percentiles of a latency, phase by phase."""
    everything = [
        (part.phase.level, part.values_s(latency)) for part in sights(result, phases(result.plan))
    ]
    parts = [(level, values) for level, values in everything if values]
    if len(parts) < 2:
        return None
    lines = {
        name: [(level, percentile(values, share)) for level, values in parts]
        for name, share in SHARES.items()
    }
    y = log_axis([value for line in lines.values() for _, value in line], "", in_time)
    chart = Chart(load_axis(result), y)
    for index, (name, line) in enumerate(lines.items()):
        draw_marked(chart, line, f"c{index}", name, in_time)
    title = f"{latency} against load"
    legend = {f"c{i}": name for i, name in enumerate(lines)}
    return Figure(title, chart.to_svg(title), "Logarithmic. Each point is a step.", legend)


def load_axis(result: Result) -> Axis:
    """What was offered."""
    label = "users" if result.plan.loop == "closed" else "requests offered a second"
    return linear_axis([phase.level for phase in phases(result.plan)], label)


def draw_marked(
    chart: Chart,
    points: list[Point],
    style: str,
    name: str,
    write: Callable[[float], str] = lambda value: f"{value:.3g}",
) -> None:
    """A line whose points tell their values."""
    points = sorted(points)
    chart.line(points, style)
    titles = [f"{name} at {level:g}: {write(float(f'{value:.3g}'))}" for level, value in points]
    chart.marks(points, style, titles)


def failures_over_time(result: Result) -> Figure | None:
    """How often what failed in each slice of time; the rarest count together."""
    failed = [record for record in result.records if record.error]
    if not failed:
        return None
    ranked = [name for name, _ in Counter(record.error for record in failed).most_common()]
    rare = set(ranked[MOST_FAULTS - 1 :]) if len(ranked) > MOST_FAULTS else set()
    parts = slices(result)
    starts = [part.start_s for part in parts]
    counts: Counter[tuple[str, int]] = Counter()
    for record in failed:
        index = max(0, bisect_right(starts, record.ended_at) - 1)
        counts[OTHERS if record.error in rare else record.error, index] += 1
    names = [name for name in ranked if name not in rare] + [OTHERS] * bool(rare)
    heights = [sum(counts[name, index] for name in names) for index in range(len(parts))]
    chart = Chart(time_axis(result), linear_axis(heights, ""))
    for index, part in enumerate(parts):
        low = 0
        for style, name in enumerate(names):
            if number := counts[name, index]:
                title = f"{number} x {name}"
                chart.bar(part.start_s, part.end_s, low, low + number, f"e{style}", title)
                low += number
    title = "Failures over time"
    totals = [sum(counts[name, index] for index in range(len(parts))) for name in names]
    legend = {f"e{i}": f"{totals[i]:,} x {name}" for i, name in enumerate(names)}
    return Figure(title, chart.to_svg(title), "Failed requests in each slice of time.", legend)
