"""Garbage collection removes only unreferenced packages, also with concurrent uploads, deployments and kills."""

import errno
import io
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared.packages import garbage
from shared.packages.deployments import Generation, Outcome, Spec, record_generation, settle
from shared.packages.garbage import blobs_of, collect, hold, write_hold
from shared.packages.manifest import (
    Layer,
    Manifest,
    PackageConfig,
    config_bytes,
    decode_manifest,
    digest_of,
)  # fmt: skip
from shared.packages.store import FileStore, StoreError, blob_key

OLD = 1.0  # epoch seconds: a long time ago


def make_package(text: str) -> tuple[Manifest, dict[str, bytes]]:
    files = {"config.json": text.encode(), "shared.json": b"the same in all"}
    layers = tuple(Layer(path, digest_of(data), len(data)) for path, data in files.items())
    manifest = Manifest(PackageConfig("model", engine={"kind": "mock"}), layers)
    return manifest, {digest_of(data): data for data in files.values()}


class Store(FileStore):
    """A store with old blobs, and deployments of them."""

    num_lists = 0

    def list(self, prefix: str) -> "list[str]":
        self.num_lists += 1
        return super().list(prefix)

    def add(self, text: str) -> str:
        digest = self.upload(*make_package(text))
        self.age()
        return digest

    def upload(self, manifest: Manifest, blobs: dict[str, bytes]) -> str:
        """Stores the blobs that are missing."""
        for data in (*blobs.values(), config_bytes(manifest), manifest.encode()):
            if self.size(digest_of(data)) is None:
                self.put(digest_of(data), io.BytesIO(data))
        return manifest.digest

    def age(self) -> None:
        for path in (self.root / "blobs").rglob("*"):
            os.utime(path, (OLD, OLD))

    def deploy(self, name: str, number: int, digest: str, verdict: str | None = "active") -> None:
        record_generation(self, Generation(name, number, digest, Spec(), created_at=OLD))
        if verdict is not None:
            settle(self, name, number, Outcome(verdict))  # type: ignore[arg-type]

    def is_whole(self, digest: str) -> bool:
        data = self.get(blob_key(digest))
        return data is not None and all(
            self.size(each) is not None for each in blobs_of(decode_manifest(data))
        )


@pytest.fixture
def store(tmp_path: Path, monkeypatch) -> Store:
    monkeypatch.setattr("os.fsync", lambda _: None)  # not needed without power failures, and slow
    return Store(tmp_path / "store")


def test_active_and_recent_versions_are_kept(store: Store):
    digests = [store.add(f"version {number}") for number in range(8)]
    for number, digest in enumerate(digests[:7], 1):
        store.deploy("n", number, digest, "active" if number < 3 else "rolled_back")
    store.deploy("n", 8, digests[7], None)
    store.num_lists = 0
    planned = collect(store, num_kept=2, is_dry=True)
    assert store.num_lists < 10  # independent of the number of blobs
    assert all(store.is_whole(digest) for digest in digests)
    done = collect(store, num_kept=2)
    assert {blob.key for blob in planned.blobs} == {blob.key for blob in done.blobs}
    # Versions 1 and 2 were active, 7 and 8 are the latest. All share a file and a config.
    assert [store.is_whole(digest) for digest in digests] == [True] * 2 + [False] * 4 + [True] * 2
    assert len(done.blobs) == 8
    assert not collect(store, num_kept=2).blobs


def test_undeployed_packages_are_removed_and_young_ones_kept(store: Store):
    gone, never = store.add("undeployed"), store.add("never deployed")
    store.deploy("n", 1, gone)
    store.deploy("n", 2, "")
    young, blobs = make_package("young")
    for data in (*blobs.values(), config_bytes(young), young.encode()):
        store.put(digest_of(data), io.BytesIO(data))
    collect(store)
    assert [store.is_whole(each) for each in (gone, never, young.digest)] == [False, False, True]


def test_an_unreadable_manifest_stops_it_before_any_removal(store: Store):
    digest, other = store.add("named"), store.add("not named")
    store.deploy("n", 1, digest)
    (store.root / blob_key(digest)).write_bytes(b"{")
    store.age()
    with pytest.raises(StoreError, match="so no blob was removed"):
        collect(store)
    assert store.is_whole(other)


