"""The secrets that a node provides to applications: files of a directory, and chosen variables of its environment.

A deployment names them. Their values are passed only to the process of that deployment, through an unnamed file.
"""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec

from engines.application.child import Variables
from shared.packages.environment import (
    Environment,
    check_environment,
    check_values,
    is_secret_name,
)
from shared.settings.limits import MAX_SECRET_BYTES
from shared.settings.tree import NodeSettings, SettingsError


class SecretMissing(Exception):
    """A secret is not available on this node. The message has its name, never its value."""


class Secrets:
    """The secrets of this node. Files are read at each use, as they may change."""

    def __init__(self, settings: NodeSettings) -> None:
        """Raises: SettingsError."""
        self._folder = Path(settings.secrets_dir).expanduser() if settings.secrets_dir else None
        if self._folder is not None and not os.access(self._folder / ".", os.R_OK | os.X_OK):
            raise SettingsError(
                f"VLM_NODE__SECRETS_DIR: {self._folder} is not a directory that the node can read"
            )
        self._variables = settings.secrets

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all available secrets."""
        files: list[str] = []
        if self._folder is not None:
            with suppress(OSError):  # deleted meanwhile, or not readable: no secrets
                files = [name for name in os.listdir(self._folder) if self._has(name)]
        found = {name for name in self._variables if name in os.environ}
        return tuple(sorted(found.union(filter(is_secret_name, files))))

    def _has(self, name: str) -> bool:
        return self._folder is not None and os.path.isfile(self._folder / name)

    def read(self, environment: Environment) -> Variables:
        """The variables and secrets for a process with this environment. Raises: BadEnvironment, SecretMissing."""
        check_environment(environment)
        secrets = {name: self._read(secret) for name, secret in environment.secrets.items()}
        given = Variables(environment.variables, secrets)
        check_values(given.all)
        return given

    def _read(self, name: str) -> str:
        """The value of a file, without one line break at its end, or else of a variable. Raises: SecretMissing."""
        if self._folder is not None and self._has(name):
            try:
                data = (self._folder / name).read_bytes()
            except OSError as error:
                raise SecretMissing(f"the secret {name}: its file: {error.strerror}") from None
            data = data.removesuffix(b"\n").removesuffix(b"\r")
        elif name in self._variables and name in os.environ:
            data = os.fsencode(os.environ[name])
        else:
            raise SecretMissing(f"this node has no secret {name}")
        if len(data) > MAX_SECRET_BYTES:
            raise SecretMissing(
                f"the secret {name} has {len(data)} bytes of at most {MAX_SECRET_BYTES}; put a shorter "
                "one in its place"
            )
        if b"\0" in data:
            raise SecretMissing(f"the secret {name} has a NUL; put text in its place")
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise SecretMissing(f"the secret {name} is not UTF-8; put text in its place") from None


def hand_over(variables: Variables) -> int:
    """Write variables to an unnamed file; returns its descriptor, for a child to read once. Raises: OSError."""
    number = _open_nameless()
    try:
        with open(number, "wb", closefd=False) as file:
            file.write(msgspec.json.encode(variables))
        os.lseek(number, 0, os.SEEK_SET)
    except OSError:
        os.close(number)
        raise
    return number


def _open_nameless() -> int:
    """An unnamed file in memory; on systems without memfd (macOS), an unlinked file on disk."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("variables")
    number, path = tempfile.mkstemp()
    os.unlink(path)
    return number
