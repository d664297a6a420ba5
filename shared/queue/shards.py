"""Several Redis servers as shards of one queue. All keys of a request are on one shard, as its scripts require.

The id of a call ends with the name of its shard: `ID-0@NAME`. Rendezvous hashing ranks the shards for each request; the
request goes to the first shard that is up. After a shard has been down for `LOST_AFTER_S`, its open calls go to another
shard, under new ids. The first shard also stores data without a request: workers, deployments, sessions and records.
"""

import asyncio
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, suppress
from hashlib import blake2b
from typing import Any, TypeVar

from msgspec.structs import replace
from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.process import Pauses, cancel
from shared.protocol import ErrorCode
from shared.queue.api import (
    Affinity,
    Budget,
    GatewayQueue,
    Limits,
    OpenRequest,
    QueueStats,
    QueueUnavailable,
    RequestState,
    Reservation,
    Submission,
    Submitted,
    shard_of,
)
from shared.queue.gateway import RedisGatewayQueue, RedisMailbox
from shared.queue.keys import AFTER_DEADLINE_S, RedisKeys
from shared.redis.client import create_redis
from shared.settings import SettingsError
from shared.settings.tree import RedisSettings

#: When a shard has been down for this long, its open calls are submitted to another shard, under new ids.
LOST_AFTER_S = 4.0
#: Limits of a tenant below this number per shard are not divided: all requests of the tenant go to one shard.
SMALL = 16
_PROBE_EVERY_S = 0.5
_NOTE_AHEAD_S = 30.0

Result = TypeVar("Result")


class Shard:
    def __init__(self, name: str, settings: RedisSettings, on_lost: Callable[[str], None]) -> None:
        self.name = name
        self.redis: Redis = create_redis(settings)
        self.queue = RedisGatewayQueue(self.redis, settings.key_prefix)
        self._on_lost = on_lost
        self._probing: asyncio.Task[None] | None = None
        self._down_since = 0.0
        self._pauses = Pauses(longest_s=8.0, stable_after_s=10.0)
        self._is_closed = False

    @property
    def is_up(self) -> bool:
        return self._probing is None

    @property
    def is_lost(self) -> bool:
        return not self.is_up and time.monotonic() - self._down_since > LOST_AFTER_S

    def note_failure(self) -> None:
        """Send no new requests to the shard until it answers again.

        Pauses before probes double while probes succeed but requests fail, such as on a server whose memory is full.
        """
        if self._probing is None and not self._is_closed:
            self._down_since = time.monotonic()
            self._probing = asyncio.create_task(self._probe(), name=f"probe shard {self.name}")

    async def ask(
        self, call: Coroutine[Any, Any, Result], failure: type[Exception] = QueueUnavailable
    ) -> Result:
        """Run a call to this shard. While the shard is down, the call fails immediately.

        `failure`: the exception of a call that the server did not answer. Raises: `failure`.
        """
        if not self.is_up:
            call.close()
            raise failure(f"the shard {self.name} is down")
        try:
            return await call
        except failure:
            self.note_failure()
            raise

    async def _probe(self) -> None:
        await asyncio.sleep(self._pauses.next_s())
        while True:
            try:
                await self.queue.open()
                break
            except QueueUnavailable:
                if self.is_lost:
                    self._on_lost(self.name)
                await asyncio.sleep(_PROBE_EVERY_S)
        self._pauses.started()
        self._probing = None

    async def close(self) -> None:
        self._is_closed = True
        await cancel(self._probing)
        await self.queue.close()
        await self.redis.aclose()


