"""What systems were measured to do, as JSON and as tables."""

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from benchmarks.peers.peer import WORKLOADS
from benchmarks.tables import Spread, new_table, show

#: characters that the tables need
_TABLE_WIDTH = 140
#: ours, and the file type of llama.cpp with as many bits of the checkpoint's bfloat16, which ours reads as it is stored
_PAIRS = {"float32": "BF16", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}


@dataclass(frozen=True, slots=True)
class Result:
    """One system at one workload, in one run. `values` are those of the rounds, in the workload's unit."""

    system: str
    workload: str
    unit: str
    values: list[float]
    load_average: float

    def speed_over(self, other: "Result") -> float:
        """How many times as fast as the other, by medians."""
        ratio = statistics.median(self.values) / statistics.median(other.values)
        return 1 / ratio if self.unit == "ms" else ratio


@dataclass(slots=True)
class Results:
    """The results of one model on one machine. A later result of a system replaces the earlier one."""

    about: dict[str, str | int]
    by_cell: dict[tuple[str, str], Result] = field(default_factory=dict)

    def add(self, results: Iterable[Result]) -> None:
        for result in results:
            self.by_cell[result.system, result.workload] = result

    def to_json(self) -> str:
        rows = [asdict(result) for result in self.by_cell.values()]
        return json.dumps({"about": self.about, "results": rows}, indent=1) + "\n"

    def best(self, maker: str, workload: str) -> Result | None:
        """The fastest of a maker's systems."""
        cells = [
            result
            for (system, name), result in self.by_cell.items()
            if name == workload and system.partition(":")[0] == maker
        ]
        return max(cells, key=lambda one: one.speed_over(cells[0])) if cells else None

    def show(self) -> None:
        """Print what each system did, and how many times as fast as its peers ours is."""
        names = [name for name in WORKLOADS if any(name == each for _, each in self.by_cell)]
        units = (f"{name}\n{WORKLOADS[name].unit}" for name in names)
        table = new_table("median, and least-most", "system", *units)
        for system in dict.fromkeys(system for system, _ in self.by_cell):
            found = (self.by_cell.get((system, name)) for name in names)
            table.add_row(system, *(Spread.of(x.values).text() if x else "" for x in found))
        ratios = new_table("ours, times as fast", "as", *names)
        for label, row in self.compare(names):
            ratios.add_row(label, *(f"{ratio:.2f}" if ratio else "" for ratio in row))
        about = ", ".join(f"{name} {value}" for name, value in self.about.items())
        show(about, table, ratios, min_width=_TABLE_WIDTH)

    def compare(self, names: list[str]) -> list[tuple[str, list[float | None]]]:
        """Each precision of ours over the best of transformers, and over llama.cpp of as many bits."""
        rows: list[tuple[str, list[float | None]]] = []
        for precision, kind in _PAIRS.items():
            ours = [self.by_cell.get((f"ours:{precision}", name)) for name in names]
            theirs = [self.best("transformers", name) for name in names]
            same = [self.by_cell.get((f"llama.cpp:{kind}", name)) for name in names]
            rows.append((f"ours {precision} : transformers' best", _ratios(ours, theirs)))
            rows.append((f"ours {precision} : llama.cpp {kind}", _ratios(ours, same)))
        return [row for row in rows if any(row[1])]


def _ratios(ours: list[Result | None], theirs: list[Result | None]) -> list[float | None]:
    pairs = zip(ours, theirs, strict=True)
    return [one.speed_over(other) if one and other else None for one, other in pairs]
