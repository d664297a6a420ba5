"""Garbage collection of unreferenced packages, concurrent with uploads and deployments.

Before a client references blobs, it writes a hold with their digests, and then waits for running collectors. A
collector writes a mark, and then reads the holds. So either the client sees the mark, or the collector sees the hold.
Holds and marks are records of the store, and expire if their writer is killed.
"""

import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from secrets import token_hex

import msgspec

from shared.packages.deployments import History, last_numbers, read_history, read_packages
from shared.packages.manifest import (
    BadPackage,
    Digest,
    Manifest,
    config_bytes,
    decode_manifest,
    digest_of,
    is_digest,
)
from shared.packages.store import Entry, PackageStore, StoreError, blob_key

GRACE_S = 24 * 3600.0  #: blobs younger than this are kept
#: Generations kept per deployment, in addition to the active one, the candidate and the rollback target.
KEPT_GENERATIONS = 10
#: After its mark, a collector has LOOK_S to read all records, and deletes until SWEEP_S. Clients wait WAIT_S at most.
LOOK_S, SWEEP_S, WAIT_S = 15.0, 20.0, 30.0
_POLL_S = 0.1
_HOLDS, _COLLECTORS = "gc/holds", "gc/collectors"


class _Hold(msgspec.Struct, frozen=True):
    blobs: list[Digest]
    package: Digest | None = None  #: digest of a package whose blobs are all protected


@dataclass(slots=True)
class Garbage:
    """The objects that were removed, or that a dry run would remove."""

    blobs: list[Entry] = field(default_factory=list)
    num_kept: int = 0
    part_bytes: int = 0

    @property
    def size(self) -> int:
        return sum(blob.size for blob in self.blobs)


def blobs_of(manifest: Manifest) -> set[str]:
    """The digests of all blobs of a package: manifest, config and files."""
    layers = {layer.digest for layer in manifest.layers}
    return layers | {manifest.digest, digest_of(config_bytes(manifest))}


@contextmanager
def hold(
    store: PackageStore, blobs: Collection[str] = (), package: str | None = None
) -> Iterator[None]:
    """Protect blobs from collection within the `with` block, even if they are uploaded later. Raises: StoreError."""
    key = write_hold(store, blobs, package)
    try:
        yield
    finally:
        store.delete(key)


def write_hold(store: PackageStore, blobs: Collection[str] = (), package: str | None = None) -> str:
    """Protect blobs for `GRACE_S`, or until the returned key is deleted. Raises: StoreError."""
    key = f"{_HOLDS}/{token_hex(12)}.json"
    store.put_if_absent(key, msgspec.json.encode(_Hold(sorted(blobs), package)))
    # Measured with the clock of this process, because the store's clock can differ.
    give_up_at = time.monotonic() + WAIT_S
    waited_for = {mark.key for mark in _marks(store, key)[0]}
    while waited_for and time.monotonic() < give_up_at:
        time.sleep(_POLL_S)
        waited_for &= {entry.key for entry in store.entries(_COLLECTORS)}
    return key


def _marks(store: PackageStore, key: str) -> tuple[list[Entry], list[Entry]]:
    """Marks of running collectors, and marks of killed collectors.

    `key`: a record that was just written; its timestamp is the current time of the store.
    """
    marks = list(store.entries(_COLLECTORS))
    written = [each.modified_at for each in store.entries(os.path.dirname(key)) if each.key == key]
    before = written[0] - WAIT_S if marks and written else float("-inf")
    live = [mark for mark in marks if mark.modified_at >= before]
    return live, [mark for mark in marks if mark.modified_at < before]


