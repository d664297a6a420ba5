"""The vector stores of all tenants, over one kind of index.

One thread at a time writes a store; readers do not wait. One lock protects the variables of `Stores`, and is not held
during I/O. Acknowledged writes survive a killed process, but not a power failure. Every key can read the collections
of the settings as stores.
"""

import hashlib
import logging
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import asdict, replace

import shared.search as wire
from search.catalog import Catalog
from search.collection import FlatIndex, read_only
from search.index import IndexKind, VectorIndex
from shared.search import SearchError, refuse
from shared.settings.limits import LimitSettings

#: Maximum number of open indexes.
MAX_OPEN = 64
#: Interval of `Stores.sweep`.
SWEEP_S = 60.0
#: File batches kept per store.
MAX_FILE_BATCHES = 100
#: Vectors with a length this close to 1 are not normalized.
LENGTH_TOLERANCE = 1e-6

logger = logging.getLogger(__name__)


class OpenStore:
    """The index of a store, opened at its first use, and the lock of its writer."""

    def __init__(self, open_index: Callable[[], VectorIndex]) -> None:
        self.writing = threading.RLock()
        self.is_compacting = False
        self._opening = threading.Lock()
        self._open_index = open_index
        self._index: VectorIndex | None = None
        self._is_dropped = False

    @property
    def is_open(self) -> bool:
        return self._index is not None

    @property
    def index(self) -> VectorIndex:
        """Raises: SearchError if the store was deleted."""
        with self._opening:
            if self._is_dropped:
                raise _no_store()
            if self._index is None:
                self._index = self._open_index()
            return self._index

    def drop(self, forget: Callable[[], bool]) -> None:
        """Delete the record of the store; its index is not opened again."""
        with self._opening:
            if not forget():
                raise _no_store()
            self._is_dropped = True
            self.close()

    def close(self) -> None:
        if self._index is not None:
            self._index.close()


