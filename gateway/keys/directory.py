"""API keys: their records in Redis and in the package store, if there is one, and this gateway's copy of all records.

Every change is a new record with the next version. So a Redis that is restored from an older copy does not revive
revoked keys, and the package store has the history of each key. The keys themselves are not stored. The copy is in
memory and at most two seconds old.
"""

import asyncio
import fnmatch
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Literal

import msgspec
from msgspec.structs import replace
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.http.errors import unavailable
from gateway.http.exchange import short_hash
from shared.packages.store import PackageStore, StoreError
from shared.process import wait_for
from shared.protocol import Priority
from shared.queue.keys import RedisStore, to_ms
from shared.redis.client import OutageLog, load_script

Role = Literal["use", "adapters", "deploy", "admin"]
Period = Literal["day", "month"]
MAX_GUESTS = 100_000
_TTL_S = 366 * 86400.0  #: time to live in Redis after the last change
_FILE = re.compile(r"keys/([^/]+)/(\d{8})\.json")
_PUT_KEY = load_script(Path(__file__).parent / "scripts" / "put_key.lua")
MAX_KEYS = 10_000  #: revoked keys included
POLL_S = 0.5
STALE_S = 2.0  #: after this time without Redis, stored keys get 503
WAIT_S = 4.0  #: maximum time that a request with a known key waits for Redis
_SYNC_S = 30.0  #: interval of comparing Redis with the package store
_PREFIX = "vlm-"
GUEST = "oidc-"  #: prefix of the tenant ids of guests: callers with a token

logger = logging.getLogger(__name__)


class KeyRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One version of a key. Units: epoch seconds. A limit of 0 is not set: the limits of the settings apply."""

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
    max_output_tokens: int = 0  #: limit of each answer
    max_priority: Priority = Priority.INTERACTIVE
    budget: float = 0.0  #: dollars
    period: Period = "month"  #: period of the budget
    tag: str = ""  #: label in usage reports, such as a team

    def is_active(self, now: float) -> bool:
        return not self.is_revoked and (not self.expires_at or now < self.expires_at)


#: Record of an unknown guest.
_NOBODY = KeyRecord("", 0, "", "", models=("",), is_revoked=True)


class Conflict(Exception):
    """The key was changed at the same time."""


_decoder = msgspec.json.Decoder(KeyRecord)


class KeyStore(RedisStore):
    """The latest record of each key. Methods raise RedisError and StoreError."""

    def __init__(self, redis: Redis, prefix: str, durable: PackageStore | None) -> None:
        super().__init__(redis, prefix)
        self._durable = durable

    async def state(self) -> bytes:
        """A random token that every change replaces; empty if Redis has no keys."""
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


class KeyDirectory:
    """Finds stored keys and limits. `on_ended` is called with the tenants whose keys were revoked or have expired."""

    def __init__(
        self, store: KeyStore, redis_address: str, on_ended: Callable[[Collection[str]], None]
    ) -> None:
        self._store = store
        self._outage = OutageLog(redis_address)
        self._on_ended = on_ended
        self.records: dict[str, KeyRecord] = {}  #: by name
        self._by_digest: dict[str, KeyRecord] = {}
        self._by_tenant: dict[str, KeyRecord] = {}
        self._guests: dict[str, str] = {}  # `KEY:NAME` by tenant
        self._new_guests: dict[str, str] = {}  # guests that are not in Redis yet
        self._active: set[str] = set()  # tenants whose keys are active
        self._state: bytes | None = None
        self._read_at = float("-inf")
        self._lock = asyncio.Lock()
        self._must_sync = asyncio.Event()
        self._tried = asyncio.Event()  #: wakes its waiters after each attempt to read the records
        self.is_known = asyncio.Event()  #: set once the keys were read

    async def find(self, key: bytes) -> KeyRecord | None:
        """The record of an active key. Raises: Overloaded if the copy is too old."""
        if not key.startswith(_PREFIX.encode()):
            return None
        digest = _digest(key)
        await self._check_fresh(is_known=digest in self._by_digest)
        record = self._by_digest.get(digest)
        return record if record is not None and record.is_active(_now()) else None

    async def _check_fresh(self, *, is_known: bool) -> None:
        """If the copy is too old, wait for Redis, unless the key is unknown. Raises: Overloaded."""
        if self._is_stale() and is_known:
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT_S):
                    await self._tried.wait()
                    if self._is_stale():  # the attempt began too long ago
                        await self._tried.wait()
        if self._is_stale():
            raise unavailable()

    def _is_stale(self) -> bool:
        return time.monotonic() - self._read_at > STALE_S

    async def admit(self, tenant: str, key: str, name: str) -> KeyRecord | None:
        """The record of a guest, a caller whose token names the stored key `key`. None if that key is not active.

        Raises: Overloaded if the copy is too old.
        """
        await self._check_fresh(is_known=key in self.records)
        if (found := self.records.get(key)) is None or not found.is_active(_now()):
            return None
        name = f"{key}:{name}"
        if self._guests.pop(tenant, None) != name:
            self._new_guests[tenant] = name
        self._guests[tenant] = name
        if len(self._guests) > MAX_GUESTS:
            del self._guests[next(iter(self._guests))]
        return self.of(tenant)

    async def know(self, tenants: Iterable[str]) -> None:
        """Read the names of guests that other gateways have recorded. Raises: RedisError."""
        if any(each.startswith(GUEST) and each not in self._guests for each in tenants):
            self._guests = await self._store.guests() | self._guests

    async def guests_of(self, name: str) -> list[str]:
        """The tenants of all guests that have this name. Raises: RedisError."""
        found = await self._store.guests() | self._guests
        return [tenant for tenant, known in found.items() if known == name]

    def guest(self, tenant: str) -> str:
        """The name of a guest, which other gateways need for `is_active`. Empty if the tenant is not a guest."""
        return self._guests.get(tenant, "")

    def of(self, tenant: str) -> KeyRecord | None:
        """The record of a tenant, active or not. A guest gets the record of its stored key, with its own name."""
        if not tenant.startswith(GUEST):
            return self._by_tenant.get(tenant)
        name = self.guest(tenant)
        record = self.records.get(name.partition(":")[0], _NOBODY)
        return replace(record, name=name or short_hash(tenant), tenant=tenant)

    def name_of(self, tenant: str) -> str:
        """The name of a tenant's key; a hash if the key is in the settings."""
        record = self.of(tenant)
        return short_hash(tenant) if record is None else record.name

    def is_active(self, tenant: str, guest: str = "") -> bool:
        """Whether the tenant's key is active. `guest`: the tenant's name, if it is a guest."""
        if guest:
            self._guests.setdefault(tenant, guest)
        record = self.of(tenant)
        return record is not None and record.is_active(_now())

    def may_use(self, tenant: str, model: str) -> bool:
        """Whether the tenant may use a model. Tenants without a stored key may use all models."""
        record = self.of(tenant)
        if record is None or not record.models:
            return True
        return any(fnmatch.fnmatchcase(model, pattern) for pattern in record.models)

    async def keep_fresh(self) -> None:
        """Read the records again whenever they have changed."""
        while True:
            try:
                await self.refresh()
            except (RedisError, OSError) as error:
                self._outage.failed(error)
            except StoreError as error:
                logger.warning("cannot read the API keys: %s", error)
            except Exception:
                logger.exception("cannot read the API keys")
            else:
                self._outage.succeeded()
                await self._write_guests()
            self._tried.set()
            self._tried.clear()
            await asyncio.sleep(POLL_S)

    async def _write_guests(self) -> None:
        names, self._new_guests = self._new_guests, {}
        if names:
            try:
                await self._store.put_guests(names)
            except RedisError:
                self._new_guests = names | self._new_guests

    async def refresh(self) -> None:
        """Raises: RedisError, StoreError."""
        async with self._lock:
            began_at = time.monotonic()
            state = await self._store.state()
            if state != self._state:
                found = await self._store.read()
                known = found | _later(self.records, found)
                if not self.is_known.is_set():
                    known |= await asyncio.to_thread(self._store.read_durable, known)
                elif _later(known, found):  # Redis was emptied, or restored from an older copy
                    self._must_sync.set()
                for record in _later(known, found).values():
                    await self._store.put(record)
                self._set(known)
                self._state = state
            self._read_at = began_at
            self.is_known.set()
            self._end()

    async def keep_synced(self) -> None:
        """Copy records that are only in the package store to Redis. Keys work meanwhile."""
        while True:
            await wait_for(self._must_sync, _SYNC_S)
            self._must_sync.clear()
            try:
                await self.sync()
            except (RedisError, StoreError, OSError) as error:
                logger.warning("cannot compare the API keys with the package store: %s", error)

    async def sync(self) -> None:
        """Raises: RedisError, StoreError."""
        found = await asyncio.to_thread(self._store.read_durable, dict(self.records))
        for record in found.values():
            await self._store.put(record)

    def _set(self, records: dict[str, KeyRecord]) -> None:
        self.records = records
        self._by_digest = {each.digest: each for each in records.values()}
        self._by_tenant = {each.tenant: each for each in records.values()}

    def _end(self) -> None:
        now = _now()
        active = {each.tenant for each in self.records.values() if each.is_active(now)}
        ended, self._active = self._active - active, active
        if ended:
            names = {each.name for each in self.records.values() if not each.is_active(now)}
            guests = self._guests.items()
            ended |= {each for each, name in guests if name.partition(":")[0] in names}
            self._on_ended(ended)

    async def close(self) -> None:
        await self._store.close()

    async def write(self, record: KeyRecord) -> None:
        """Write the next version of a record. Raises: Conflict, RedisError, StoreError."""
        try:
            await asyncio.to_thread(self._store.put_durable, record)
        except Conflict:  # Redis may lack the record of the other change
            await self.sync()
            await self.refresh()
            raise
        if not await self._store.put(record):
            raise Conflict
        await self.refresh()


def _later(records: dict[str, KeyRecord], than: dict[str, KeyRecord]) -> dict[str, KeyRecord]:
    """The records that are newer than the record of the same key in `than`, or whose key is missing there."""
    return {
        name: record
        for name, record in records.items()
        if name not in than or than[name].version < record.version
    }


def new_key() -> tuple[str, str]:
    key = _PREFIX + secrets.token_urlsafe(32)
    return key, _digest(key.encode())


def next_version(record: KeyRecord, **changes: object) -> KeyRecord:
    return replace(record, version=record.version + 1, changed_at=_now(), **changes)


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def _now() -> float:
    return time.time()  # noqa: TID251 (expiry is a date)