def collect(
    store: PackageStore,
    *,
    grace_s: float = GRACE_S,
    num_kept: int = KEPT_GENERATIONS,
    is_dry: bool = False,
) -> Garbage:
    """Remove unreferenced blobs. Safe to run concurrently and to kill. Raises: StoreError."""
    before = time.time() - grace_s  # noqa: TID251
    found = list(store.entries("blobs/sha256"))
    old = {entry.key: entry for entry in found if entry.modified_at < before}
    roots = _Roots(store, before, num_kept)
    garbage = Garbage(num_kept=len(found))
    if is_dry:
        named = roots.read()
        garbage.blobs = [entry for key, entry in old.items() if key not in named]
        garbage.num_kept -= len(garbage.blobs)
        return garbage
    while old:
        mark = f"{_COLLECTORS}/{token_hex(12)}.json"
        # Taken before the write, because clients and other collectors count from the mark's timestamp.
        marked_at = time.monotonic()
        store.put_if_absent(mark, b"{}")
        try:
            named = roots.read()
            if time.monotonic() - marked_at > LOOK_S:
                raise StoreError(
                    f"reading the records of {store.url} took more than {LOOK_S:g} s; try again later"
                )
            old = {key: entry for key, entry in old.items() if key not in named}
            for key in list(old):
                if time.monotonic() - marked_at > SWEEP_S:
                    break
                store.delete(key)
                garbage.blobs.append(old.pop(key))
        finally:
            store.delete(mark)
    garbage.num_kept -= len(garbage.blobs)
    _clean_up(store, garbage)
    return garbage


def _clean_up(store: PackageStore, garbage: Garbage) -> None:
    """Remove marks of killed collectors, old partial uploads and holds, and signatures without a package."""
    if list(store.entries(_COLLECTORS)):
        mark = f"{_COLLECTORS}/{token_hex(12)}.json"
        store.put_if_absent(mark, b"{}")
        for dead in _marks(store, mark)[1]:
            store.delete(dead.key)
        store.delete(mark)
    before = time.time() - GRACE_S  # noqa: TID251
    garbage.part_bytes = store.delete_parts(before)
    for entry in list(store.entries(_HOLDS)):
        if entry.modified_at < before:
            store.delete(entry.key)
    for entry in list(store.entries("signatures")):
        package = f"sha256:{entry.key.split('/')[1]}"
        if entry.modified_at < before and is_digest(package) and store.size(package) is None:
            store.delete(entry.key)


class _Roots:
    """Finds the keys of all referenced blobs. Caches manifests, which never change."""

    def __init__(self, store: PackageStore, before: float, num_kept: int) -> None:
        self._store = store
        self._before = before
        self._num_kept = num_kept
        self._packages: dict[str, set[str]] = {}

    def read(self) -> set[str]:
        """Raises: StoreError, which ends the collection: an unreadable record may reference any blob."""
        named: set[str] = set()
        now = time.time()  # noqa: TID251
        # Holds first: a client deletes its hold after it has recorded the deployment.
        for entry in list(self._store.entries(_HOLDS)):
            if now - entry.modified_at < GRACE_S and (data := self._store.get(entry.key)):
                try:
                    held = msgspec.json.decode(data, type=_Hold)
                except msgspec.MsgspecError as error:
                    url = self._store.url
                    raise StoreError(f"{url}: {entry.key} cannot be read: {error}") from None
                named.update(held.blobs)
                if held.package is not None:
                    named |= self._package(held.package)
        for name in last_numbers(self._store):
            history = read_history(self._store, name)
            for digest in self._kept(history) if history is not None else ():
                named |= self._package(digest)
        for digest in read_packages(self._store, self._num_kept):
            named |= self._package(digest)
        return {blob_key(digest) for digest in named}

    def _kept(self, history: History) -> set[str]:
        """The digests of the active version, the candidate, the rollback target and recent versions."""
        numbers = sorted(history.generations)
        kept = [each for each in history.generations.values() if each.created_at >= self._before]
        if history.last.digest:
            kept += [history.generations[number] for number in numbers[-self._num_kept :]]
            active = history.active
            others = (active, history.candidate, history.before(active.version if active else ""))
            kept += [each for each in others if each is not None]
        return {each.digest for each in kept if each.digest}

    def _package(self, digest: str) -> set[str]:
        if digest not in self._packages:
            data = self._store.get(blob_key(digest))
            if data is None:  # its upload may follow
                return {digest}
            try:
                self._packages[digest] = blobs_of(decode_manifest(data))
            except BadPackage as error:
                raise StoreError(
                    f"{self._store.url}: cannot read the manifest {digest}, so no blob was removed: {error}"
                ) from None
        return self._packages[digest]
