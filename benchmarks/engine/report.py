"""Runs of a benchmark to medians and spreads, and these to a table."""

import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.engine.machine import Machine
from benchmarks.engine.measure import Run
from benchmarks.tables import Spread, new_table, show
from deploy.capacity import EngineFigures

#: of the table; `total tok/s` counts prompt tokens too
_COLUMNS = (
    "scenario",
    "batch",
    "steps",
    "output\ntok/s",
    "total\ntok/s",
    "images\n/s",
    "TTFT\nms",
    "TPOT\nms",
    "ITL p99\nms, slower",
    "GB/s\nGFLOP/s",
    "of\nroofline",
    "peak\nMiB",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One scenario at one batch size. TTFT, TPOT and ITL pool the requests of all rounds. Units: seconds, bytes."""

    scenario: str
    batch_size: int
    num_rounds: int
    num_steps: float  #: median of the rounds
    rates: dict[str, Spread]
    ttft_s: Spread
    tpot_s: Spread | None
    itl_p99_s: float | None
    slowdown: Spread | None  #: of streams by a late prompt, of each round
    roofline_ratio: Spread
    peak_bytes: int  #: of the process so far


def to_row(
    scenario: str, batch_size: int, runs: list[Run], machine: Machine, peak_bytes: int
) -> Row:
    rates = [run.rates() for run in runs]
    tpots = [value for run in runs for value in run.tpots]
    itls = sorted(value for run in runs for value in run.itls)
    slowdowns = [run.slowdown for run in runs if run.slowdown is not None]
    shares = [run.roofline_ratio(machine.bytes_per_s, machine.flops_per_s) for run in runs]
    return Row(
        scenario=scenario,
        batch_size=batch_size,
        num_rounds=len(runs),
        num_steps=statistics.median(len(run.steps) for run in runs),
        rates={name: Spread.of([rate[name] for rate in rates]) for name in rates[0]},
        ttft_s=Spread.of([value for run in runs for value in run.ttfts]),
        tpot_s=Spread.of(tpots) if tpots else None,
        itl_p99_s=itls[int(0.99 * (len(itls) - 1))] if itls else None,
        slowdown=Spread.of(slowdowns) if slowdowns else None,
        roofline_ratio=Spread.of(shares),
        peak_bytes=peak_bytes,
    )


def to_figures(machine: Machine, model: str, rows: list[Row]) -> EngineFigures:
    """The costs that `vlm plan` reads, of the largest batch. Raises: ValueError without decode and prefill."""
    batch_size = max(row.batch_size for row in rows)
    of = {row.scenario: row.rates for row in rows if row.batch_size == batch_size}
    if not {"decode", "prefill"} <= of.keys():
        raise ValueError("--figures: --scenarios must contain decode and prefill")
    output_token_s = 1 / of["decode"]["output_tokens_per_s"].median
    image_s = None
    if rates := of.get("image"):
        images_s = 1 - rates["output_tokens_per_s"].median * output_token_s
        image_s = images_s / rates["images_per_s"].median
    return EngineFigures(
        f"{machine.device}, {machine.num_threads} threads", model, batch_size, output_token_s,
        1 / of["prefill"]["total_tokens_per_s"].median, image_s and max(image_s, 1e-9),
    )  # fmt: skip


def show_report(machine: Machine, model: dict[str, Any], rows: list[Row]) -> None:
    """Print what a reader compares: medians, with the least and the most behind them."""
    table = new_table(f"median, and least-most, of {rows[0].num_rounds}", *_COLUMNS)
    for row in rows:
        table.add_row(*_cells(row))
    show(
        ", ".join(f"{name} {value}" for name, value in model.items()),
        f"{machine.device}, {machine.num_threads} threads, torch {machine.torch_version}, load average"
        f" {machine.load_average:.1f}; measured {machine.bytes_per_s / 1e9:.1f} GB/s,"
        f" {machine.flops_per_s / 1e9:,.0f} GFLOP/s",
        table,
    )


def _cells(row: Row) -> list[str]:
    rate = row.rates
    return [
        row.scenario,
        str(row.batch_size),
        f"{row.num_steps:,.0f}",
        rate["output_tokens_per_s"].text(),
        rate["total_tokens_per_s"].text(),
        rate["images_per_s"].text() if rate["images_per_s"].high else "",
        row.ttft_s.text(1e3),
        row.tpot_s.text(1e3) if row.tpot_s else "",
        _itl_text(row),
        f"{rate['bytes_per_s'].median / 1e9:.1f}\n{rate['flops_per_s'].median / 1e9:,.0f}",
        f"{row.roofline_ratio.median:.0%}",
        f"{row.peak_bytes / 2**20:,.0f}",
    ]


def _itl_text(row: Row) -> str:
    text = f"{row.itl_p99_s * 1e3:,.1f}" if row.itl_p99_s else ""
    return f"{text}\n{row.slowdown.median:.2f}x" if row.slowdown else text
