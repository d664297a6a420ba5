"""The Lua scripts: every change of a request's state is one of them.

Each is idempotent and fenced by the attempt number, so that it may be sent again after a lost reply. One file
each; its top says which keys it takes, which named arguments (one MessagePack map) and raw bytes, and what it answers.
"""

from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class Script:
    """A script's text and the digest by which Redis knows it."""

    source: str
    sha: str


def named(*raw: bytes, **arguments: Any) -> tuple[bytes, ...]:
    """The arguments of one call: by name in ARGV[1], and from ARGV[2] raw bytes, which Lua cannot unpack."""
    return msgspec.msgpack.encode(arguments), *raw


def _load(name: str) -> Script:
    source = (Path(__file__).parent / f"{name}.lua").read_text()
    return Script(source, sha1(source.encode(), usedforsecurity=False).hexdigest())


SUBMIT = _load("submit")
FORGET_LOST = _load("forget_lost")
TAKE = _load("take")
CLAIM = _load("claim")
BEGIN = _load("begin")
PUBLISH = _load("publish")
LISTEN = _load("listen")
CANCEL = _load("cancel")
REFUND = _load("refund")
RENEW = _load("renew")
RELEASE = _load("release")
REAP = _load("reap")
PUT_IMAGE = _load("put_image")
RELEASE_IMAGE = _load("release_image")
