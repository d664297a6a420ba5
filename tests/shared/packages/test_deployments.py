"""Records of deployments: written once, and enough to know again what serves."""

from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from shared.packages.deployments import (
    Conflict,
    Generation,
    Outcome,
    Spec,
    last_numbers,
    read_history,
    record_generation,
    settle,
)
from shared.packages.store import StoreError, open_store

A, B = (f"sha256:{letter * 64}" for letter in "ab")


@pytest.fixture
def store(tmp_path):
    return open_store(f"file://{tmp_path}")


def test_of_two_deployments_at_once_one_is_refused(store):
    def deploy(digest: str) -> bool:
        try:
            record_generation(store, Generation("n", 1, digest, Spec()))
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(deploy, (A, B))) == [False, True]


def test_who_first_says_what_came_of_a_generation_decides(store):
    first, second = Outcome("rolled_back", "it crashed"), Outcome("active")
    assert settle(store, "n", 1, first) == first
    assert settle(store, "n", 1, second) == first


def test_the_records_say_what_serves_and_where_a_rollback_leads(store):
    assert read_history(store, "n") is None
    for number, digest in enumerate((A, B), 1):
        record_generation(store, Generation("n", number, digest, Spec()))
        settle(store, "n", number, Outcome("active"))
    record_generation(store, Generation("n", 3, A, Spec()))
    record_generation(store, Generation("n-other", 1, A, Spec()))
    history = read_history(store, "n")
    assert history is not None
    assert history.active is not None
    assert history.candidate is not None
    assert (history.active.number, history.candidate.number) == (2, 3)
    back = history.before(B)
    assert back is not None
    assert back.digest == A
    settle(store, "n", 3, Outcome("rolled_back"))
    record_generation(store, Generation("n", 4, "", Spec(), "undeploy"))
    settle(store, "n", 4, Outcome("active"))
    history = read_history(store, "n")
    assert history is not None
    assert (history.active, history.candidate) == (None, None)
    assert last_numbers(store) == {"n": 4, "n-other": 1}


def test_a_record_that_was_damaged_is_told_by_its_key(store):
    store.put_if_absent("deployments/n/00000001.json", b"{")
    with pytest.raises(StoreError, match=r"deployments/n/00000001\.json cannot be read"):
        read_history(store, "n")


@pytest.mark.parametrize(
    "spec",
    [b'{"max_instances":0}', b'{"min_instances":5}', b'{"canary":1}', b'{"unknown":1}'],
)
def test_a_spec_out_of_its_limits_is_refused(spec):
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(spec, type=Spec)