class Shards:
    """All shards. `on_lost` is called repeatedly with the name of a lost shard, until it answers."""

    def __init__(
        self, settings: RedisSettings, on_lost: Callable[[str], None] = lambda name: None
    ) -> None:
        self.all = [Shard(name, each, on_lost) for name, each in settings.shards.items()]
        self._by_name = {shard.name: shard for shard in self.all}

    def __len__(self) -> int:
        return len(self.all)

    def find(self, call_id: str) -> Shard:
        """The shard of a call. Raises: QueueUnavailable if it was removed."""
        name = shard_of(call_id)
        if not name:
            return self.all[0]
        if name not in self._by_name:
            raise QueueUnavailable(f"there is no shard {name!r}")
        return self._by_name[name]

    def rank(self, name: str) -> list[Shard]:
        """All shards in the order for `name`, by rendezvous hashing."""

        def weight(shard: Shard) -> bytes:
            return blake2b(f"{shard.name} {name}".encode(errors="surrogatepass")).digest()

        return sorted(self.all, key=weight)

    def group(self, call_ids: Sequence[str]) -> list[tuple[Shard, list[str]]]:
        """The calls of each shard, without calls of removed shards."""
        found: dict[str, tuple[Shard, list[str]]] = {}
        for call_id in call_ids:
            try:
                shard = self.find(call_id)
            except QueueUnavailable:
                continue
            found.setdefault(shard.name, (shard, []))[1].append(call_id)
        return list(found.values())

    async def close(self) -> None:
        await asyncio.gather(*(shard.close() for shard in self.all))


