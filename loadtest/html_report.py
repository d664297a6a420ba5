"""A result as one page that needs nothing else: numbers, plots, tables; dark and light, wide and narrow.

Called by `vlm loadtest`. The page loads nothing and runs no script, and its policy says so.
"""

import json
from html import escape
from pathlib import Path
from string import Template

import msgspec

from loadtest import charts
from loadtest.charts import Figure
from loadtest.report import Table, in_ms, in_number, percentile
from loadtest.result import (
    Result,
    Sight,
    by_kind,
    counted,
    failure_ratio,
    failures,
    load_result,
    mean_stages_s,
)
from loadtest.result_tables import describe_load, in_percent, to_latency_table, to_rate_table

PAGE = Template((Path(__file__).parent / "report.html").read_text())
MAX_FAULT_ROWS = 50
STYLE = (Path(__file__).parent / "report.css").read_text()


def run(source: Path, page: Path) -> int:
    """Make the page of a result's file; returns the exit code. Raises: ResultError."""
    write_page(load_result(source), page)
    return 0


def write_page(result: Result, page: Path) -> None:
    """Write the page."""
    page.write_text(to_html(result), encoding="utf-8")


def to_html(result: Result) -> str:
    """The whole page."""
    return PAGE.substitute(
        style=STYLE,
        title=f"Load test of {escape(result.model)}",
        subtitle=escape(subtitle(result)),
        numbers=numbers(result),
        load=section("Load and answers", load_figures(result), to_rate_table(result)),
        latencies=section("Latencies", latency_figures(result), to_latency_table(result)),
        stages=stages(result),
        failures=failure_section(result),
        order=escape(order_of(result)),
    )


def subtitle(result: Result) -> str:
    """Who was asked what, when, from where."""
    words = [
        f"{result.workload.profile} questions",
        describe_load(result.plan),
        f"asked of {result.url}",
        f"from {result.machine}",
        result.created_at,
    ]
    return " · ".join(words)


def numbers(result: Result) -> str:
    """The run in a few numbers."""
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
    shown["of the requests failed"] = in_percent(failure_ratio(result))
    return "".join(
        f"<div><dd>{value}</dd><dt>{escape(name)}</dt></div>" for name, value in shown.items()
    )


def load_figures(result: Result) -> list[Figure | None]:
    """How much came back."""
    return [
        charts.throughput_by_load(result),
        charts.latency_by_load(result, "TTFT"),
        charts.latency_by_load(result, "E2E"),
        charts.rates_over_time(result),
        charts.open_requests(result),
    ]


def latency_figures(result: Result) -> list[Figure | None]:
    """How long it took."""
    over_time = [charts.latency_over_time(result, latency) for latency in ("TTFT", "E2E")]
    return over_time + [
        charts.distribution(result, latency) for latency in ("TTFT", "TPOT", "ITL", "E2E")
    ]


def section(title: str, figures: list[Figure | None], table: Table) -> str:
    """Plots, and the same as a table."""
    plots = "".join(figure.to_html() for figure in figures if figure)
    return f"<h2>{title}</h2><div class=plots>{plots}</div>{to_table(table)}"


def to_table(table: Table) -> str:
    """A table that scrolls by itself where it is too wide."""
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    caption = f"<caption>{escape(table.title)}</caption>"
    return f"<div class=wide><table>{caption}<tr>{head}</tr>{rows}</table></div>"


def stages(result: Result) -> str:
    """Of each kind a bar of the mean time in each of the server's stages."""
    means = {kind: mean_stages_s(records) for kind, records in by_kind(counted(result)).items()}
    means = {kind: found for kind, found in means.items() if found}
    if not means:
        return ""
    names = list(next(iter(means.values())))
    longest = max(sum(found.values()) for found in means.values())
    keys = "".join(f'<li class="{escape(name)}">{escape(name)}</li>' for name in names)
    bars = "".join(stage_bar(kind, found, longest) for kind, found in means.items())
    table = Table("Mean time of each stage, ms", ["kind", *names, "all"])
    for kind, found in means.items():
        table.add(kind, *(in_ms(found[name]) for name in names), in_ms(sum(found.values())))
    return (
        "<h2>Stages</h2><p>Where the server says that the time went, on average; the stages add up to its "
        f"own end-to-end time.</p><ul class=keys>{keys}</ul><div class=stages>{bars}</div>{to_table(table)}"
    )


def stage_bar(kind: str, means_s: dict[str, float], longest_s: float) -> str:
    """One kind's stages side by side, as wide as they are long."""
    parts = "".join(
        f'<i class="{escape(name)}" style="width:{100 * seconds / longest_s:.2f}%" '
        f'title="{escape(name)} {in_ms(seconds)} ms"></i>'
        for name, seconds in means_s.items()
    )
    total = in_ms(sum(means_s.values()))
    return f"<p>{escape(kind)}<b>{total} ms</b></p><div class=stack>{parts}</div>"


def failure_section(result: Result) -> str:
    """What went wrong, or that nothing did."""
    figure = charts.failures_over_time(result)
    if figure is None:
        return f"<h2>Failures</h2><p>None: {len(result.records):,} answers were complete and right.</p>"
    table = Table("Failures", ["what", "requests"])
    ranked = failures(result).most_common()
    for fault, number in ranked[:MAX_FAULT_ROWS]:
        table.add(fault, f"{number:,}")
    if rest := ranked[MAX_FAULT_ROWS:]:
        table.add(f"{len(rest):,} other kinds", f"{sum(number for _, number in rest):,}")
    return section("Failures", [figure], table)


def order_of(result: Result) -> str:
    """What was ordered, to order it again."""
    order = {
        "workload": msgspec.to_builtins(result.workload),
        "plan": msgspec.to_builtins(result.plan),
        "objective": msgspec.to_builtins(result.objective),
    }
    return json.dumps(order, indent=1)
