"""Tables, spreads and progress bars of the benchmarks."""

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

Turn = TypeVar("Turn")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, minimum and maximum of a number over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    def text(self, scale: float = 1.0) -> str:
        """The median, and below it minimum and maximum."""
        numbers = [value * scale for value in (self.median, self.low, self.high)]
        digits = 0 if numbers[0] >= 100 else 1
        median, low, high = (f"{number:,.{digits}f}" for number in numbers)
        return f"{median}\n{low}-{high}"


def new_table(title: str, *columns: str) -> Table:
    """A table whose first column names the row."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False,
        collapse_padding=True,
    )  # fmt: skip
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def show(*parts: Table | str) -> None:
    """Print tables to standard output. A narrow terminal wraps lines, but no numbers."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.width = max(console.width, 140)
    for part in parts:
        console.print(part)


def in_turn(rounds: int, targets: Sequence[Turn]) -> Iterator[tuple[int, Turn]]:
    """Yield each round with each target. Every second round is in reverse order, so that drift favours no target."""
    for number in range(rounds):
        for target in targets if number % 2 == 0 else targets[::-1]:
            yield number, target


def measuring(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Yield each turn, with a progress bar on standard error, or one line per turn if that is no terminal."""
    screen = Console(stderr=True)
    if screen.is_terminal:  # few refreshes, because this process is part of the measurement
        yield from track(turns, "measuring", console=screen, transient=True, refresh_per_second=1)
        return
    for number, turn in enumerate(turns, 1):
        screen.print(f"measuring {number} of {len(turns)}")
        yield turn


def in_figures(value: float) -> str:
    """A number with at least three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def in_ms(seconds: float) -> str:
    return in_figures(1e3 * seconds)
