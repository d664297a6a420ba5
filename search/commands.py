"""`vlm embed`, `vlm search`, `vlm store load` and `vlm store export`.

`vlm embed` embeds files of texts and images into a collection, with an engine in this process or with a gateway. An
interrupted `vlm embed` or `vlm store export` is resumed after its last complete part.
"""

import base64
import csv
import hashlib
import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, TextIO, TypeVar
from urllib.parse import quote

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engines.base import EngineCall, EngineStartError, PreparedImage, RequestError
from engines.packages.resolve import BUILT_IN
from engines.registry import find_kind
from search.collection import (
    MANIFEST,
    PARTIAL,
    BadCollection,
    FlatIndex,
    Manifest,
    Part,
    PartRecord,
    read_manifest,
    write_manifest,
    write_part,
    write_whole,
)
from shared.gateway_client import ApiFailed, Client, GatewaySilent
from shared.gateway_url import URL
from shared.protocol import Embed, ImagePart, ImageRef, TextPart
from shared.search import STORE_ID, Attributes, Hit, Item
from shared.settings import SettingsError
from shared.settings.limits import MAX_METADATA_ENTRIES, MAX_METADATA_VALUE_CHARS, LimitSettings

DOCUMENT_PROMPTS = ("document", "passage", "search_document")
QUERY_PROMPTS = ("query", "search_query")
TIMEOUT_S = 600.0
TRIES = 5  #: attempts per request to the gateway
#: File of the `Plan` of an incomplete collection.
PLAN = "embedding.json"
IMAGE_ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".avif"})


class EmbedError(Exception):
    """A command of this module failed; the message is printed."""


@dataclass(frozen=True, slots=True)
class Source:
    id: str
    text: str = ""
    image: Path | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)


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
            f"{path}: use .txt (one text per line), .jsonl, .csv, images, or a folder of images"
        )


def list_images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_ENDINGS)


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """Raises: EmbedError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield file
    except UnicodeDecodeError:
        raise EmbedError(f"{path} is not UTF-8: convert it first") from None
    except (OSError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise EmbedError(f"{path} cannot be read ({reason})") from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with _opened(path) as file:
        yield from ((number, line.rstrip("\r\n")) for number, line in enumerate(file, 1))


def _read_jsonl(path: Path, text_field: str) -> Iterator[Source]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            json.dumps(row, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            raise EmbedError(f"{path}:{number} is not valid JSON") from None
        if isinstance(row, str):
            row = {text_field: row}
        if not isinstance(row, dict):
            raise EmbedError(f"{path}:{number}: write an object with {text_field!r}, or a string")
        yield _from_row(row, text_field, f"{path}:{number}", path.parent)


def _read_csv(path: Path, text_field: str) -> Iterator[Source]:
    with _opened(path) as file:
        rows = csv.DictReader(file)
        for row in rows:
            yield _from_row(row, text_field, f"{path}:{rows.line_num}", path.parent)


def _from_row(row: Mapping[str, Any], text_field: str, place: str, folder: Path) -> Source:
    """Create a source from a row. Fields other than the text, `id` and `image` become attributes."""
    text, image = row.get(text_field), row.get("image") or None  # a column may be empty
    if not isinstance(text, str) and not isinstance(image, str):
        raise EmbedError(f"{place} has no text in {text_field!r}: name the field by --text-field")
    if not text and not isinstance(image, str):
        raise EmbedError(f"{place} has an empty text in {text_field!r}: remove the line")
    attributes = {
        key: value
        for key, value in row.items()
        if key not in (text_field, "id", "image")
        and isinstance(key, str)
        and isinstance(value, str | bool | int | float)
        and len(str(value)) <= MAX_METADATA_VALUE_CHARS
        and (isinstance(value, str) or abs(value) <= sys.float_info.max)
    }
    if len(attributes) > MAX_METADATA_ENTRIES:
        raise EmbedError(f"{place} has more than {MAX_METADATA_ENTRIES} attributes: leave some out")
    return Source(
        id="" if row.get("id") is None else str(row["id"]),
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
    """SHA-256 of a file. Raises: EmbedError."""
    return hashlib.sha256(_read(path)).hexdigest()


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
    embedder: "Embedder",
    *,
    text_field: str = "text",
    dtype: str = "f32",
    part_items: int = 8192,
    batch_items: int = 256,
    report: Callable[[int, int], None] = lambda num_done, total: None,
    known: tuple[str, int] | None = None,
) -> Manifest:
    """Write or resume a collection. `known`: the `fingerprint` of the inputs. Raises: EmbedError, BadCollection."""
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
    manifest = _to_manifest(plan, total, parts)
    if sum(part.num_items for part in parts) != total:
        raise EmbedError("the inputs changed during the run: run the command again")
    write_manifest(directory, manifest)
    (directory / PLAN).unlink(missing_ok=True)
    return manifest


def _to_manifest(plan: Plan, total: int, parts: Sequence[PartRecord], **more: Any) -> Manifest:
    fields = msgspec.structs.asdict(plan) | more
    del fields["part_items"]
    return Manifest(num_items=total, parts=tuple(parts), **fields)


def open_output(directory: Path) -> None:
    """Create the directory of a collection. Raises: EmbedError if it has other files; OSError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise EmbedError(f"{directory} is a file: give a directory with --output") from None
    is_begun = (directory / MANIFEST).exists() or (directory / PLAN).exists()
    if not is_begun and any(path.suffix != PARTIAL for path in directory.iterdir()):
        raise EmbedError(f"{directory} is not empty: name a new directory")


