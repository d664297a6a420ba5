"""`vlm embed`: a collection from texts and images, by an engine in this process or by a gateway.

Parts are written one after another, each whole; the manifest comes last. Run again on the same
inputs it goes on after the last whole part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np

from search.collection import (
    MANIFEST,
    Manifest,
    Part,
    PartRecord,
    read_manifest,
    write_manifest,
    write_part,
    write_whole,
)
from search.embedders import Embedder
from search.sources import EmbedError, Source, fingerprint, hash_file, read_sources
from shared.search import Attributes, Item

#: Of a collection that is not whole yet: what it is made of.
PLAN = "embedding.json"


class Plan(msgspec.Struct, frozen=True):
    """What must be the same to go on with a collection."""

    model: str
    digest: str
    prompt: str
    dimensions: int
    dtype: str
    part_items: int
    inputs: str


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it is. `num_before`: items that an earlier run has made."""

    num_items: int
    num_before: int
    total: int
    num_chars: int


def embed(
    paths: Sequence[Path],
    directory: Path,
    embedder: Embedder,
    *,
    text_field: str = "text",
    dtype: str = "f32",
    part_items: int = 8192,
    batch_items: int = 256,
    report: Callable[[Progress], None] = lambda progress: None,
    known: tuple[str, int] | None = None,
) -> Manifest:
    """Make the collection, or what is missing of it; `known` is the `fingerprint` of the inputs.

    Raises: EmbedError, BadCollection.
    """
    inputs, total = known or fingerprint(read_sources(paths, text_field))
    plan = Plan(
        embedder.model,
        embedder.digest,
        embedder.prompt,
        embedder.dimensions,
        dtype,
        part_items,
        inputs,
    )
    parts = _resume(directory, plan)
    num_before = sum(part.num_items for part in parts)
    progress = Progress(num_before, num_before, total, 0)
    report(progress)
    sources = islice(read_sources(paths, text_field), num_before, None)
    while batch := list(islice(sources, part_items)):
        items: list[Item] = []
        for first in range(0, len(batch), batch_items):
            some = batch[first : first + batch_items]
            vectors = embedder.embed(some)
            items += map(_to_item, some, vectors)
            progress = Progress(
                progress.num_items + len(some),
                num_before,
                total,
                progress.num_chars + sum(len(source.text) for source in some),
            )
            report(progress)
        parts.append(write_part(directory, len(parts), items, dtype))
    manifest = Manifest(
        model=plan.model,
        digest=plan.digest,
        dimensions=plan.dimensions,
        dtype=dtype,
        num_items=total,
        parts=tuple(parts),
        prompt=plan.prompt,
        inputs=inputs,
    )
    if sum(part.num_items for part in parts) != total:
        raise EmbedError("the inputs changed meanwhile: run it again")
    write_manifest(directory, manifest)
    (directory / PLAN).unlink(missing_ok=True)
    return manifest


def open_output(directory: Path) -> None:
    """Make it where it is not. Raises: EmbedError if it can be no collection's; OSError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise EmbedError(f"{directory}: a file is there; name a directory with --output") from None
    is_begun = (directory / MANIFEST).exists() or (directory / PLAN).exists()
    if not is_begun and any(directory.iterdir()):
        raise EmbedError(f"{directory} is not empty: name a new directory")


def _resume(directory: Path, plan: Plan) -> list[PartRecord]:
    """The parts that an earlier run has made of the same. Raises: EmbedError."""
    open_output(directory)
    if (directory / MANIFEST).exists():
        manifest = read_manifest(directory)
        if (manifest.inputs, manifest.digest) != (plan.inputs, plan.digest):
            raise EmbedError(f"{directory} holds another collection: name a new directory")
        _refuse_changes(directory, manifest, plan, ("prompt", "dtype"))
        return list(manifest.parts)
    try:
        known = msgspec.json.decode((directory / PLAN).read_bytes(), type=Plan)
    except FileNotFoundError:
        write_whole(directory / PLAN, msgspec.json.encode(plan))
        return []
    except msgspec.MsgspecError:
        raise EmbedError(f"{directory / PLAN} cannot be read: name a new directory") from None
    _refuse_changes(directory, known, plan, Plan.__struct_fields__)
    parts = []
    while (path := directory / f"part-{len(parts):05d}.safetensors").exists():
        part = Part(path, plan.dimensions)
        parts.append(PartRecord(path.name, len(part), hash_file(path)))
        if len(part) < plan.part_items:
            break
    return parts


def _refuse_changes(
    directory: Path, known: Plan | Manifest, plan: Plan, names: Sequence[str]
) -> None:
    """Raises: EmbedError if one of these fields differs."""
    differs = [name for name in names if getattr(known, name) != getattr(plan, name)]
    if differs:
        raise EmbedError(
            f"{directory} was begun with another {' and '.join(differs)}: name a new directory, or go "
            "on as it was begun"
        )


def _to_item(source: Source, vector: np.ndarray) -> Item:
    attributes: Attributes = {
        key: value if isinstance(value, str | bool) else float(value)
        for key, value in source.attributes.items()
    }
    return Item(
        id=source.id,
        vector=np.ascontiguousarray(vector, "<f4").tobytes(),
        text=source.text,
        image=str(source.image or ""),
        attributes=attributes,
    )
