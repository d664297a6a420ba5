"""`vlm embed`: collections from files of texts and images, by an engine in this process or a gateway.

An interrupted run is resumed after its last part.
"""

import base64
import csv
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

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
from shared.gateway_client import Client
from shared.search import Attributes, Item

DOCUMENT_PROMPTS = ("document", "passage", "search_document")
QUERY_PROMPTS = ("query", "search_query")
TIMEOUT_S = 600.0
TRIES = 5  #: of a request to the gateway
#: The plan of an incomplete collection.
PLAN = "embedding.json"
IMAGE_ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".avif"})
_MAX_ATTRIBUTES = 16
_MAX_ATTRIBUTE_CHARS = 512


class EmbedError(Exception):
    """A command of search failed."""


@dataclass(frozen=True, slots=True)
class Source:
    id: str
    text: str = ""
    image: Path | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)


class Embedder(Protocol):
    """Computes vectors, by an engine in this process or by a gateway."""

    model: str
    digest: str
    dimensions: int
    prompt: str

    def embed(self, sources: Sequence[Source]) -> np.ndarray:
        """Shapes: [sources, dimensions], float32 of length 1. Raises: EmbedError."""
        ...

    def close(self) -> None: ...


def read_sources(paths: Sequence[Path], text_field: str) -> Iterator[Source]:
    """Read lines of txt, objects of jsonl, rows of csv, and images, in order. Raises: EmbedError with file and line."""
    sources = (source for path in paths for source in _read_one(path, text_field))
    for number, source in enumerate(sources):
        yield source if source.id else replace(source, id=str(number))


def _read_one(path: Path, text_field: str) -> Iterator[Source]:
    if path.is_dir():
        images = list_images(path)
        if not images:
            raise EmbedError(f"{path} has no images ({', '.join(sorted(IMAGE_ENDINGS))})")
        yield from (Source(str(image.relative_to(path)), image=image) for image in images)
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
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_ENDINGS)


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
    """Other fields of the row become attributes."""
    text, image = row.get(text_field), row.get("image")
    if not isinstance(text, str) and not isinstance(image, str):
        raise EmbedError(f"{place} has no text in {text_field!r}: give the field with --text-field")
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
    """SHA-256 and number of the inputs. Raises: EmbedError, also for duplicate ids."""
    whole, seen = hashlib.sha256(), set[str]()
    for source in sources:
        if source.id in seen:
            raise EmbedError(f"two inputs have the id {source.id!r}: ids must be unique")
        seen.add(source.id)
        content = hash_file(source.image) if source.image else source.text
        whole.update(json.dumps([source.id, content, dict(source.attributes)]).encode() + b"\n")
    if not seen:
        raise EmbedError("there is no input")
    return whole.hexdigest(), len(seen)


def hash_file(path: Path) -> str:
    """SHA-256. Raises: EmbedError."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise EmbedError(f"{path} cannot be read ({error.strerror})") from None


class Plan(msgspec.Struct, frozen=True):
    """Parameters that must not change when a collection is resumed."""

    model: str
    digest: str
    prompt: str
    dimensions: int
    dtype: str
    part_items: int
    inputs: str


def embed(
    paths: Sequence[Path],
    directory: Path,
    embedder: Embedder,
    *,
    text_field: str = "text",
    dtype: str = "f32",
    part_items: int = 8192,
    batch_items: int = 256,
    report: Callable[[int, int], None] = lambda num_done, total: None,
    known: tuple[str, int] | None = None,
) -> Manifest:
    """Write a collection, or resume one. `known`: the `fingerprint` of the inputs. Raises: EmbedError, BadCollection."""
    inputs, total = known or fingerprint(read_sources(paths, text_field))
    model = (embedder.model, embedder.digest, embedder.prompt, embedder.dimensions)
    plan = Plan(*model, dtype, part_items, inputs)
    parts = _resume(directory, plan)
    num_done = sum(part.num_items for part in parts)
    report(num_done, total)
    sources = islice(read_sources(paths, text_field), num_done, None)
    while batch := list(islice(sources, part_items)):
        items: list[Item] = []
        for first in range(0, len(batch), batch_items):
            some = batch[first : first + batch_items]
            items += map(_to_item, some, embedder.embed(some))
            num_done += len(some)
            report(num_done, total)
        parts.append(write_part(directory, len(parts), items, dtype))
    fields = msgspec.structs.asdict(plan)
    del fields["part_items"]
    manifest = Manifest(num_items=total, parts=tuple(parts), **fields)
    if sum(part.num_items for part in parts) != total:
        raise EmbedError("the inputs changed during the run: run it again")
    write_manifest(directory, manifest)
    (directory / PLAN).unlink(missing_ok=True)
    return manifest


def open_output(directory: Path) -> None:
    """Create the directory of a collection. Raises: EmbedError if it has other files; OSError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise EmbedError(f"{directory} is a file: give a directory with --output") from None
    is_begun = (directory / MANIFEST).exists() or (directory / PLAN).exists()
    if not is_begun and any(directory.iterdir()):
        raise EmbedError(f"{directory} is not empty: name a new directory")


