"""Flat: a collection of `vlm embed`, mapped and scanned. Exact; read-only; needs numpy alone.

It is what the other indexes are compared with.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import msgspec
import numpy as np

from search.collection import BadCollection, Manifest, Part, read_manifest
from search.filters import matches
from search.index import IndexStats
from shared.search import Filter, Hit, Item, refuse

#: Filters whose rows are remembered; a byte a row.
_MASKS = 16


class FlatIndex:
    """All rows of a directory."""

    def __init__(self, directory: Path) -> None:
        """Raises: BadCollection."""
        self.manifest: Manifest = read_manifest(directory)
        self._parts = [
            Part(directory / part.name, self.manifest.dimensions) for part in self.manifest.parts
        ]
        rows = [part.num_items for part in self.manifest.parts]
        if [len(part) for part in self._parts] != rows or sum(rows) != self.manifest.num_items:
            raise BadCollection(f"{directory}: its parts are not those of its manifest")
        self._num_bytes = sum(
            (directory / part.name).stat().st_size for part in self.manifest.parts
        )
        # What is stored in half precision is unpacked once: half is slow to multiply.
        self._vectors = [np.asarray(part.vectors, "<f4") for part in self._parts]
        self._mask = lru_cache(_MASKS)(self._compute_mask)

    def upsert(self, items: Sequence[Item]) -> None:
        """Raises: SearchError."""
        raise refuse("read_only", "This store is a collection of files: nothing can be written.")

    def delete(self, ids: Sequence[str] | None = None, where: Filter | None = None) -> int:
        """Raises: SearchError."""
        raise refuse("read_only", "This store is a collection of files: nothing can be deleted.")

    def search(self, vectors: np.ndarray, k: int, where: Filter | None = None) -> list[list[Hit]]:
        """All rows of each part at once."""
        masks: Sequence[np.ndarray | None] = [None] * len(self._parts)
        if where is not None:
            masks = self._mask(msgspec.msgpack.encode(where))
        return [self._search_one(vector, k, masks) for vector in vectors]

    def _search_one(
        self, vector: np.ndarray, k: int, masks: Sequence[np.ndarray | None]
    ) -> list[Hit]:
        found: list[tuple[float, str, Part, int]] = []
        for part, rows, mask in zip(self._parts, self._vectors, masks, strict=True):
            scores = rows @ vector if mask is None else rows[mask] @ vector
            best = _best(scores, k)
            chosen = best if mask is None else mask[best]
            found += [
                (float(score), part.text("ids", row), part, row)
                for score, row in zip(scores[best], chosen, strict=True)
            ]
        found.sort(key=lambda hit: (-hit[0], hit[1]))
        return [Hit(item=part.item(row), score=score) for score, _, part, row in found[:k]]

    def _compute_mask(self, encoded: bytes) -> list[np.ndarray]:
        """The rows that pass a filter, part by part."""
        where = msgspec.msgpack.decode(encoded, type=Filter)
        return [
            np.array(
                [row for row in range(len(part)) if matches(where, part.attributes(row))], "i8"
            )
            for part in self._parts
        ]

    @cached_property
    def _places(self) -> dict[str, tuple[Part, int]]:
        return {
            part.text("ids", row): (part, row) for part in self._parts for row in range(len(part))
        }

    def get(self, ids: Sequence[str]) -> list[Item]:
        """Those that are there, with their vectors."""
        found = [self._places[key] for key in ids if key in self._places]
        return [part.item(row, with_vector=True) for part, row in found]

    def page(self, after: str, limit: int, with_vectors: bool = False) -> list[Item]:
        """The next items in the order of ids."""
        wanted = sorted(key for key in self._places if key > after)[:limit]
        places = [self._places[key] for key in wanted]
        return [part.item(row, with_vector=with_vectors) for part, row in places]

    def items(self) -> Iterator[Item]:
        """All items, as they were written."""
        for part in self._parts:
            yield from part.items()

    def stats(self) -> IndexStats:
        """Of the manifest, and of the files."""
        return IndexStats(self.manifest.num_items, self._num_bytes)

    def compact(self) -> None:
        """There is nothing to do."""

    def close(self) -> None:
        """The maps end with the last array."""


def _best(scores: np.ndarray, k: int) -> np.ndarray:
    """The rows of the k best scores, and those that equal the last of them."""
    if len(scores) <= k:
        return np.arange(len(scores))
    least = -math.inf if k < 1 else np.partition(scores, -k)[-k]
    return np.flatnonzero(scores >= least)
