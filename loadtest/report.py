"""Tables of numbers for a terminal."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table as RichTable


@dataclass(slots=True)
class Table:
    """A titled table; the first column names the row, the others are numbers already written out."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def add(self, name: str, *cells: str) -> None:
        self.rows.append([name, *cells])

    def to_rich(self) -> RichTable:
        table = RichTable(title=self.title, title_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


def show(tables: Sequence[Table]) -> None:
    console = Console()
    for table in tables:
        console.print(table.to_rich())


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0..1) of all values do not exceed; NaN without values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def in_ms(seconds: float) -> str:
    """Milliseconds to three figures; a dash for what was not measured."""
    return "-" if math.isnan(seconds) else _to_three_figures(seconds * 1000)


def in_number(value: float) -> str:
    """A number to three figures at least; a dash for what was not measured."""
    return "-" if math.isnan(value) else _to_three_figures(value)


def _to_three_figures(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
