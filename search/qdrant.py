"""The Qdrant index: a server, for stores larger than one machine, with a collection per store.

The id of a point is a UUID of the item's id. Writes wait for the server's write-ahead log.
"""

import heapq
import uuid
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import numpy as np
from qdrant_client import QdrantClient, models

from search.filters import to_columns, to_qdrant
from search.index import IndexStats, OrderedIds, SearchUnavailable
from shared.search import Filter, Hit, Item

_IDS = uuid.UUID("6b1a3c52-7a0e-4c3f-9d0b-5b8f3a2d9e11")
_PAGE = 1000
#: The sizes of points are rounded up to so many bytes, so that the server can count them by value.
_SIZE_STEP = 256
_MAX_SIZES = 10_000
TIMEOUT_S = 30


def open_qdrant(url: str) -> "QdrantIndexes":
    """The collections of `qdrant://HOST:PORT`, or `qdrants://` for TLS; `?key=` for an API key.

    Raises: SearchUnavailable.
    """
    parts = urlsplit(url)
    key = parse_qs(parts.query).get("key", [None])[0]
    scheme = "https" if parts.scheme == "qdrants" else "http"
    address = f"{scheme}://{parts.hostname}:{parts.port or 6333}"
    client = QdrantClient(url=address, api_key=key, timeout=TIMEOUT_S, check_compatibility=False)
    try:
        client.get_collections()
    except Exception as error:  # of grpc, httpx or qdrant_client
        client.close()
        raise SearchUnavailable(
            f"VLM_SEARCH__INDEX: no Qdrant answers at {parts.hostname}:{parts.port or 6333} "
            f"({type(error).__name__}); start it, or correct the address"
        ) from None
    return QdrantIndexes(client)


class QdrantIndexes:
    """A collection per store."""

    database = None

    def __init__(self, client: QdrantClient) -> None:
        self._client = client

    def open(self, name: str, dimensions: int) -> "QdrantIndex":
        if not self._client.collection_exists(name):
            vectors = models.VectorParams(size=dimensions, distance=models.Distance.COSINE)
            self._client.create_collection(name, vectors_config=vectors)
        self._client.create_payload_index(name, "size", models.PayloadSchemaType.INTEGER)
        return QdrantIndex(self._client, name, dimensions)

    def drop(self, name: str) -> None:
        self._client.delete_collection(name)

    def close(self) -> None:
        self._client.close()


class QdrantIndex:
    """The collection of one store."""

    def __init__(self, client: QdrantClient, name: str, dimensions: int) -> None:
        self._client = client
        self._name = name
        self._dimensions = dimensions
        self._ids = OrderedIds(self._read_ids, self.get)

    def upsert(self, items: Sequence[Item]) -> None:
        points = [
            models.PointStruct(
                id=_to_uuid(item.id),
                vector=np.frombuffer(item.vector, "<f4").tolist(),
                payload=_to_payload(item),
            )
            for item in items
        ]
        try:
            self._client.upsert(self._name, points, wait=True)
        except BaseException:
            self._ids.forget()  # it may have been written
            raise
        self._ids.add(item.id for item in items)

    def delete(self, ids: Sequence[str] | None = None, where: Filter | None = None) -> int:
        if ids is not None:
            has_ids = models.HasIdCondition(has_id=[_to_uuid(key) for key in ids])
            chosen = models.Filter(must=[has_ids])
        elif where is not None:
            chosen = to_qdrant(where)
        else:
            return 0
        num_found = self._client.count(self._name, count_filter=chosen, exact=True).count
        if num_found:
            self._client.delete(self._name, models.FilterSelector(filter=chosen), wait=True)
            if ids is None:
                self._ids.forget()
            else:
                self._ids.remove(ids)
        return num_found

    def search(self, vectors: np.ndarray, k: int, where: Filter | None = None) -> list[list[Hit]]:
        chosen = to_qdrant(where) if where is not None else None
        asked = [
            models.QueryRequest(query=vector.tolist(), filter=chosen, limit=k, with_payload=True)
            for vector in vectors
        ]
        answers = self._client.query_batch_points(self._name, asked)
        return [
            sorted(
                (Hit(item=_to_item(point), score=point.score) for point in answer.points),
                key=lambda hit: (-hit.score, hit.item.id),
            )
            for answer in answers
        ]

    def get(self, ids: Sequence[str]) -> list[Item]:
        keys = [_to_uuid(key) for key in ids]
        found = self._client.retrieve(self._name, keys, with_payload=True, with_vectors=True)
        return [_to_item(point) for point in found]

    def page(self, after: str, limit: int, with_vectors: bool = False) -> list[Item]:
        return self._ids.page(after, limit, with_vectors)

    def _read_ids(self, after: str, limit: int) -> list[str]:
        return heapq.nsmallest(limit, (key for key in self._scroll() if key > after))

    def _scroll(self) -> Iterator[str]:
        offset: Any = None
        while True:
            points, offset = self._client.scroll(
                self._name, limit=_PAGE, offset=offset, with_payload=["id"]
            )
            yield from ((point.payload or {})["id"] for point in points)
            if offset is None:
                return

    def stats(self) -> IndexStats:
        """`num_bytes` is the size of the items: Qdrant reports none."""
        sizes = self._client.facet(self._name, "size", limit=_MAX_SIZES, exact=True).hits
        num_items = sum(size.count for size in sizes)
        return IndexStats(num_items, sum(int(size.value) * size.count for size in sizes))

    def compact(self) -> None:
        """The server compacts by itself."""

    def close(self) -> None:
        """All collections share the connection."""


def _to_uuid(key: str) -> str:
    return str(uuid.uuid5(_IDS, key))


def _to_payload(item: Item) -> dict[str, Any]:
    payload = msgspec.to_builtins(msgspec.structs.replace(item, vector=b""))
    num_bytes = len(msgspec.msgpack.encode(item))
    size = -(-num_bytes // _SIZE_STEP) * _SIZE_STEP
    return {**payload, "filterable": to_columns(item.attributes), "size": size}


def _to_item(point: Any) -> Item:
    item = msgspec.convert(point.payload, Item)
    if point.__class__.__name__ == "ScoredPoint" or point.vector is None:
        return item
    return msgspec.structs.replace(item, vector=np.asarray(point.vector, "<f4").tobytes())
