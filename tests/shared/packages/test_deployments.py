"""Deployment records are written once and suffice to restore the active version."""

import msgspec
import pytest

from shared.packages import rollout
from shared.packages.deployments import (
    Environment,
    Generation,
    Outcome,
    Resources,
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


def test_the_records_name_the_active_version_and_the_one_before(store):
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


def test_the_error_of_a_damaged_record_names_its_key(store):
    store.put_if_absent("deployments/n/00000001.json", b"{")
    with pytest.raises(StoreError, match=r"deployments/n/00000001\.json is damaged"):
        read_history(store, "n")


@pytest.mark.parametrize(
    "spec", [{"max_instances": 0}, {"min_instances": 5}, {"canary": 1}, {"unknown": 1}, {"requires": ["telepathy"]}]
)  # fmt: skip
def test_a_spec_beyond_its_limits_is_refused(spec):
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(spec), type=Spec)


EARLIER_RECORD = b"""{"name":"n","number":1,"digest":"%s","spec":{"min_instances":1,"max_instances":4,
"resources":{"memory_bytes":5},"canary":0.1,"idle_s":300.0,"target_age_s":2.0,"start_s":60.0,"retry_limit":3},
"cause":"deploy","created_at":1.5}""" % A.encode()
#: The spec as a record of the previous release, which refuses unknown fields.
EARLIER_SPEC = (
    b'"spec":{"min_instances":1,"resources":{"memory_bytes":5},"canary":0.1,"start_s":60.0}'
)


@pytest.mark.parametrize(
    "environment", [Environment(), Environment({"X": "1"}), Environment(secrets={"X": "x"})]
)
def test_the_previous_release_reads_records_without_new_features(environment):
    """The spec of a revision in Redis has the same form."""
    spec = Spec(1, resources=Resources(memory_bytes=5), canary=0.1, start_s=60.0)
    made = Generation("n", 1, A, spec, created_at=1.5, environment=environment)
    uses_more = environment != Environment()
    expected = EARLIER_SPEC[:-1] + b',"requires":["environment"]}' if uses_more else EARLIER_SPEC
    revision = rollout.admit(rollout.App("n"), made, 1.0).candidate
    for record in (msgspec.json.encode(made), msgspec.json.encode(revision)):
        assert expected in record
    assert msgspec.json.decode(msgspec.json.encode(made), type=Generation) == made
    assert uses_more or msgspec.json.decode(EARLIER_RECORD, type=Generation) == made
