"""From the store to a directory that a worker may read: every byte is checked here again, what a cache holds once
in the life of a node and whenever it has changed.

What two versions share is fetched once.
"""

import logging
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from engines.base import EngineStartError
from engines.registry import check_package
from shared.packages.manifest import BadPackage, Layer, Manifest, check_content
from shared.packages.resumable_file import Report, ResumableFile, WrongDigest
from shared.packages.signature import BadSignature, check_signed
from shared.packages.store import BadBlob, PackageStore, StoreError, blob_key, read_manifest
from worker.node.cache import RESERVE_BYTES, Cache, Uses

_THREADS = 4

logger = logging.getLogger(__name__)


class InstallError(Exception):
    """The package cannot be had here; the message says which layer is to blame."""


def install(
    store: PackageStore,
    digest: str,
    cache: Cache,
    report: Report | None = None,
    signers: Path | None = None,
    uses: Uses | None = None,
) -> tuple[Manifest, Path]:
    """A package and its folder; fetches what the cache lacks. Blocks.

    `signers`: the file of those of whom one must have signed it. The folder stays there while `uses` are open.
    Raises: InstallError.
    """
    try:
        manifest = read_manifest(store, digest)
        if manifest.config.kind == "model":
            check_package(manifest.config.engine, {layer.path for layer in manifest.layers})
        if signers is not None:
            check_signed(store, digest, signers)
        folder = cache.folder / "packages" / digest.removeprefix("sha256:")
        if uses is not None:
            uses.add(folder)
        is_intact = partial(_is_intact, manifest, folder, cache)
        if folder.is_dir() and not is_intact() and cache.discard(folder, is_intact):
            logger.warning("%s was changed and is installed again", folder)
        if not folder.is_dir():
            layers = {layer.digest: layer for layer in manifest.layers}
            cache.make_room(_size(_find_missing(layers, cache)), layers)
            with cache.filling():
                _fetch_all(store, _find_missing(layers, cache), cache.folder, report)
                _link(manifest, cache.folder, folder)
            if not is_intact() and cache.discard(folder, is_intact):
                raise InstallError(
                    f"{folder}: digest_mismatch: it was changed after it was fetched"
                )
    except (StoreError, BadPackage, BadSignature, EngineStartError) as error:
        raise InstallError(str(error)) from None
    except OSError as error:
        raise InstallError(f"{error.filename or cache.folder}: {error.strerror}") from None
    return manifest, folder


def _find_missing(layers: Mapping[str, Layer], cache: Cache) -> list[Layer]:
    blobs = cache.folder / "blobs"
    paths = [blobs / digest.removeprefix("sha256:") for digest in layers]
    with ThreadPoolExecutor(_THREADS) as threads:
        found = list(threads.map(cache.has_content, paths, layers))
    return [layer for layer, is_there in zip(layers.values(), found, strict=True) if not is_there]


def _is_intact(manifest: Manifest, folder: Path, cache: Cache) -> bool:
    """Whether a folder has the files of the package, as they were packed, and no others."""
    layers = {folder / layer.path: layer.digest for layer in manifest.layers}
    if {path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()} != set(
        layers
    ):
        return False
    with ThreadPoolExecutor(_THREADS) as threads:
        return all(threads.map(cache.has_content, layers, layers.values()))


def _size(layers: Sequence[Layer]) -> int:
    return sum(layer.size for layer in layers)


def _fetch_all(
    store: PackageStore, missing: Sequence[Layer], cache: Path, report: Report | None
) -> None:
    blobs = cache / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    blobs.chmod(0o755)
    free = shutil.disk_usage(blobs).free
    if _size(missing) + RESERVE_BYTES > free:
        raise InstallError(
            f"the package needs {_size(missing) / 1e9:.1f} GB in {cache}, and {free / 1e9:.1f} GB are free"
        )
    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(lambda layer: _fetch(store, layer, blobs, report), missing))


def _fetch(store: PackageStore, layer: Layer, blobs: Path, report: Report | None) -> None:
    """Get a blob, or what a fetch that was cut short left to get."""

    def read(start: int) -> Iterator[bytes]:
        size = start
        for piece in store.stream(blob_key(layer.digest), start) if start < layer.size else ():
            size += len(piece)
            if size > layer.size:
                raise WrongDigest("it has more bytes than the manifest says")
            yield piece

    try:
        with ResumableFile(blobs, layer.digest) as part:
            part.fill(read, report)
            with part.path.open("rb") as file:
                check_content(layer.path, file)
            mode = 0o555 if layer.is_executable else 0o444
            part.move(blobs / layer.digest.removeprefix("sha256:"), mode)
    except WrongDigest as error:
        raise BadBlob(f"{layer.path}: digest_mismatch: {error}") from None


def _link(manifest: Manifest, cache: Path, folder: Path) -> None:
    """Make the folder aside and rename it: it is whole, or not there."""
    aside = cache / "packages" / f"{secrets.token_hex(8)}.part"
    aside.mkdir(parents=True)
    try:
        for layer in manifest.layers:
            target = aside / layer.path
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(cache / "blobs" / layer.digest.removeprefix("sha256:"), target)
        for parent, _, _ in os.walk(aside):
            os.chmod(parent, 0o755)  # whatever the umask: no other user adds files
        os.rename(aside, folder)
    except OSError:
        if not folder.is_dir():  # else another was first
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