class Stores:
    def __init__(
        self,
        catalog: Catalog,
        indexes: IndexKind,
        limits: LimitSettings,
        collections: Sequence[Path] = (),
    ) -> None:
        """Raises: BadCollection."""
        self._catalog = catalog
        self._indexes = indexes
        self._limits = limits
        self._open: OrderedDict[str, OpenStore] = OrderedDict()
        self._lock = threading.Lock()
        self._collections = dict(map(_open_collection, collections))
        self._background = ThreadPoolExecutor(1, "compact")
        self._due: set[str] = set()
        self._being_written: Counter[str] = Counter()  #: bytes, by tenant
        self._searched_at: dict[str, int] = {}  #: by store, until the next sweep records it
        self._orphans = set[str]()
        self._is_closing = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep_on, name="sweep", daemon=True)
        self._answers: Mapping[type[wire.Request], Callable[[Any], Any]] = {
            wire.CreateStore: self._create_store,
            wire.ReadStore: lambda asked: self._find(asked.tenant, asked.store),
            wire.ListStores: self._list_stores,
            wire.ChangeStore: self._change_store,
            wire.DropStore: self._drop_store,
            wire.PutItems: self._put_items,
            wire.DropItems: self._drop_items,
            wire.ReadItems: self._read_items,
            wire.Query: self._query,
            wire.PutFile: self._put_file,
            wire.ReadFile: self._read_file,
            wire.ListFiles: lambda a: catalog.list_files(a.tenant, a.page, a.purpose),
            wire.DropFile: self._drop_file,
            wire.AttachFile: self._attach_file,
            wire.ReadStoreFile: self._read_store_file,
            wire.ListStoreFiles: lambda a: catalog.list_store_files(
                self._find(a.tenant, a.store).id, a.page
            ),
            wire.ChangeStoreFile: self._change_store_file,
            wire.DetachFile: self._detach_file,
            wire.PutFileBatch: self._put_file_batch,
            wire.ReadFileBatch: self._read_file_batch,
        }
        if not catalog.is_shared:  # else another process may be doing the unfinished work
            self._orphans.update(catalog.orphans())
            for record in catalog.unfinished():
                self._forget_chunks(record)
        self._sweeper.start()

    def answer(self, request: wire.Request) -> Any:
        """Handle a request. Blocks. Raises: SearchError."""
        return self._answers[type(request)](request)

    def close(self) -> None:
        """Finish the writes, and close all indexes."""
        self._is_closing.set()
        self._sweeper.join()
        self._background.shutdown(cancel_futures=True)
        for store in self._open.values():
            with store.writing:
                store.close()
        self._indexes.close()
        self._catalog.close()

    def _sweep_on(self) -> None:
        while True:
            try:
                self.sweep()
            except Exception:
                logger.exception("the sweep failed")
            if self._is_closing.wait(SWEEP_S):
                return

    def sweep(self) -> None:
        """Record the times of searches; delete expired stores, and indexes without a store."""
        with self._lock:
            searched_at, orphans = dict(self._searched_at), list(self._orphans)
        for name, at in searched_at.items():
            self._catalog.change_store(
                name, lambda now, at=at: replace(now, last_active_at=max(at, now.last_active_at))
            )
            with self._lock:
                if self._searched_at.get(name) == at:
                    del self._searched_at[name]
        for tenant, record in self._catalog.all_stores():
            if record.expires_at is not None and record.expires_at <= _now():
                logger.info("store %s has expired", record.id)
                with suppress(SearchError):  # another process has deleted it
                    self._drop_store(
                        wire.DropStore(tenant=tenant, store=record.id), only_expired=True
                    )
        for name in orphans:
            self._drop_index(name)

    def _drop_index(self, name: str) -> None:
        """Delete the index of a deleted store, now or in a later sweep."""
        try:
            self._indexes.drop(name)
        except Exception:
            logger.exception("the index of the deleted store %s cannot be deleted yet", name)
            self._leave_index(name)
            return
        self._catalog.drop_orphan(name)
        with self._lock:
            self._orphans.discard(name)

    def _leave_index(self, name: str) -> None:
        with self._lock:
            self._orphans.add(name)

    # Stores

    def _create_store(self, asked: wire.CreateStore) -> wire.StoreRecord:
        most = self._limits.max_stores
        full = refuse("full", f"This key has {most} vector stores, the maximum: delete one.")
        if len(self._catalog.stores(asked.tenant)) >= most:
            raise full
        fields = msgspec.structs.asdict(asked)
        del fields["tenant"]
        name, now = wire.STORE_ID + secrets.token_hex(16), _now()
        record = wire.StoreRecord(id=name, created_at=now, last_active_at=now, **fields)
        is_shared = self._catalog.is_shared
        if not is_shared:
            self._catalog.add_orphan(name)
        try:
            with self._catalog.change_all(name):
                self._indexes.open(name, record.dimensions)
                if not self._catalog.add_store(asked.tenant, record, most):
                    raise full
        except BaseException:
            if not is_shared:  # a shared database has rolled it back
                self._leave_index(name)
            raise
        return record

    def _find(self, tenant: str, name: str) -> wire.StoreRecord:
        """A store of the tenant, or a collection. Raises: SearchError."""
        record = self._catalog.store(tenant, name)
        if record is not None:
            return record
        for collection, _ in self._collections.values():
            if name in (collection.id, collection.name):
                return collection
        if not name.startswith(wire.STORE_ID):
            for record in self._catalog.stores(tenant):
                if record.name == name:
                    return record
        raise _no_store()

    def _find_writable(self, tenant: str, name: str) -> wire.StoreRecord:
        record = self._find(tenant, name)
        if record.is_read_only:
            raise read_only()
        return record

    def _list_stores(self, asked: wire.ListStores) -> list[wire.StoreRecord]:
        """The stores of the tenant; collections are listed as the newest."""
        page = asked.page
        shared = [record for record, _ in self._collections.values()]
        if page.before:
            return self._catalog.list_stores(asked.tenant, page)
        ids = [record.id for record in shared]
        is_within = page.after in ids
        left = shared[ids.index(page.after) + 1 :] if is_within else shared
        found = self._catalog.list_stores(asked.tenant, page)
        if page.is_ascending:
            return left if is_within else found + left
        return found if self._catalog.store(asked.tenant, page.after) else left + found

    def _change_store(self, asked: wire.ChangeStore) -> wire.StoreRecord:
        record = self._find_writable(asked.tenant, asked.store)
        changes = {
            name: value
            for name in ("name", "metadata", "expires_after_days")
            if (value := getattr(asked, name)) is not None
        }
        changed = self._catalog.change_store(
            record.id, lambda now: replace(now, last_active_at=_now(), **changes)
        )
        if changed is None:
            raise _no_store()
        return changed

    def _drop_store(self, asked: wire.DropStore, *, only_expired: bool = False) -> bool:
        record = self._find_writable(asked.tenant, asked.store)
        with self._writing(record) as store:
            if only_expired:  # a write may have renewed it before it was locked
                current = self._find_writable(asked.tenant, record.id)
                if current.expires_at is None or current.expires_at > _now():
                    return False
            store.drop(partial(self._catalog.drop_store, record.id))
            with self._lock:
                del self._open[record.id]
            if self._catalog.is_shared:  # in the same transaction
                self._indexes.drop(record.id)
                self._catalog.drop_orphan(record.id)
        if not self._catalog.is_shared:
            self._drop_index(record.id)
        return True

    # Items

    def _put_items(self, asked: wire.PutItems) -> wire.StoreRecord:
        record = self._find_writable(asked.tenant, asked.store)
        self._check_digest(record, asked.digest)
        items = _normalized(asked.items, record)
        with self._writing(record) as store, self._room(asked.tenant, _size(items)):
            index = store.index
            self._check_no_chunks(record, items)
            self._upsert(record, index, items)
            return self._note_change(record, index)

    def _check_no_chunks(self, record: wire.StoreRecord, items: Sequence[wire.Item]) -> None:
        """Raises: SearchError if an item would replace a chunk of an attached file."""
        for number, item in enumerate(items):
            file_id, colon, _ = item.id.rpartition(":")
            if (
                colon
                and file_id.startswith(wire.FILE_ID)
                and self._catalog.store_file(record.id, file_id)
            ):
                message = "This is the id of a chunk of a file in this store: send another id."
                raise refuse("invalid", message, f"items.[{number}].id")

    def _upsert(
        self, record: wire.StoreRecord, index: VectorIndex, items: Sequence[wire.Item]
    ) -> None:
        limits, stats = self._limits, index.stats()
        if stats.num_items + len(items) > limits.max_store_items:
            known = len(index.get([item.id for item in items]))
            if stats.num_items + len(items) - known > limits.max_store_items:
                raise refuse(
                    "full",
                    f"A vector store holds at most {limits.max_store_items} items: delete some, or "
                    "create another store.",
                )
        index.upsert(items)
        self._compact_later(record)

    def _drop_items(self, asked: wire.DropItems) -> int:
        record = self._find_writable(asked.tenant, asked.store)
        with self._writing(record) as store:
            num_deleted = store.index.delete(asked.ids, asked.where)
            if num_deleted:
                self._note_change(record, store.index)
                self._compact_later(record)
        return num_deleted

    def _read_items(self, asked: wire.ReadItems) -> list[wire.Item]:
        record = self._find(asked.tenant, asked.store)
        index = self._store(record).index
        if asked.ids is None:
            return index.page(asked.page.after, asked.page.limit + 1, asked.with_vectors)
        found = index.get(asked.ids)
        if asked.with_vectors:
            return found
        return [replace(item, vector=b"") for item in found]

    def _query(self, asked: wire.Query) -> list[wire.Hit]:
        record = self._find(asked.tenant, asked.store)
        self._check_digest(record, asked.digest)
        vectors = _check_vectors(asked.vectors, record)
        lists = self._store(record).index.search(vectors, asked.k, asked.where)
        if not record.is_read_only:
            with self._lock:
                self._searched_at[record.id] = _now()
        best: dict[str, wire.Hit] = {}
        for hit in (hit for hits in lists for hit in hits):
            if hit.item.id not in best or hit.score > best[hit.item.id].score:
                best[hit.item.id] = hit
        return sorted(best.values(), key=lambda hit: (-hit.score, hit.item.id))[: asked.k]

    # Files

    def _put_file(self, asked: wire.PutFile) -> wire.FileRecord:
        most = self._limits.max_files
        record = wire.FileRecord(
            id=wire.FILE_ID + secrets.token_hex(16),
            filename=asked.filename,
            purpose=asked.purpose,
            num_bytes=len(asked.data),
            created_at=_now(),
        )
        with self._room(asked.tenant, len(asked.data)):
            if not self._catalog.add_file(asked.tenant, record, asked.data, most):
                raise refuse("full", f"This key has {most} files, the maximum: delete one.")
        return record

    def _read_file(self, asked: wire.ReadFile) -> wire.FileRecord:
        record = self._catalog.file(asked.tenant, asked.file, with_data=asked.with_data)
        if record is None:
            raise refuse("not_found", "There is no such file.", "file_id")
        return record

    def _drop_file(self, asked: wire.DropFile) -> bool:
        if not self._catalog.drop_file(asked.tenant, asked.file):
            raise refuse("not_found", "There is no such file.", "file_id")
        return True

    def _attach_file(self, asked: wire.AttachFile) -> wire.StoreFile:
        store = self._find_writable(asked.tenant, asked.store)
        file = self._read_file(wire.ReadFile(tenant=asked.tenant, file=asked.file))
        self._check_digest(store, asked.digest)
        items = _normalized(asked.items, store)
        record = wire.StoreFile(
            id=file.id,
            store_id=store.id,
            filename=file.filename,
            created_at=_now(),
            status="in_progress",
            num_chunks=len(asked.items),
            num_bytes=file.num_bytes,
            max_chunk_tokens=asked.max_chunk_tokens,
            chunk_overlap_tokens=asked.chunk_overlap_tokens,
            attributes=asked.attributes,
        )
        with self._writing(store) as opened, self._room(asked.tenant, _size(items)):
            index = opened.index
            before = self._catalog.store_file(store.id, file.id)
            most = max(before.num_chunks if before else 0, record.num_chunks)
            # After a crash, the next start deletes all chunks up to the larger count.
            self._catalog.put_store_file(replace(record, num_chunks=most))
            try:
                self._upsert(store, index, items)
            except BaseException:
                if self._catalog.is_shared:  # the transaction is rolled back
                    raise
                if before is None:
                    self._catalog.drop_store_file(store.id, file.id)
                else:
                    self._catalog.put_store_file(before)
                raise
            if most > record.num_chunks:
                index.delete(chunk_ids(file.id, record.num_chunks, most))
            record = replace(record, status="completed")
            self._catalog.put_store_file(record)
            self._note_change(store, index)
        return record

    def _read_store_file(
        self, asked: wire.ReadStoreFile | wire.ChangeStoreFile | wire.DetachFile
    ) -> wire.StoreFile:
        store = self._find(asked.tenant, asked.store)
        record = self._catalog.store_file(store.id, asked.file)
        if record is None:
            raise refuse("not_found", "There is no such file in this vector store.", "file_id")
        return record

    def _change_store_file(self, asked: wire.ChangeStoreFile) -> wire.StoreFile:
        store = self._find_writable(asked.tenant, asked.store)
        with self._writing(store) as opened:
            record = self._read_store_file(asked)
            chunks = opened.index.get(chunk_ids(record.id, 0, record.num_chunks))
            changed = [replace(item, attributes=asked.attributes) for item in chunks]
            with self._room(asked.tenant, _size(changed)):
                self._upsert(store, opened.index, changed)
            record = replace(record, attributes=asked.attributes)
            self._catalog.put_store_file(record)
            self._note_change(store, opened.index)
        return record

    def _put_file_batch(self, asked: wire.PutFileBatch) -> wire.FileBatch:
        store = self._find_writable(asked.tenant, asked.store)
        batch = wire.FileBatch(
            id=wire.FILE_BATCH_ID + secrets.token_hex(16),
            store_id=store.id,
            created_at=_now(),
            files=asked.files,
        )
        with self._writing(store):
            self._find_writable(asked.tenant, store.id)
            self._catalog.add_file_batch(batch, MAX_FILE_BATCHES)
        return batch

    def _read_file_batch(self, asked: wire.ReadFileBatch) -> wire.FileBatch:
        store = self._find(asked.tenant, asked.store)
        batch = self._catalog.file_batch(store.id, asked.batch)
        if batch is None:
            raise refuse("not_found", "There is no such file batch.", "batch_id")
        files = [
            file if file.status == "failed" else self._catalog.store_file(store.id, file.id)
            for file in batch.files
        ]
        return replace(batch, files=[file for file in files if file is not None])

    def _detach_file(self, asked: wire.DetachFile) -> bool:
        store = self._find_writable(asked.tenant, asked.store)
        with self._writing(store) as opened:
            record = self._read_store_file(asked)
            self._catalog.put_store_file(replace(record, status="in_progress"))
            opened.index.delete(chunk_ids(record.id, 0, record.num_chunks))
            self._catalog.drop_store_file(store.id, record.id)
            self._note_change(store, opened.index)
        return True

    def _forget_chunks(self, record: wire.StoreFile) -> None:
        """Delete the chunks of a file that was being written or deleted when the process ended."""
        logger.warning(
            "file %s is incomplete in %s: deleting its chunks", record.id, record.store_id
        )
        for tenant in self._catalog.tenant_of(record.store_id):
            store = self._find(tenant, record.store_id)
            with self._writing(store) as opened:
                opened.index.delete(chunk_ids(record.id, 0, record.num_chunks))
                self._catalog.drop_store_file(record.store_id, record.id)
                self._note_change(store, opened.index)

    # Open stores, quotas, compaction

    def _store(self, record: wire.StoreRecord) -> OpenStore:
        """The store, whose index opens at its first use. Beyond `MAX_OPEN`, the least recently used store is closed."""
        if record.id in self._collections:
            return self._collections[record.id][1]
        with self._lock:
            store = self._open.get(record.id)
            if store is None:
                store = self._open[record.id] = OpenStore(partial(self._open_index, record))
            self._open.move_to_end(record.id)
            if len(self._open) > MAX_OPEN:
                self._close_one()
            return store

    def _open_index(self, record: wire.StoreRecord) -> VectorIndex:
        if not self._catalog.tenant_of(record.id):  # else a deleted index would be created again
            with self._lock:
                self._open.pop(record.id, None)
            raise _no_store()
        return self._indexes.open(record.id, record.dimensions)

    def _close_one(self) -> None:
        for name, store in self._open.items():
            # A compaction deletes files that a newly opened index would read.
            is_idle = store.is_open and not store.is_compacting
            if is_idle and store.writing.acquire(blocking=False):
                del self._open[name]
                store.writing.release()
                return

    @contextmanager
    def _writing(self, record: wire.StoreRecord) -> Iterator[OpenStore]:
        """Lock the store for writing; in a shared database, in one transaction."""
        while True:
            store = self._store(record)
            with store.writing:
                if self._store(record) is store:  # it was not closed and opened again meanwhile
                    with self._catalog.change_all(record.id):
                        yield store
                    return

    def _note_change(self, record: wire.StoreRecord, index: VectorIndex) -> wire.StoreRecord:
        stats = index.stats()

        def change(current: wire.StoreRecord) -> wire.StoreRecord:
            return replace(
                current,
                num_items=stats.num_items,
                num_bytes=stats.num_bytes,
                num_files=self._catalog.num_store_files(record.id),
                last_active_at=_now(),
            )

        return self._catalog.change_store(record.id, change) or record

    @contextmanager
    def _room(self, tenant: str, num_new: int) -> Iterator[None]:
        """Reserve bytes of the tenant's quota while they are written. Raises: SearchError if the quota is exceeded."""
        most = self._limits.max_key_search_bytes
        with self._lock:
            self._being_written[tenant] += num_new
            num_bytes = self._being_written[tenant]
        try:
            # Read after the reservations: concurrent writes may count twice, but none is missed.
            num_bytes += self._catalog.files_of(tenant)[1]
            num_bytes += sum(record.num_bytes for record in self._catalog.stores(tenant))
            if num_bytes > most:
                raise refuse(
                    "full",
                    f"This key may store {most} bytes in files and vector stores: delete some.",
                )
            yield
        finally:
            with self._lock:
                self._being_written[tenant] -= num_new
                if not self._being_written[tenant]:
                    del self._being_written[tenant]

    def _check_digest(self, record: wire.StoreRecord, digest: str) -> None:
        """Raises: SearchError if another model computed the vectors."""
        if digest and record.digest and digest != record.digest:
            raise refuse("conflict", wire.MODEL_CHANGED, "embedding_model")

    def _compact_later(self, record: wire.StoreRecord) -> None:
        """Schedule a compaction in the background, unless one is due."""
        with self._lock:
            if record.id in self._due:
                return
            self._due.add(record.id)
        self._background.submit(self._compact, record)

    def _compact(self, record: wire.StoreRecord) -> None:
        with self._lock:
            self._due.discard(record.id)
            store = self._open.get(record.id)
            if store is None:
                return
            store.is_compacting = True
        try:
            with suppress(SearchError):  # deleted meanwhile
                store.index.compact()
        except Exception:
            logger.exception("store %s cannot be compacted", record.id)
        finally:
            store.is_compacting = False


