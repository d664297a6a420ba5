"""A collection on disk, as `vlm embed` writes it: safetensors, texts among them, and a manifest.

    part-00000.safetensors    embeddings [rows, dimensions]; ids, texts, images, attributes (JSON), each as
                              the bytes of all rows and `..._offsets` int64 [rows + 1]
    manifest.json             written last: model, digest, prompt, parts with their SHA-256

Each file is written beside its name, synced and renamed: what has a name is whole. Nothing is
pickled.
"""

import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from shared.search import Attributes, Item

MANIFEST = "manifest.json"
FORMAT = 1
TEXT_COLUMNS = ("ids", "texts", "images", "attributes")
_DTYPES = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "U8": np.dtype("u1"),
}


class BadCollection(Exception):
    """A directory that holds no whole collection; the message says what is wrong."""


class PartRecord(msgspec.Struct, frozen=True):
    """One file of a collection."""

    name: str
    num_items: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection is. `inputs`: SHA-256 of what it was made of; empty where it was exported."""

    model: str
    digest: str
    dimensions: int
    dtype: str
    num_items: int
    parts: tuple[PartRecord, ...]
    prompt: str = ""
    inputs: str = ""
    format: int = FORMAT


def write_part(
    directory: Path, number: int, items: Sequence[Item], dtype: str = "f32"
) -> PartRecord:
    """Write items as one file, whole or not at all."""
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
    """Say that the collection is whole."""
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
    write_whole(directory / MANIFEST, data)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that has its name only once it is on disk."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(directory: Path) -> Manifest:
    """Raises: BadCollection."""
    try:
        manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise BadCollection(
            f"{directory} has no {MANIFEST}, which `vlm embed` writes last: name a directory that it "
            "made; where it was cut, run it again, it resumes"
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise BadCollection(f"{directory / MANIFEST} cannot be read: {error}") from None
    if manifest.format != FORMAT:
        raise BadCollection(
            f"{directory} has format {manifest.format}: this version reads {FORMAT}"
        )
    return manifest


class Part:
    """One file, mapped: its pages are read when they are used and shared by all processes."""

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
            raise BadCollection(f"{path}: its vectors are not of {dimensions} dimensions")
        for name, (data, offsets) in self._columns.items():
            is_good = offsets.shape == (rows + 1,) and offsets[0] == 0 and offsets[-1] == len(data)
            if not is_good or (np.diff(offsets) < 0).any():
                raise BadCollection(f"{path}: the offsets of {name} do not fit")

    def __len__(self) -> int:
        return len(self.vectors)

    def text(self, column: str, row: int) -> str:
        """A text of a row."""
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

    def items(self) -> Iterator[Item]:
        """All rows, with their vectors."""
        return (self.item(row, with_vector=True) for row in range(len(self)))


def _map(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file without a copy. Raises: BadCollection."""
    try:
        with safe_open(path, "np") as file:  # checks the header and its offsets
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
