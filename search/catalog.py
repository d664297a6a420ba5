"""Records of stores, files and their tenants, in a SQLite file or in PostgreSQL.

Each change is one transaction, durable on return. Readers do not wait for writers.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from shared.search import FileBatch, FileRecord, Page, StoreFile, StoreRecord

if TYPE_CHECKING:
    from search.postgres import Postgres

_SCHEMA = """
CREATE TABLE IF NOT EXISTS stores (
    number {number}, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL, record {blob} NOT NULL);
CREATE INDEX IF NOT EXISTS stores_of_tenant ON stores (tenant);
CREATE TABLE IF NOT EXISTS files (
    number {number}, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL, purpose TEXT NOT NULL,
    num_bytes INTEGER NOT NULL, record {blob} NOT NULL, data {blob} NOT NULL);
CREATE INDEX IF NOT EXISTS files_of_tenant ON files (tenant);
CREATE TABLE IF NOT EXISTS store_files (
    number {number}, store TEXT NOT NULL, id TEXT NOT NULL, record {blob} NOT NULL,
    UNIQUE (store, id));
CREATE TABLE IF NOT EXISTS file_batches (
    number {number}, store TEXT NOT NULL, id TEXT NOT NULL, record {blob} NOT NULL,
    UNIQUE (store, id));
