"""What remains after all requests have ended: keys in Redis, and resources of processes."""

from dataclasses import dataclass

import psutil
from redis.asyncio import Redis

from shared.queue.keys import GROUP

MIB = 1024 * 1024


async def redis_leftovers(redis: Redis, prefix: str) -> list[str]:
    """Describes what should not be in Redis after every request has ended."""
    found: list[str] = []
    async for raw in redis.scan_iter(match=f"{prefix}:*", count=1000):
        key = raw.decode()
        if await redis.pttl(key) == -1:
            found.append(f"{key} never expires")
        kind = key.removeprefix(prefix).partition(":{")[2].partition("}:")[2].partition(":")[0]
        if kind == "queue":
            found += await _queue_leftovers(redis, key)
        elif kind == "backlog":
            found += [f"{key} holds {num} requests"] if (num := await redis.xlen(key)) else []
        elif kind == "reservations":
            if await redis.zcount(key, 1, "+inf"):
                found.append(f"{key} counts what is open")
        elif kind == "request":
            state = await redis.hget(key, "state")
            if state in (b"queued", b"running"):
                found.append(f"{key} is still {state.decode()}")
    return found


async def _queue_leftovers(redis: Redis, key: str) -> list[str]:
    num_entries = 0
    for _, fields in await redis.xrange(key):
        num_entries += b"id" in fields  # a wakeup is deleted by the worker that reads it
    groups = {g["name"]: g["pending"] for g in await redis.xinfo_groups(key)}
    num_pending = groups.get(GROUP.encode(), 0)
    found = [f"{key} holds {num_entries} requests"] if num_entries else []
    return found + ([f"{key} has {num_pending} pending entries"] if num_pending else [])


@dataclass(frozen=True, slots=True)
class Resources:
    num_threads: int
    num_files: int
    num_connections: int
    rss_bytes: int

    @classmethod
    def of(cls, pid: int) -> "Resources":
        process = psutil.Process(pid)
        with process.oneshot():
            return cls(
                process.num_threads(),
                process.num_fds(),
                len(process.net_connections("all")),
                process.memory_info().rss,
            )


def growth(
    before: Resources, after: Resources, *, max_things: int = 3, max_bytes: int = 32 * MIB
) -> list[str]:
    """Describes the resources that a process holds in addition. Pools can grow by a few items."""
    found = [
        f"{name} grew from {getattr(before, name)} to {getattr(after, name)}"
        for name in ("num_threads", "num_files", "num_connections")
        if getattr(after, name) > getattr(before, name) + max_things
    ]
    grown = after.rss_bytes - before.rss_bytes
    return found + ([f"memory grew by {grown / MIB:.0f} MiB"] if grown > max_bytes else [])
