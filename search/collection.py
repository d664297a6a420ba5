"""A collection of `vlm embed` on disk, and the exact, read-only index over it.

    part-00000.safetensors    embeddings [rows, dimensions]; ids, texts, images, attributes (JSON), each as
                              the bytes of all rows and `..._offsets` int64 [rows + 1]
    manifest.json             written last: model, digest, prompt, parts with their SHA-256

Files are written under a temporary name, synced and renamed. Nothing is pickled.
"""

import hashlib
import json
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from search.index import IndexStats, matches
from shared.packages.store import place
from shared.search import Attributes, Filter, Hit, Item, SearchError, refuse

MANIFEST = "manifest.json"
PARTIAL = ".partial"  #: ending of a file that is being written
#: Number of filters whose matching rows are cached.
_MASKS = 16
FORMAT = 1
TEXT_COLUMNS = ("ids", "texts", "images", "attributes")
_DTYPES = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "U8": np.dtype("u1"),
}


class BadCollection(Exception):
    """The directory is not a complete collection."""


def read_only() -> SearchError:
    return refuse("read_only", "This store is a collection of files and cannot be written.")


class PartRecord(msgspec.Struct, frozen=True):
    name: str
    num_items: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a collection. `inputs`: SHA-256 of the inputs; empty for an exported store."""

    model: str
    digest: str
    dimensions: int
    dtype: str
    num_items: int
    parts: tuple[PartRecord, ...]
    prompt: str = ""
    query_prompt: str | None = None  #: None: the model's own
    inputs: str = ""
    format: int = FORMAT


def write_part(
    directory: Path, number: int, items: Sequence[Item], dtype: str = "f32"
) -> PartRecord:
    """Write items as one file, atomically."""
    vectors = np.frombuffer(b"".join(item.vector for item in items), "<f4").reshape(len(items), -1)
    tensors = {"embeddings": vectors.astype({"f32": "<f4", "f16": "<f2"}[dtype])}
    columns = {
        "ids": [item.id for item in items],
        "texts": [item.text for item in items],
        "images": [item.image for item in items],
        "attributes": [json.dumps(item.attributes) if item.attributes else "" for item in items],
    }
    for name, values in columns.items():
        encoded = [value.encode() for value in values]
        tensors[name] = np.frombuffer(b"".join(encoded), np.uint8)
        tensors[f"{name}_offsets"] = np.cumsum([0, *map(len, encoded)], dtype="<i8")
    name = f"part-{number:05d}.safetensors"
    data = save(tensors)
    write_whole(directory / name, data)
    return PartRecord(name, len(items), hashlib.sha256(data).hexdigest())


def write_manifest(directory: Path, manifest: Manifest) -> None:
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
    write_whole(directory / MANIFEST, data)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically, and sync it."""
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    place(os.replace, partial, path)


