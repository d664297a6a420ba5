"""`/v1/admin/keys`: create, list, change, rotate and revoke API keys; `/v1/admin/audit`: the log of changes;
`/v1/usage`: requests, tokens, images and costs by day, key, model and tag.
"""

import asyncio
import csv
import io
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import date, timedelta  # noqa: TID251 (reports are by calendar day)
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType, field
from starlette.responses import Response

from gateway.api.fields import Data, NewestQuery, invalid
from gateway.batches import Batches
from gateway.calls.lifecycle import Lifecycle
from gateway.http.endpoint import Caller, Resource, operation, owner_of
from gateway.http.errors import InvalidRequest, NotFound, conflict, unavailable
from gateway.http.exchange import short_hash
from gateway.keys.audit import AuditEntry, AuditLog
from gateway.keys.directory import (
    MAX_KEYS,
    Conflict,
    KeyDirectory,
    KeyRecord,
    Period,
    Role,
    new_key,
    next_version,
)
from gateway.keys.usage import NANO, UsageLog, Used, today
from gateway.search import SearchClient
from shared.packages.store import StoreError
from shared.protocol import Priority
from shared.search import DropFile, DropStore, ListFiles, ListStores, Page
from shared.sessions.store import SessionStore

_PATH = "/v1/admin/keys"
_MAX = 2**31
_PAGE = 100
_ENDS_WITHIN_S = 20.0  #: time limit for cancelled batches to end
_POLL_S = 0.2
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$(?!\n)"

_NAME_HINT = (
    "Send 1 to 64 letters, digits, dots, dashes and underscores, and begin with a letter or digit."
)
_DEFAULTS = {each.name: each.default for each in msgspec.structs.fields(KeyRecord)}

Limit = Annotated[int, Meta(ge=1, le=_MAX)] | UnsetType | None
Pattern = Annotated[str, Meta(min_length=1, max_length=256)]
Patterns = Annotated[tuple[Pattern, ...], Meta(min_length=1, max_length=64)]
MAX_DAYS = 366
_GROUPS = ("day", "key", "tag", "model")
_COUNTS = ("requests", "input_tokens", "cached_input_tokens", "output_tokens", "images", "cost")


class UpdateKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `PATCH /v1/admin/keys/{name}`. Omitted fields stay unchanged; null removes a limit."""

    #: Patterns of model names, such as `qwen*`; null: all models.
    models: Patterns | UnsetType | None = UNSET
    requests_per_minute: Limit = UNSET  #: per model; null: the default of the settings
    tokens_per_minute: Limit = UNSET
    open_requests: Limit = UNSET
    expires_in_s: Limit = UNSET  #: from now
    max_output_tokens: Limit = UNSET  #: of each answer
    max_priority: Priority | UnsetType = UNSET
    budget: Annotated[float, Meta(gt=0, le=1e6)] | UnsetType | None = UNSET  #: dollars
    period: Period | UnsetType = UNSET  #: of the budget, in UTC
    tag: Annotated[str, Meta(max_length=64)] | UnsetType = UNSET  #: label in usage reports

    def changes(self, now: float) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in UpdateKey.__struct_fields__:
            value = getattr(self, name)
            if value is not UNSET and name == "expires_in_s":
                found["expires_at"] = now + value if value else 0.0
            elif value is not UNSET:
                found[name] = _DEFAULTS[name] if value is None else value
        return found


class CreateKey(UpdateKey, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/admin/keys`."""

    name: Annotated[str, Meta(pattern=_NAME)]
    roles: Annotated[tuple[Role, ...], Meta(min_length=1, max_length=4)] = ("use",)


class KeyObject(msgspec.Struct):
    """Properties of a key, without the key itself. Times: epoch seconds."""

    name: str
    state: str  #: `active`, `expired` or `revoked`
    roles: tuple[Role, ...]
    models: tuple[str, ...] | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    open_requests: int | None
    created_at: int
    changed_at: int
    expires_at: int | None
    max_output_tokens: int | None
    max_priority: Priority
    budget: float | None
    period: Period
    tag: str
    object: str = "key"


class NewKey(KeyObject):
    """A new or rotated key. `key` is the key itself, which only this answer contains."""

    key: str = ""


class KeyList(Data[KeyObject]):
    """All keys, sorted by name."""


class AuditList(Data[AuditEntry]):
    """Audit entries, newest first."""


