"""Summarizes runs of a benchmark in a table of medians and spreads."""

from dataclasses import dataclass
from importlib.metadata import version
from statistics import median
from typing import Any

from benchmarks.engine.machine import Machine
from benchmarks.engine.measure import Run
from benchmarks.tables import Spread, new_table, show
from deploy.capacity import EngineFigures

#: Columns of the table; `total tok/s` includes prompt tokens.
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
    """The rounds of one scenario at one batch size. `peak_bytes`: peak memory of the process so far."""

    scenario: str
    batch_size: int
    runs: list[Run]
    peak_bytes: int

    def rate(self, name: str) -> Spread:
        return Spread.of([run.rates()[name] for run in self.runs])


def to_figures(machine: Machine, model: str, rows: list[Row]) -> EngineFigures:
    """The costs that `vlm plan` reads, at the largest batch size. Raises: ValueError without decode and prefill."""
    batch_size = max(row.batch_size for row in rows)
    of = {row.scenario: row for row in rows if row.batch_size == batch_size}
    if not {"decode", "prefill"} <= of.keys():
        raise ValueError("--figures: --scenarios must contain decode and prefill")
    output_token_s = 1 / of["decode"].rate("output_tokens_per_s").median
    image_s = None
    if row := of.get("image"):
        images_s = 1 - row.rate("output_tokens_per_s").median * output_token_s
        image_s = max(images_s / row.rate("images_per_s").median, 1e-9)
    return EngineFigures(
        f"{machine.device}, {machine.num_threads} threads", model, batch_size, output_token_s,
        1 / of["prefill"].rate("total_tokens_per_s").median, image_s,
    )  # fmt: skip


def show_report(machine: Machine, model: dict[str, Any], rows: list[Row]) -> None:
    """Print medians, with minimum and maximum."""
    table = new_table(f"median and minimum-maximum, of {len(rows[0].runs)}", *_COLUMNS)
    for row in rows:
        table.add_row(*_cells(row, machine))
    show(
        ", ".join(f"{name} {value}" for name, value in model.items()),
        f"{machine.device}, {machine.num_threads} threads, torch {version('torch')}; measured"
        f" {machine.bytes_per_s / 1e9:.1f} GB/s, {machine.flops_per_s / 1e9:,.0f} GFLOP/s",
        table,
    )


def _cells(row: Row, machine: Machine) -> list[str]:
    """The cells of a row. TTFT, TPOT and ITL cover the requests of all rounds."""
    runs, images = row.runs, row.rate("images_per_s")
    ttft = Spread.of([value for run in runs for value in run.ttfts])
    tpots = [value for run in runs for value in run.tpots]
    itls = sorted(value for run in runs for value in run.itls)
    itl_p99 = f"{1e3 * itls[int(0.99 * (len(itls) - 1))]:,.1f}" if itls else ""
    slowdowns = [run.slowdown for run in runs if run.slowdown is not None]
    roofline = median(run.roofline_ratio(machine.bytes_per_s, machine.flops_per_s) for run in runs)
    return [
        row.scenario,
        str(row.batch_size),
        f"{median(len(run.steps) for run in runs):,.0f}",
        row.rate("output_tokens_per_s").text(),
        row.rate("total_tokens_per_s").text(),
        images.text() if images.high else "",
        ttft.text(1e3),
        Spread.of(tpots).text(1e3) if tpots else "",
        f"{itl_p99}\n{median(slowdowns):.2f}x" if slowdowns else itl_p99,
        f"{row.rate('bytes_per_s').median / 1e9:.1f}\n{row.rate('flops_per_s').median / 1e9:,.0f}",
        f"{roofline:.0%}",
        f"{row.peak_bytes / 2**20:,.0f}",
    ]