CREATE TABLE IF NOT EXISTS orphans (id TEXT PRIMARY KEY);
"""
Record = TypeVar("Record", StoreRecord, FileRecord, StoreFile, FileBatch)


class Sqlite:
    """The SQLite file of one process. Thread-safe: one connection per thread, one writer at a time. SQL uses `?`."""

    #: Whether several processes use the database, which then holds the vectors too.
    is_shared = False
    #: Column types of the primary key, which numbers the rows, and of bytes.
    number, blob = "INTEGER PRIMARY KEY", "BLOB"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._writing = threading.RLock()

    @property
    def _connection(self) -> sqlite3.Connection:
        if (connection := getattr(self._local, "connection", None)) is None:
            connection = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
            connection.execute("PRAGMA synchronous = FULL")
            self._local.connection = connection
            self._connections.append(connection)
        return connection

    def create(self, tables: str) -> None:
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.executescript(tables)

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql, values).fetchall()

    @contextmanager
    def change(self, owner: str = "") -> Iterator[None]:
        """One transaction of this thread. Transactions of one owner (a store or tenant) run one after another."""
        with self._writing, self._connection:  # commits, or rolls back
            self._connection.execute("BEGIN IMMEDIATE")
            yield

    def close(self) -> None:
        with self._writing:
            for connection in self._connections:
                connection.close()


Database: TypeAlias = "Sqlite | Postgres"


class Catalog:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._rows = database.rows
        self._change = database.change
        self.is_shared = database.is_shared
        database.create(_SCHEMA.format(number=database.number, blob=database.blob))

    def _write(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._change():
            return self._rows(sql, *values)

    def change_all(self, owner: str) -> AbstractContextManager[None]:
        """One transaction of records and vectors, if the database has both."""
        return self._change(owner) if self.is_shared else nullcontext()

    # Stores

    def add_orphan(self, name: str) -> None:
        """Record an index before its store is created."""
        self._write("INSERT INTO orphans (id) VALUES (?)", name)

    def orphans(self) -> list[str]:
        return [row[0] for row in self._rows("SELECT id FROM orphans")]

    def drop_orphan(self, name: str) -> None:
        self._write("DELETE FROM orphans WHERE id = ?", name)

    def add_store(self, tenant: str, record: StoreRecord, max_stores: int) -> bool:
        """Add a store, so that its index is no longer an orphan; returns False if the tenant has `max_stores`."""
        with self._change(tenant):
            [(count,)] = self._rows("SELECT count(*) FROM stores WHERE tenant = ?", tenant)
            if count >= max_stores:
                return False
            sql = "INSERT INTO stores (id, tenant, record) VALUES (?, ?, ?)"
            self._rows(sql, record.id, tenant, _encode(record))
            self._rows("DELETE FROM orphans WHERE id = ?", record.id)
        return True

    def change_store(
        self, name: str, change: Callable[[StoreRecord], StoreRecord]
    ) -> StoreRecord | None:
        """Replace a store's record. Returns the new one; None if the store does not exist."""
        with self._change(name):
            rows = self._rows("SELECT record FROM stores WHERE id = ?", name)
            if not rows:
                return None
            record = change(_decode(rows[0][0], StoreRecord))
            self._rows("UPDATE stores SET record = ? WHERE id = ?", _encode(record), name)
        return record

    def store(self, tenant: str, name: str) -> StoreRecord | None:
        rows = self._rows("SELECT record FROM stores WHERE tenant = ? AND id = ?", tenant, name)
        return _decode(rows[0][0], StoreRecord) if rows else None

    def stores(self, tenant: str) -> list[StoreRecord]:
        rows = self._rows("SELECT record FROM stores WHERE tenant = ? ORDER BY number", tenant)
        return [_decode(row[0], StoreRecord) for row in rows]

    def all_stores(self) -> list[tuple[str, StoreRecord]]:
        rows = self._rows("SELECT tenant, record FROM stores")
        return [(tenant, _decode(record, StoreRecord)) for tenant, record in rows]

    def list_stores(self, tenant: str, page: Page) -> list[StoreRecord]:
        return self._page("stores", "tenant", tenant, page, StoreRecord)

    def tenant_of(self, name: str) -> list[str]:
        return [row[0] for row in self._rows("SELECT tenant FROM stores WHERE id = ?", name)]

    def drop_store(self, name: str) -> bool:
        """Delete the records of a store and its files; its index becomes an orphan."""
        with self._change(name):
            if not self._rows("DELETE FROM stores WHERE id = ? RETURNING id", name):
                return False
            self._rows("DELETE FROM store_files WHERE store = ?", name)
            self._rows("DELETE FROM file_batches WHERE store = ?", name)
            self._rows("INSERT INTO orphans (id) VALUES (?)", name)
        return True

    # Files

    def add_file(self, tenant: str, record: FileRecord, data: bytes, max_files: int) -> bool:
        """Add a file; returns False if the tenant has `max_files`."""
        with self._change(tenant):
            if self.files_of(tenant)[0] >= max_files:
                return False
            sql = (
                "INSERT INTO files (id, tenant, purpose, num_bytes, record, data)"
                " VALUES (?, ?, ?, ?, ?, ?)"
            )
            values = (record.id, tenant, record.purpose, record.num_bytes, _encode(record), data)
            self._rows(sql, *values)
        return True

    def file(self, tenant: str, name: str, *, with_data: bool = False) -> FileRecord | None:
        columns = "record, data" if with_data else "record"
        sql = f"SELECT {columns} FROM files WHERE tenant = ? AND id = ?"
        for record, *data in self._rows(sql, tenant, name):
            return msgspec.structs.replace(_decode(record, FileRecord), data=b"".join(data))
        return None

    def list_files(self, tenant: str, page: Page, purpose: str) -> list[FileRecord]:
        return self._page("files", "tenant", tenant, page, FileRecord, purpose)

    def files_of(self, tenant: str) -> tuple[int, int]:
        """Number and bytes of a tenant's files."""
        sql = "SELECT count(*), coalesce(sum(num_bytes), 0) FROM files WHERE tenant = ?"
        [(count, num_bytes)] = self._rows(sql, tenant)
        return count, num_bytes

    def drop_file(self, tenant: str, name: str) -> bool:
        sql = "DELETE FROM files WHERE tenant = ? AND id = ? RETURNING id"
        return bool(self._write(sql, tenant, name))

    # Files in stores

    def put_store_file(self, record: StoreFile) -> None:
        self._write(
            "INSERT INTO store_files (store, id, record) VALUES (?, ?, ?)"
            " ON CONFLICT (store, id) DO UPDATE SET record = excluded.record",
            record.store_id, record.id, _encode(record),
        )  # fmt: skip

    def store_file(self, store: str, name: str) -> StoreFile | None:
        rows = self._rows("SELECT record FROM store_files WHERE store = ? AND id = ?", store, name)
        return _decode(rows[0][0], StoreFile) if rows else None

    def list_store_files(self, store: str, page: Page) -> list[StoreFile]:
        return self._page("store_files", "store", store, page, StoreFile)

    def num_store_files(self, store: str) -> int:
        return self._rows("SELECT count(*) FROM store_files WHERE store = ?", store)[0][0]

    def unfinished(self) -> list[StoreFile]:
        """Files whose chunks were being written or deleted when the process ended."""
        rows = self._rows("SELECT record FROM store_files")
        records = [_decode(row[0], StoreFile) for row in rows]
        return [record for record in records if record.status == "in_progress"]

    def drop_store_file(self, store: str, name: str) -> None:
        self._write("DELETE FROM store_files WHERE store = ? AND id = ?", store, name)

    def add_file_batch(self, batch: FileBatch, max_batches: int) -> None:
        with self._change(batch.store_id):
            sql = "INSERT INTO file_batches (store, id, record) VALUES (?, ?, ?)"
            self._rows(sql, batch.store_id, batch.id, _encode(batch))
            kept = "SELECT number FROM file_batches WHERE store = ? ORDER BY number DESC LIMIT ?"
            sql = f"DELETE FROM file_batches WHERE store = ? AND number NOT IN ({kept})"
            self._rows(sql, batch.store_id, batch.store_id, max_batches)

    def file_batch(self, store: str, name: str) -> FileBatch | None:
        rows = self._rows("SELECT record FROM file_batches WHERE store = ? AND id = ?", store, name)
        return _decode(rows[0][0], FileBatch) if rows else None

    def _page(
        self,
        table: str,
        column: str,
        owner: str,
        page: Page,
        type_: type[Record],
        purpose: str = "",
    ) -> list[Record]:
        """A page in the order of creation, with one extra record if more follow. Ignores a cursor that was deleted."""
        at = f"SELECT number FROM {table} WHERE {column} = ? AND id = ?"
        edges = self._rows(at, owner, page.after or page.before)
        order, sign = ("ASC", ">") if page.is_ascending != bool(page.before) else ("DESC", "<")
        condition = f"{column} = ?"
        values: list[Any] = [owner]
        if purpose:
            condition += " AND purpose = ?"
            values.append(purpose)
        if edges:
            condition += f" AND number {sign} ?"
            values.append(edges[0][0])
        sql = f"SELECT record FROM {table} WHERE {condition} ORDER BY number {order} LIMIT ?"
        rows = self._rows(sql, *values, page.limit + 1)
        records = [_decode(row[0], type_) for row in rows]
        return records[::-1] if page.before else records

    def close(self) -> None:
        self._database.close()


def _encode(record: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(record)


def _decode(data: bytes, type_: type[Record]) -> Record:
    return msgspec.msgpack.decode(data, type=type_)