class Forgotten(msgspec.Struct):
    """Numbers of deleted objects."""

    answers: int = 0  #: stored answers of `/v1/responses`, and uploaded images
    sessions: int = 0
    batches: int = 0  #: with their files
    vector_stores: int = 0
    files: int = 0  #: files for vector stores
    object: str = "key.forgotten"


@dataclass(frozen=True, slots=True)
class TenantData:
    """Deletes the data of tenants in all stores."""

    _lifecycle: Lifecycle
    _sessions: SessionStore
    _batches: Batches | None
    _look_for_batches: Callable[[], None]
    _search: SearchClient

    async def forget(self, tenant: str, found: Forgotten) -> None:
        """Delete and count a tenant's data. Idempotent. Raises: ApiError, QueueUnavailable, StoreError."""
        found.answers += await self._lifecycle.kept.delete_all(tenant)
        found.sessions += await self._forget_sessions(owner_of(tenant, "session"))
        owner = owner_of(tenant)
        if self._batches is not None:
            found.batches += await self._forget_batches(self._batches, owner)
        if self._search.is_on:
            page = Page(limit=_PAGE)
            while stores := [
                each
                for each in await self._search.ask(ListStores(tenant=owner, page=page))
                if not each.is_read_only  # read-only stores are shared by all tenants
            ]:
                for store in stores:
                    await self._search.ask(DropStore(tenant=owner, store=store.id))
                found.vector_stores += len(stores)
            while files := await self._search.ask(ListFiles(tenant=owner, page=page)):
                for file in files:
                    await self._search.ask(DropFile(tenant=owner, file=file.id))
                found.files += len(files)

    async def end_sessions(self, tenant: str) -> None:
        """Close a tenant's sessions and cancel their tasks. Idempotent. Raises: QueueUnavailable."""
        queue = self._lifecycle.dispatcher.queue
        owner, after, has_more = owner_of(tenant, "session"), "", True
        while has_more and (page := await self._sessions.page(owner, after, _PAGE, 0)) is not None:
            found, has_more = page
            for session in [each.session for each in found]:
                await self._sessions.close_session(session)
                for task in await self._sessions.tasks(session.id):
                    await queue.cancel(task.model, [task.request_id])
                after = session.id

    async def _forget_batches(self, batches: Batches, owner: str) -> int:
        """Raises: Overloaded if a batch does not end in time."""
        until = time.monotonic() + _ENDS_WITHIN_S
        while await asyncio.to_thread(batches.cancel_all, owner):
            if time.monotonic() > until:
                raise unavailable()
            self._look_for_batches()
            await asyncio.sleep(_POLL_S)
        return await asyncio.to_thread(batches.forget, owner)

    async def _forget_sessions(self, owner: str) -> int:
        queue, num_forgotten = self._lifecycle.dispatcher.queue, 0
        while (page := await self._sessions.page(owner, "", _PAGE, 0)) is not None and page[0]:
            for state in page[0]:
                session = state.session
                for task in await self._sessions.tasks(session.id):
                    await queue.cancel(task.model, [task.request_id])
                    known = await queue.state(task.model, task.request_id)
                    if known is not None and known.attempt:
                        await queue.result(task.model, task.request_id, known.attempt, is_last=True)
                    await queue.forget(task.model, task.request_id, failed_only=False)
                if session.common is not None:
                    self._lifecycle.blobs.release(session.id, [session.common])
                await self._sessions.forget(session)
            num_forgotten += len(page[0])
        return num_forgotten


@dataclass
class Audit(Resource):
    tag = "keys"
    access = "admin"

    _log: AuditLog

    @operation("GET", "/v1/admin/audit")
    async def list_audit_entries(self, caller: Caller, query: NewestQuery) -> AuditList:
        """List the requests that changed keys, deployments, nodes or adapters, and their callers, newest first."""
        return AuditList(await self._log.read(query.limit))


