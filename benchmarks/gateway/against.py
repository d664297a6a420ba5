"""Compare the fleets of two checkouts: `vlm bench gateway --against FOLDER`.

Both fleets run at the same time and are measured alternately by the same client. They restart each round, because the
memory layout of a process makes it faster or slower for its life. Ratios are of adjacent measurements.
"""

from pathlib import Path
from statistics import median

from rich.table import Table

from benchmarks.gateway.run import BenchError, create_bodies, measure_cell, run_vlm_fleet
from benchmarks.gateway.tables import ROLES, Cell, Samples
from benchmarks.tables import in_ms, in_turn, measuring, new_table

NUM_TURNS = 20  #: measurements of each cell and checkout per round

Pair = tuple[Samples, Samples]


def run_against(
    folder: Path, seconds: float, rounds: int, connections: list[int], num_turns: int = NUM_TURNS
) -> list[Table]:
    """Alternate measurements of text requests, of `seconds` each. Raises: BenchError."""
    check_checkout(folder)
    text = create_bodies()[0]
    cells = [Cell(text, stream, number) for number in connections for stream in (False, True)]
    found: dict[Cell, list[Pair]] = {cell: [] for cell in cells}
    for _ in measuring(range(rounds)):
        with run_vlm_fleet() as ours, run_vlm_fleet(folder=folder) as theirs:
            for cell in cells:
                pair = Samples(), Samples()
                for _, side in in_turn(num_turns, (0, 1)):
                    measure_cell(cell, (ours, theirs)[side], seconds, pair[side])
                found[cell].append(pair)
    return [to_table(found)]


def check_checkout(folder: Path) -> None:
    """Raises: BenchError."""
    if not (folder / "vlm.py").is_file():
        raise BenchError(f"--against {folder}: the folder is not a checkout of this project")


def to_table(found: dict[Cell, list[Pair]]) -> Table:
    """One row per cell: medians of all rounds, and ratios of ours to theirs; below 1 ours is faster."""
    columns = ["request", "connections", "theirs p50 ms", "ours p50 ms", "ratio", "of rounds"]
    title = "This checkout and the other: CPU in microseconds, theirs and ours"
    table = new_table(title, *columns, *ROLES, "ratio")
    for cell, pairs in found.items():
        ratios = [to_ratio(*pair) for pair in pairs]
        p50s = [median(pair[side].p50_s for pair in pairs) for side in (0, 1)]
        cpus = [[median(p[side].cpu_of(role) for p in pairs) for role in ROLES] for side in (0, 1)]
        table.add_row(
            cell.name, str(cell.num_connections), in_ms(p50s[1]), in_ms(p50s[0]),
            f"{median(ratios):.3f}", f"{min(ratios):.2f} to {max(ratios):.2f}",
            *(f"{1e6 * b:.0f} {1e6 * a:.0f}" for a, b in zip(*cpus, strict=True)),
            f"{sum(cpus[0]) / sum(cpus[1]):.3f}",
        )  # fmt: skip
    return table


def to_ratio(ours: Samples, theirs: Samples) -> float:
    """Median ratio of the p50 of adjacent measurements."""
    both = zip(ours.results, theirs.results, strict=True)
    return median(mine.p50_s / other.p50_s for mine, other in both)
