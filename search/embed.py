"""`vlm embed`: a collection from texts and images, by an engine in this process or by a gateway.

Parts are written one after another, each whole; the manifest comes last. Run again on the same
inputs it goes on after the last whole part.
"""

import base64
import csv
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from shared.search import Attributes, Item

IMAGE_ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".webp"})
#: Of a collection that is not whole yet: what it is made of.
PLAN = "embedding.json"
DOCUMENT_PROMPTS = ("document", "passage", "search_document")
QUERY_PROMPTS = ("query", "search_query")
_MAX_ATTRIBUTES = 16
_MAX_ATTRIBUTE_CHARS = 512
_PIECE = 1024 * 1024


class EmbedError(Exception):
    """The collection cannot be made; the message says what to do."""


class GatewaySilent(EmbedError):
    """No gateway answers."""


@dataclass(frozen=True, slots=True)
class Source:
    """One input: a text, or the path of an image."""

    id: str
    text: str = ""
    image: Path | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)


class Embedder(Protocol):
    """What makes vectors."""

    model: str
    digest: str
    dimensions: int
    prompt: str

    def embed(self, sources: Sequence[Source]) -> np.ndarray:
        """Shapes: [sources, dimensions], float32 of length 1. Raises: EmbedError."""
        ...

    def close(self) -> None:
        """Let go of engine or connection."""
        ...


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


# Inputs


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
        content = _hash_file(source.image) if source.image else source.text
        whole.update(json.dumps([source.id, content, dict(source.attributes)]).encode() + b"\n")
    if not seen:
        raise EmbedError("there is no input")
    return whole.hexdigest(), len(seen)


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
    except OSError as error:
        raise EmbedError(f"{path} cannot be read ({error.strerror})") from None
    return digest.hexdigest()


# The collection