@dataclass
class Keys(Resource):
    tag = "keys"
    access = "admin"

    _keys: KeyDirectory | None
    _data: TenantData
    _has_prices: bool
    _raise_budgets: Callable[[], Awaitable[object]]  #: makes new budgets include earlier usage

    def to_error(self, error: Exception) -> Exception:
        if isinstance(error, Conflict):
            message = "The key was changed at the same time: read it again, then retry."
            return conflict(message)
        return unavailable() if isinstance(error, StoreError | OSError) else error

    @operation("POST", _PATH, hints={"name": _NAME_HINT})
    async def create_key(self, caller: Caller, body: CreateKey) -> NewKey:
        """Create a key. Only this answer contains the key itself."""
        keys = await self._fresh()
        if body.name in keys.records:
            message = "There is a key of this name: send another name, or rotate the key."
            raise conflict(message, code="key_exists", param="name")
        self._check_budget(body)
        if len(keys.records) >= MAX_KEYS:
            raise invalid("name", f"there are {MAX_KEYS} keys, the maximum; rotate one instead")
        key, digest = new_key()
        now = time.time()  # noqa: TID251
        record = KeyRecord(
            body.name, 1, digest, secrets.token_hex(16), body.roles,
            created_at=now, changed_at=now, **body.changes(now),
        )  # fmt: skip
        return await self._write(keys, record, key)

    @operation("GET", _PATH)
    async def list_keys(self, caller: Caller) -> KeyList:
        """List the keys."""
        keys = await self._fresh()
        return KeyList([_to_object(keys.records[name]) for name in sorted(keys.records)])

    @operation("GET", _PATH + "/{name}")
    async def retrieve_key(self, caller: Caller) -> KeyObject:
        """Show a key."""
        return _to_object(_find(await self._fresh(), caller))

    @operation("PATCH", _PATH + "/{name}")
    async def update_key(self, caller: Caller, body: UpdateKey) -> KeyObject:
        """Change limits of a key. All gateways apply the change within two seconds."""
        keys = await self._fresh()
        record = _find_active(keys, caller)
        self._check_budget(body)
        if not (changes := body.changes(time.time())):  # noqa: TID251
            raise InvalidRequest("Send at least one field to change.", code="missing_field")
        if "budget" in changes or "period" in changes:
            await self._raise_budgets()
        record = next_version(record, **changes)
        await keys.write(record)
        return _to_object(record)

    @operation("POST", _PATH + "/{name}:rotate")
    async def rotate_key(self, caller: Caller) -> NewKey:
        """Replace a key. Name, data and limits stay the same. Only this answer contains the new key."""
        keys = await self._fresh()
        record = _find_active(keys, caller)
        key, digest = new_key()
        return await self._write(keys, next_version(record, digest=digest), key)

    @operation("DELETE", _PATH + "/{name}")
    async def revoke_key(self, caller: Caller) -> KeyObject:
        """Revoke a key: its open requests end, and all gateways refuse it within two seconds."""
        keys = await self._fresh()
        record = _find(keys, caller)
        now = time.time()  # noqa: TID251
        admins = [k for k in keys.records.values() if "admin" in k.roles and k.is_active(now)]
        if admins == [record]:
            message = "This is the last key with the role admin: create another one first."
            raise conflict(message, code="last_admin_key", param="name")
        if not record.is_revoked:
            record = next_version(record, is_revoked=True)
            await keys.write(record)
        await self._data.end_sessions(record.tenant)
        return _to_object(record)

    @operation("POST", _PATH + "/{name}:forget")
    async def forget_key(self, caller: Caller) -> Forgotten:
        """Delete all stored data of a key, or of a caller with an OpenID Connect token, given as `KEY:NAME`."""
        keys, name = await self._fresh(), caller.path["name"]
        tenants = await keys.guests_of(name) if ":" in name else [_find(keys, caller).tenant]
        if not tenants:
            message = "No caller with a token has this name: `vlm usage` lists recent callers."
            raise NotFound(message, param="name", code="key_not_found")
        total = Forgotten()
        for tenant in tenants:
            await self._data.forget(tenant, total)
        return total

    def _check_budget(self, body: UpdateKey) -> None:
        if body.budget and not self._has_prices:
            raise invalid(
                "budget", "a budget needs prices: set VLM_GATEWAY__PRICES for all gateways"
            )

    async def _fresh(self) -> KeyDirectory:
        """The directory with the latest changes of other gateways. Raises: NotFound, RedisError, StoreError."""
        if self._keys is None:
            raise NotFound(
                "Keys are off: set VLM_GATEWAY__ROOT_KEY for all gateways.", code="keys_off"
            )
        await self._keys.refresh()
        return self._keys

    async def _write(self, keys: KeyDirectory, record: KeyRecord, key: str) -> NewKey:
        await keys.write(record)
        shown = msgspec.structs.asdict(_to_object(record))
        return NewKey(**shown, key=key)


def _find(keys: KeyDirectory, caller: Caller) -> KeyRecord:
    record = keys.records.get(caller.path["name"])
    if record is None:
        message = "There is no key of this name: `vlm keys list` lists the keys."
        raise NotFound(message, param="name", code="key_not_found")
    return record


