"""What `vlm embed` reads: texts and images, each with an id and attributes."""

import csv
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

IMAGE_ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".avif"})
_MAX_ATTRIBUTES = 16
_MAX_ATTRIBUTE_CHARS = 512
_PIECE = 1024 * 1024


class EmbedError(Exception):
    """The collection cannot be made; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    """One input: a text, or the path of an image."""

    id: str
    text: str = ""
    image: Path | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)


def read_sources(paths: Sequence[Path], text_field: str) -> Iterator[Source]:
    """The inputs in their order: lines of txt, objects of jsonl, rows of csv, images of folders.

    Raises: EmbedError that names file and line.
    """
    number = 0
    for path in paths:
        for source in _read_one(path, text_field):
            yield (
                source
                if source.id
                else Source(str(number), source.text, source.image, source.attributes)
            )
            number += 1


def _read_one(path: Path, text_field: str) -> Iterator[Source]:
    if path.is_dir():
        yield from _read_folder(path)
    elif path.suffix.lower() in IMAGE_ENDINGS:
        yield Source(path.name, image=path)
    elif path.suffix in (".jsonl", ".ndjson"):
        yield from _read_jsonl(path, text_field)
    elif path.suffix == ".csv":
        yield from _read_csv(path, text_field)
    elif path.suffix in (".txt", ".md", ""):
        yield from (Source("", line) for _, line in _lines(path) if line.strip())
    else:
        raise EmbedError(
            f"{path}: send .txt (a text a line), .jsonl, .csv, images, or a folder of images"
        )


def list_images(folder: Path) -> list[Path]:
    """The images in a folder and those within it, by their endings."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_ENDINGS)


def _read_folder(folder: Path) -> Iterator[Source]:
    paths = list_images(folder)
    if not paths:
        endings = ", ".join(sorted(IMAGE_ENDINGS))
        raise EmbedError(f"{folder} holds no image ({endings})")
    for path in paths:
        yield Source(str(path.relative_to(folder)), image=path)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8-sig", newline=None) as file:
            yield from ((number, line.rstrip("\n")) for number, line in enumerate(file, 1))
    except UnicodeDecodeError:
        raise EmbedError(f"{path} is not UTF-8: convert it first") from None
    except OSError as error:
        raise EmbedError(f"{path} cannot be read ({error.strerror})") from None


def _read_jsonl(path: Path, text_field: str) -> Iterator[Source]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            raise EmbedError(f"{path}:{number} is not JSON") from None
        if isinstance(row, str):
            row = {text_field: row}
        if not isinstance(row, dict):
            raise EmbedError(f"{path}:{number}: write an object with {text_field!r}, or a text")
        yield _from_row(row, text_field, f"{path}:{number}", path.parent)


def _read_csv(path: Path, text_field: str) -> Iterator[Source]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            for row in rows:
                yield _from_row(row, text_field, f"{path}:{rows.line_num}", path.parent)
    except UnicodeDecodeError:
        raise EmbedError(f"{path} is not UTF-8: convert it first") from None
    except (OSError, csv.Error) as error:
        raise EmbedError(f"{path} cannot be read: {error}") from None


def _from_row(row: Mapping[str, Any], text_field: str, place: str, folder: Path) -> Source:
    """A row's text or image, its id, and what else it has as attributes."""
    text, image = row.get(text_field), row.get("image")
    if not isinstance(text, str) and not isinstance(image, str):
        raise EmbedError(
            f"{place} has no text in {text_field!r}: name another field with --text-field"
        )
    attributes = {
        key: value
        for key, value in row.items()
        if key not in (text_field, "id", "image")
        and isinstance(key, str)
        and isinstance(value, str | bool | int | float)
        and len(str(value)) <= _MAX_ATTRIBUTE_CHARS
        and (not isinstance(value, float) or math.isfinite(value))
    }
    if len(attributes) > _MAX_ATTRIBUTES:
        raise EmbedError(f"{place} has more than {_MAX_ATTRIBUTES} attributes: leave some out")
    return Source(
        id=str(row.get("id") or ""),
        text=text if isinstance(text, str) else "",
        image=folder / image if isinstance(image, str) else None,
        attributes=attributes,
    )


def fingerprint(sources: Iterator[Source]) -> tuple[str, int]:
    """SHA-256 of the inputs, and how many there are.

    Raises: EmbedError for none, for two of one id, and as `read_sources`.
    """
    whole, seen = hashlib.sha256(), set()
    for source in sources:
        if source.id in seen:
            raise EmbedError(f"two inputs have the id {source.id!r}: ids name items")
        seen.add(source.id)
        content = hash_file(source.image) if source.image else source.text
        whole.update(json.dumps([source.id, content, dict(source.attributes)]).encode() + b"\n")
    if not seen:
        raise EmbedError("there is no input")
    return whole.hexdigest(), len(seen)


def hash_file(path: Path) -> str:
    """SHA-256. Raises: EmbedError."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
    except OSError as error:
        raise EmbedError(f"{path} cannot be read ({error.strerror})") from None
    return digest.hexdigest()
