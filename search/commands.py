"""`vlm embed`, `vlm search`, `vlm store load` and `vlm store export`."""

import base64
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engines.base import EngineStartError
from engines.packages.resolve import BUILT_IN
from engines.registry import find_kind
from search.collection import (
    MANIFEST,
    BadCollection,
    FlatIndex,
    Manifest,
    read_manifest,
    write_manifest,
    write_part,
)
from search.embed import (
    PLAN,
    QUERY_PROMPTS,
    TIMEOUT_S,
    TRIES,
    Embedder,
    EmbedError,
    Source,
    embed,
    fingerprint,
    list_images,
    open_embedder,
    open_output,
    read_sources,
)
from shared.gateway_client import ApiFailed, Client, GatewaySilent
from shared.gateway_url import URL
from shared.search import STORE_ID, Item
from shared.settings import SettingsError
from shared.settings.limits import LimitSettings

LINE_S = 5.0  #: between lines of progress where there is no terminal
LOAD_ITEMS = 512
EXPORT_PART_ITEMS = 8192
PAGE = 100
_IMAGES = 256
_STORES = "/v1/vector_stores"

console = Console(stderr=True, highlight=False)

Report = Callable[[int, int], None]  #: items done, and their total


class Found(NamedTuple):
    """A hit to print."""

    score: float
    id: str
    text: str


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
    open_: Callable[[], Embedder],
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
    with _progress("loading") as report:
        store = load(Client(url, api_key, TIMEOUT_S), directory, name, model, report)
    print(f"{store['id']} {store['name']}: {store['num_items']} items")


def load(client: Client, directory: Path, name: str, model: str, report: Report) -> dict[str, Any]:
    """Upsert a collection into a store, which is created if it does not exist. Raises: EmbedError, BadCollection."""
    index = FlatIndex(directory)
    manifest = index.manifest
    store = find_store(client, name)
    if store is None:
        body = {
            "name": name,
            "embedding_model": model or manifest.model,
            "dimensions": manifest.dimensions,
            "prompt": manifest.prompt,
        }
        store = client.ask("POST", _STORES, body, TRIES)
    if store["embedding_digest"] != manifest.digest and store["embedding_digest"]:
        raise EmbedError(
            f"{directory} and the store were embedded by different models ({manifest.model}, "
            f"{store['embedding_model']}): load it into a new store"
        )
    num_done = 0
    for batch in _batches(index.items()):
        sent = [_to_wire(item) for item in batch]
        client.ask("PUT", f"{_STORES}/{store['id']}/items", {"items": sent}, TRIES)
        num_done += len(batch)
        report(num_done, manifest.num_items)
    return client.ask("GET", f"{_STORES}/{store['id']}", tries=TRIES)


