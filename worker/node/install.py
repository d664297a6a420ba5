"""From the store to a directory that a worker may read: every byte is checked here again.

What two versions share is fetched once.
"""

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engines.base import EngineStartError
from engines.registry import check_package
from shared.packages.manifest import BadPackage, Layer, Manifest, check_content
from shared.packages.part import Part, Report, WrongDigest
from shared.packages.signature import BadSignature, check_signed
from shared.packages.store import BadBlob, PackageStore, StoreError, read_manifest
from worker.node.cache import RESERVE_BYTES, Cache, Uses

_THREADS = 4


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
        if not folder.is_dir():
            layers = {layer.digest: layer for layer in manifest.layers}
            cache.make_room(_size(_find_missing(layers, cache.folder)), layers)
            with cache.filling():
                _fetch_all(store, _find_missing(layers, cache.folder), cache.folder, report)
                _link(manifest, cache.folder, folder)
    except (StoreError, BadPackage, BadSignature, EngineStartError) as error:
        raise InstallError(str(error)) from None
    except OSError as error:
        raise InstallError(f"{error.filename or cache.folder}: {error.strerror}") from None
    return manifest, folder


def _find_missing(layers: Mapping[str, Layer], cache: Path) -> list[Layer]:
    blobs = cache / "blobs"
    return [
        layer
        for digest, layer in layers.items()
        if not _is_there(blobs / digest.removeprefix("sha256:"), layer.size)
    ]


def _size(layers: Sequence[Layer]) -> int:
    return sum(layer.size for layer in layers)


def _fetch_all(
    store: PackageStore, missing: Sequence[Layer], cache: Path, report: Report | None
) -> None:
    blobs = cache / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(blobs).free
    if _size(missing) + RESERVE_BYTES > free:
        raise InstallError(
            f"the package needs {_size(missing) / 1e9:.1f} GB in {cache}, and {free / 1e9:.1f} GB are free"
        )
    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(lambda layer: _fetch(store, layer, blobs, report), missing))


def _is_there(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _fetch(store: PackageStore, layer: Layer, blobs: Path, report: Report | None) -> None:
    """Get a blob, or what a fetch that was cut short left to get."""

    def read(start: int) -> Iterator[bytes]:
        size = start
        for piece in store.read(layer.digest, start) if start < layer.size else ():
            size += len(piece)
            if size > layer.size:
                raise WrongDigest("it has more bytes than the manifest says")
            yield piece

    try:
        with Part(blobs, layer.digest) as part:
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
        os.rename(aside, folder)
    except OSError:
        if not folder.is_dir():  # else another was first
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