class ShardedGatewayQueue(GatewayQueue):
    """A `GatewayQueue` over shards."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._noted: dict[str, float] = {}  # by shard: until when it may have requests

    def place(
        self, request_id: str, tenant: str, limits: Limits | None, affinity: Affinity | None
    ) -> str:
        name = request_id
        if limits is not None and self._is_small(limits):
            name = f"tenant {tenant}"
        elif affinity is not None:
            name = affinity.name
        ranked = self._shards.rank(name)
        return f"@{next((shard for shard in ranked if shard.is_up), ranked[0]).name}"

    def is_lost(self, request_id: str) -> bool:
        return self._shards.find(request_id).is_lost

    def _is_small(self, limits: Limits) -> bool:
        of_tenant = (
            limits.max_tenant_requests,
            limits.max_tenant_requests_per_minute,
            limits.max_tenant_tokens_per_minute,
        )
        return limits.has_budget or any(0 < most < SMALL * len(self._shards) for most in of_tenant)

    def _share(self, reservation: Reservation) -> Reservation:
        """The reservation with the part of its limits that one shard enforces."""
        limits = reservation.limits

        def part(most: int) -> int:
            return -(-most // len(self._shards))

        if self._is_small(limits):
            limits = replace(limits, max_tokens=part(limits.max_tokens))
        else:
            limits = Limits(
                part(limits.max_tokens),
                part(limits.max_tenant_requests),
                part(limits.max_tenant_requests_per_minute),
                part(limits.max_tenant_tokens_per_minute),
            )
        return replace(reservation, limits=limits)

    async def submit(self, calls: Submission) -> Submitted:
        shard = self._shards.find(calls.choices[0].id)
        await self._note(shard, calls.timeout_s + AFTER_DEADLINE_S)
        part = replace(
            calls,
            max_waiting=-(-calls.max_waiting // len(self._shards)),
            reservation=calls.reservation and self._share(calls.reservation),
        )
        return await shard.ask(shard.queue.submit(part))

    async def _note(self, shard: Shard, lives_s: float) -> None:
        """Record how long the shard may have requests, for `check_shards`."""
        now = time.time()  # noqa: TID251
        if self._noted.get(shard.name, 0.0) < now + lives_s:
            until, first = now + lives_s + _NOTE_AHEAD_S, self._shards.all[0]
            with suppress(QueueUnavailable):
                await first.ask(first.queue.note_shard(shard.name, until))
                self._noted[shard.name] = until

    async def share(self, model: str, request_ids: Sequence[str]) -> int:
        groups = self._shards.group(request_ids)
        calls = [shard.ask(shard.queue.share(model, ids)) for shard, ids in groups]
        return sum(await asyncio.gather(*calls))

    async def cancel(
        self, model: str, request_ids: Sequence[str], *, is_lost: bool = False
    ) -> None:
        groups = self._shards.group(request_ids)
        calls = (s.ask(s.queue.cancel(model, ids, is_lost=is_lost)) for s, ids in groups)
        await asyncio.gather(*calls)

    async def refund(self, reservation: Reservation) -> bool:
        shard = self._shards.find(reservation.request_ids[0])
        return await shard.ask(shard.queue.refund(self._share(reservation)))

    async def states(self, model: str, request_ids: Sequence[str]) -> list[RequestState | None]:
        groups = self._shards.group(request_ids)
        calls = [shard.ask(shard.queue.states(model, ids)) for shard, ids in groups]
        found: dict[str, RequestState | None] = {}
        for (_, ids), states in zip(groups, await asyncio.gather(*calls), strict=True):
            found |= zip(ids, states, strict=True)
        return [found.get(request_id) for request_id in request_ids]

    async def open_requests(self, models: Collection[str], limit: int) -> list[OpenRequest]:
        """The open requests of the shards that are up."""
        calls = [shard.ask(shard.queue.open_requests(models, limit)) for shard in self._shards.all]
        found = await asyncio.gather(*calls, return_exceptions=True)
        there = [each for of_shard in found if isinstance(of_shard, list) for each in of_shard]
        return sorted(there, key=lambda each: each.age_s)[:limit]

    async def usage(self, day: int, *, skips_down: bool) -> list[dict[str, int]]:
        calls = [
            each.ask(each.queue.usage(day, skips_down=skips_down)) for each in self._shards.all
        ]
        found = await asyncio.gather(*calls, return_exceptions=skips_down)
        return [sums for of_shard in found if isinstance(of_shard, list) for sums in of_shard]

    async def set_spent(self, call_id: str, tenant: str, budget: Budget, amount: int) -> None:
        shard = self._shards.find(call_id)
        await shard.ask(shard.queue.set_spent(call_id, tenant, budget, amount))

    async def raise_usage(self, day: int, sums: Mapping[str, int]) -> None:
        calls = [s.ask(s.queue.raise_usage(day, sums)) for s in self._shards.all if s.is_up]
        await asyncio.gather(*calls)

    async def raise_spent(self, period: str, spent: Mapping[str, int]) -> None:
        calls = [s.ask(s.queue.raise_spent(period, spent)) for s in self._shards.all if s.is_up]
        await asyncio.gather(*calls)

    async def events(self, model: str, request_id: str) -> list[bytes]:
        shard = self._shards.find(request_id)
        return await shard.ask(shard.queue.events(model, request_id))

    async def listen(self, model: str, request_id: str, gateway_id: str) -> RequestState | None:
        shard = self._shards.find(request_id)
        return await shard.ask(shard.queue.listen(model, request_id, gateway_id))

    async def forget(self, model: str, request_id: str, *, failed_only: bool) -> None:
        shard = self._shards.find(request_id)
        await shard.ask(shard.queue.forget(model, request_id, failed_only=failed_only))

    async def confirm(self, model: str, request_ids: Sequence[str]) -> None:
        groups = self._shards.group(request_ids)
        await asyncio.gather(*(shard.queue.confirm(model, ids) for shard, ids in groups))

    async def result(
        self, model: str, request_id: str, attempt: int, *, is_last: bool
    ) -> bytes | None:
        shard = self._shards.find(request_id)
        return await shard.ask(shard.queue.result(model, request_id, attempt, is_last=is_last))

    async def stats(self, model: str) -> QueueStats:
        """The sum of the shards that are up."""
        calls = [shard.ask(shard.queue.stats(model)) for shard in self._shards.all]
        found = await asyncio.gather(*calls, return_exceptions=True)
        there = [stats for stats in found if isinstance(stats, QueueStats)]
        if not there:
            raise QueueUnavailable("no shard answers")
        return QueueStats(
            sum(stats.num_open for stats in there),
            sum(stats.num_backlog for stats in there),
            max(stats.age_s for stats in there),
            is_whole=len(there) == len(found),
        )

    async def servers(self) -> dict[str, dict[str, str]]:
        calls = [shard.ask(shard.queue.servers()) for shard in self._shards.all]
        found = await asyncio.gather(*calls, return_exceptions=True)
        return {
            shard.name: servers[""]
            for shard, servers in zip(self._shards.all, found, strict=True)
            if isinstance(servers, dict)
        }

    async def fail_all(self, model: str, code: ErrorCode, message: str) -> int:
        calls = [s.ask(s.queue.fail_all(model, code, message)) for s in self._shards.all]
        return sum(await asyncio.gather(*calls))

    async def crash_tenants(self, model: str, worker_id: str) -> frozenset[str]:
        calls = [s.ask(s.queue.crash_tenants(model, worker_id)) for s in self._shards.all]
        return frozenset().union(*await asyncio.gather(*calls))

    async def open(self) -> None:
        await asyncio.gather(
            *(shard.ask(shard.queue.open()) for shard in self._shards.all), return_exceptions=True
        )

    async def close(self) -> None:
        await self._shards.close()


class ShardedMailbox:
    """A `Mailbox` with one mailbox per shard. Mailboxes of shards that are down are opened once they are up."""

    def __init__(
        self,
        shards: Shards,
        settings: RedisSettings,
        gateway_id: str,
        on_gap: Callable[[str], None],
        is_needed: Callable[[str], bool],
    ) -> None:
        self.gateway_id = gateway_id
        self._on_gap = on_gap
        self._is_needed = is_needed
        self._redis = [create_redis(each, blocking=True) for each in settings.shards.values()]
        self._boxes: list[tuple[Shard, RedisMailbox]] = [
            (
                shard,
                RedisMailbox(
                    redis,
                    settings.key_prefix,
                    gateway_id,
                    on_gap,
                    is_needed,
                    on_failure=shard.note_failure,
                ),
            )
            for shard, redis in zip(shards.all, self._redis, strict=True)
        ]
        self._models: set[str] = set()
        self._tasks: list[asyncio.Task[Any]] = []

    async def open(self, models: Iterable[str]) -> None:
        models = list(models)
        self._models.update(models)
        missing = [each for each in self._boxes if not each[1].models.issuperset(models)]
        calls = [shard.ask(box.open(models)) for shard, box in missing]
        await asyncio.gather(*calls, return_exceptions=True)

    async def events(self) -> AsyncIterator[tuple[str, bytes]]:
        arrived: asyncio.Queue[tuple[str, bytes] | Exception] = asyncio.Queue(maxsize=1000)

        async def read(box: RedisMailbox) -> None:
            try:
                async for event in box.events():
                    await arrived.put(event)
            except Exception as error:
                await arrived.put(error)

        await cancel(*self._tasks)
        self._tasks = [asyncio.create_task(read(box)) for _, box in self._boxes]
        self._tasks.append(asyncio.create_task(self._open_later()))
        while True:
            event = await arrived.get()
            if isinstance(event, Exception):
                raise event
            yield event

    async def _open_later(self) -> None:
        while True:
            await asyncio.sleep(_PROBE_EVERY_S)
            self._models = {model for model in self._models if self._is_needed(model)}
            for shard, box in self._boxes:
                if shard.is_up and (missing := self._models - box.models):
                    try:
                        await shard.ask(box.open(missing))
                    except QueueUnavailable:
                        continue
                    for model in missing:
                        self._on_gap(model)

    async def close(self) -> None:
        await cancel(*self._tasks)
        await asyncio.gather(*(box.close() for _, box in self._boxes))
        for redis in self._redis:
            await redis.aclose()


def create_gateway_queue(settings: RedisSettings, redis: Redis) -> GatewayQueue:
    """Create the queue: on `redis` if the settings have one server, otherwise on all shards."""
    if len(settings.shards) == 1:
        return RedisGatewayQueue(redis, settings.key_prefix)
    return ShardedGatewayQueue(Shards(settings))


async def check_shards(settings: RedisSettings) -> None:
    """If Redis answers, check that the settings have all shards that may have requests. Raises: SettingsError."""
    async with aclosing(create_redis(settings)) as redis:
        try:
            noted: dict[Any, Any] = await redis.hgetall(RedisKeys(settings.key_prefix).shards)
            seconds, _ = await redis.time()
        except (RedisError, OSError):
            return
    for name, until in noted.items():
        left_s = float(until) - seconds
        if name.decode() not in settings.shards and left_s > 0:
            raise SettingsError(
                f"VLM_REDIS_URL: the shard {name.decode()} is missing and may have requests for another "
                f"{left_s:.0f} s: add it, or wait"
            )