def _resume(directory: Path, plan: Plan) -> list[PartRecord]:
    """The complete parts of an earlier run. Raises: EmbedError."""
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
            f"{directory} was started with another {' and '.join(differs)}: name a new directory, or use "
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
        from engines.image_decoder import decode_image  # noqa: PLC0415

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
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415

    from engines.image_decoder import FORMAT_NAMES, FORMATS  # noqa: PLC0415

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            kind, (width, height) = (image.format or "").lower(), image.size
    except Image.DecompressionBombError as error:
        raise EmbedError(f"{path}: {error}") from None
    except (UnidentifiedImageError, OSError):
        raise EmbedError(f"{path}: use an image in {FORMAT_NAMES}") from None
    return ImageRef(hashlib.sha256(data).hexdigest(), len(data), f"image/{kind}", width, height)


def find_prompt(asked: str | None, prompts: Sequence[str], usual: Sequence[str]) -> str:
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
        prompt: str | None,
        usual: Sequence[str],
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
        """Embed texts and images in separate requests, each within the gateway's limits."""
        rows: dict[int, np.ndarray] = {}
        texts = {index: each.text for index, each in enumerate(sources) if each.image is None}
        images = {index: each.image for index, each in enumerate(sources) if each.image is not None}
        prompt = {"prompt_name": self.prompt} if self.prompt else {}
        for some in _batches(texts, lambda index: len(texts[index]), LimitSettings.max_input_chars):
            inputs = [texts[index] for index in some]
            rows |= zip(some, self._ask(inputs, prompt), strict=True)
        for some in _batches(images, lambda index: images[index].stat().st_size, IMAGE_BYTES, 16):
            inputs = [{"image": base64.b64encode(_read(images[each])).decode()} for each in some]
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


#: Computes vectors of sources. Shapes: [sources, dimensions], float32 of length 1. Raises: EmbedError.
Embedder = LocalEmbedder | RemoteEmbedder


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


LINE_S = 5.0  #: interval of lines of progress if stderr is not a terminal
LOAD_ITEMS = 512
IMAGE_BYTES = 16 * 1024 * 1024  #: maximum bytes of images per request, before base64 adds a third
EXPORT_PART_ITEMS = 8192
PAGE = 100
_IMAGES = 256
_STORES = "/v1/vector_stores"

console = Console(stderr=True, highlight=False)

Each = TypeVar("Each")
Report = Callable[[int, int], None]  #: items done, and their total


@contextmanager
def _failing() -> Iterator[None]:
    """Print expected errors, and exit with code 1."""
    try:
        yield
    except (
        ApiFailed, EmbedError, BadCollection, EngineStartError, SettingsError, OSError,
    ) as error:  # fmt: skip
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        console.print("interrupted; run the command again to resume")
        sys.exit(130)


