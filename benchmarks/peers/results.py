"""Tables of what systems were measured to do."""

from statistics import median

from benchmarks.peers.peer import WORKLOADS
from benchmarks.tables import Spread, new_table, show

#: ours, and the file type of llama.cpp with as many bits of the checkpoint's bfloat16, which ours reads as it is stored
_PAIRS = {"float32": "BF16", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}

#: Values of the rounds, in the unit of the workload, by system and workload.
Results = dict[tuple[str, str], list[float]]


def show_results(about: dict[str, str | int], results: Results) -> None:
    """Print what each system did, and how many times as fast as its peers ours is."""
    names = [name for name in WORKLOADS if any(name == each for _, each in results)]
    units = (f"{name}\n{WORKLOADS[name].unit}" for name in names)
    table = new_table("median, and least-most", "system", *units)
    for system in dict.fromkeys(system for system, _ in results):
        found = (results.get((system, name)) for name in names)
        table.add_row(system, *(Spread.of(values).text() if values else "" for values in found))
    ratios = new_table("ours, times as fast", "as", *names)
    for label, row in compare(results, names):
        ratios.add_row(label, *(f"{ratio:.2f}" if ratio else "" for ratio in row))
    title = ", ".join(f"{name} {value}" for name, value in about.items())
    show(title, table, ratios)


def compare(results: Results, names: list[str]) -> list[tuple[str, list[float | None]]]:
    """Each precision of ours over the best of transformers, and over llama.cpp of as many bits."""
    rows: list[tuple[str, list[float | None]]] = []
    for precision, kind in _PAIRS.items():
        for label, system in (
            ("transformers' best", "transformers:"),
            (f"llama.cpp {kind}", f"llama.cpp:{kind}"),
        ):
            ours = [_best_speed(results, f"ours:{precision}", name) for name in names]
            theirs = [_best_speed(results, system, name) for name in names]
            pairs = zip(ours, theirs, strict=True)
            ratios = [one / other if one and other else None for one, other in pairs]
            rows.append((f"ours {precision} : {label}", ratios))
    return [row for row in rows if any(row[1])]


def _best_speed(results: Results, system: str, workload: str) -> float | None:
    """The median of the fastest of the systems whose names begin so."""
    medians = [
        median(values)
        for (name, each), values in results.items()
        if each == workload and name.startswith(system)
    ]
    is_time = WORKLOADS[workload].unit == "ms"
    return max((1 / value if is_time else value for value in medians), default=None)
