"""The digests of large files, remembered as git's index does: by place, size and times.

A file that was written to just before it was hashed is not remembered: its times may not tell the next write.
"""

import json
import os
import time
from pathlib import Path
from secrets import token_hex

from shared.packages.manifest import digest_of_file

MIN_BYTES = 16 * 1024 * 1024
QUIET_S = 2.0
_MAX_FILES = 10_000


class HashCache:
    """Digests by path. Safe in threads; of two commands at once, the last one's are kept."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file or _default_file()
        self._known: dict[str, list[int | str]] = {}
        try:
            read = json.loads(self._file.read_text())
            if isinstance(read, dict):
                self._known = read
        except (OSError, ValueError):
            pass
        self._has_changed = False

    def digest(self, path: Path) -> str:
        """The digest of a file. Raises: OSError."""
        found = path.stat()
        if found.st_size < MIN_BYTES:
            return digest_of_file(path)
        place = str(path.resolve())
        state = [
            found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns,
        ]  # fmt: skip
        known = self._known.get(place)
        if known and known[:-1] == state:
            return str(known[-1])
        digest = digest_of_file(path)
        is_quiet = time.time() - found.st_ctime > QUIET_S  # noqa: TID251
        if is_quiet:
            self._known[place] = [*state, digest]
            self._has_changed = True
        return digest

    def save(self) -> None:
        """Remember for the next command, if that can be."""
        if not self._has_changed:
            return
        latest = dict(list(self._known.items())[-_MAX_FILES:])
        part = self._file.with_name(f"{self._file.name}.{token_hex(4)}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(latest))
            part.chmod(0o600)
            os.replace(part, self._file)
        except OSError:
            part.unlink(missing_ok=True)


def _default_file() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "vlm-fleet" / "digests.json"