@contextmanager
def _progress(what: str) -> Iterator[Report]:
    """A bar on a terminal, else a line every few seconds."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=None, rate="")
        first: tuple[int, float] | None = None
        next_line_at = 0.0

        def report(num_done: int, total: int) -> None:
            nonlocal first, next_line_at
            now = time.monotonic()
            first = first or (num_done, now)
            rate = f"{(num_done - first[0]) / max(now - first[1], 1e-3):.0f} items/s"
            bar.update(task, completed=num_done, total=total, rate=rate)
            if not console.is_terminal and now >= next_line_at:
                console.print(f"{num_done} of {total} items, {rate}", soft_wrap=True)
                next_line_at = now + LINE_S

        yield report


@_failing()
def run_embed(
    inputs: list[Path],
    output: Path,
    text_field: str,
    dtype: str,
    part_items: int,
    open_: "Callable[[], Embedder]",
) -> None:
    console.print(f"{output}: reading inputs", markup=False)
    known = fingerprint(read_sources(inputs, text_field))
    open_output(output)
    with _progress("embedding") as report, closing(open_()) as embedder:
        manifest = embed(
            inputs, output, embedder, text_field=text_field, dtype=dtype, part_items=part_items,
            report=report, known=known,
        )  # fmt: skip
    print(
        f"{output}: {manifest.num_items} items of {manifest.model}, {manifest.dimensions} dimensions"
    )


# Stores of a gateway


def find_store(client: Client, name: str) -> dict[str, Any] | None:
    """A store by its id or its name. Raises: EmbedError."""
    if name.startswith(STORE_ID):
        return client.ask("GET", f"{_STORES}/{quote(name, safe='')}", tries=TRIES)
    stores = client.pages(_STORES, TRIES, limit=PAGE)
    return next((store for store in stores if store["name"] == name), None)


@_failing()
def run_load(directory: Path, name: str, url: str, model: str, api_key: str | None) -> None:
    """Upsert a collection into a store, which is created if it does not exist."""
    client, index = Client(url, api_key, TIMEOUT_S), FlatIndex(directory)
    manifest = index.manifest
    store = find_store(client, name)
    if store is None:
        same = ("dimensions", "prompt", "query_prompt")
        body = {field: getattr(manifest, field) for field in same}
        body |= {"name": name, "embedding_model": model or manifest.model}
        store = client.ask("POST", _STORES, body, TRIES)
    if store["embedding_digest"] != manifest.digest and store["embedding_digest"]:
        raise EmbedError(
            f"{directory} and the store were embedded by different models ({manifest.model}, "
            f"{store['embedding_model']}): load it into a new store"
        )
    path, num_done = f"{_STORES}/{store['id']}", 0
    with _progress("loading") as report:
        for batch in _batches(
            index.items(), lambda item: len(item.text), LimitSettings.max_input_chars
        ):
            client.ask("PUT", f"{path}/items", {"items": [_to_wire(item) for item in batch]}, TRIES)
            num_done += len(batch)
            report(num_done, manifest.num_items)
    store = client.ask("GET", path, tries=TRIES)
    print(f"{store['id']} {store['name']}: {store['num_items']} items")


def _batches(
    items: Iterable[Each], size_of: Callable[[Each], int], max_size: int, most: int = LOAD_ITEMS
) -> Iterator[list[Each]]:
    """Batches of up to `most` items and a total of up to `max_size`; a larger item is a batch of its own."""
    batch: list[Each] = []
    size = 0
    for item in items:
        size += size_of(item)
        if len(batch) == most or (batch and size > max_size):
            yield batch
            batch, size = [], size_of(item)
        batch.append(item)
    if batch:
        yield batch


def _to_wire(item: Item) -> dict[str, Any]:
    wire = {"id": item.id, "embedding": base64.b64encode(item.vector).decode()}
    optional = {"text": item.text, "attributes": item.attributes}
    return wire | {name: value for name, value in optional.items() if value}


@_failing()
def run_export(name: str, output: Path, url: str, dtype: str, api_key: str | None) -> None:
    """Write a store as a collection, or resume an export."""
    client = Client(url, api_key, TIMEOUT_S)
    store = find_store(client, name)
    if store is None:
        raise EmbedError(f"there is no vector store {name!r}")
    open_output(output)
    if (output / MANIFEST).exists():
        raise EmbedError(f"{output} is not empty: name a new directory")
    model = (store["embedding_model"], store["embedding_digest"], store["prompt"])
    plan = Plan(*model, store["dimensions"], dtype, EXPORT_PART_ITEMS, store["id"])
    parts, after = _resume(output, plan), ""
    if parts:
        last = Part(output / parts[-1].name, plan.dimensions)
        after = last.text("ids", len(last) - 1)
    path = f"{_STORES}/{store['id']}/items"
    pages = client.pages(path, TRIES, after, limit=PAGE, include="embedding")
    items, num_done = map(_from_wire, pages), sum(part.num_items for part in parts)
    with _progress("exporting") as report:
        while batch := list(islice(items, EXPORT_PART_ITEMS)):
            parts.append(write_part(output, len(parts), batch, dtype))
            num_done += len(batch)
            report(num_done, store["num_items"])
    manifest = _to_manifest(plan, num_done, parts, query_prompt=store["query_prompt"], inputs="")
    write_manifest(output, manifest)
    (output / PLAN).unlink()
    print(f"{output}: {num_done} items")


def _from_wire(item: dict[str, Any]) -> Item:
    text, image = _content(item)
    vector = base64.b64decode(item["embedding"])
    return Item(id=item["id"], vector=vector, text=text, image=image, attributes=item["attributes"])


def _content(item: dict[str, Any]) -> tuple[str, str]:
    pieces = item["content"]
    images = (piece.get("image_url", {}).get("url", "") for piece in pieces)
    return "".join(piece.get("text", "") for piece in pieces), "".join(images)


# Searches


@_failing()
def run_search(
    target: str,
    text: str | None,
    image: Path | None,
    limit: int,
    url: str | None,
    engine: str,
    model: str,
    api_key: str | None,
) -> None:
    if (text is None) == (image is None):
        raise EmbedError("give either a text or --image FILE to search for")
    if image is not None and not image.is_file():
        raise EmbedError(f"{image} is not a file: give an image with --image")
    query, directory = Source("query", text or "", image), Path(target)
    if not directory.is_dir():
        try:
            found = search_store(Client(url or URL, api_key, TIMEOUT_S), target, query, limit)
        except GatewaySilent as error:
            raise EmbedError(f"there is no directory {target}, and {error}") from None
    else:
        model = _find_model(directory, model, url, engine)
        is_collection = (directory / MANIFEST).exists()
        prompt = read_manifest(directory).query_prompt if is_collection else None
        embedder = open_embedder(engine, model, url, api_key, prompt, QUERY_PROMPTS)
        with closing(embedder):
            search = search_directory if is_collection else search_images
            found = search(directory, query, limit, embedder)
    for hit in found:
        text = hit.item.text or hit.item.image
        print(f"{hit.score:7.4f}  {hit.item.id}  {text[:100]}".rstrip())


def _find_model(directory: Path, model: str, url: str | None, engine: str) -> str:
    """The given model, or the collection's; empty for the engine's default. Raises: EmbedError, BadCollection."""
    if not (directory / MANIFEST).exists():
        if (directory / PLAN).exists():
            read_manifest(directory)  # raises BadCollection
        if not list_images(directory):
            raise EmbedError(f"{directory} is not a collection (no {MANIFEST}) and has no images")
        return model
    kind = find_kind(engine)
    if model or (url is None and (kind is None or not kind.needs_checkpoint)):
        return model
    model = read_manifest(directory).model
    if url is None and model not in BUILT_IN:  # a manifest must not cause a download
        raise EmbedError(f"give --url, or name the collection's model with --model: {model}")
    return model


def search_directory(directory: Path, query: Source, k: int, embedder: Embedder) -> list[Hit]:
    """The nearest items of a collection. Raises: EmbedError, BadCollection."""
    index = FlatIndex(directory)
    manifest = index.manifest
    if embedder.digest != manifest.digest or embedder.dimensions != manifest.dimensions:
        raise EmbedError(
            f"{directory} was embedded by {manifest.model}, which differs from {embedder.model}: give "
            "the collection's model with --model"
        )
    return index.search(np.asarray(embedder.embed([query])), k)[0]


def search_images(folder: Path, query: Source, k: int, embedder: Embedder) -> list[Hit]:
    """The nearest images of a folder that is not a collection. Raises: EmbedError."""
    images = read_sources([folder], "text")
    [vector] = embedder.embed([query])
    found: list[Hit] = []
    while batch := list(islice(images, _IMAGES)):
        scores = np.asarray(embedder.embed(batch)) @ vector
        pairs = zip(scores, batch, strict=True)
        found += [Hit(item=Item(id=source.id), score=float(score)) for score, source in pairs]
        found = sorted(found, key=lambda hit: -hit.score)[:k]
    return found


def search_store(client: Client, name: str, query: Source, k: int) -> list[Hit]:
    """The nearest items of a store. Raises: EmbedError."""
    asked: Any = query.text
    if query.image is not None:
        asked = {"image": base64.b64encode(query.image.read_bytes()).decode()}
    store = find_store(client, name)
    if store is None:
        raise EmbedError(f"there is no vector store {name!r}, nor a directory of that name")
    body = {"query": asked, "max_num_results": k}
    page = client.ask("POST", f"{_STORES}/{store['id']}/search", body, TRIES)
    return [
        Hit(item=Item(id=hit["id"], text="".join(_content(hit))), score=hit["score"])
        for hit in page["data"]
    ]