def _no_store() -> SearchError:
    return refuse("not_found", "There is no such vector store.", "vector_store_id")


def _size(items: Sequence[wire.Item]) -> int:
    return len(msgspec.msgpack.encode(items))


def chunk_ids(file_id: str, first: int, last: int) -> list[str]:
    return [f"{file_id}:{number}" for number in range(first, last)]


def _open_collection(directory: Path) -> tuple[str, tuple[wire.StoreRecord, OpenStore]]:
    """Open a directory of `vlm embed` as a store. Raises: BadCollection."""
    index = FlatIndex(directory)
    manifest = index.manifest
    fields = asdict(manifest)
    if manifest.query_prompt is None:  # keeps the ids that earlier releases computed
        del fields["query_prompt"]
    identity = hashlib.sha256(msgspec.json.encode(fields)).hexdigest()
    created_at = int((directory / manifest.parts[0].name).stat().st_mtime) if manifest.parts else 0
    record = wire.StoreRecord(
        id=wire.STORE_ID + identity[:32],
        name=directory.resolve().name,
        created_at=created_at,
        last_active_at=created_at,
        model=manifest.model,
        digest=manifest.digest,
        dimensions=manifest.dimensions,
        prompt=manifest.prompt,
        query_prompt=manifest.query_prompt or "",
        uses_model_prompt=manifest.query_prompt is None,
        num_items=manifest.num_items,
        num_bytes=index.stats().num_bytes,
        is_read_only=True,
    )
    return record.id, (record, OpenStore(lambda: index))


