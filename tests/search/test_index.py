"""Every index keeps acknowledged items and finds the nearest ones after any kill: one state machine for all kinds."""

import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from benchmarks.search.run import make_items, make_vectors
from search.index import WINDOW, OrderedIds, matches
from shared.search import Filter, Item
from tests.fuzzing import IS_LONG
from tests.search.index_process import DIMENSIONS, KINDS, IndexProcess, lance, recall

IDS = [f"id {number}'\"" for number in range(12)]
KEYS = ("color", 'it\'s "n"')
texts = st.sampled_from(["red", "o'hara", 'say "hi"', "", "100%_\\", "näh\n"])
values = texts | st.booleans() | st.sampled_from([0.0, 1.0, -1.5, 1e300, 0.1])
numbers = st.sampled_from([-2.0, 0.0, 0.1, 1.0])
comparisons = st.one_of(
    st.builds(Filter, st.sampled_from(["eq", "ne"]), st.sampled_from(KEYS), values),
    st.builds(Filter, st.sampled_from(["gt", "gte", "lt", "lte"]), st.sampled_from(KEYS), numbers),
    st.builds(
        Filter, st.sampled_from(["in", "nin"]), st.sampled_from(KEYS), st.lists(values, max_size=3)
    ),
)
filters = st.recursive(
    comparisons,
    lambda inner: st.builds(
        lambda kind, parts: Filter(kind, filters=tuple(parts)),
        st.sampled_from(["and", "or"]),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=4,
)
seeds = st.integers(0, 30)
attributes = st.dictionaries(st.sampled_from(KEYS), values, max_size=2)


def direction(seed: int) -> np.ndarray:
    row = np.random.default_rng(seed).standard_normal(DIMENSIONS)
    return (row / np.linalg.norm(row)).astype("<f4")


items = st.builds(
    lambda key, seed, text, marks: Item(
        id=key, vector=direction(seed).tobytes(), text=text, attributes=marks
    ),
    st.sampled_from(IDS),
    seeds,
    texts,
    attributes,
)
batches = st.lists(items, min_size=1, max_size=6, unique_by=lambda item: item.id)


class IndexMachine(RuleBasedStateMachine):
    kind = ""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="vlm-index-")
        self.index = IndexProcess(self.kind, Path(self.folder.name) / "index")
        self.model: dict[str, Item] = {}

    @rule(batch=batches)
    def upsert(self, batch):
        self.index.ask("upsert", items=batch)
        self.model |= {item.id: item for item in batch}

    @rule(ids=st.lists(st.sampled_from(IDS), unique=True, max_size=4))
    def delete(self, ids):
        known = [key for key in ids if key in self.model]
        assert self.index.ask("delete", ids=ids) == len(known)
        for key in known:
            del self.model[key]

    @rule(where=filters)
    def delete_by_filter(self, where):
        gone = [key for key, item in self.model.items() if matches(where, item.attributes)]
        assert self.index.ask("delete", where=where) == len(gone)
        for key in gone:
            del self.model[key]

    @rule(seed=seeds, k=st.integers(1, 8), where=st.none() | filters)
    def search(self, seed, k, where):
        query = direction(seed)
        [hits] = self.index.ask("search", vectors=query[None], k=k, where=where)
        scores = {
            key: float(np.frombuffer(item.vector, "<f4") @ query)
            for key, item in self.model.items()
            if where is None or matches(where, item.attributes)
        }
        best = sorted(scores.values(), reverse=True)[:k]
        assert [hit.score for hit in hits] == pytest.approx(best, abs=1e-5)
        for hit in hits:
            assert hit.score == pytest.approx(scores[hit.item.id], abs=1e-5)
            known = self.model[hit.item.id]
            assert (hit.item.text, hit.item.attributes) == (known.text, known.attributes)
        assert len({hit.item.id for hit in hits}) == len(hits)

    @rule()
    def compact(self):
        self.index.ask("compact")

    @rule()
    def reopen(self):
        self.index.close()
        self.index.start()

    @rule()
    def kill(self):
        self.index.kill()
        self.index.start()

    @rule(batch=batches)
    def kill_while_writing(self, batch):
        self.index.begin("upsert", items=batch)
        self.index.kill()
        self.index.start()
        before, after = self.model, self.model | {item.id: item for item in batch}
        self.model = after if self.stored().keys() == after.keys() else before
        if before.keys() == after.keys() and _same(self.stored(), after):
            self.model = after

    def stored(self) -> dict[str, Item]:
        page = self.index.ask("page", after="", limit=100, with_vectors=True)
        return {item.id: item for item in page}

    @invariant()
    def it_holds_what_was_acknowledged(self):
        stored = self.stored()
        assert list(stored) == sorted(self.model)
        assert _same(stored, self.model)
        assert self.index.ask("stats").num_items == len(self.model)

    def teardown(self) -> None:
        self.index.close()
        self.folder.cleanup()


