"""Installs packages from the store, with the Python packages that applications import, and runs them as workers.

Every file is verified when it is fetched, when a node first uses it, and after a change. Files that two versions share
are fetched once. `requirements.lock` pins the Python packages, with hashes; they come from `wheels/` if the package has
that folder, else from an index. Only wheels are installed: building a package would run its code outside of a sandbox.

Source: pip, "Secure installs".
"""

import atexit
import hashlib
import json
import logging
import os
import platform
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import msgspec
from packaging.requirements import InvalidRequirement, Requirement

from engines.application.sandbox import check_isolation
from engines.base import EngineStartError
from engines.child_process import hide_process
from engines.registry import APPLICATION_KIND, EngineKind, check_package, find_kind, kind_of
from shared.packages.deployments import (
    NAME,
    BadEnvironment,
    Environment,
    Resources,
    Spec,
    version_digest,
    version_name,
)
from shared.packages.manifest import BadPackage, Layer, Manifest, check_content, is_digest
from shared.packages.signature import BadSignature, check_signed
from shared.packages.store import (
    SUFFIX,
    BadBlob,
    PackageStore,
    ResumableFile,
    StoreError,
    blob_key,
    open_store,
    read_manifest,
)
from shared.settings.load import load_settings
from shared.settings.tree import EngineValues, Settings, SettingsError
from worker.node.cache import RESERVE_BYTES, Cache, Uses, open_cache
from worker.node.environment import (
    HUB_SECRETS,
    WORKER_GROUPS,
    SecretMissing,
    Secrets,
    child_environment,
    hand_over,
    plain_environment,
)
from worker.node.resources import find_gpus

_THREADS = 4
LOCK = "requirements.lock"
WHEELS = "wheels/"
#: Allowed options of a lock file: none of them makes pip read a file or build a package.
_HARMLESS = re.compile(
    r"(-i|--index-url|--extra-index-url|--trusted-host)[ =]\s*[^\s$]+|--only-binary[ =]:all:|--pre|--prefer-binary"
)
_WITHIN_S = 900.0
_POLL_S = 0.1

logger = logging.getLogger(__name__)
VARIABLES_FD = "VLM_ENGINE__VARIABLES_FD"


class InstallError(Exception):
    """The package cannot be installed; the message names the layer."""