def embed(
    paths: Sequence[Path],
    directory: Path,
    embedder: Embedder,
    *,
    text_field: str = "text",
    dtype: str = "f32",
    part_items: int = 8192,
    batch_items: int = 256,
    tell: Callable[[Progress], None] = lambda progress: None,
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
    tell(progress)
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
            tell(progress)
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
        if (manifest.inputs, manifest.digest) == (plan.inputs, plan.digest):
            return list(manifest.parts)
        raise EmbedError(f"{directory} holds another collection: name a new directory")
    try:
        known = msgspec.json.decode((directory / PLAN).read_bytes(), type=Plan)
    except FileNotFoundError:
        write_whole(directory / PLAN, msgspec.json.encode(plan))
        return []
    except msgspec.MsgspecError:
        raise EmbedError(f"{directory / PLAN} cannot be read: name a new directory") from None
    if known != plan:
        differs = [
            name for name in Plan.__struct_fields__ if getattr(known, name) != getattr(plan, name)
        ]
        raise EmbedError(
            f"{directory} was begun with another {' and '.join(differs)}: name a new directory, or go "
            "on as it was begun"
        )
    parts = []
    while (path := directory / f"part-{len(parts):05d}.safetensors").exists():
        part = Part(path, plan.dimensions)
        parts.append(PartRecord(path.name, len(part), _hash_file(path)))
        if len(part) < plan.part_items:
            break
    return parts


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


# Engines


class LocalEmbedder:
    """An engine in this process."""

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
            raise EmbedError(f"{card.name} makes no vectors; it offers: {', '.join(card.tasks)}")
        self.model, self.digest, self.dimensions = card.name, card.digest, card.dimensions
        self.prompt = find_prompt(prompt, card.prompts, usual)
        self._capacity = self._engine.capabilities().max_num_seqs

    def embed(self, sources: Sequence[Source]) -> np.ndarray:
        """One call each, so that the engine packs steps of like lengths."""
        from engines.base import EngineCall, PreparedImage, RequestError  # noqa: PLC0415
        from engines.image_decoder import decode_image  # noqa: PLC0415
        from shared.protocol import Embed, ImagePart, ImageRef, TextPart  # noqa: PLC0415

        rows: dict[str, bytes] = {}
        waiting = list(enumerate(sources))[::-1]
        num_running = 0
        while waiting or num_running:
            while waiting and num_running < self._capacity:
                index, source = waiting.pop()
                images: list[PreparedImage] = []
                refs: tuple[ImageRef, ...] = ()
                part: TextPart | ImagePart = TextPart(source.text)
                try:
                    if source.image is not None:
                        data = source.image.read_bytes()
                        ref = _image_ref(data)
                        content = self._engine.prepare_image(data, ref, decode_image)
                        images, refs, part = (
                            [PreparedImage(ref.sha256, content)],
                            (ref,),
                            ImagePart(0),
                        )
                    prompt = self.prompt if source.image is None else ""
                    task = Embed((part,), refs, prompt_name=prompt, truncate="end")
                    self._engine.add(self._engine.prepare(EngineCall(str(index), task), images))
                except (RequestError, OSError) as error:
                    raise EmbedError(f"{source.image or source.id}: {error}") from None
                num_running += 1
            for output in self._engine.step():
                if output.error is not None:
                    raise EmbedError(f"{sources[int(output.request_id)].id}: {output.error}")
                if output.finish_reason is not None:
                    rows[output.request_id] = output.values
                    num_running -= 1
        data = b"".join(rows[str(index)] for index in range(len(sources)))
        return np.frombuffer(data, "<f4").reshape(len(sources), self.dimensions)

    def close(self) -> None:
        """Free the device."""
        self._engine.close()


def _image_ref(data: bytes) -> Any:
    import io  # noqa: PLC0415

    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415

    from shared.protocol import ImageRef  # noqa: PLC0415

    try:
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP")) as image:
            kind, (width, height) = (image.format or "").lower(), image.size
    except (UnidentifiedImageError, OSError):
        raise OSError(0, "it is no PNG, JPEG or WebP") from None
    return ImageRef(hashlib.sha256(data).hexdigest(), len(data), f"image/{kind}", width, height)


def find_prompt(
    asked: str | None, prompts: Sequence[str], usual: Sequence[str] = DOCUMENT_PROMPTS
) -> str:
    """The prompt that is asked for, else the model's own of that use. Raises: EmbedError."""
    if asked is None:
        return next((name for name in usual if name in prompts), "")
    if asked and asked not in prompts:
        raise EmbedError(f"the prompts of this model are: {', '.join(prompts) or 'none'}")
    return asked


class RemoteEmbedder:
    """A gateway, whose fleet does the work as a batch, behind what people wait for."""

    def __init__(
        self,
        url: str,
        model: str,
        api_key: str | None,
        prompt: str | None = None,
        usual: Sequence[str] = DOCUMENT_PROMPTS,
    ) -> None:
        """Raises: EmbedError."""
        self._client = connect(url, api_key)
        is_batch = usual is DOCUMENT_PROMPTS
        self._options = {"service_tier": "flex"} if is_batch else {}
        card = self._find(model)
        self.model, self.digest = card["id"], card.get("digest", "")
        self.dimensions = card["dimensions"]
        self.prompt = find_prompt(prompt, card.get("prompts", ()), usual)

    def _find(self, model: str) -> dict[str, Any]:
        cards = self._call("GET", "/v1/models")["data"]
        known = [card for card in cards if "embed" in card["tasks"]]
        for card in known:
            if card["id"] == model or (not model and len(known) == 1):
                return card
        names = ", ".join(card["id"] for card in known) or "none"
        raise EmbedError(
            f"name one of the gateway's models that make vectors with --model: {names}"
        )

    def embed(self, sources: Sequence[Source]) -> np.ndarray:
        """Texts in one request, images in as many as their number asks for."""
        rows: dict[int, np.ndarray] = {}
        texts = [index for index, source in enumerate(sources) if source.image is None]
        images = [index for index, source in enumerate(sources) if source.image is not None]
        prompt = {"prompt_name": self.prompt} if self.prompt else {}
        if texts:
            inputs = [sources[index].text for index in texts]
            rows |= zip(texts, self._ask(inputs, prompt), strict=True)
        for first in range(0, len(images), 16):
            some = images[first : first + 16]
            inputs = [{"image": _base64(sources[index].image)} for index in some]
            rows |= zip(some, self._ask(inputs, {}), strict=True)
        return np.stack([rows[index] for index in range(len(sources))])

    def _ask(self, inputs: Sequence[Any], prompt: Mapping[str, str]) -> list[np.ndarray]:
        body = {
            "model": self.model, "input": inputs, "encoding_format": "base64", "truncate": True,
            **prompt, **self._options,
        }  # fmt: skip
        answer = self._call("POST", "/v1/embeddings", body)
        return [np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in answer["data"]]

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        return call(self._client, method, path, body)

    def close(self) -> None:
        """Hang up."""
        self._client.close()


def connect(url: str, api_key: str | None) -> Any:
    """A client of a gateway."""
    import httpx  # noqa: PLC0415

    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(base_url=url, headers=headers, timeout=600, trust_env=False)


def call(client: Any, method: str, path: str, body: Any = None, tries: int = 5) -> Any:
    """A gateway's answer; tried again where that may help. Raises: EmbedError."""
    import httpx  # noqa: PLC0415

    for attempt in range(tries):
        is_last = attempt == tries - 1
        try:
            answer = client.request(method, path, json=body)
        except httpx.HTTPError as error:
            if is_last:
                raise GatewaySilent(
                    f"{client.base_url} does not answer ({type(error).__name__}): name a gateway with --url"
                ) from None
            time.sleep(2**attempt / 4)
            continue
        if answer.is_success:
            return answer.json()
        wait_s = answer.headers.get("retry-after")
        if wait_s is None or is_last:
            raise EmbedError(_message(answer))
        time.sleep(min(float(wait_s), 30))
    raise AssertionError


def _message(answer: Any) -> str:
    try:
        error = answer.json()["error"]
        return f"{error['message']} ({error['param'] or error['code']})"
    except (ValueError, KeyError, TypeError):
        return f"the gateway answered {answer.status_code}"


def _base64(path: Path | None) -> str:
    assert path is not None
    try:
        return base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise EmbedError(f"{path} cannot be read ({error.strerror})") from None
