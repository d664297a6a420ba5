"""One run, or several over each other, as one page that needs nothing else: numbers, plots, tables; dark and light.

Called by `vlm loadtest`. plotly.js is in the page; its policy lets it load nothing and run nothing else.
"""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from loadtest.figures import Runs, figures
from loadtest.report import Table, in_ms, in_number, percentile
from loadtest.result import (
    Result,
    ResultError,
    Sight,
    failure_ratio,
    failures,
    load_result,
)
from loadtest.result_tables import (
    describe_load,
    in_percent,
    to_latency_table,
    to_rate_table,
    to_stage_table,
)

MAX_FAULT_ROWS = 50
FOLDER = Path(__file__).parent


def run(source: Path, page: Path) -> int:
    """Make the page of a result's file; returns the exit code. Raises: ResultError."""
    write_page({"run": load_result(source)}, page)
    return 0


def write_page(runs: Runs, page: Path, changes: Table | None = None) -> None:
    """Write the page of runs by name; `changes`: what differs between them. Raises: ResultError."""
    page.write_text(to_html(runs, changes), encoding="utf-8")


def to_html(runs: Runs, changes: Table | None = None) -> str:
    """The whole page. Raises: ResultError without plotly."""
    loader = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined
    )
    found = figures(runs)
    scripts = [plotly_js(), (FOLDER / "report.js").read_text()]
    return loader.get_template("report.html").render(
        title=f"Load test of {' and '.join(dict.fromkeys(r.model for r in runs.values()))}",
        style=Markup((FOLDER / "report.css").read_text()),
        scripts=[Markup(script) for script in scripts],
        hashes=[sha256(script) for script in scripts],
        runs={name: (subtitle(result), numbers(result)) for name, result in runs.items()},
        orders={name: order_of(result) for name, result in runs.items()},
        changes=changes,
        sections={name: (found[name], tables(name, runs)) for name in found},
        data=to_script_data(found),
    )


def plotly_js() -> str:
    """The library's code. Raises: ResultError."""
    try:
        from plotly.offline import get_plotlyjs  # noqa: PLC0415 - a page is not always wanted
    except ImportError:
        raise ResultError("plotly is not installed: pip install '.[loadtest]'") from None
    return get_plotlyjs()


def sha256(script: str) -> str:
    """A script's hash as a content security policy names it."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def to_script_data(found: object) -> Markup:
    """Figures as JSON that cannot end the element that it is in."""
    text = msgspec.json.encode(found).decode()
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c"))


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


def numbers(result: Result) -> dict[str, str]:
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
    return shown | {"of the requests failed": in_percent(failure_ratio(result))}


def tables(section: str, runs: Runs) -> Sequence[Table]:
    """The numbers of a section, a table for each run that has any."""
    make = {
        "Load and answers": to_rate_table,
        "Latencies": to_latency_table,
        "Stages": to_stage_table,
        "Failures": to_failure_table,
    }[section]
    found = {name: make(result) for name, result in runs.items()}
    if len(found) > 1:
        for name, table in found.items():
            table.title = f"{name}: {table.title}"
    return [table for table in found.values() if table.rows]


def to_failure_table(result: Result) -> Table:
    """What went wrong how often."""
    table = Table("Failures", ["what", "requests"])
    ranked = failures(result).most_common()
    for fault, number in ranked[:MAX_FAULT_ROWS]:
        table.add(fault, f"{number:,}")
    if rest := ranked[MAX_FAULT_ROWS:]:
        table.add(f"{len(rest):,} other kinds", f"{sum(number for _, number in rest):,}")
    return table


def order_of(result: Result) -> str:
    """What was ordered, to order it again."""
    order = {"workload": result.workload, "plan": result.plan, "objective": result.objective}
    return msgspec.json.format(msgspec.json.encode(order), indent=1).decode()