def _same(stored: dict[str, Item], model: dict[str, Item]) -> bool:
    def comparable(item: Item):
        vector = np.frombuffer(item.vector, "<f4").round(5).tolist()
        return item.id, [x + 0.0 for x in vector], item.text, item.attributes

    return stored.keys() == model.keys() and all(
        comparable(stored[key]) == comparable(model[key]) for key in model
    )


@pytest.mark.parametrize("kind", KINDS)
def test_acknowledged_items_are_found_after_any_kill(kind):
    run_state_machine_as_test(
        type("Machine", (IndexMachine,), {"kind": kind}),
        settings=settings(
            max_examples=100 if IS_LONG else 2,
            stateful_step_count=30 if IS_LONG else 15,
            database=None,
            derandomize=not IS_LONG,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_an_index_in_8_bits_finds_the_nearest_of_twenty_thousand(tmp_path):
    vectors = make_vectors(20_000, 32, 1)
    index = lance().LanceIndexes(tmp_path).open("store", 32)
    index.upsert(make_items(vectors[:18_000]))
    index.compact()
    index.upsert(make_items(vectors)[18_000:])  # newer than the index over the vectors
    assert recall(index, vectors, make_vectors(50, 32, 2)) >= 0.97
    index.upsert(make_items(vectors[:200]))
    assert index.stats().num_items == 20_000
    assert index.delete(["7", "19999"]) == 2
    index.compact()
    kept = np.delete(vectors, [7, 19_999], axis=0)
    names = np.delete(np.arange(20_000), [7, 19_999])
    assert recall(index, kept, make_vectors(50, 32, 3), names) >= 0.97


def test_single_writes_leave_few_files(tmp_path):
    """A hundred commits within seconds, with concurrent searches."""
    index = lance().LanceIndexes(tmp_path).open("store", 8)
    items = make_items(make_vectors(50, 8, 1))
    for number in range(100):
        item = items[number % 50]
        index.upsert([item])
        index.compact()
        assert index.search(np.frombuffer(item.vector, "<f4")[None], 1)[0][0].item.id == item.id
    assert index.stats().num_items == 50
    assert sum(path.is_file() for path in tmp_path.rglob("*")) <= 2 * 50


def test_old_versions_are_kept_while_they_are_read(tmp_path):
    readers = lance().Readers()
    begun, gate = threading.Event(), threading.Event()

    def read():
        with readers.reading():
            begun.set()
            assert gate.wait(60)

    with ThreadPoolExecutor(1) as threads:
        ended = threads.submit(read)
        assert begun.wait(60)
        assert not readers.wait(0.01)
        with readers.reading():  # began after the waiting writer
            gate.set()
            ended.result(60)
            assert readers.wait(0.01) is False
        assert readers.wait(60)


class Ids:
    """An unordered index in memory."""

    def __init__(self, ids):
        self.ids = set(ids)
        self.num_read = 0
        self.ordered = OrderedIds(self.read, lambda ids: [Item(id=i) for i in ids if i in self.ids])

    def read(self, after, limit):
        self.num_read += len(self.ids)
        return sorted(key for key in self.ids if key > after)[:limit]

    def walk(self, limit, between=lambda number: None):
        found, number = [], 0
        while page := self.ordered.page(found[-1] if found else "", limit, False):
            found += [item.id for item in page]
            between(number)
            number += 1
        return found


@pytest.mark.parametrize(("window", "num_reads"), [(WINDOW, 1), (500, 7)])
def test_a_walk_in_pages_reads_the_ids_once(monkeypatch, window, num_reads):
    """Once per window."""
    monkeypatch.setattr("search.index.WINDOW", window)
    index = Ids(f"{n:05}" for n in range(3000))
    assert index.walk(70) == sorted(index.ids)
    assert index.num_read <= num_reads * 3000


def test_pages_have_all_written_and_no_deleted_items(monkeypatch):
    monkeypatch.setattr("search.index.WINDOW", 50)
    index = Ids(f"{n:05}" for n in range(0, 1000, 2))
    first = set(index.ids)

    def write(number):
        key, gone = f"{(number * 37) % 1000:05}", f"{(number * 12) % 1000:05}"
        index.ids.add(key)
        index.ordered.add([key])
        index.ids.discard(gone)
        index.ordered.remove([gone])

    found = index.walk(7, write)
    assert sorted(set(found)) == found
    assert first & index.ids <= set(found)
    assert index.walk(7) == sorted(index.ids)