def _batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Batches within the limits of one request: items, and characters of text."""
    batch: list[Item] = []
    num_chars = 0
    for item in items:
        num_chars += len(item.text)
        if len(batch) == LOAD_ITEMS or (batch and num_chars > LimitSettings.max_input_chars):
            yield batch
            batch, num_chars = [], len(item.text)
        batch.append(item)
    if batch:
        yield batch


def _to_wire(item: Item) -> dict[str, Any]:
    wire = {"id": item.id, "embedding": base64.b64encode(item.vector).decode()}
    optional = {"text": item.text, "attributes": item.attributes}
    return wire | {name: value for name, value in optional.items() if value}


@_failing()
def run_export(name: str, output: Path, url: str, dtype: str, api_key: str | None) -> None:
    with _progress("exporting") as report:
        manifest = export(Client(url, api_key, TIMEOUT_S), name, output, dtype, report)
    print(f"{output}: {manifest.num_items} items")


def export(client: Client, name: str, directory: Path, dtype: str, report: Report) -> Manifest:
    """Write a store as a collection. Raises: EmbedError."""
    store = find_store(client, name)
    if store is None:
        raise EmbedError(f"there is no vector store {name!r}")
    open_output(directory)
    if any(directory.iterdir()):
        raise EmbedError(f"{directory} is not empty: name a new directory")
    path = f"{_STORES}/{store['id']}/items"
    pages = client.pages(path, TRIES, limit=PAGE, include="embedding")
    items, parts, num_done = map(_from_wire, pages), [], 0
    while batch := list(islice(items, EXPORT_PART_ITEMS)):
        parts.append(write_part(directory, len(parts), batch, dtype))
        num_done += len(batch)
        report(num_done, store["num_items"])
    manifest = Manifest(
        model=store["embedding_model"],
        digest=store["embedding_digest"],
        dimensions=store["dimensions"],
        dtype=dtype,
        num_items=num_done,
        parts=tuple(parts),
    )
    write_manifest(directory, manifest)
    return manifest


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
        raise EmbedError("give what to search for: either a text or --image FILE")
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
        embedder = open_embedder(engine, model, url, api_key, None, QUERY_PROMPTS)
        is_collection = (directory / MANIFEST).exists()
        with closing(embedder):
            search = search_directory if is_collection else search_images
            found = search(directory, query, limit, embedder)
    for hit in found:
        print(f"{hit.score:7.4f}  {hit.id}  {hit.text[:100]}".rstrip())


def _find_model(directory: Path, model: str, url: str | None, engine: str) -> str:
    """The given model, or the collection's. Empty: the default. Raises: EmbedError, BadCollection."""
    if not (directory / MANIFEST).exists():
        if (directory / PLAN).exists():
            read_manifest(directory)  # which raises
        if not list_images(directory):
            raise EmbedError(f"{directory} is no collection (no {MANIFEST}) and has no images")
        return model
    kind = find_kind(engine)
    if model or (url is None and (kind is None or not kind.needs_checkpoint)):
        return model
    model = read_manifest(directory).model
    if url is None and model not in BUILT_IN:  # a manifest must not choose what is loaded
        raise EmbedError(f"name the collection's model with --model: {model}")
    return model


def search_directory(directory: Path, query: Source, k: int, embedder: Embedder) -> Sequence[Found]:
    """The nearest items of a collection. Raises: EmbedError, BadCollection."""
    index = FlatIndex(directory)
    manifest = index.manifest
    if embedder.digest != manifest.digest or embedder.dimensions != manifest.dimensions:
        raise EmbedError(
            f"{directory} was embedded by {manifest.model}, which differs from {embedder.model}: name "
            "its model with --model"
        )
    [hits] = index.search(np.asarray(embedder.embed([query])), k)
    return [Found(hit.score, hit.item.id, hit.item.text or hit.item.image) for hit in hits]


def search_images(folder: Path, query: Source, k: int, embedder: Embedder) -> Sequence[Found]:
    """The nearest images of a folder that is not a collection. Raises: EmbedError."""
    images = read_sources([folder], "text")
    [vector] = embedder.embed([query])
    found: list[Found] = []
    while batch := list(islice(images, _IMAGES)):
        scores = np.asarray(embedder.embed(batch)) @ vector
        pairs = zip(scores, batch, strict=True)
        found += [Found(float(score), source.id, "") for score, source in pairs]
        found = sorted(found, key=lambda hit: -hit.score)[:k]
    return found


def search_store(client: Client, name: str, query: Source, k: int) -> Sequence[Found]:
    """The nearest items of a store. Raises: EmbedError."""
    asked: Any = query.text
    if query.image is not None:
        asked = {"image": base64.b64encode(query.image.read_bytes()).decode()}
    store = find_store(client, name)
    if store is None:
        raise EmbedError(f"there is no vector store {name!r}, nor a directory of that name")
    body = {"query": asked, "max_num_results": k}
    page = client.ask("POST", f"{_STORES}/{store['id']}/search", body, TRIES)
    return [Found(hit["score"], hit["id"], "".join(_content(hit))) for hit in page["data"]]