def _resume(directory: Path, plan: Plan) -> list[PartRecord]:
    """The complete parts of an earlier run. Raises: EmbedError."""
    open_output(directory)
    if (directory / MANIFEST).exists():
        manifest = read_manifest(directory)
        if (manifest.inputs, manifest.digest) != (plan.inputs, plan.digest):
            raise EmbedError(f"{directory} has another collection: name a new directory")
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
            f"{directory} was begun with another {' and '.join(differs)}: name a new directory, or use "
            "the same values"
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


class LocalEmbedder:
    def __init__(
        self,
        kind: str,
        model: str,
        prompt: str | None = None,
        usual: Sequence[str] = DOCUMENT_PROMPTS,
    ) -> None:
        """Raises: EngineStartError, EmbedError."""
        from engines.registry import create_engine  # noqa: PLC0415 (may load torch)

        loaded = create_engine({"kind": kind, "model": model} if model else {"kind": kind})
        self._engine, card = loaded.engine, loaded.card
        if "embed" not in card.tasks:
            raise EmbedError(f"{card.name} does not embed; it supports: {', '.join(card.tasks)}")
        self.model, self.digest, self.dimensions = card.name, card.digest, card.dimensions
        self.prompt = find_prompt(prompt, card.prompts, usual)
        self._capacity = self._engine.capabilities().max_num_seqs

    def embed(self, sources: Sequence[Source]) -> np.ndarray:
        """One call per input: the engine batches inputs of similar length."""
        rows: dict[str, bytes] = {}
        waiting = list(enumerate(sources))[::-1]
        num_running = 0
        while waiting or num_running:
            while waiting and num_running < self._capacity:
                self._start(*waiting.pop())
                num_running += 1
            for output in self._engine.step():
                if output.error is not None:
                    raise EmbedError(f"{sources[int(output.request_id)].id}: {output.error}")
                if output.finish_reason is not None:
                    rows[output.request_id] = output.values
                    num_running -= 1
        data = b"".join(rows[str(index)] for index in range(len(sources)))
        return np.frombuffer(data, "<f4").reshape(len(sources), self.dimensions)

    def _start(self, index: int, source: Source) -> None:
        """Raises: EmbedError."""
        from engines.base import EngineCall, PreparedImage, RequestError  # noqa: PLC0415
        from engines.image_decoder import decode_image  # noqa: PLC0415
        from shared.protocol import Embed, ImagePart, TextPart  # noqa: PLC0415

        task, images = Embed((TextPart(source.text),), prompt_name=self.prompt, truncate="end"), []
        try:
            if source.image is not None:
                data = _read(source.image)
                ref = _image_ref(source.image, data)
                content = self._engine.prepare_image(data, ref, decode_image)
                images = [PreparedImage(ref.sha256, content)]
                task = Embed((ImagePart(0),), (ref,), truncate="end")
            self._engine.add(self._engine.prepare(EngineCall(str(index), task), images))
        except RequestError as error:
            raise EmbedError(f"{source.image or source.id}: {error}") from None

    def close(self) -> None:
        self._engine.close()