def test_an_unreadable_folder_stops_it_before_any_removal(store: Store, monkeypatch):
    digest, scandir = store.add("named"), os.scandir
    store.deploy("n", 1, digest)

    def fail(path: str) -> Iterator[os.DirEntry[str]]:
        if path.endswith("deployments/n"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(path)

    monkeypatch.setattr("os.scandir", fail)
    with pytest.raises(StoreError, match="deployments cannot be read: Permission denied"):
        collect(store)
    assert store.is_whole(digest)


def test_an_unfinished_upload_keeps_the_blobs_that_it_found(store: Store):
    digest = store.add("found")
    with hold(store, package=digest):
        collect(store)
        assert store.is_whole(digest)
    manifest, _ = make_package("found")
    with hold(store, blobs_of(manifest)):
        collect(store)
        assert store.is_whole(digest)
    collect(store)
    assert not store.is_whole(digest)


def test_an_upload_during_a_collection_waits_and_finds_the_removed_blobs(store: Store, monkeypatch):
    """The upload writes its hold after the collector has read the holds, so it must not rely on blobs to be removed."""
    digest = store.add("about to go")
    begun, go_on = threading.Event(), threading.Event()
    original = FileStore.delete

    def slow(self: FileStore, key: str) -> None:
        if key.startswith("blobs/"):
            begun.set()
            assert go_on.wait(60)
        original(self, key)

    monkeypatch.setattr(FileStore, "delete", slow)
    with ThreadPoolExecutor(2) as threads:
        collecting = threads.submit(collect, store)
        assert begun.wait(60)
        holding = threads.submit(write_hold, store, package=digest)
        assert not holding.done()
        go_on.set()
        collecting.result()
        holding.result()
    assert not store.is_whole(digest)  # the uploader detects this now
    store.add("about to go")
    collect(store)
    assert store.is_whole(digest)


def test_a_deployment_recorded_during_a_collection_keeps_its_blobs(store: Store):
    """The hold is released before the collector reads the holds, unless the collector reads them first."""
    digest = store.add("new")
    manifest = make_package("new")[0]
    key = write_hold(store, blobs_of(manifest))
    store.add("garbage")
    listed = store.list

    def list_then_deploy(prefix: str) -> list[str]:
        found = list(listed(prefix))
        if prefix == "deployments" and store.get(key) is not None:
            store.deploy("n", 1, digest)
            store.delete(key)
        return found

    store.list = list_then_deploy  # type: ignore[method-assign]
    collect(store, grace_s=0)
    assert store.is_whole(digest)


def test_the_mark_of_a_dead_collector_blocks_nothing_and_is_removed(store: Store, monkeypatch):
    digest = store.add("named")
    store.deploy("n", 1, digest)
    store.put_if_absent("gc/collectors/dead.json", b"{}")
    mark = store.root / "gc/collectors/dead.json"
    at = mark.stat().st_mtime - garbage.WAIT_S - 1
    os.utime(mark, (at, at))
    monkeypatch.setattr(garbage.time, "sleep", lambda _: pytest.fail("it waits for a dead mark"))
    with hold(store, package=digest):
        pass
    collect(store)
    assert not store.list("gc")
    assert store.is_whole(digest)


def test_concurrent_collectors_and_uploads_lose_no_referenced_blob(store: Store):
    stopping = threading.Event()

    def keep_collecting() -> int:
        num_blobs = 0
        while not stopping.is_set():
            num_blobs += len(collect(store, grace_s=0).blobs)
        return num_blobs

    def keep_deploying(worker: int) -> set[str]:
        digests = set()
        for number in range(6):
            manifest, blobs = make_package(f"{worker} {number % 2}")
            with hold(store, blobs_of(manifest)):
                store.upload(manifest, blobs)
                store.deploy(f"app{worker}", number + 1, manifest.digest)
            assert store.is_whole(manifest.digest)
            digests.add(manifest.digest)
        return digests

    store.add("garbage")
    with ThreadPoolExecutor(4) as threads:
        collectors = [threads.submit(keep_collecting) for _ in range(2)]
        deployed = [threads.submit(keep_deploying, worker) for worker in range(2)]
        try:
            digests = set().union(*(each.result() for each in deployed))
        finally:
            stopping.set()
        assert sum(each.result() for each in collectors) >= 2
    assert all(map(store.is_whole, digests))
