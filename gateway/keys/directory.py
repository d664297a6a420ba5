"""One gateway's copy of all API keys, in memory, at most two seconds old."""

import asyncio
import fnmatch
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from msgspec.structs import replace
from redis.exceptions import RedisError

from gateway.http.errors import unavailable
from gateway.http.exchange import short_hash
from gateway.keys.records import MAX_GUESTS, Conflict, KeyRecord, KeyStore
from shared.packages.store import StoreError
from shared.redis.client import OutageLog

MAX_KEYS = 10_000  #: revoked keys included
POLL_S = 0.5
STALE_S = 2.0  #: after this long without Redis, stored keys are neither accepted nor refused
_SYNC_S = 30.0  #: interval of comparing Redis with the package store
_PREFIX = "vlm-"
GUEST = "oidc-"  #: prefix of the tenants of callers with a token
#: Record of a guest that this gateway no longer knows.
_NOBODY = KeyRecord("", 0, "", "", models=("",), is_revoked=True)

logger = logging.getLogger(__name__)


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
        self._new_guests: dict[str, str] = {}  # not in Redis yet
        self._active: set[str] = set()  # tenants
        self._state: bytes | None = None
        self._read_at = float("-inf")
        self._lock = asyncio.Lock()
        self._must_sync = asyncio.Event()
        self.is_known = asyncio.Event()  #: set once the keys were read

    async def find(self, key: bytes) -> KeyRecord | None:
        """The record of an active key. Raises: Overloaded if the copy is too old."""
        if not key.startswith(_PREFIX.encode()):
            return None
        self._check_fresh()
        record = self._by_digest.get(_digest(key))
        return record if record is not None and record.is_active(_now()) else None

    def _check_fresh(self) -> None:
        if time.monotonic() - self._read_at > STALE_S:
            raise unavailable()

    def admit(self, tenant: str, key: str, name: str) -> KeyRecord | None:
        """The record of a guest, a caller whose token names the stored key `key`. None if that key is not active.

        Raises: Overloaded if the copy is too old.
        """
        self._check_fresh()
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
        """Look up the names of guests of other gateways. Raises: RedisError."""
        if any(each.startswith(GUEST) and each not in self._guests for each in tenants):
            self._guests = await self._store.guests() | self._guests

    async def guests_of(self, name: str) -> list[str]:
        """The tenants of the guests of a name. Raises: RedisError."""
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
            with suppress(TimeoutError):
                async with asyncio.timeout(_SYNC_S):
                    await self._must_sync.wait()
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
        except Conflict:  # perhaps with a record that is not in Redis
            await self.sync()
            await self.refresh()
            raise
        if not await self._store.put(record):
            raise Conflict
        await self.refresh()


def _later(records: dict[str, KeyRecord], than: dict[str, KeyRecord]) -> dict[str, KeyRecord]:
    """The records that are newer than the same key's record in `than`, or missing there."""
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
