"""The usage of each key: counted in Redis when a call ends, and saved in the package store if there is one."""

import asyncio
import json
import logging
import time
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta  # noqa: TID251 (usage is per day)

import msgspec
from msgspec import Struct

from gateway.keys.directory import Period
from shared.packages.store import PackageStore, StoreError
from shared.protocol import Call
from shared.queue.api import Budget, GatewayQueue, QueueUnavailable

NANO = 1_000_000_000
KINDS = ("requests", "input", "cached", "output", "images", "cost")
_SAVE_S = 5.0
_MOST_LOAD = 0.1  #: maximum ratio of time spent on saving
_LONGEST_PAUSE_S = 60.0
_EPOCH = date(1970, 1, 1)

logger = logging.getLogger(__name__)


class Used(Struct):
    """One tenant's usage of a model on a day. Unit of the cost: nano-dollars."""

    day: date
    tenant: str
    model: str
    counts: dict[str, int]  #: by kind


class UsageLog:
    """Reads and saves usage.

    Redis counts the usage of a day in a numbered set of sums. If it loses the set, it begins one with another number.
    The usage of a day is the total of its sets. If Redis is restored from an older copy, saved sums replace lower ones.
    """

    def __init__(self, queue: GatewayQueue, durable: PackageStore | None) -> None:
        self._queue = queue
        self._durable = durable
        self._saved: dict[str, dict[str, int]] = {}  # by path
        self._runs: dict[str, str] = {}  # `run_id` of each Redis, by name
        self._reading = asyncio.Lock()  # one at a time, because reading a year is expensive

    async def read(self, first: date, last: date) -> list[Used]:
        """The usage of the days from `first` to `last`, inclusive. Raises: QueueUnavailable, StoreError."""
        sums = await self._sums(first, last)
        return [used for path, each in sums.items() for used in _split(path, each)]

    async def _sums(self, first: date, last: date) -> dict[str, dict[str, int]]:
        days = [first + timedelta(n) for n in range((last - first).days + 1)]
        async with self._reading:
            found = await asyncio.gather(*map(self._of_day, days))
            sums = {_path(day, e): e for day, all_ in zip(days, found, strict=True) for e in all_}
            if self._durable is not None:
                paths = await asyncio.to_thread(self._durable.list, "usage")
                paths = [path for path in paths if _day_of(path) in days]
                saved = await asyncio.gather(*map(self._get, paths))
                for path, data in zip(paths, saved, strict=True):
                    sums[path] = _join(sums.get(path, {}), data)
        return sums

    async def _of_day(self, day: date) -> list[dict[str, int]]:
        """The sums in Redis. With a package store, servers that are down are skipped: the store has their sums."""
        number = (day - _EPOCH).days
        return await self._queue.usage(number, skips_down=self._durable is not None)

    async def _get(self, path: str) -> dict[str, int]:
        assert self._durable is not None
        return json.loads(await asyncio.to_thread(self._durable.get, path) or b"{}")

    async def restore_budget(self, call: Call, budget: Budget) -> None:
        """Write to Redis how much of a budget the tenant of a call has spent. Raises: QueueUnavailable."""
        first = date.fromisoformat(f"{budget.period}-01"[:10])
        last = max(first, today()) if len(budget.period) == 7 else first
        try:
            sums = await self._sums(first, last)
        except StoreError as error:
            raise QueueUnavailable(str(error)) from None
        spent = _costs(sums.values()).get(call.tenant, 0)
        await self._queue.set_spent(call.id, call.tenant, budget, spent)

    async def keep_saved(self) -> None:
        """Save today's and yesterday's usage every few seconds, and restore the sums of a restarted Redis."""
        while self._durable is not None:
            began_at = time.monotonic()
            try:
                await self._restore()
                for day in (today() - timedelta(1), today()):
                    for sums in await self._of_day(day):
                        await self._save(self._durable, _path(day, sums), sums)
            except (QueueUnavailable, StoreError, OSError) as error:
                logger.warning("cannot save the usage of the API keys: %s", error)
            took_s = time.monotonic() - began_at
            await asyncio.sleep(min(max(_SAVE_S, took_s / _MOST_LOAD), _LONGEST_PAUSE_S))

    async def _restore(self) -> None:
        """If a Redis was started or failed over since the last call, raise its sums and budgets to the saved ones."""
        servers = await self._queue.servers()
        runs = {name: info.get("run_id", "") for name, info in servers.items()}
        if all(self._runs.get(name) == run for name, run in runs.items()):
            return
        yesterday = today() - timedelta(1)
        for path, each in (await self.raise_budgets()).items():
            if (day := _day_of(path)) >= yesterday:
                await self._queue.raise_usage((day - _EPOCH).days, each)
        self._runs |= runs

    async def raise_budgets(self) -> dict[str, dict[str, int]]:
        """Raise the spending of budgets to the counted costs. Returns the sums of this month and yesterday."""
        now = today()
        sums = await self._sums(min(now.replace(day=1), now - timedelta(1)), now)
        for period in (now.isoformat()[:7], now.isoformat()):
            of_period = [each for path, each in sums.items() if path.startswith(f"usage/{period}")]
            spent = await asyncio.to_thread(_costs, of_period)
            await self._queue.raise_spent(period, spent)
        return sums

    async def _save(self, durable: PackageStore, path: str, sums: dict[str, int]) -> None:
        if self._saved.get(path) == sums:
            return
        # Keep the higher counts: Redis may have been restored from an older copy.
        joined = _join(sums, await self._get(path))
        await asyncio.to_thread(durable.write, path, [msgspec.json.encode(joined)])
        self._saved = {path: sums, **dict(list(self._saved.items())[:9])}


def today() -> date:
    return datetime.now(UTC).date()


def period_of(period: Period, now: float) -> tuple[str, float]:
    """Name and end of the day or month that contains `now`."""
    at = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "day":
        return at.date().isoformat(), (at + timedelta(1)).timestamp()
    end = (at.replace(day=1) + timedelta(32)).replace(day=1)
    return at.strftime("%Y-%m"), end.timestamp()


def _day_of(path: str) -> date:
    return date.fromisoformat(path.split("/")[1])


def _costs(all_: Iterable[dict[str, int]]) -> dict[str, int]:
    costs: dict[str, int] = {}
    for sums in all_:
        for name, amount in sums.items():
            if name.startswith("cost "):
                tenant = name.split(" ", 2)[1]
                costs[tenant] = costs.get(tenant, 0) + amount
    return costs


def _path(day: date, sums: dict[str, int]) -> str:
    return f"usage/{day.isoformat()}/{sums.get('', 0)}.json"


def _join(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    names = first.keys() | second.keys()
    return {name: max(first.get(name, 0), second.get(name, 0)) for name in names}


def _split(path: str, sums: dict[str, int]) -> Iterable[Used]:
    day, found = _day_of(path), {}
    for name, amount in sums.items():
        if name:
            kind, tenant, model = name.split(" ", 2)
            model = model.partition("@")[0]  # without the version of a deployment
            found.setdefault((tenant, model), dict.fromkeys(KINDS, 0))[kind] += amount
    return [Used(day, tenant, model, counts) for (tenant, model), counts in found.items()]
