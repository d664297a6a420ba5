"""The Lua scripts of the queue: each change of a request's state is one script.

Each script is idempotent and fenced by the attempt number, so that it can be sent again after a lost reply. The head of
each file lists its keys, named arguments (one MessagePack map), raw bytes and reply.
"""

from pathlib import Path

from shared.redis.client import Script, load_script


def _load(*names: str) -> Script:
    return load_script(*(Path(__file__).parent / f"{name}.lua" for name in names))


SUBMIT = _load("wake", "submit")
SHARE = _load("share")
FORGET = _load("forget")
FORGET_LOST = _load("forget_lost")
TAKE = _load("take")
CLAIM = _load("wake", "claim")
BEGIN = _load("begin")
PUBLISH = _load("count_usage", "publish")
LISTEN = _load("listen")
NOTE_SHARD = _load("note_shard")
CANCEL = _load("count_usage", "wake", "cancel")
FAIL = _load(
    "count_usage", "wake", "fail", "cancel"
)  # only nodes run it: the ACL denies gateways RPUSH
STATES = _load("states")
REFUND = _load("refund")
RENEW = _load("renew")
RELEASE = _load("release")
REAP = _load("reap")
HOLD = _load("hold")
CRASH_TENANTS = _load("crash_tenants")
RAISE_SUMS = _load("raise_sums")
