"""Collections into vector stores of a gateway and out of them, and searches in either."""

import base64
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from search.collection import Manifest, write_manifest, write_part
from search.embed import open_output
from search.embedders import (
    DOCUMENT_PROMPTS,
    QUERY_PROMPTS,
    LocalEmbedder,
    RemoteEmbedder,
    call,
    connect,
)
from search.flat import FlatIndex
from search.sources import EmbedError, Source, read_sources
from shared.search import STORE_ID, Item
from shared.settings.limits import LimitSettings

LOAD_ITEMS = 512
EXPORT_PART_ITEMS = 8192
PAGE = 100
_IMAGES = 256
_STORES = "/v1/vector_stores"

Report = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Gateway:
    """Where stores are, and whose."""

    url: str
    api_key: str | None


def find_store(client: Any, name: str) -> dict[str, Any] | None:
    """A store by its id or its name. Raises: EmbedError."""
    if name.startswith(STORE_ID):
        return call(client, "GET", f"{_STORES}/{quote(name, safe='')}")
    after = ""
    while True:
        page = call(client, "GET", f"{_STORES}?limit={PAGE}" + (f"&after={after}" if after else ""))
        for store in page["data"]:
            if store["name"] == name:
                return store
        if not page["has_more"]:
            return None
        after = page["last_id"]


def load(
    directory: Path, name: str, gateway: Gateway, model: str, report: Report
) -> dict[str, Any]:
    """Put a collection into a store, made where there is none of that name; may be run again.

    Raises: EmbedError, BadCollection.
    """
    index = FlatIndex(directory)
    manifest = index.manifest
    with connect(gateway.url, gateway.api_key) as client:
        store = find_store(client, name)
        if store is None:
            body = {
                "name": name,
                "embedding_model": model or manifest.model,
                "dimensions": manifest.dimensions,
                "prompt": manifest.prompt,
            }
            store = call(client, "POST", _STORES, body)
        if store["embedding_digest"] != manifest.digest and store["embedding_digest"]:
            raise EmbedError(
                f"{directory} was made by another model than the one of the store ({manifest.model}, "
                f"{store['embedding_model']}): name its model with --model"
            )
        done = 0
        for batch in _batches(index.items()):
            sent = [_to_wire(item) for item in batch]
            call(client, "PUT", f"{_STORES}/{store['id']}/items", {"items": sent})
            done += len(batch)
            report(done, manifest.num_items)
        return call(client, "GET", f"{_STORES}/{store['id']}")


def _batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """As many as one request may hold, in items and in characters of their texts."""
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
    wire: dict[str, Any] = {"id": item.id, "embedding": base64.b64encode(item.vector).decode()}
    if item.text:
        wire["text"] = item.text
    if item.attributes:
        wire["attributes"] = item.attributes
    return wire


def export(name: str, directory: Path, gateway: Gateway, dtype: str, report: Report) -> Manifest:
    """Write a store as a collection. Raises: EmbedError."""
    with connect(gateway.url, gateway.api_key) as client:
        store = find_store(client, name)
        if store is None:
            raise EmbedError(f"there is no vector store {name!r}")
        open_output(directory)
        if any(directory.iterdir()):
            raise EmbedError(f"{directory} is not empty: name a new directory")
        items, parts = _read_all(client, store["id"]), []
        done = 0
        while batch := list(islice(items, EXPORT_PART_ITEMS)):
            parts.append(write_part(directory, len(parts), batch, dtype))
            done += len(batch)
            report(done, store["num_items"])
    manifest = Manifest(
        model=store["embedding_model"],
        digest=store["embedding_digest"],
        dimensions=store["dimensions"],
        dtype=dtype,
        num_items=done,
        parts=tuple(parts),
    )
    write_manifest(directory, manifest)
    return manifest


def _read_all(client: Any, store: str) -> Iterator[Item]:
    after = ""
    while True:
        query = f"limit={PAGE}&include=embedding" + (
            f"&after={quote(after, safe='')}" if after else ""
        )
        page = call(client, "GET", f"{_STORES}/{store}/items?{query}")
        for item in page["data"]:
            texts = [piece.get("text", "") for piece in item["content"]]
            images = [
                piece["image_url"]["url"] for piece in item["content"] if "image_url" in piece
            ]
            yield Item(
                id=item["id"],
                vector=base64.b64decode(item["embedding"]),
                text="".join(texts),
                image="".join(images),
                attributes=item["attributes"],
            )
        if not page["has_more"]:
            return
        after = page["last_id"]


@dataclass(frozen=True, slots=True)
class Found:
    """A hit as a person reads it."""

    score: float
    id: str
    text: str


def search_directory(
    directory: Path, query: Source, k: int, embedder: LocalEmbedder | RemoteEmbedder
) -> list[Found]:
    """The nearest items of a collection. Raises: EmbedError, BadCollection."""
    index = FlatIndex(directory)
    manifest = index.manifest
    if embedder.digest != manifest.digest or embedder.dimensions != manifest.dimensions:
        raise EmbedError(
            f"{directory} was made by {manifest.model}, in another version than {embedder.model}: name "
            "its model with --model"
        )
    [hits] = index.search(np.asarray(embedder.embed([query])), k)
    return [Found(hit.score, hit.item.id, hit.item.text or hit.item.image) for hit in hits]


def search_images(
    folder: Path, query: Source, k: int, embedder: LocalEmbedder | RemoteEmbedder
) -> list[Found]:
    """The nearest images of a folder that is no collection. Raises: EmbedError."""
    images = read_sources([folder], "text")
    [asked] = embedder.embed([query])
    found: list[Found] = []
    while batch := list(islice(images, _IMAGES)):
        scores = np.asarray(embedder.embed(batch)) @ asked
        found += [
            Found(float(score), source.id, "") for score, source in zip(scores, batch, strict=True)
        ]
        found = sorted(found, key=lambda hit: -hit.score)[:k]
    return found


def search_store(name: str, query: Source, k: int, gateway: Gateway) -> list[Found]:
    """The nearest items of a store. Raises: EmbedError."""
    asked: Any = query.text
    if query.image is not None:
        asked = {"image": base64.b64encode(query.image.read_bytes()).decode()}
    with connect(gateway.url, gateway.api_key) as client:
        store = find_store(client, name)
        if store is None:
            raise EmbedError(f"there is no vector store {name!r}, nor a directory of that name")
        body = {"query": asked, "max_num_results": k}
        page = call(client, "POST", f"{_STORES}/{store['id']}/search", body)
    return [
        Found(
            hit["score"],
            hit["id"],
            "".join(
                piece.get("text", "") or piece.get("image_url", {}).get("url", "")
                for piece in hit["content"]
            ),
        )
        for hit in page["data"]
    ]


def open_embedder(
    engine: str, model: str, gateway: Gateway | None, prompt: str | None, *, is_query: bool = False
) -> LocalEmbedder | RemoteEmbedder:
    """A gateway where one is named, else an engine in this process. Raises: EmbedError, EngineStartError."""
    usual = QUERY_PROMPTS if is_query else DOCUMENT_PROMPTS
    if gateway is not None:
        return RemoteEmbedder(gateway.url, model, gateway.api_key, prompt, usual)
    return LocalEmbedder(engine, model, prompt, usual)