def _find_active(keys: KeyDirectory, caller: Caller) -> KeyRecord:
    record = _find(keys, caller)
    if record.is_revoked:
        raise conflict("This key is revoked: create another one.", code="key_revoked", param="name")
    if not record.is_active(time.time()):  # noqa: TID251
        raise conflict(
            "This key has expired: create another one.", code="key_expired", param="name"
        )
    return record


def _to_object(record: KeyRecord) -> KeyObject:
    state = "active" if record.is_active(time.time()) else "expired"  # noqa: TID251
    return KeyObject(
        record.name, "revoked" if record.is_revoked else state, record.roles, record.models or None,
        record.requests_per_minute or None, record.tokens_per_minute or None, record.open_requests or None,
        int(record.created_at), int(record.changed_at), int(record.expires_at) or None,
        record.max_output_tokens or None, record.max_priority,
        record.budget or None, record.period, record.tag,
    )  # fmt: skip


class UsageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of `GET /v1/usage`. Days are in UTC."""

    begin: date | None = field(default=None, name="from")  #: null: the first day of this month
    end: date | None = field(default=None, name="to")  #: the last day; null: today
    by: str = "day,key,model"  #: comma-separated: day, key, tag, model
    format: Literal["json", "csv"] = "json"


class UsageRow(msgspec.Struct):
    """Usage of finished requests. `input_tokens` includes cached tokens."""

    day: date | UnsetType = UNSET
    key: str | UnsetType = UNSET  #: name of the key, or a hash for a key from the settings
    tag: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    requests: int = 0
    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    images: int = 0
    cost: float | None = None  #: dollars; null: no prices are set


class UsageList(Data[UsageRow]):
    """Rows, sorted by the values of the columns in `by`."""


@dataclass
class UsageReport(Resource):
    """Usage of all keys if the caller has the root key or the role `admin`, else of the caller's key."""

    tag = "keys"
    access = "any"

    _log: UsageLog
    _keys: KeyDirectory | None
    _root: str | None  #: tenant of the root key
    _has_prices: bool

    def to_error(self, error: Exception) -> Exception:
        return unavailable() if isinstance(error, StoreError | OSError) else error

    @operation("GET", "/v1/usage")
    async def list_usage(self, caller: Caller, query: UsageQuery) -> UsageList | Response:
        """List the usage of finished requests."""
        groups = query.by.split(",")
        if not set(groups) <= set(_GROUPS):
            raise invalid("by", "send one or more of day, key, tag, model, separated by commas")
        end = query.end or today()
        begin = query.begin or end.replace(day=1)
        if not 0 <= (end - begin).days < MAX_DAYS:
            raise invalid(
                "from",
                f"send a day at most {MAX_DAYS - 1} days before `to`, which is today by default",
            )
        if end > today() + timedelta(1):
            raise invalid("to", "send a day that is not in the future")
        tenant = caller.context.tenant
        key = None if self._keys is None else self._keys.of(tenant)
        sees_all = tenant == self._root or (key is not None and "admin" in key.roles)
        found = await self._log.read(begin, end)
        if self._keys is not None:
            await self._keys.know(each.tenant for each in found)
        rows = await asyncio.to_thread(
            self._sum, [each for each in found if sees_all or each.tenant == tenant], groups
        )
        if query.format == "json":
            return UsageList(rows)
        return Response(_to_csv(rows, groups), media_type="text/csv")

    def _sum(self, found: list[Used], groups: list[str]) -> list[UsageRow]:
        rows: dict[tuple[str, ...], UsageRow] = {}
        for each in found:
            key = None if self._keys is None else self._keys.of(each.tenant)
            named: dict[str, Any] = {
                "day": each.day,
                "key": short_hash(each.tenant) if key is None else key.name,
                "tag": "" if key is None else key.tag,
                "model": each.model,
            }
            named = {name: named[name] for name in groups}
            row = rows.setdefault(tuple(map(str, named.values())), UsageRow(**named))
            counts = each.counts
            row.requests += counts["requests"]
            row.input_tokens += counts["input"]
            row.cached_input_tokens += counts["cached"]
            row.output_tokens += counts["output"]
            row.images += counts["images"]
            if self._has_prices:
                row.cost = round((row.cost or 0.0) + counts["cost"] / NANO, 9)
        return [rows[name] for name in sorted(rows)]


def _to_csv(rows: list[UsageRow], groups: list[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    columns = [name for name in _GROUPS if name in groups] + list(_COUNTS)
    writer.writerow(columns)
    writer.writerows([_cell(getattr(row, name)) for name in columns] for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    """Quote a text that a spreadsheet would evaluate as a formula."""
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if is_formula else value
