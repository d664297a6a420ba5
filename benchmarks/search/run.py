"""`vlm bench search`: cost and recall of an index, compared with an exact search in numpy.

As in embeddings of texts, the vectors have fewer independent directions than dimensions (half as many), plus noise.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from benchmarks.tables import new_table, show
from search.collection import FlatIndex, Manifest, write_manifest, write_part
from search.index import VectorIndex, matches, open_indexes
from shared.search import Filter, Item

K = 10
_BATCH = 2000
#: A filter that about one item in a hundred passes.
_RARE = Filter("eq", "group", 7.0)


def make_vectors(count: int, dimensions: int, seed: int) -> np.ndarray:
    """Random vectors of length 1. Shapes: (count, dimensions)."""
    shape = np.random.default_rng(0)
    rank = dimensions // 2
    axes = shape.standard_normal((rank, dimensions)) * np.linspace(1, 0.05, rank)[:, None]
    draw = np.random.default_rng(seed)
    rows = draw.standard_normal((count, rank)) @ axes
    rows += 0.15 * draw.standard_normal((count, dimensions))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype("<f4")


def make_items(vectors: np.ndarray) -> list[Item]:
    return [
        Item(
            id=str(number),
            vector=row.tobytes(),
            text=f"text {number}",
            attributes={"group": float(number % 100)},
        )
        for number, row in enumerate(vectors)
    ]


def build(kind: str, items: Sequence[Item], folder: Path) -> VectorIndex:
    dimensions = len(items[0].vector) // 4
    if kind == "flat":
        parts = [write_part(folder, n, some) for n, some in enumerate(_batches(items, 50_000))]
        write_manifest(
            folder,
            Manifest(
                model="", digest="", dimensions=dimensions, dtype="f32",
                num_items=len(items), parts=tuple(parts),
            ),
        )  # fmt: skip
        return FlatIndex(folder)
    indexes = open_indexes(kind if "://" in kind else f"{kind}://{folder}")
    indexes.drop("s")
    with indexes.database.change() if indexes.database is not None else nullcontext():
        index = indexes.open("s", dimensions)
    for some in _batches(items, _BATCH):
        index.upsert(some)
    index.compact()
    return index


def _batches(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    return [items[first : first + size] for first in range(0, len(items), size)]


def _cpu_ms(work: Callable[[], object]) -> tuple[float, float]:
    """CPU time of the process and wall time of one call."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return (time.process_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3


def run(sizes: Sequence[int], dimensions: int, kinds: Sequence[str], num_queries: int) -> None:
    table = new_table("", "vectors", "index", "build CPU s", "query CPU ms", "p50 ms", "recall@10",
                  "1 % filter: CPU ms", "recall", "MB")  # fmt: skip
    for size in sizes:
        vectors = make_vectors(size, dimensions, 1)
        queries = make_vectors(num_queries, dimensions, 2)
        items = make_items(vectors)
        passes = np.array([matches(_RARE, item.attributes) for item in items])
        truth = [np.argsort(-(vectors @ query))[:K] for query in queries]
        rare = np.flatnonzero(passes)
        rare_truth = [rare[np.argsort(-(vectors[rare] @ query))[:K]] for query in queries]
        exact = [
            _cpu_ms(lambda query=query, rows=vectors: np.argpartition(-(rows @ query), K))[0]
            for query in queries
        ]
        table.add_row(str(size), "numpy", "", f"{np.median(exact):.2f}", "", "1", "", "", "")
        for kind in kinds:
            with tempfile.TemporaryDirectory(prefix="vlm-bench-") as folder:
                began = time.process_time()
                index = build(kind, items, Path(folder))
                build_s = time.process_time() - began
                plain = _measure(index, queries, truth, None)
                rarely = _measure(index, queries, rare_truth, _RARE)
                table.add_row(
                    str(size), kind.partition(":")[0], f"{build_s:.1f}", f"{plain[0]:.2f}", f"{plain[1]:.2f}",
                    f"{plain[2]:.3f}", f"{rarely[0]:.2f}", f"{rarely[2]:.3f}",
                    f"{index.stats().num_bytes / 1e6:.0f}",
                )  # fmt: skip
                index.close()
    show(table)


def _measure(
    index: VectorIndex, queries: np.ndarray, truth: Sequence[np.ndarray], where: Filter | None
) -> tuple[float, float, float]:
    """CPU and wall time of the median query, and the recall."""
    index.search(queries[:1], K, where)
    found: list[list[str]] = []

    def search(query: np.ndarray) -> None:
        [hits] = index.search(query[None], K, where)
        found.append([hit.item.id for hit in hits])

    times = np.array([_cpu_ms(lambda query=query: search(query)) for query in queries])
    shares = [len({*map(str, t)} & {*f}) / len(t) for t, f in zip(truth, found, strict=True)]
    return float(np.median(times[:, 0])), float(np.median(times[:, 1])), float(np.mean(shares))
