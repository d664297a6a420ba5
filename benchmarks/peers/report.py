"""Results as tables: what each system did, and how many times as fast as its peers ours is.

Used by `run`.
"""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.peers.peer import WORKLOADS
from benchmarks.peers.results import Result, Results

#: characters that the tables need
TABLE_WIDTH = 140
#: ours, and the file type of llama.cpp with as many bits of the checkpoint's bfloat16, which ours reads as it is stored
PAIRS = {"float32": "BF16", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}


def show(console: Console, results: Results) -> None:
    """Print both tables."""
    console.print(", ".join(f"{name} {value}" for name, value in results.about.items()))
    systems = list(dict.fromkeys(system for system, _ in results.by_cell))
    names = [name for name in WORKLOADS if any(name == each for _, each in results.by_cell)]
    table = Table(title="median, and least-most", box=SIMPLE_HEAD)
    for column in ("system", *(f"{name}\n{WORKLOADS[name].unit}" for name in names)):
        table.add_column(column, no_wrap=True, justify="left" if column == "system" else "right")
    for system in systems:
        table.add_row(system, *(_text(results.find(system, name)) for name in names))
    console.print(table)
    table = Table(title="ours, times as fast", box=SIMPLE_HEAD)
    for column in ("as", *names):
        table.add_column(column, no_wrap=True, justify="left" if column == "as" else "right")
    for label, ratios in compare(results, names):
        table.add_row(label, *(f"{ratio:.2f}" if ratio else "" for ratio in ratios))
    console.print(table)


def compare(results: Results, names: list[str]) -> list[tuple[str, list[float | None]]]:
    """Each precision of ours over the best of transformers, and over llama.cpp of as many bits."""
    rows = []
    for precision, kind in PAIRS.items():
        ours = [results.find(f"ours:{precision}", name) for name in names]
        theirs = [results.best("transformers", name) for name in names]
        same = [results.find(f"llama.cpp:{kind}", name) for name in names]
        rows.append((f"ours {precision} : transformers' best", _ratios(ours, theirs)))
        rows.append((f"ours {precision} : llama.cpp {kind}", _ratios(ours, same)))
    return [row for row in rows if any(row[1])]


def _ratios(ours: list[Result | None], theirs: list[Result | None]) -> list[float | None]:
    pairs = zip(ours, theirs, strict=True)
    return [one.speed_over(other) if one and other else None for one, other in pairs]


def _text(result: Result | None) -> str:
    if result is None:
        return ""
    numbers = (result.median, min(result.values), max(result.values))
    digits = 0 if numbers[0] >= 100 else 1
    median, low, high = (f"{number:,.{digits}f}" for number in numbers)
    return f"{median}\n{low}-{high}"
