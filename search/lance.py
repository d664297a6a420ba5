"""The Lance index: tables of versioned files in a directory of this process.

A write is one commit: a file, then the version that names it. Tables of up to `SCAN_ROWS` rows are scanned exactly. In
larger tables, a search scans 8-bit vectors, and reranks the best candidates by their exact vectors. Rows that are newer
than the index are scanned too, so that a search sees all acknowledged writes. A graph index would take minutes to build
and have a lower recall at equal search time.
"""

import json
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta  # noqa: TID251 (a span, no clock)
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import lancedb
import numpy as np
import pyarrow as pa
from lancedb.index import BTree, IvfSq

from search.index import IndexStats, OrderedIds, sql_text, to_json, to_sql
from shared.search import Filter, Hit, Item
from shared.settings import SettingsError
from shared.settings.limits import MIB

#: Up to this many rows, an exact scan takes no longer than the index.
SCAN_ROWS = 10_000
#: A table with more files is compacted.
MAX_FRAGMENTS = 32
#: A table is compacted after (rows / `_ROWS_PER_COMMIT`) commits: at least `MIN_COMMITS`, at most `MAX_COMMITS`.
MIN_COMMITS, MAX_COMMITS = 16, 200
_ROWS_PER_COMMIT = 64
#: Candidates to rerank, per requested result.
REFINE_FACTOR = 4
_BATCH_IDS = 500
_TEXTS = ["id", "text", "image", "file_id", "filename"]
_PLAIN = [*_TEXTS, "attributes"]
#: Maximum wait for readers of old versions. If a reader takes longer, old versions are kept.
_READERS_END_WITHIN_S = 10.0
#: Limits of Lance's caches, which otherwise grow to several GiB.
_INDEX_CACHE_BYTES, _METADATA_CACHE_BYTES = 256 * MIB, 8 * MIB


def open_lance(url: str) -> "LanceIndexes":
    """The tables of `lance:///DIRECTORY`. Raises: SettingsError."""
    directory = Path(unquote(urlsplit(url).path))
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise SettingsError(
            f"{directory}: vector stores cannot be written there ({error.strerror}): set a writable directory"
        ) from None
    return LanceIndexes(directory)


class LanceIndexes:
    database = None

    def __init__(self, directory: Path) -> None:
        os.environ.setdefault("LANCE_LOG", "error")
        self._directory = directory
        session = lancedb.Session(_INDEX_CACHE_BYTES, _METADATA_CACHE_BYTES)
        self._database = lancedb.connect(str(directory), session=session)

    def open(self, name: str, dimensions: int) -> "LanceIndex":
        if self._path(name).exists():
            table = self._database.open_table(name)
        else:
            table = self._database.create_table(name, schema=_schema(dimensions))
        return LanceIndex(table, self._path(name), dimensions)

    def drop(self, name: str) -> None:
        if self._path(name).exists():
            self._database.drop_table(name)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.lance"

    def close(self) -> None:
        """Nothing to close."""


class Readers:
    """Tracks the active readers, so that a writer can wait for those that began earlier."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: set[object] = set()

    @contextmanager
    def reading(self) -> Iterator[None]:
        reader = object()
        with self._changed:
            self._open.add(reader)
        try:
            yield
        finally:
            with self._changed:
                self._open.remove(reader)
                self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the current readers; returns whether they ended in time."""
        with self._changed:
            current = set(self._open)
            return self._changed.wait_for(lambda: current.isdisjoint(self._open), timeout_s)


