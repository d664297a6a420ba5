"""Installs packages from the store, and the Python packages that applications import.

Every file is verified when it is fetched, when a node first uses it, and after a change. Files that two
versions share are fetched once. The Python packages are those of `requirements.lock`, with hashes, from `wheels/` if
the package has that folder. Only wheels are installed: building a package would run its code outside of any sandbox.

Source: pip, "Secure installs".
"""

import hashlib
import logging
import os
import platform
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from engines.base import EngineStartError
from engines.registry import check_package
from shared.packages.manifest import BadPackage, Layer, Manifest, check_content
from shared.packages.resumable_file import SUFFIX, Report, ResumableFile, WrongDigest
from shared.packages.signature import BadSignature, check_signed
from shared.packages.store import BadBlob, PackageStore, StoreError, blob_key, read_manifest
from worker.node.cache import RESERVE_BYTES, Cache, Uses
from worker.node.environment import HUB_SECRETS, plain_environment

_THREADS = 4
LOCK = "requirements.lock"
WHEELS = "wheels/"
_WITHIN_S = 900.0

logger = logging.getLogger(__name__)


class InstallError(Exception):
    """The package cannot be installed; the message names the layer."""


def install(
    store: PackageStore,
    digest: str,
    cache: Cache,
    report: Report | None = None,
    signers: Path | None = None,
    uses: Uses | None = None,
) -> tuple[Manifest, Path]:
    """Install a package; returns its manifest and folder. Blocks. Raises: InstallError.

    `signers`: file of the allowed signers. `uses`: keeps the folder until it is closed.
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
    """Whether a folder has exactly the files of the package."""
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
    """Fetch a blob; an interrupted fetch is resumed."""

    def read(start: int) -> Iterator[bytes]:
        size = start
        for piece in store.stream(blob_key(layer.digest), start) if start < layer.size else ():
            size += len(piece)
            if size > layer.size:
                raise WrongDigest("it has more bytes than in the manifest")
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
    with _building(folder) as aside:
        for layer in manifest.layers:
            target = aside / layer.path
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(cache / "blobs" / layer.digest.removeprefix("sha256:"), target)
        for parent, _, _ in os.walk(aside):
            os.chmod(parent, 0o755)  # whatever the umask: no other user adds files


@contextmanager
def _building(folder: Path) -> Iterator[Path]:
    """A temporary folder, renamed to `folder` unless another process was first. Raises: OSError."""
    aside = folder.with_name(f"{secrets.token_hex(8)}{SUFFIX}")
    try:
        aside.mkdir(parents=True)
        yield aside
        os.rename(aside, folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def make_packages(
    manifest: Manifest,
    folder: Path,
    uses: Uses | None = None,
    *,
    cache: Cache,
    hidden: frozenset[str] = frozenset(),
) -> Path | None:
    """Install an application's Python packages; returns their folder, or None. Blocks. Raises: InstallError.

    `uses`: keeps the folder until it is closed. `hidden`: variables that pip does not inherit.
    """
    layers = {layer.path: layer for layer in manifest.layers}
    wheels = [path for path in layers if path.startswith(WHEELS) and path.endswith(".whl")]
    if manifest.config.kind != "python" or (LOCK not in layers and not wheels):
        return None
    named = [layers[path].digest for path in (LOCK, *wheels) if path in layers]
    python = f"{sys.implementation.cache_tag} {platform.system()} {platform.machine()}"
    digest = hashlib.sha256("\n".join([python, *named]).encode()).hexdigest()
    target = cache.folder / "environments" / digest
    if uses is not None:
        uses.add(target)
    if target.is_dir():
        return target
    what = ["--requirement", LOCK, "--require-hashes"] if LOCK in layers else ["--no-deps", *wheels]
    where = ["--no-index", "--find-links", WHEELS] if wheels else []
    try:
        cache.make_room(sum(layers[path].size for path in wheels))
        with cache.filling(), _building(target) as aside:
            _run_pip([*what, *where, "--target", str(aside)], folder, hidden)
    except OSError as error:
        raise InstallError(f"{error.filename or target}: {error.strerror}") from None
    return target


def _run_pip(arguments: list[str], folder: Path, hidden: frozenset[str]) -> None:
    """Raises: InstallError, OSError."""
    environment = plain_environment(HUB_SECRETS | hidden, ("PIP_",))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_WITHIN_S
        )
    except subprocess.TimeoutExpired:
        raise InstallError(f"{LOCK}: not installed within {_WITHIN_S:g} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["pip failed"]
        said = next((line for line in lines if line.startswith("ERROR")), lines[-1])
        raise InstallError(f"{LOCK}: {said[:300]}")