def read_manifest(directory: Path) -> Manifest:
    """Raises: BadCollection."""
    try:
        manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise BadCollection(
            f"{directory} has no {MANIFEST}: name a directory of `vlm embed`; if `vlm embed` was interrupted, "
            "run it again"
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise BadCollection(f"{directory / MANIFEST} cannot be read: {error}") from None
    if manifest.format != FORMAT:
        raise BadCollection(
            f"{directory} has format {manifest.format}: this version reads {FORMAT}"
        )
    return manifest


class Part:
    """One file, memory-mapped."""

    def __init__(self, path: Path, dimensions: int) -> None:
        """Raises: BadCollection."""
        tensors = _map(path)
        try:
            self.vectors = tensors["embeddings"]
            self._columns = {
                name: (tensors[name], tensors[f"{name}_offsets"]) for name in TEXT_COLUMNS
            }
        except KeyError as error:
            raise BadCollection(f"{path} lacks the tensor {error}") from None
        rows = len(self.vectors)
        if self.vectors.shape != (rows, dimensions):
            raise BadCollection(f"{path}: the vectors do not have {dimensions} dimensions")
        for name, (data, offsets) in self._columns.items():
            is_good = offsets.shape == (rows + 1,) and offsets[0] == 0 and offsets[-1] == len(data)
            if not is_good or (np.diff(offsets) < 0).any():
                raise BadCollection(f"{path}: the offsets of {name} are invalid")

    def __len__(self) -> int:
        return len(self.vectors)

    def text(self, column: str, row: int) -> str:
        data, offsets = self._columns[column]
        return data[offsets[row] : offsets[row + 1]].tobytes().decode(errors="replace")

    def attributes(self, row: int) -> Attributes:
        encoded = self.text("attributes", row)
        return json.loads(encoded) if encoded else {}

    def item(self, row: int, *, with_vector: bool = False) -> Item:
        return Item(
            id=self.text("ids", row),
            vector=self.vectors[row].astype("<f4").tobytes() if with_vector else b"",
            text=self.text("texts", row),
            image=self.text("images", row),
            attributes=self.attributes(row),
        )


def _map(path: Path) -> dict[str, np.ndarray]:
    """Map the tensors of a file. Raises: BadCollection."""
    try:
        with safe_open(path, "np") as file:  # validates the header
            file.keys()
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError, SafetensorError) as error:
        raise BadCollection(f"{path} cannot be read: {error}") from None
    tensors = {}
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        if tensor["dtype"] not in _DTYPES:
            raise BadCollection(f"{path}: {name} has the type {tensor['dtype']}")
        dtype, shape = _DTYPES[tensor["dtype"]], tensor["shape"]
        count, begin = int(np.prod(shape)), 8 + size + tensor["data_offsets"][0]
        tensors[name] = np.frombuffer(data, dtype, count, begin).reshape(shape)
    return tensors


class FlatIndex:
    """A `search.index.VectorIndex` over a collection: a scan of all rows in numpy."""

    def __init__(self, directory: Path) -> None:
        """Raises: BadCollection."""
        self.manifest: Manifest = read_manifest(directory)
        self._parts = [
            Part(directory / part.name, self.manifest.dimensions) for part in self.manifest.parts
        ]
        rows = [part.num_items for part in self.manifest.parts]
        if [len(part) for part in self._parts] != rows or sum(rows) != self.manifest.num_items:
            raise BadCollection(f"{directory}: the parts differ from the manifest")
        self._num_bytes = sum(
            (directory / part.name).stat().st_size for part in self.manifest.parts
        )
        # Half precision is slow to multiply.
        self._vectors = [np.asarray(part.vectors, "<f4") for part in self._parts]
        self._mask = lru_cache(_MASKS)(self._compute_mask)

    def upsert(self, items: Sequence[Item]) -> None:
        raise read_only()

    def delete(self, ids: Sequence[str] | None = None, where: Filter | None = None) -> int:
        raise read_only()

    def search(self, vectors: np.ndarray, k: int, where: Filter | None = None) -> list[list[Hit]]:
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
        """The rows of each part that match a filter."""
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
        found = [self._places[key] for key in ids if key in self._places]
        return [part.item(row, with_vector=True) for part, row in found]

    @cached_property
    def _ids(self) -> list[str]:
        return sorted(self._places)

    def page(self, after: str, limit: int, with_vectors: bool = False) -> list[Item]:
        at = bisect_right(self._ids, after)
        places = [self._places[key] for key in self._ids[at : at + limit]]
        return [part.item(row, with_vector=with_vectors) for part, row in places]

    def items(self) -> Iterator[Item]:
        for part in self._parts:
            yield from (part.item(row, with_vector=True) for row in range(len(part)))

    def stats(self) -> IndexStats:
        return IndexStats(self.manifest.num_items, self._num_bytes)

    def compact(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do: a file is unmapped when its last array is freed."""


def _best(scores: np.ndarray, k: int) -> np.ndarray:
    """The rows of the k best scores, and rows that tie with the last of them."""
    if len(scores) <= k:
        return np.arange(len(scores))
    return np.flatnonzero(scores >= np.partition(scores, -k)[-k])