class LanceIndex:
    def __init__(self, table: Any, path: Path, dimensions: int) -> None:
        self._table = table
        self._path = path
        self._dimensions = dimensions
        self._lock = threading.Lock()
        self._readers = Readers()
        self._ids = OrderedIds(self._read_ids, self.get)
        self._is_closed = False
        self._is_indexed = bool(self._vector_index())
        self._compacted_at = table.version

    def upsert(self, items: Sequence[Item]) -> None:
        merge = self._table.merge_insert("id")
        merge = merge.when_matched_update_all().when_not_matched_insert_all()
        with self._lock:
            merge.execute(self._to_table(items))
            self._ids.add(item.id for item in items)

    def delete(self, ids: Sequence[str] | None = None, where: Filter | None = None) -> int:
        if ids is None:
            conditions = [to_sql(where)] if where is not None else []
        else:
            conditions = list(_id_conditions(ids))
        with self._lock:
            num_deleted = sum(self._table.delete(each).num_deleted_rows for each in conditions)
            if ids is None:
                self._ids.forget()
            else:
                self._ids.remove(ids)
            return num_deleted

    def search(self, vectors: np.ndarray, k: int, where: Filter | None = None) -> list[list[Hit]]:
        with self._readers.reading():
            return [self._search_one(vector, k, where) for vector in vectors]

    def _search_one(self, vector: np.ndarray, k: int, where: Filter | None) -> list[Hit]:
        query = self._table.search(vector).distance_type("cosine")
        if self._is_indexed:
            query = query.refine_factor(REFINE_FACTOR)
        if where is not None:
            query = query.where(to_sql(where), prefilter=True)
        rows = query.select([*_PLAIN, "_distance"]).limit(k).to_arrow().to_pylist()
        hits = [Hit(item=_to_item(row), score=1.0 - row["_distance"]) for row in rows]
        return sorted(hits, key=lambda hit: (-hit.score, hit.item.id))

    def get(self, ids: Sequence[str]) -> list[Item]:
        with self._readers.reading():
            conditions = _id_conditions(ids)
            return [item for each in conditions for item in self._read(each, _BATCH_IDS)]

    def page(self, after: str, limit: int, with_vectors: bool = False) -> list[Item]:
        return self._ids.page(after, limit, with_vectors)

    def _read_ids(self, after: str, limit: int) -> list[str]:
        with self._readers.reading():
            ids = self._table.search().where(f"id > {sql_text(after)}").select(["id"]).to_arrow()
        return ids.sort_by("id")["id"][:limit].to_pylist()

    def _read(self, condition: str, limit: int) -> list[Item]:
        query = self._table.search().where(condition).select([*_PLAIN, "vector"]).limit(limit)
        return [_to_item(row) for row in query.to_arrow().to_pylist()]

    def stats(self) -> IndexStats:
        num_bytes = sum(
            entry.stat().st_size
            for folder, _, names in os.walk(self._path)
            for entry in map(Path(folder).joinpath, names)
            if entry.exists()
        )
        return IndexStats(self._table.count_rows(), num_bytes)

    def compact(self) -> None:
        """Merge files; build or update the index once `SCAN_ROWS` rows are not indexed."""
        with self._lock:
            if self._is_closed:
                return
            statistics, num_rows = self._vector_index(), self._table.count_rows()
            num_new = statistics.num_unindexed_rows if statistics else num_rows
            num_fragments = self._table.stats()["fragment_stats"]["num_fragments"]
            most = min(MAX_COMMITS, max(MIN_COMMITS, num_rows // _ROWS_PER_COMMIT))
            if num_new >= SCAN_ROWS and statistics is None:
                self._build()
            elif (
                num_new >= SCAN_ROWS
                or num_fragments > MAX_FRAGMENTS
                or self._table.version - self._compacted_at > most
            ):
                self._optimize()

    def _optimize(self) -> None:
        """Merge files, and delete old versions once no reader uses them; the caller holds the lock."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._table.optimize()
            if self._readers.wait(_READERS_END_WITHIN_S):
                self._table.optimize(cleanup_older_than=timedelta(0))
        self._compacted_at = self._table.version

    def _build(self) -> None:
        config = IvfSq(distance_type="cosine", num_partitions=1)
        self._table.create_index("vector", config=config, replace=True)
        self._table.create_index("id", config=BTree(), replace=True)
        self._table.wait_for_index(["vector_idx"], timedelta(minutes=10))
        self._is_indexed = True

    def _vector_index(self) -> Any:
        names = {index.name for index in self._table.list_indices()}
        return self._table.index_stats("vector_idx") if "vector_idx" in names else None

    def close(self) -> None:
        """Prevent later compactions."""
        with self._lock:
            self._is_closed = True

    def _to_table(self, items: Sequence[Item]) -> pa.Table:
        vectors = np.frombuffer(b"".join(item.vector for item in items), "<f4")
        columns = {name: [getattr(item, name) for item in items] for name in _TEXTS} | {
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors), self._dimensions),
            "attributes": [json.dumps(item.attributes) for item in items],
            "filterable": pa.ExtensionArray.from_storage(
                pa.json_(), pa.array([to_json(item.attributes) for item in items])
            ),
        }
        return pa.table(columns, schema=_schema(self._dimensions))


def _schema(dimensions: int) -> pa.Schema:
    texts = [pa.field(name, pa.string()) for name in _PLAIN]
    vector = pa.field("vector", pa.list_(pa.float32(), dimensions))
    return pa.schema([texts[0], vector, *texts[1:], pa.field("filterable", pa.json_())])


def _id_conditions(ids: Sequence[str]) -> list[str]:
    return [
        f"id IN ({', '.join(map(sql_text, ids[first : first + _BATCH_IDS]))})"
        for first in range(0, len(ids), _BATCH_IDS)
    ]


def _to_item(row: dict[str, Any]) -> Item:
    vector = row.get("vector")
    return Item(
        vector=b"" if vector is None else np.asarray(vector, "<f4").tobytes(),
        attributes=json.loads(row["attributes"]),
        **{name: row[name] for name in _TEXTS},
    )
