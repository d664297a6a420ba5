"""The report of one run as one HTML page with plotly.js inside. Its policy lets it load and run nothing else."""

import base64
import hashlib
from pathlib import Path

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from loadtest.figures import figures
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
    """Write the page of a saved result; returns the exit code. Raises: ResultError."""
    write_page(load_result(source), page)
    return 0


def write_page(result: Result, page: Path) -> None:
    """Write the page of a run. Raises: ResultError."""
    page.write_text(to_html(result), encoding="utf-8")


def to_html(result: Result) -> str:
    """Render the page. Raises: ResultError without plotly."""
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
