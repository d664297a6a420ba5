"""Storage limits of a key under concurrent writes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import msgspec
import pytest

import shared.search as wire
from search.catalog import Catalog, Sqlite
from search.stores import Stores
from shared.settings.limits import LimitSettings
from tests.factories_search import make_items
from tests.search.index_process import lance

NUM_WRITERS = 6
ITEMS = make_items(50)
SIZE = len(msgspec.msgpack.encode(ITEMS))
MOST = 3 * SIZE + SIZE // 2


@pytest.fixture
def stores(tmp_path):
    limits = LimitSettings(max_key_search_bytes=MOST)
    stores = Stores(
        Catalog(Sqlite(tmp_path / "catalog")), lance().LanceIndexes(tmp_path / "stores"), limits
    )
    yield stores
    stores.close()


def create(stores, tenant="t", **changes):
    asked = wire.CreateStore(
        tenant=tenant, name="s", model="m", digest="d", dimensions=8, **changes
    )
    return stores.answer(asked).id


def put(store, items=ITEMS, tenant="t"):
    return wire.PutItems(tenant=tenant, store=store, digest="d", items=items)


def query(store):
    return wire.Query(tenant="t", store=store, digest="d", vectors=[ITEMS[0].vector], k=1)


def list_ids(stores, **page):
    asked = wire.ListStores(tenant="t", page=wire.Page(**page))
    return [record.id for record in stores.answer(asked)]


def test_concurrent_writers_store_no_more_than_sequential_ones(stores, monkeypatch):
    """All writes wait inside the index. Their bytes also count for a file that is uploaded meanwhile."""
    names = [create(stores) for _ in range(NUM_WRITERS)]
    of_another = create(stores, "other")
    gate, told = threading.Event(), threading.Semaphore(0)
    upsert = lance().LanceIndex.upsert

    def slow(index, items):
        told.release()
        assert gate.wait(60)
        upsert(index, items)

    def write(store, tenant="t"):
        try:
            stores.answer(put(store, tenant=tenant))
        except wire.SearchError as error:
            told.release()
            return error.fault.code
        return "written"

    monkeypatch.setattr(lance().LanceIndex, "upsert", slow)
    with ThreadPoolExecutor(NUM_WRITERS + 1) as threads:
        written = [threads.submit(write, name) for name in names]
        theirs = threads.submit(write, of_another, "other")
        for _ in range(NUM_WRITERS + 1):
            assert told.acquire(timeout=60)
        with pytest.raises(wire.SearchError, match="bytes in files"):
            stores.answer(wire.PutFile(tenant="t", filename="f", purpose="p", data=b"x" * SIZE))
        gate.set()
        assert sorted(each.result() for each in written) == ["full"] * 3 + ["written"] * 3
        assert theirs.result() == "written"
    counts = [
        len(stores.answer(wire.ReadItems(tenant="t", store=name, page=wire.Page(limit=100))))
        for name in names
    ]
    assert sorted(counts) == [0, 0, 0, 50, 50, 50]


def test_a_refused_or_failed_write_releases_its_bytes(stores, monkeypatch):
    name = create(stores)

    def fail(index, items):
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(lance().LanceIndex, "upsert", fail)
        for _ in range(5):
            with pytest.raises(OSError, match="disk"):
                stores.answer(put(name))
    for _ in range(5):
        with pytest.raises(wire.SearchError, match="bytes in files"):
            stores.answer(put(name, make_items(400)))
    stores.answer(put(name))


@pytest.mark.parametrize("is_write", [False, True])
def test_a_store_deleted_during_a_request_stays_deleted(stores, tmp_path, monkeypatch, is_write):
    name = create(stores)
    find = Catalog.store
    meanwhile = [lambda: stores.answer(wire.DropStore(tenant="t", store=name))]

    def find_and_delete(catalog, tenant, name):
        found = find(catalog, tenant, name)
        if meanwhile:
            meanwhile.pop()()
        return found

    monkeypatch.setattr(Catalog, "store", find_and_delete)
    asked = put(name) if is_write else query(name)
    with pytest.raises(wire.SearchError, match="no such vector store"):
        stores.answer(asked)
    assert list((tmp_path / "stores").iterdir()) == []


@pytest.mark.parametrize(
    ("owner", "name", "writes"),
    [
        ("LanceIndexes", "open", wire.CreateStore(tenant="u", name="s", model="m", digest="d", dimensions=8)),
        ("LanceIndexes", "drop", wire.DropStore(tenant="t", store="other")),
        ("LanceIndex", "upsert", put("other", ITEMS[:5])),
        ("Catalog", "files_of", wire.PutFile(tenant="u", filename="f", purpose="p", data=b"x")),
    ],
)  # fmt: skip
def test_readers_do_not_wait_for_writers(stores, monkeypatch, owner, name, writes):
    store, other = create(stores), create(stores)
    stores.answer(put(store, ITEMS[:5]))
    file = stores.answer(wire.PutFile(tenant="t", filename="f", purpose="p", data=b"x"))
    begun, gate = threading.Event(), threading.Event()
    owner = Catalog if owner == "Catalog" else getattr(lance(), owner)
    original = getattr(owner, name)

    def blocked(*arguments):
        begun.set()
        assert gate.wait(60)
        return original(*arguments)

    reads = [
        query(store),
        wire.ReadItems(tenant="t", store=store, ids=[ITEMS[0].id]),
        wire.ReadStore(tenant="t", store=store),
        wire.ListStores(tenant="t", page=wire.Page()),
        wire.ReadFile(tenant="t", file=file.id, with_data=True),
    ]
    if hasattr(writes, "store"):
        writes = msgspec.structs.replace(writes, store=other)
    with ThreadPoolExecutor(2) as threads, monkeypatch.context() as patch:
        patch.setattr(owner, name, blocked)
        written = threads.submit(stores.answer, writes)
        try:
            assert begun.wait(60)
            for read in reads:
                assert threads.submit(stores.answer, read).result(30)
        finally:
            gate.set()
        written.result(60)


def test_a_store_stays_open_while_it_is_compacted(stores, monkeypatch):
    store, other = create(stores), create(stores)
    begun, gate, optimize = threading.Event(), threading.Event(), lance().LanceIndex._optimize

    def blocked(index):
        begun.set()
        assert gate.wait(60)
        optimize(index)

    monkeypatch.setattr(lance().LanceIndex, "_optimize", blocked)
    monkeypatch.setattr("search.lance.MAX_COMMITS", 2)
    monkeypatch.setattr("search.stores.MAX_OPEN", 1)
    for item in ITEMS[:3]:
        stores.answer(put(store, [item]))
    assert begun.wait(60)
    for name in (other, store):  # opening the first store would close the other one
        stores.answer(query(name))
    gate.set()
    stores._background.submit(int).result(60)  # its only background thread
    assert stores.answer(query(store))


def reopened(tmp_path):
    """Opens the same files as another process would."""
    indexes = lance().LanceIndexes(tmp_path / "stores")
    return Stores(Catalog(Sqlite(tmp_path / "catalog")), indexes, LimitSettings())


@pytest.mark.parametrize("is_restarted", [False, True])
def test_an_index_that_cannot_be_deleted_yet_is_deleted_later(
    stores, tmp_path, monkeypatch, is_restarted
):
    name = create(stores)
    stores.answer(put(name, ITEMS[:5]))

    def fail(kind, name):
        raise OSError("no route to host")

    with monkeypatch.context() as patch:
        patch.setattr(lance().LanceIndexes, "drop", fail)
        assert stores.answer(wire.DropStore(tenant="t", store=name))
    assert list_ids(stores) == []
    assert len(list((tmp_path / "stores").iterdir())) == 1
    if is_restarted:
        stores = reopened(tmp_path)
    stores.sweep()
    assert list((tmp_path / "stores").iterdir()) == []


def test_a_killed_creation_leaves_no_index(stores, tmp_path, monkeypatch):
    def end(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "add_store", end)
        with pytest.raises(KeyboardInterrupt):
            create(stores)
    assert len(list((tmp_path / "stores").iterdir())) == 1
    reopened(tmp_path).sweep()
    assert list((tmp_path / "stores").iterdir()) == []


def test_an_unused_store_expires(stores, tmp_path, monkeypatch):
    day = 86_400
    names = {days: create(stores, expires_after_days=days) for days in (0, 1, 2, 5)}
    now = stores.answer(wire.ReadStore(tenant="t", store=names[1])).created_at
    searched_at = now + 2 * day - 1
    monkeypatch.setattr("search.stores._now", lambda: searched_at)
    stores.answer(query(names[2]))
    with monkeypatch.context() as away:
        away.setattr(Catalog, "change_store", Mock(side_effect=OSError("away")))
        with pytest.raises(OSError, match="away"):
            stores.sweep()
    monkeypatch.setattr("search.stores._now", lambda: now + 2 * day + 1)
    stores.sweep()
    left = set(list_ids(stores))
    assert left == {names[0], names[2], names[5]}
    assert {path.stem for path in (tmp_path / "stores").iterdir()} == left
    assert stores.answer(wire.ReadStore(tenant="t", store=names[2])).last_active_at == searched_at


def test_a_page_can_begin_at_a_deleted_entry(stores):
    first, gone, last = (create(stores) for _ in range(3))
    stores.answer(wire.DropStore(tenant="t", store=gone))
    assert list_ids(stores, after=gone) == list_ids(stores, before=gone) == [last, first]
    assert list_ids(stores, after=gone, is_ascending=True) == [first, last]
