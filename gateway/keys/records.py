"""Records of API keys: in the package store, if there is one, and then in Redis.

Every change is a new record with the next version. So a Redis that is restored from an older copy revives no revoked
key, and the package store has the history of each key. The keys themselves are not stored.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from typing import Literal, get_args

import msgspec
from redis.asyncio import Redis

from shared.packages.store import PackageStore
from shared.protocol import Priority
from shared.queue.keys import RedisStore, to_ms
from shared.redis.client import load_script

Role = Literal["use", "adapters", "deploy", "admin"]
Period = Literal["day", "month"]
ROLES: tuple[Role, ...] = get_args(Role)
MAX_GUESTS = 100_000
_TTL_S = 366 * 86400.0  #: in Redis, after the last change
_FILE = re.compile(r"keys/([^/]+)/(\d{8})\.json")
_PUT_KEY = load_script(Path(__file__).parent / "scripts" / "put_key.lua")


class KeyRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One state of a key. Units: epoch seconds. 0: none, or the limit of the gateway's settings."""

    name: str
    version: int
    digest: str  #: SHA-256 of the key
    tenant: str  #: owner of the data that the key creates; stays when the key is rotated
    roles: tuple[Role, ...] = ("use",)
    models: tuple[str, ...] = ()  #: patterns of model names; empty: all
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    open_requests: int = 0
    created_at: float = 0.0
    changed_at: float = 0.0
    expires_at: float = 0.0
    is_revoked: bool = False
    max_output_tokens: int = 0  #: of each answer
    max_priority: Priority = Priority.INTERACTIVE
    budget: float = 0.0  #: dollars
    period: Period = "month"  #: of the budget
    tag: str = ""  #: label in usage reports, such as a team

    def is_active(self, now: float) -> bool:
        return not self.is_revoked and (not self.expires_at or now < self.expires_at)


class Conflict(Exception):
    """The key was changed at the same time."""


_decoder = msgspec.json.Decoder(KeyRecord)


class KeyStore(RedisStore):
    """The latest record of each key. Methods raise RedisError and StoreError."""

    def __init__(self, redis: Redis, prefix: str, durable: PackageStore | None) -> None:
        super().__init__(redis, prefix)
        self._durable = durable

    async def state(self) -> bytes:
        """A random token of the last change; empty if Redis has no keys."""
        return await self._ask("HGET", self._keys.api_keys, "") or b""

    async def read(self) -> dict[str, KeyRecord]:
        found = await self._ask("HGETALL", self._keys.api_keys)
        values = (value for name, value in zip(found[::2], found[1::2], strict=True) if name)
        records = [_decoder.decode(value.partition(b" ")[2]) for value in values]
        return {record.name: record for record in records}

    def read_durable(self, known: dict[str, KeyRecord]) -> dict[str, KeyRecord]:
        """Records of the package store that are newer than `known`. Blocks."""
        if self._durable is None:
            return {}
        latest: dict[str, int] = {}
        for key in self._durable.list("keys"):
            if match := _FILE.fullmatch(key):
                latest[match[1]] = max(int(match[2]), latest.get(match[1], 0))
        found = {}
        for name, version in latest.items():
            before = known.get(name)
            if before is None or before.version < version:
                data = self._durable.get(_path(name, version))
                if data is not None:
                    found[name] = _decoder.decode(data)
        return found

    def put_durable(self, record: KeyRecord) -> None:
        """Write a record to the package store. Blocks. Raises: Conflict."""
        if self._durable is None:
            return
        data = msgspec.json.encode(record)
        path = _path(record.name, record.version)
        if not self._durable.put_if_absent(path, data) and self._durable.get(path) != data:
            raise Conflict

    async def put(self, record: KeyRecord) -> bool:
        """Write a record to Redis and its replica. Returns whether it is the latest."""
        keys = self._keys.api_keys
        value = b"%d " % record.version + msgspec.json.encode(record)
        is_latest = await self._run(
            _PUT_KEY, [keys], value, name=record.name, version=record.version,
            token=token_hex(8), ttl_ms=to_ms(_TTL_S),
        )  # fmt: skip
        if not is_latest:
            return False
        await self._confirm(("HEXISTS", keys, record.name))
        return True

    async def guests(self) -> dict[str, str]:
        """The names of guests, by tenant."""
        found = await self._ask("HGETALL", self._keys.guests)
        names = [each.decode() for each in found]
        return dict(zip(names[::2], names[1::2], strict=True))

    async def put_guests(self, names: Mapping[str, str]) -> None:
        """Write names of guests, unless there are too many."""
        if await self._ask("HLEN", self._keys.guests) < MAX_GUESTS:
            fields = (part for pair in names.items() for part in pair)
            await self._ask("HSET", self._keys.guests, *fields)
            await self._ask("PEXPIRE", self._keys.guests, to_ms(_TTL_S))


def _path(name: str, version: int) -> str:
    return f"keys/{name}/{version:08d}.json"
