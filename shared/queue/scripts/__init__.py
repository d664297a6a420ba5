"""The Lua scripts: every change of a request's state is one of them.

Each is idempotent and fenced by the attempt number, so that it may be sent again after a lost reply. What
they take and answer is said at the top of each file in `shared/queue/scripts/`; what several need is a prelude of theirs.
"""

from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Script:
    """A script's text and the digest by which Redis knows it."""

    source: str
    sha: str


def _load(*names: str) -> Script:
    folder = Path(__file__).parent
    source = "".join((folder / f"{name}.lua").read_text() for name in names)
    return Script(source, sha1(source.encode(), usedforsecurity=False).hexdigest())


ENQUEUE = _load("places", "bounds", "enqueue")
FORGET_LOST = _load("forget_lost")
TAKE = _load("backlog", "take")
AGE = _load("backlog", "age")
CLAIM = _load("claim")
BEGIN = _load("begin")
PUBLISH = _load("post", "publish")
FINISH = _load("places", "post", "finish")
LISTEN = _load("listen")
CANCEL = _load("places", "cancel")
SETTLE = _load("bounds", "settle")
RENEW = _load("renew")
RELEASE = _load("release")
REAP = _load("reap")
PUT_IMAGE = _load("put_image")
RELEASE_IMAGE = _load("release_image")
