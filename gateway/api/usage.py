"""`/v1/usage`: requests, tokens, images and costs by day, key, model and tag."""

import asyncio
import csv
import io
from dataclasses import dataclass
from datetime import date, timedelta  # noqa: TID251 (people ask for days)
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType, field
from starlette.responses import Response

from gateway.api.fields import Data, invalid
from gateway.http.endpoint import Caller, Resource, operation
from gateway.http.errors import unavailable
from gateway.http.exchange import short_hash
from gateway.keys.directory import KeyDirectory
from gateway.keys.usage import NANO, UsageLog, Used, today
from shared.packages.store import StoreError

MAX_DAYS = 366
_GROUPS = ("day", "key", "tag", "model")
_COUNTS = ("requests", "input_tokens", "cached_input_tokens", "output_tokens", "images", "cost")


class UsageQuery(msgspec.Struct, frozen=True):
    """The query of `GET /v1/usage`. Days are of UTC."""

    begin: date | None = field(default=None, name="from")  #: null: the first day of this month
    end: date | None = field(default=None, name="to")  #: the last day; null: today
    by: str = "day,key,model"  #: comma-separated: day, key, tag, model
    format: Literal["json", "csv"] = "json"


class UsageRow(msgspec.Struct):
    """Usage of finished requests. `input_tokens` includes cached tokens."""

    day: date | UnsetType = UNSET
    key: str | UnsetType = UNSET  #: name of the key; of a key in the settings, a hash
    tag: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    requests: int = 0
    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    images: int = 0
    cost: float | None = None  #: dollars; null: no prices are set


class UsageList(Data[UsageRow]):
    """Rows in the order of `by`."""


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
            raise invalid("by", "send some of day, key, tag, model, separated by commas")
        end = query.end or today()
        begin = query.begin or end.replace(day=1)
        if not 0 <= (end - begin).days < MAX_DAYS:
            raise invalid(
                "from",
                f"send a day at most {MAX_DAYS - 1} days before `to`, which is today if it is left out",
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
    """A value that spreadsheets don't interpret as a formula."""
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if is_formula else value
