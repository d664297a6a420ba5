"""A node verifies every byte of a package and unpacks nothing outside its folder."""

import io
import os
import signal
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest

from shared.packages.manifest import Layer, Manifest, PackageConfig, digest_of
from shared.packages.store import PIECE_BYTES, FileStore, blob_key
from worker.node.cache import Cache, Uses
from worker.node.install import InstallError, install

FILES = {"config.json": b"{}", "sub/weights.safetensors": b"weights" * 1000, "bin/run": b"#!"}
FILES["run.txt"] = FILES["bin/run"]


def add(store: FileStore, files: dict[str, bytes], **engine: str) -> str:
    layers = []
    for path, data in sorted(files.items()):
        store.put(digest_of(data), io.BytesIO(data))
        layers.append(Layer(path, digest_of(data), len(data), path.startswith("bin/")))
    manifest = Manifest(PackageConfig("model", engine={"kind": "mock", **engine}), tuple(layers))
    store.put(manifest.digest, io.BytesIO(manifest.encode()))
    return manifest.digest


class Recorded(FileStore):
    """A store that records the keys of the blobs that are read, each with its start offset."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.starts: dict[str, int] = {}

    def stream(self, key: str, start: int = 0) -> Iterator[bytes]:
        self.starts[key] = start
        return super().stream(key, start)


def test_a_blob_shared_by_two_versions_is_fetched_and_hashed_once(store, tmp_path, monkeypatch):
    install(store, add(store, FILES), Cache(tmp_path / "cache"))
    recorded, cache, new = Recorded(store.root), Cache(tmp_path / "cache"), b'{"new": 1}'
    changed = add(store, {**FILES, "config.json": new})
    install(recorded, changed, cache)
    assert recorded.starts == {blob_key(digest_of(new)): 0}
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("hashed again"))
    install(store, changed, cache)


WEIGHTS = "sub/weights.safetensors"


def overwrite(path: Path) -> None:
    """Changes the first byte of a file, and keeps its size and timestamps."""
    before = path.stat()
    path.chmod(0o644)
    path.write_bytes(b"W" + path.read_bytes()[1:])
    path.chmod(0o444)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def link_elsewhere(path: Path) -> None:
    other = path.parents[4] / "other"
    other.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(other)


@pytest.mark.parametrize(
    "tamper",
    [overwrite, link_elsewhere, Path.unlink, lambda path: path.with_name("x.py").write_text("x")],
)
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_cached_package_that_changed_is_installed_again(store, tmp_path, tamper, is_restarted):
    digest, cache = add(store, FILES), Cache(tmp_path / "cache")
    _, folder = install(store, digest, cache)
    tamper(folder / WEIGHTS)
    _, again = install(store, digest, Cache(tmp_path / "cache") if is_restarted else cache)
    found = {str(p.relative_to(again)): p.read_bytes() for p in again.rglob("*") if p.is_file()}
    assert found == FILES
    assert not [path for path in again.rglob("*") if path.is_symlink()]


def test_a_cached_blob_that_was_changed_is_fetched_again(store, tmp_path):
    cache = Cache(tmp_path / "cache")
    _, folder = install(store, add(store, FILES), cache)
    overwrite(folder / WEIGHTS)  # the hard-linked blob changes too
    _, other = install(store, add(store, {**FILES, "config.json": b'{"new": 1}'}), cache)
    assert (other / WEIGHTS).read_bytes() == FILES[WEIGHTS]


def test_no_other_user_can_write_to_a_package(store, tmp_path):
    before = os.umask(0)
    try:
        _, folder = install(store, add(store, FILES), Cache(tmp_path / "cache"))
    finally:
        os.umask(before)
    for path in (folder, folder / "sub", tmp_path / "cache" / "blobs"):
        assert path.stat().st_mode & 0o777 == 0o755
    assert {path: (folder / path).read_bytes() for path in FILES} == FILES
    modes = [(folder / path).stat().st_mode & 0o777 for path in FILES]
    assert modes == [0o444, 0o444, 0o555, 0o555]  # the last two are one file


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: data[:-1], "digest_mismatch"),
        (lambda data: b"W" + data[1:], "digest_mismatch"),
        (lambda data: data + b"x", "more bytes"),
    ],
)
def test_a_truncated_or_changed_blob_is_refused_by_name(store, tmp_path, damage, says):
    digest, data = add(store, FILES), FILES["sub/weights.safetensors"]
    (store.root / blob_key(digest_of(data))).write_bytes(damage(data))
    with pytest.raises(InstallError, match=rf"sub/weights\.safetensors: .*{says}"):
        install(store, digest, Cache(tmp_path / "cache"))
    assert not list((tmp_path / "cache").glob("packages/*"))
    assert not list((tmp_path / "cache").rglob("*.part"))
    store.put(digest_of(data), io.BytesIO(data))  # the blob is repaired
    install(store, digest, Cache(tmp_path / "cache"))


def test_a_manifest_that_was_changed_is_refused(store, tmp_path):
    digest = add(store, FILES)
    path = store.root / blob_key(digest)
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(InstallError, match="was changed"):
        install(store, digest, Cache(tmp_path / "cache"))


CODE = {"kind": "application", "command": '["bin/run"]', "isolation": "none"}


@pytest.mark.parametrize(
    ("files", "engine", "says"),
    [
        ({"../../evil": b"x"}, {}, "send a relative path"),
        ({"notes.json": b"\x80\x04N."}, {}, r"notes\.json: pickle files"),
        (FILES, CODE, "kind=application does not run models"),
        ({"notes.json": b"{}"}, {"kind": "torch"}, r"config\.json is missing"),
    ],
)
def test_invalid_packages_are_refused(store, tmp_path, files, engine, says):
    with pytest.raises(InstallError, match=says):
        install(store, add(store, files, **engine), Cache(tmp_path / "cache"))
    assert not list(tmp_path.rglob("evil"))
    assert not list((tmp_path / "cache").glob("packages/*"))


def test_a_disk_that_is_too_small_is_refused_before_the_fetch(store, tmp_path, monkeypatch):
    digest = add(store, FILES)
    usage = os.statvfs(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("U", (), {"free": 10, "u": usage})())
    with pytest.raises(InstallError, match="GB are free"):
        install(store, digest, Cache(tmp_path / "cache"))


@pytest.mark.parametrize("code", [-signal.SIGKILL, 1])
def test_an_interrupted_fetch_is_resumed(store, tmp_path, code):
    """The kill happens between two pieces. Neither complete blobs nor the fetched pieces are fetched again."""
    cache = tmp_path / "cache"
    install(store, add(store, FILES), Cache(cache))  # leaves one blob to fetch
    weights = os.urandom(3 * PIECE_BYTES)
    digest = add(store, {**FILES, "sub/weights.safetensors": weights})
    arguments = (store, digest, Cache(cache), code)
    process = get_context("fork").Process(target=_install_until_ended, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == code
    [part] = cache.rglob("*.part")
    assert part.stat().st_size == 2 * PIECE_BYTES
    recorded = Recorded(store.root)
    _, folder = install(recorded, digest, Cache(cache))
    assert (folder / "sub/weights.safetensors").read_bytes() == weights
    assert recorded.starts == {blob_key(digest_of(weights)): 2 * PIECE_BYTES}
    assert not list(cache.rglob("*.part"))


def _install_until_ended(store: FileStore, digest: str, cache: Cache, code: int) -> None:
    uses = Uses()

    class Ended(FileStore):
        def stream(self, key: str, start: int = 0) -> Iterator[bytes]:
            for number, piece in enumerate(super().stream(key, start)):
                if number == 2 and code < 0:
                    os.kill(os.getpid(), -code)
                uses.is_over = number == 2
                yield piece

    install(Ended(store.root), digest, cache, uses=uses)
