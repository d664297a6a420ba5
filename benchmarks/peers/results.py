"""What systems were measured to do, kept in a file so that a comparison may come about in several runs.

Used by `run` and the report.
"""

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Result:
    """One system at one workload, in one run. `values` are those of the rounds, in the workload's unit."""

    system: str
    workload: str
    unit: str
    values: list[float]
    measured_at: str
    load_average: float

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def speed_over(self, other: "Result") -> float:
        """How many times as fast as the other, by medians."""
        ratio = self.median / other.median
        return 1 / ratio if self.unit == "ms" else ratio


@dataclass(slots=True)
class Results:
    """All that is known, and of which model and machine. A later result takes the place of an earlier one."""

    about: dict[str, str | int]
    by_cell: dict[tuple[str, str], Result] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path | None, about: dict[str, str | int]) -> "Results":
        """What the file holds, if it is there and about the same. Raises: ValueError."""
        if file is None or not file.exists():
            return cls(about)
        content = json.loads(file.read_text())
        if content["about"] != about:
            raise ValueError(f"{file} is about {content['about']}, not about {about}")
        results = cls(about)
        results.add(Result(**row) for row in content["results"])
        return results

    def add(self, results: Iterable[Result]) -> None:
        for result in results:
            self.by_cell[result.system, result.workload] = result

    def to_json(self) -> str:
        rows = [asdict(result) for result in self.by_cell.values()]
        return json.dumps({"about": self.about, "results": rows}, indent=1) + "\n"

    def find(self, system: str, workload: str) -> Result | None:
        return self.by_cell.get((system, workload))

    def best(self, maker: str, workload: str) -> Result | None:
        """The fastest of a maker's systems."""
        cells = [
            result
            for (system, name), result in self.by_cell.items()
            if name == workload and system.partition(":")[0] == maker
        ]
        return max(cells, key=lambda one: one.speed_over(cells[0])) if cells else None
