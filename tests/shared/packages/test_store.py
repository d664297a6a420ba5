"""Stores in directories and buckets: blobs are stored by hash, and the first writer of a record wins."""

import io
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest

from shared.packages.manifest import digest_of
from shared.packages.store import BadBlob, FileStore, PackageStore, StoreError, blob_key, open_store


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> PackageStore:
    if request.param == "file":
        return open_store(f"file://{tmp_path / 'store'}")
    return open_store(request.getfixturevalue("s3_url") + f"/{uuid4().hex}")


def test_a_stored_blob_is_read_back(store: PackageStore):
    data = os.urandom(12 * 1024 * 1024)
    digest, told = digest_of(data), []
    assert store.size(digest) is None
    store.put(digest, io.BytesIO(data), told.append)
    assert store.size(digest) == len(data) == sum(told)
    assert b"".join(store.stream(blob_key(digest))) == data
    assert b"".join(store.stream(blob_key(digest), 7)) == data[7:]
    store.put(digest, io.BytesIO(data))  # a second write changes nothing
    empty = digest_of(b"")
    store.put(empty, io.BytesIO(b""))
    assert store.size(empty) == 0
    assert not b"".join(store.stream(blob_key(empty)))


def test_bytes_of_another_digest_are_refused(store: PackageStore):
    digest = digest_of(b"right")
    with pytest.raises(BadBlob, match="the content has the digest"):
        store.put(digest, io.BytesIO(b"wrong"))
    assert store.size(digest) is None
    with pytest.raises(StoreError):
        list(store.stream(blob_key(digest)))
    with pytest.raises(StoreError, match="not a digest"):
        store.size("sha256:../../etc/passwd")


def test_one_of_many_concurrent_writers_of_a_record_wins(store: PackageStore):
    # moto does not check the condition of a write atomically, so its writers run one at a time.
    with ThreadPoolExecutor(1 if store.url.startswith("s3") else 8) as threads:
        won = list(threads.map(lambda n: store.put_if_absent("a/1.json", b"%d" % n), range(8)))
    assert won.count(True) == 1
    assert store.get("a/1.json") == b"%d" % won.index(True)
    assert store.get("a/2.json") is None
    store.put_if_absent("a/b/2.json", b"")
    store.put_if_absent("ab/3.json", b"")
    assert store.list("a") == ["a/1.json", "a/b/2.json"]
    assert store.list("none") == []


def test_a_store_that_cannot_be_written_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        open_store(f"file://{tmp_path}/file/x").put_if_absent("a", b"")
    with pytest.raises(StoreError, match="use file:///DIRECTORY"):
        open_store("http://somewhere")


def test_a_blob_can_be_stored_concurrently(tmp_path: Path):
    store, data = open_store(f"file://{tmp_path}"), os.urandom(1_000_000)
    barrier = threading.Barrier(4)

    def put(_: int) -> None:
        barrier.wait()
        store.put(digest_of(data), io.BytesIO(data))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(put, range(4)))
    assert b"".join(store.stream(blob_key(digest_of(data)))) == data
    assert not list((tmp_path / "uploads").iterdir())


def test_writes_into_a_folder_that_is_emptied_concurrently_succeed(tmp_path: Path):
    store = FileStore(tmp_path)

    def come_and_go(name: str) -> None:
        for _ in range(100):
            assert store.put_if_absent(f"folder/in/{name}", b"x")
            store.write(f"folder/in/{name}", [b"y"])
            assert store.get(f"folder/in/{name}") == b"y"
            store.list("folder")
            store.delete(f"folder/in/{name}")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(come_and_go, "abcd"))
    assert store.list("folder") == []


def test_a_record_of_any_size_is_replaced_atomically_and_deleted(store):
    for size in (5, 9_000_000):
        store.write("folder/name", [b"x" * (size - 1), b"y"])
        assert b"".join(store.stream("folder/name")) == b"x" * (size - 1) + b"y"
    assert "folder/name" in store.list("folder")
    store.delete("folder/name")
    store.delete("folder/name")
    with pytest.raises(StoreError):
        list(store.stream("folder/name"))