def _image_ref(path: Path, data: bytes) -> Any:
    """Raises: EmbedError."""
    import io  # noqa: PLC0415

    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415

    from engines.image_decoder import FORMAT_NAMES, FORMATS  # noqa: PLC0415
    from shared.protocol import ImageRef  # noqa: PLC0415

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            kind, (width, height) = (image.format or "").lower(), image.size
    except (UnidentifiedImageError, OSError):
        raise EmbedError(f"{path}: use an image in {FORMAT_NAMES}") from None
    return ImageRef(hashlib.sha256(data).hexdigest(), len(data), f"image/{kind}", width, height)


def find_prompt(
    asked: str | None, prompts: Sequence[str], usual: Sequence[str] = DOCUMENT_PROMPTS
) -> str:
    """The given prompt, else the model's prompt for this use. Raises: EmbedError."""
    if asked is None:
        return next((name for name in usual if name in prompts), "")
    if asked and asked not in prompts:
        raise EmbedError(
            f"--prompt {asked}: unknown; prompts of this model: {', '.join(prompts) or 'none'}"
        )
    return asked


class RemoteEmbedder:
    """Embeds with a gateway. Documents are embedded at batch priority."""

    def __init__(
        self,
        url: str,
        model: str,
        api_key: str | None,
        prompt: str | None = None,
        usual: Sequence[str] = DOCUMENT_PROMPTS,
    ) -> None:
        """Raises: ApiFailed, EmbedError."""
        self._client = Client(url, api_key, TIMEOUT_S)
        is_batch = usual is DOCUMENT_PROMPTS
        self._options = {"service_tier": "flex"} if is_batch else {}
        card = self._find(model)
        self.model, self.digest = card["id"], card.get("digest", "")
        self.dimensions = card["dimensions"]
        self.prompt = find_prompt(prompt, card.get("prompts", ()), usual)

    def _find(self, model: str) -> dict[str, Any]:
        cards = self._client.ask("GET", "/v1/models", tries=TRIES)["data"]
        known = [card for card in cards if "embed" in card["tasks"]]
        if not model:
            known = [card for card in known if card["num_workers"]] or known
        for card in known:
            if card["id"] == model or (not model and len(known) == 1):
                return card
        names = ", ".join(card["id"] for card in known) or "none"
        raise EmbedError(f"give one of the gateway's embedding models with --model: {names}")

    def embed(self, sources: Sequence[Source]) -> np.ndarray:
        """Texts in one request, images 16 to a request."""
        rows: dict[int, np.ndarray] = {}
        texts = [index for index, source in enumerate(sources) if source.image is None]
        images = [index for index, source in enumerate(sources) if source.image is not None]
        prompt = {"prompt_name": self.prompt} if self.prompt else {}
        if texts:
            inputs = [sources[index].text for index in texts]
            rows |= zip(texts, self._ask(inputs, prompt), strict=True)
        for first in range(0, len(images), 16):
            some = images[first : first + 16]
            inputs = [
                {"image": base64.b64encode(_read(sources[index].image)).decode()} for index in some
            ]
            rows |= zip(some, self._ask(inputs, {}), strict=True)
        return np.stack([rows[index] for index in range(len(sources))])

    def _ask(self, inputs: Sequence[Any], prompt: Mapping[str, str]) -> list[np.ndarray]:
        body = {
            "model": self.model, "input": inputs, "encoding_format": "base64", "truncate": True,
            **prompt, **self._options,
        }  # fmt: skip
        answer = self._client.ask("POST", "/v1/embeddings", body, TRIES)
        return [np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in answer["data"]]

    def close(self) -> None:
        self._client.close()


def _read(path: Path | None) -> bytes:
    """Raises: EmbedError."""
    assert path is not None
    try:
        return path.read_bytes()
    except OSError as error:
        raise EmbedError(f"{path} cannot be read ({error.strerror})") from None


def open_embedder(
    engine: str,
    model: str,
    url: str | None,
    api_key: str | None,
    prompt: str | None,
    usual: Sequence[str] = DOCUMENT_PROMPTS,
) -> Embedder:
    """A gateway if `url` is given, else an engine in this process. Raises: ApiFailed, EmbedError, EngineStartError."""
    if url is not None:
        return RemoteEmbedder(url, model, api_key, prompt, usual)
    return LocalEmbedder(engine, model, prompt, usual)