def _check_vectors(vectors: Sequence[bytes], record: wire.StoreRecord) -> np.ndarray:
    """Normalize vectors. Shapes: [vectors, dimensions]. Raises: SearchError."""
    size = record.dimensions * 4
    for index, vector in enumerate(vectors):
        if len(vector) != size:
            message = f"A vector has {len(vector) // 4} dimensions: send {record.dimensions}."
            raise refuse("invalid", message, str(index))
    rows = np.frombuffer(b"".join(vectors), "<f4").reshape(len(vectors), record.dimensions)
    with np.errstate(over="ignore", invalid="ignore"):
        lengths = np.linalg.norm(rows.astype("f8"), axis=1)
    bad = np.flatnonzero(~(np.isfinite(lengths) & (lengths > 0)))
    if len(bad):
        message = "A vector is zero or not finite: send finite numbers that are not all zero."
        raise refuse("invalid", message, str(int(bad[0])))
    if np.abs(lengths - 1).max(initial=0) < LENGTH_TOLERANCE:
        return rows
    return (rows / lengths[:, None]).astype("<f4")


def _normalized(items: Sequence[wire.Item], record: wire.StoreRecord) -> list[wire.Item]:
    """Items with normalized vectors. Raises: SearchError."""
    rows = _check_vectors([item.vector for item in items], record)
    return [replace(item, vector=row.tobytes()) for item, row in zip(items, rows, strict=True)]


def _now() -> int:
    return int(time.time())  # noqa: TID251 (people read it)
