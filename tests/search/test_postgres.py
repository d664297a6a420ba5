"""Vector stores in PostgreSQL: two search processes on one database, a killed server, and an index of many items."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import msgspec
import numpy as np
import psycopg
import pytest

import shared.search as wire
from benchmarks.search.run import make_items, make_vectors
from search.catalog import Catalog
from search.index import open_indexes
from search.postgres import PostgresIndex, PostgresIndexes, open_postgres
from search.stores import Stores
from shared.settings import SettingsError
from shared.settings.limits import LimitSettings
from tests.factories_search import SearchProcess, run_search
from tests.factories_search import make_items as make_few
from tests.search.index_process import recall
from tests.search.postgres_server import postgres
from tests.waiting import wait_for

CREATE = wire.CreateStore(tenant="t", name="store", model="m", digest="d", dimensions=8)


@pytest.fixture
def url() -> str:
    return postgres().new_database()


@pytest.fixture(scope="module")
def shared_url() -> str:
    return postgres().new_database()


@pytest.fixture(scope="module")
def pair(tmp_path_factory, shared_url) -> Iterator[tuple[SearchProcess, SearchProcess]]:
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(run_search(tmp_path_factory.mktemp(name), index=shared_url))
            for name in ("one", "two")
        )
        yield one, two


@pytest.fixture
def stores(url) -> Iterator[Stores]:
    indexes = open_postgres(url)
    stores = Stores(Catalog(indexes.database), indexes, LimitSettings())
    yield stores
    stores.close()


@contextmanager
def open_index(url: str, dimensions: int) -> Iterator[PostgresIndex]:
    indexes = open_postgres(url)
    with closing(indexes):
        with indexes.database.change():
            index = indexes.open("store", dimensions)
        yield index


def put(store: str, items: list[wire.Item]) -> wire.PutItems:
    return wire.PutItems(tenant="t", store=store, digest="d", items=items)


def tables(url: str) -> set[str]:
    with psycopg.connect(url) as connection:
        sql = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
        return {name for (name,) in connection.execute(sql)}


def test_concurrent_writers_of_two_processes_lose_nothing(pair, shared_url):
    """Concurrent upserts of equal IDs, files and stores; the other process finds, deletes and counts them."""
    one, two = pair
    store = one.ask(CREATE, wire.StoreRecord).id

    def write(number: int) -> None:
        process = pair[number % 2]
        items = [msgspec.structs.replace(i, id=f"{number} {i.id}") for i in make_few(20)]
        process.ask(put(store, [*items, *make_few(5)]), wire.StoreRecord)
        file = wire.PutFile(tenant="t", filename="f", purpose="assistants", data=b"text")
        name = process.ask(file, wire.FileRecord).id
        chunk = msgspec.structs.replace(items[0], id=f"{name}:0", file_id=name)
        attach = wire.AttachFile(
            tenant="t", store=store, file=name, digest="d", items=[chunk], max_chunk_tokens=1,
            chunk_overlap_tokens=0,
        )  # fmt: skip
        assert process.ask(attach, wire.StoreFile).status == "completed"
        process.ask(CREATE, wire.StoreRecord)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(16)))
    record = two.ask(wire.ReadStore(tenant="t", store=store), wire.StoreRecord)
    assert (record.num_items, record.num_files) == (16 * 21 + 5, 16)
    listed = one.ask(wire.ListStores(tenant="t", page=wire.Page(limit=100)), list[wire.StoreRecord])
    assert len(listed) == 17
    assert sum(name.startswith("vs_") for name in tables(shared_url)) == 17

    gone = [item.id for item in make_few(5)]
    assert two.ask(wire.DropItems(tenant="t", store=store, ids=[*gone, "none"]), int) == 5
    found = one.ask(
        wire.ReadItems(tenant="t", store=store, page=wire.Page(limit=1000)), list[wire.Item]
    )
    assert len(found) == 16 * 21
    assert found == sorted(found, key=lambda item: item.id)
    two.ask(wire.DropStore(tenant="t", store=store), bool)
    with pytest.raises(wire.SearchError, match="no such vector store"):
        one.ask(put(store, make_few(1)), wire.StoreRecord)


def test_a_store_and_its_vectors_are_deleted_in_one_transaction(stores, url, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("told to")

    store = stores.answer(CREATE).id
    stores.answer(put(store, make_few(3)))
    drop = wire.DropStore(tenant="t", store=store)
    with monkeypatch.context() as patch:
        patch.setattr(PostgresIndexes, "drop", fail)
        with pytest.raises(OSError, match="told to"):
            stores.answer(drop)
    assert len(stores.answer(wire.ReadItems(tenant="t", store=store, page=wire.Page()))) == 3
    assert stores.answer(drop)
    assert not any(name.startswith("vs_") for name in tables(url))
    monkeypatch.setattr(PostgresIndexes, "open", fail)
    with pytest.raises(OSError, match="told to"):
        stores.answer(CREATE)
    assert stores.answer(wire.ListStores(tenant="t", page=wire.Page())) == []


def test_a_killed_database_loses_nothing_that_was_acknowledged(pair):
    process = pair[0]
    acknowledged: list[int] = []
    begun, refusals = threading.Event(), list[str]()
    store = process.ask(CREATE, wire.StoreRecord).id

    def write() -> None:
        for number in range(10_000):
            items = [msgspec.structs.replace(i, id=f"{number} {i.id}") for i in make_few(20)]
            try:
                process.ask(put(store, items), wire.StoreRecord)
            except wire.SearchError as error:
                refusals.append(error.fault.code)
                return
            acknowledged.append(number)
            if number == 3:
                begun.set()

    writer = threading.Thread(target=write)
    writer.start()
    assert begun.wait(30)
    for _ in range(8):  # opens a connection per thread of the process
        process.ask(wire.ReadStore(tenant="t", store=store), wire.StoreRecord)
    postgres().kill()
    writer.join(30)
    assert refusals == ["unavailable"]
    with pytest.raises(wire.SearchError, match="does not answer"):
        process.ask(wire.ReadStore(tenant="t", store=store), wire.StoreRecord)
    postgres().start()

    def stored() -> list[wire.Item] | None:
        try:
            read = wire.ReadItems(tenant="t", store=store, page=wire.Page(limit=100_000))
            return process.ask(read, list[wire.Item])
        except wire.SearchError:  # the database recovers
            return None

    wait_for(lambda: stored() is not None, 30)
    batches = [int(item.id.partition(" ")[0]) for item in stored() or ()]
    assert set(acknowledged) <= set(batches)
    assert len(batches) == 20 * len(set(batches))
    process.ask(put(store, make_few(1)), wire.StoreRecord)


def test_the_nearest_of_twelve_thousand_with_and_without_the_index(url):
    vectors, queries = make_vectors(12_000, 16, 1), make_vectors(30, 16, 2)
    with open_index(url, 16) as index:
        items = make_items(vectors)
        for at in range(0, len(items), 3000):
            index.upsert(items[at : at + 3000])
        assert recall(index, vectors, queries) == 1.0
        for _ in range(2):  # the second call has nothing to do
            index.compact()
        assert recall(index, vectors, queries) >= 0.95
        assert all(len(hits) == 2000 for hits in index.search(queries[:1], 2000))
        before = index.stats().num_bytes
        gone = np.argsort(-(queries[0] @ vectors.T))[:1000]  # all that the index would examine
        assert index.delete([str(n) for n in gone]) == 1000
        [hits] = index.search(queries[:1], 10)
        assert len(hits) == 10
        assert index.stats().num_bytes == pytest.approx(before * 11 / 12, rel=0.01)
        assert index.search(queries[:1], 10, wire.Filter("in", "none", ["x"])) == [[]]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("host=", "host=/nowhere&x="), "URL is invalid"),
        (("?host=", "?host=/nowhere/"), "start it, or correct the URL"),
        (("/db", "/no_such_db"), "does not exist"),
        (("postgresql:", "mysql:"), "use lance://, postgresql://"),
        (("postgres:@", "u:se cret@"), "URL is invalid"),
    ],
)
def test_an_unusable_database_is_a_clear_error(url, change, says):
    with pytest.raises(SettingsError, match=says) as refused:
        open_indexes(url.replace(*change))
    assert "\n" not in str(refused.value)
    assert "cret" not in str(refused.value)
