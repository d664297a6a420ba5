"""The report of one run as one HTML page with plotly.js inside. Its policy lets it load and run nothing else."""

import base64
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from loadtest.load_plan import Phase, phases
from loadtest.record import Latency, percentile
from loadtest.report import (
    SHOWN,
    Table,
    describe_load,
    in_ms,
    in_number,
    in_percent,
    to_latency_table,
    to_rate_table,
    to_stage_table,
)
from loadtest.result import (
    Result,
    Sight,
    by_kind,
    counted,
    failure_ratio,
    failures,
    mean_stages_s,
    sights,
)

MAX_SLICES = 40
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

Trace = dict[str, Any]


class Figure(msgspec.Struct):
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
        (by_load if len(by_load) > 1 else [], lambda part: part.phase.level, "against load", loop),
        (over_time, lambda part: part.phase.middle_s, "over time", "seconds after the warm-up"),
    ):
        found.append(rates(result, parts, at, f"Requests a second {name}", axis))
        found += [latencies(parts, latency, at, f"{latency} {name}", axis) for latency in SHOWN]
    return [figure for figure in found if figure.data]


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


MAX_FAULT_ROWS = 50
FOLDER = Path(__file__).parent


class NoPlotly(Exception):
    """plotly is not installed."""


def write_page(result: Result, page: Path) -> None:
    """Write the page of a run. Raises: NoPlotly."""
    page.write_text(to_html(result), encoding="utf-8")


def to_html(result: Result) -> str:
    """Render the page. Raises: NoPlotly."""
    loader = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined
    )
    found = figures(result)
    scripts = [plotly_js(), (FOLDER / "report.js").read_text()]
    tables = [to_rate_table, to_latency_table, to_stage_table, to_failure_table]
    return loader.get_template("report.html").render(
        title=f"Load test of {result.model}",
        style=Markup((FOLDER / "report.css").read_text()),
        scripts=[Markup(script) for script in scripts],
        hashes=[sha256(script) for script in scripts],
        subtitle=subtitle(result),
        numbers=numbers(result),
        order=order_of(result),
        figures=found,
        tables=[table for make in tables if (table := make(result)).rows],
        data=to_script_data(found),
    )


def plotly_js() -> str:
    """The library's code. Raises: NoPlotly."""
    try:
        from plotly.offline import get_plotlyjs  # noqa: PLC0415 - a page is not always wanted
    except ImportError:
        raise NoPlotly("plotly is not installed: pip install '.[loadtest]'") from None
    return get_plotlyjs()


def sha256(script: str) -> str:
    """A script's hash as a content security policy names it."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def to_script_data(found: object) -> Markup:
    """Figures as JSON that cannot end the element that it is in."""
    text = msgspec.json.encode(found).decode()
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c"))


def subtitle(result: Result) -> str:
    words = [
        f"{result.workload.profile} questions",
        describe_load(result.plan),
        f"asked of {result.url}",
        f"from {result.machine}",
        result.created_at,
    ]
    return " · ".join(words)


def numbers(result: Result) -> dict[str, str]:
    whole = Sight(result)
    shown = {
        "answers/s": in_number(whole.answered_rate),
        "output tokens/s": in_number(whole.token_rate),
        "TTFT p50, ms": in_ms(percentile(whole.values_s("TTFT"), 0.5)),
        "TTFT p99, ms": in_ms(percentile(whole.values_s("TTFT"), 0.99)),
        "TPOT p50, ms": in_ms(percentile(whole.values_s("TPOT"), 0.5)),
        "E2E p50, ms": in_ms(percentile(whole.values_s("E2E"), 0.5)),
        "E2E p99, ms": in_ms(percentile(whole.values_s("E2E"), 0.99)),
    }
    if str(result.objective):
        shown[f"kept to {result.objective}"] = in_percent(whole.good_ratio)
    return shown | {"of the requests failed": in_percent(failure_ratio(result))}


def to_failure_table(result: Result) -> Table:
    table = Table("Failures", ["what", "requests"])
    ranked = failures(result).most_common()
    for fault, number in ranked[:MAX_FAULT_ROWS]:
        table.add(fault, f"{number:,}")
    if rest := ranked[MAX_FAULT_ROWS:]:
        table.add(f"{len(rest):,} other kinds", f"{sum(number for _, number in rest):,}")
    return table


def order_of(result: Result) -> str:
    order = {"workload": result.workload, "plan": result.plan, "objective": result.objective}
    return msgspec.json.format(msgspec.json.encode(order), indent=1).decode()
