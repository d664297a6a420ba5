"""Lua scripts and their arguments."""

from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class Script:
    """The text of a script, and its digest in Redis."""

    source: str
    sha: str


def load_script(*paths: Path) -> Script:
    """Load a script from one file after the other."""
    source = "".join(path.read_text() for path in paths)
    return Script(source, sha1(source.encode(), usedforsecurity=False).hexdigest())


def named(*raw: bytes, **arguments: Any) -> tuple[bytes, ...]:
    """The arguments of one call: named ones in ARGV[1], and from ARGV[2] raw bytes, which Lua cannot unpack."""
    return msgspec.msgpack.encode(arguments), *raw
