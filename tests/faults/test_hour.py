"""An hour of single writes and searches: the search process does not grow. `make faults ARGS=--hour`, or `--hour=360`."""

import time

import psutil
import pytest

from shared.search import CreateStore, Hit, PutItems, Query, StoreRecord
from tests.factories_search import make_items, run_search

NUM_ITEMS = 50


@pytest.fixture
def hour_s(request: pytest.FixtureRequest) -> float:
    """How long the hour is."""
    seconds = request.config.getoption("--hour")
    if not seconds:
        pytest.skip("for as long as --hour says")
    return seconds


@pytest.mark.timeout(0)
def test_single_writes_grow_neither_memory_nor_files(tmp_path, hour_s):
    items = make_items(NUM_ITEMS, 384)
    with run_search(tmp_path / "data") as search:
        create = CreateStore(tenant="t", name="s", model="m", digest="d", dimensions=384)
        store = search.ask(create, StoreRecord).id
        put = PutItems(tenant="t", store=store, digest="d", items=items)
        search.ask(put, StoreRecord)
        began_at, at_a_quarter, num_writes = time.monotonic(), 0, 0
        while (elapsed_s := time.monotonic() - began_at) < hour_s:
            item = items[num_writes % NUM_ITEMS]
            put = PutItems(tenant="t", store=store, digest="d", items=[item])
            search.ask(put, StoreRecord)
            query = Query(tenant="t", store=store, digest="d", vectors=[item.vector], k=3)
            assert search.ask(query, list[Hit])[0].item.id == item.id
            num_writes += 1
            if elapsed_s > hour_s / 4 and not at_a_quarter:
                at_a_quarter = psutil.Process(search.pid).memory_info().rss
        at_the_end = psutil.Process(search.pid).memory_info().rss
        num_files = sum(path.is_file() for path in (tmp_path / "data" / "stores").rglob("*"))
    print(
        f"{num_writes} writes, {num_files} files, RSS {at_a_quarter >> 20} -> {at_the_end >> 20} MiB"
    )
    assert at_the_end <= 1.1 * at_a_quarter
    assert num_files <= 2 * NUM_ITEMS
