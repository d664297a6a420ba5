"""What an application imports besides: its own packages, installed once for each lock file.

`requirements.lock` names them with their hashes, and `wheels/` may hold them; then nothing is downloaded. Wheels
only: to build a package is to run its code, outside of any sandbox.

Source: pip, "Secure installs".
"""

import hashlib
import os
import platform
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

from shared.packages.manifest import Manifest
from shared.packages.resumable_file import SUFFIX
from worker.node.cache import Cache, Uses
from worker.node.environment import HUB_SECRETS, plain_environment
from worker.node.install import InstallError

LOCK = "requirements.lock"
WHEELS = "wheels/"
_WITHIN_S = 900.0


def make_packages(
    manifest: Manifest,
    folder: Path,
    uses: Uses | None = None,
    *,
    cache: Cache,
    hidden: frozenset[str] = frozenset(),
) -> Path | None:
    """The folder of an application's own packages; None if it names none. Blocks. Raises: InstallError.

    It stays there while `uses` are open. `hidden`: variables that pip does not see.
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
        with cache.filling():
            _make([*what, *where], folder, target, hidden)
    except OSError as error:
        raise InstallError(f"{error.filename or target}: {error.strerror}") from None
    return target


def _make(arguments: list[str], folder: Path, target: Path, hidden: frozenset[str]) -> None:
    """Raises: InstallError, OSError."""
    aside = target.with_name(f"{secrets.token_hex(8)}{SUFFIX}")
    try:
        aside.mkdir(parents=True)
        _run_pip([*arguments, "--target", str(aside)], folder, hidden)
        os.rename(aside, target)
    except OSError:
        if not target.is_dir():  # else another was first
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


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