def install(
    store: PackageStore,
    digest: str,
    cache: Cache,
    signers: Path | None = None,
    uses: Uses | None = None,
) -> tuple[Manifest, Path]:
    """Install a package; returns its manifest and folder. Blocks. Raises: InstallError.

    `signers`: file of the allowed signers. `uses`: locks the folder until it is closed.
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
            logger.warning("%s was modified; installing it again", folder)
        if not folder.is_dir():
            layers = {layer.digest: layer for layer in manifest.layers}
            cache.make_room(sum(layer.size for layer in _find_missing(layers, cache)), layers)
            with cache.filling():
                _fetch_all(store, _find_missing(layers, cache), cache.folder, uses or Uses())
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
    found = {path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}
    if found != layers.keys():
        return False
    with ThreadPoolExecutor(_THREADS) as threads:
        return all(threads.map(cache.has_content, layers, layers.values()))


def _fetch_all(store: PackageStore, missing: Sequence[Layer], cache: Path, uses: Uses) -> None:
    blobs = cache / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    blobs.chmod(0o755)
    free = shutil.disk_usage(blobs).free
    if (needed := sum(layer.size for layer in missing) + RESERVE_BYTES) > free:
        raise InstallError(
            f"the package and a reserve need {needed / 1e9:.2f} GB in {cache}, and {free / 1e9:.2f} GB are free"
        )
    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(lambda layer: _fetch(store, layer, blobs, uses), missing))


def _fetch(store: PackageStore, layer: Layer, blobs: Path, uses: Uses) -> None:
    """Fetch a blob, resuming an interrupted fetch. Stops when the instance stops."""

    def read(start: int) -> Iterator[bytes]:
        size = start
        for piece in store.stream(blob_key(layer.digest), start) if start < layer.size else ():
            if uses.is_over:
                raise InstallError(f"{layer.path}: the download was interrupted")
            size += len(piece)
            if size > layer.size:
                raise BadBlob("it has more bytes than in the manifest")
            yield piece

    try:
        with ResumableFile(blobs, layer.digest) as part:
            part.fill(read)
            with part.path.open("rb") as file:
                check_content(layer.path, file)
            mode = 0o555 if layer.is_executable else 0o444
            part.move(blobs / layer.digest.removeprefix("sha256:"), mode)
    except BadBlob as error:
        raise BadBlob(f"{layer.path}: digest_mismatch: {error}") from None


def _link(manifest: Manifest, cache: Path, folder: Path) -> None:
    with _building(folder) as temporary:
        for layer in manifest.layers:
            target = temporary / layer.path
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(cache / "blobs" / layer.digest.removeprefix("sha256:"), target)
            if layer.is_executable:  # the blob may come from a file that was not executable
                target.chmod(0o555)
        for parent, _, _ in os.walk(temporary):
            os.chmod(parent, 0o755)  # regardless of the umask, no other user can add files


@contextmanager
def _building(folder: Path) -> Iterator[Path]:
    """A temporary folder, renamed to `folder` unless another process was first. Raises: OSError."""
    temporary = folder.with_name(f"{secrets.token_hex(8)}{SUFFIX}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        os.rename(temporary, folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def make_packages(
    manifest: Manifest,
    folder: Path,
    uses: Uses | None = None,
    *,
    cache: Cache,
    hidden: frozenset[str] = frozenset(),
) -> Path | None:
    """Install an application's Python packages; returns their folder, or None. Blocks. Raises: InstallError.

    `uses`: locks the folder until it is closed. `hidden`: variables that pip does not inherit.
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
    source, what = folder.absolute(), ["--requirement", LOCK, "--require-hashes"]
    where = ["--no-index", "--find-links", str(source / WHEELS)] if wheels else []
    try:
        cache.make_room(sum(layers[path].size for path in wheels))
        # pip runs in an empty folder. In the package's folder, it would import or build files of the package.
        with cache.filling(), _building(target) as temporary, TemporaryDirectory() as place:
            if LOCK in layers:
                Path(place, LOCK).write_text(_read_lock(source / LOCK), "utf-8")
            else:
                what = ["--no-deps", *(str(source / path) for path in wheels)]
            arguments = [*what, *where, "--target", str(temporary.absolute())]
            _run_pip(arguments, place, hidden, uses or Uses())
    except OSError as error:
        raise InstallError(f"{error.filename or target}: {error.strerror}") from None
    return target


def _read_lock(path: Path) -> str:
    """The lines of a lock file, without comments. Raises: OSError; InstallError for paths, URLs and other options.

    Such lines would make pip read files of the node, or build packages.
    """
    written = path.read_text("utf-8-sig", "replace").splitlines()
    lines = [re.sub(r"(^|\s)#.*", "", line) for line in written]
    for line in lines:
        wanted = re.sub(r"--hash=sha\d+:[0-9a-f]+|\\$", "", line).strip()
        with suppress(InvalidRequirement):
            if not wanted or _HARMLESS.fullmatch(wanted) or Requirement(wanted).url is None:
                continue
        raise InstallError(f"{LOCK}: {wanted[:80]!r} is refused; write NAME==VERSION with hashes")
    return "\n".join(lines)


