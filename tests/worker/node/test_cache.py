"""A node's cache: packages in use are kept; of the others, the least recently used is removed first."""

import os
from pathlib import Path

from shared.packages.manifest import digest_of
from shared.packages.store import FileStore
from tests.worker.node.test_install import add
from worker.node.cache import Cache, Uses
from worker.node.install import install

SHARED = b"shared" * 100
SIZE = 1000  #: bytes of the file that only one version has


def version(store: FileStore, name: str) -> str:
    """Adds a package that shares a file with all others; returns its digest."""
    return add(store, {"config.json": SHARED, "own.json": name.encode() * SIZE})


def run(store: FileStore, cache: Cache, name: str) -> Uses:
    uses = Uses()
    install(store, version(store, name), cache, uses=uses)
    return uses


def ages(cache: Cache, *names: Path) -> None:
    """Marks the packages as used long ago in this order, because timestamps of file systems are coarse."""
    for number, folder in enumerate(names):
        os.utime(f"{folder}.lock", (number, number))


def folder(store: FileStore, cache: Cache, name: str) -> Path:
    return cache.folder / "packages" / version(store, name).removeprefix("sha256:")


def kept(store: FileStore, cache: Cache, names: str) -> str:
    return "".join(name for name in names if folder(store, cache, name).is_dir())


def blobs(cache: Cache) -> set[str]:
    return {f"sha256:{path.name}" for path in (cache.folder / "blobs").iterdir()}


def test_the_least_recently_used_package_is_removed(store, tmp_path):
    cache = Cache(tmp_path / "cache", len(SHARED) + 3 * SIZE)
    for name in "abc":
        run(store, cache, name).close()
    ages(cache, *(folder(store, cache, name) for name in "abc"))
    run(store, cache, "a").close()  # used again
    run(store, cache, "d").close()
    assert kept(store, cache, "abcd") == "acd"
    assert blobs(cache) == {digest_of(SHARED), *(digest_of(n.encode() * SIZE) for n in "acd")}
    assert len(list((cache.folder / "packages").iterdir())) == 6  # three, each with a lock
    run(store, cache, "b").close()  # fetched again
    assert (folder(store, cache, "b") / "own.json").read_bytes() == b"b" * SIZE


def test_a_running_package_is_removed_only_after_it_ended(store, tmp_path):
    cache = Cache(tmp_path / "cache", 1)
    first, second = run(store, cache, "a"), run(store, cache, "a")
    run(store, cache, "b").close()
    first.close()
    third = run(store, cache, "c")
    assert kept(store, cache, "abc") == "ac"
    assert (folder(store, cache, "a") / "own.json").read_bytes() == b"a" * SIZE
    second.close()
    third.close()
    run(store, cache, "d").close()
    assert kept(store, cache, "abcd") == "d"
    assert blobs(cache) == {digest_of(SHARED), digest_of(b"d" * SIZE)}


def test_packages_that_an_application_imports_are_counted_and_removed(store, tmp_path):
    cache = Cache(tmp_path / "cache", 10 * SIZE)
    uses, environment = Uses(), cache.folder / "environments" / "e"
    uses.add(environment)
    environment.mkdir()
    (environment / "module.py").write_bytes(b"#" * 9 * SIZE)
    run(store, cache, "a").close()
    assert environment.is_dir()
    uses.close()
    ages(cache, environment, folder(store, cache, "a"))
    run(store, cache, "b").close()
    assert not environment.exists()
    assert kept(store, cache, "ab") == "ab"


def test_nothing_is_removed_while_a_package_is_fetched(store, tmp_path):
    cache = Cache(tmp_path / "cache", 1)
    run(store, cache, "a").close()
    with cache.filling():
        cache.make_room(SIZE)
        assert kept(store, cache, "a") == "a"
    cache.make_room(SIZE)
    assert kept(store, cache, "a") == ""