def _run_pip(arguments: list[str], folder: str, hidden: frozenset[str], uses: Uses) -> None:
    """Run pip. Stops when the instance stops. Raises: InstallError, OSError."""
    named = LOCK if LOCK in arguments else WHEELS
    environment = plain_environment(HUB_SECRETS | hidden, ("PIP_",))
    command = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", *arguments]
    nothing, give_up_at = subprocess.DEVNULL, time.monotonic() + _WITHIN_S
    with TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=nothing, stdout=nothing, stderr=log
        )
        try:
            while process.poll() is None:
                if uses.is_over:
                    raise InstallError(f"{named}: the installation was interrupted")
                if time.monotonic() > give_up_at:
                    raise InstallError(f"{named}: not installed within {_WITHIN_S:g} s")
                time.sleep(_POLL_S)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        lines = [line for line in log.read().splitlines() if line.strip()] or ["pip failed"]
    if process.returncode:
        said = next((line for line in lines if line.startswith("ERROR")), lines[-1])
        raise InstallError(f"{named}: {said[:300]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedWorker:
    """How to run an installed package. `version`: the digest of the package and its environment variables."""

    name: str
    package: str
    version: str
    manifest: Manifest
    folder: Path
    packages: Path | None
    resources: Resources
    start_s: object

    @property
    def engine(self) -> str:
        config = self.manifest.config
        if config.kind != "model":
            return APPLICATION_KIND
        return kind_of({**config.engine, "model": str(self.folder)})

    @property
    def runs_code(self) -> bool:
        return self._kind.runs_code

    @property
    def _kind(self) -> EngineKind:
        if (kind := find_kind(self.engine)) is None:
            raise EngineStartError(f"there is no engine {self.engine!r}")
        return kind

    def environment(self, settings: Settings, **worker: Any) -> dict[str, str]:
        """The environment of the worker. `worker`: settings of the group `worker`. Raises: EngineStartError."""
        config = self.manifest.config
        values = dict(config.engine)
        if config.kind != "model":
            values = {
                "kind": APPLICATION_KIND,
                "entry": config.entry,
                "command": json.dumps(config.command),
                "network": str(config.network),
                "packages": str(self.packages or ""),
                "start_s": str(self.start_s),
                "uses_gpu": str(self.resources.gpu > 0),
                "isolation": settings.node.isolation,
            }
        short = version_name("", self.version)
        values |= {"model": str(self.folder), "served_name": self.name + short}
        taken = self._kind.load_settings().model_fields
        if "num_threads" in taken:
            values.setdefault("num_threads", str(max(1, round(self.resources.cpu))))
        if "memory_bytes" in taken:
            values["memory_bytes"] = str(self.resources.memory_bytes)
        package = f"{self.name}@{self.package}"
        if self.version != self.package:  # the version has environment variables
            package += f"+{short[1:]}"
        settings = settings.model_copy(update={"engine": EngineValues.model_validate(values)})
        settings = settings.changed(worker={"package": package, "lora": (), **worker})
        hidden = HUB_SECRETS if self.runs_code else frozenset()
        return child_environment(settings, WORKER_GROUPS, hidden)


def run_package(settings: Settings) -> int:
    """Run a worker of the package that `settings.deploy` names until a signal. Returns the exit code."""
    from worker.main import run_worker  # noqa: PLC0415 - not needed by nodes

    hide_process()
    try:
        settings = _become(settings)
    except (EngineStartError, SettingsError) as error:
        logger.critical("%s", error)
        return os.EX_CONFIG
    return run_worker(settings)


def _become(settings: Settings) -> Settings:
    """Install the package, and make this process its worker. Blocks.

    Returns the worker's settings. They replace the environment of this process, which contains the store's
    credentials. Raises: EngineStartError, SettingsError.
    """
    deploy = settings.deploy
    name, _, package = deploy.package.partition("@")
    if not re.match(NAME, name) or not is_digest(package):
        raise SettingsError(
            "VLM_DEPLOY__PACKAGE: write NAME@sha256:... with a digest of 64 hexadecimal digits"
        )
    # For process 1 of a container, the kernel ignores signals without a handler.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))
    try:
        environment = msgspec.json.decode(deploy.environment or "{}", type=Environment)
        variables = Secrets(settings.node).read(environment)
        check_isolation(settings.node.isolation)
        store, cache, uses = open_store(deploy.store), open_cache(deploy), Uses()
        atexit.register(uses.close)
        manifest, folder = install(store, package, cache, signers=deploy.signers, uses=uses)
        hidden = frozenset(settings.node.secrets)
        packages = make_packages(manifest, folder, uses, cache=cache, hidden=hidden)
    except msgspec.MsgspecError as error:
        raise SettingsError(f"VLM_DEPLOY__ENVIRONMENT: {error}") from None
    except StoreError as error:
        raise SettingsError(f"VLM_DEPLOY__STORE: {error}") from None
    except (BadEnvironment, InstallError, SecretMissing) as error:
        raise EngineStartError(f"{deploy.package}: {error}") from None
    cpu = deploy.cpu or float(os.cpu_count() or 1)
    worker = PackagedWorker(
        name=name, package=package, version=version_digest(package, environment),
        manifest=manifest, folder=folder, packages=packages,
        resources=Resources(cpu, deploy.memory_bytes, len(find_gpus(os.environ))),
        start_s=settings.engine.values().get("start_s", Spec().start_s),
    )  # fmt: skip
    own = worker.environment(settings)
    if worker.runs_code and variables.all:
        own[VARIABLES_FD] = str(hand_over(variables))
    os.environ.clear()
    os.environ.update(own)
    overrides: dict[str, Any] = {"_env_file": None}
    return load_settings(**overrides)
