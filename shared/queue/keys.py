"""All keys in Redis, with content and time to live.

The keys of one model share the hash tag `{model}`, the keys of one blob the hash tag `{SHA-256}`. Every key expires, so
that a crash leaves nothing behind.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from redis.asyncio import Redis

from shared.redis.client import RedisSender, Script, named, retry_idempotent
from shared.redis.confirm import Confirmer

Member = TypeVar("Member")

logger = logging.getLogger(__name__)

GROUP = "workers"  #: the consumer group of every queue
RELEASED_CONSUMER = "released"  #: owner of released entries

#: Time for which a request and its log are kept after the deadline, for late readers.
AFTER_DEADLINE_S = 60.0
#: Time for which a request and its log are kept after the end, to repair gaps and recognise retries.
AFTER_END_S = 60.0
#: Time to live of an idle queue, longer than the longest deadline.
QUEUE_TTL_S = 48 * 3600.0
#: Time to live of a mailbox. A gateway whose mailbox has expired counts as gone.
MAILBOX_TTL_S = 30.0
MAX_MAILBOX_ENTRIES = 20_000
DEAD_TTL_S = 7 * 24 * 3600.0
MAX_DEAD_ENTRIES = 10_000
#: Time for which a blob is kept after its last request, because the conversation may continue.
BLOB_LINGER_S = 30.0
#: Time to live of `RedisKeys.crash`. Nodes read this set soon after a crash.
CRASH_TTL_S = 600.0
#: A crash within this time after the cancellation of a running request may be caused by the request.
LEFT_TTL_S = 10.0
#: A preferred worker is remembered for this long; caches rarely keep an image or prefix longer.
AFFINITY_TTL_S = 600.0
#: Time to live of a worker's stream of wakeups. No request is reserved for a worker without this stream.
WAKEUPS_TTL_S = 10.0
#: A model is listed for this long after its last worker.
MODEL_TTL_S = 24 * 3600.0


def to_ms(seconds: float) -> int:
    """Whole milliseconds, at least 1."""
    return max(1, round(seconds * 1000))


def _key(kind: str) -> Any:
    return property(lambda keys: f"{keys.prefix}:{kind}")


def _named(kind: str) -> "Callable[[RedisKeys, str], str]":
    def key(keys: "RedisKeys", name: str) -> str:
        return f"{keys.prefix}:{kind}:{name}"

    return key


def _tagged(kind: str, part: str = "") -> "Callable[[RedisKeys, str], str]":
    def key(keys: "RedisKeys", name: str) -> str:
        return f"{keys.prefix}:{kind}:{{{name}}}{part}"

    return key


def _owned(kind: str) -> "Callable[[RedisKeys, str], str]":
    def key(keys: "RedisKeys", owner: str) -> str:
        return f"{keys.prefix}:{{{owner}}}:{kind}"

    return key


def _owned_named(kind: str) -> "Callable[[RedisKeys, str, str | int], str]":
    def key(keys: "RedisKeys", owner: str, name: str | int) -> str:
        return f"{keys.prefix}:{{{owner}}}:{kind}:{name}"

    return key


@dataclass(frozen=True, slots=True)
class RedisKeys:
    """The keys under one prefix. Arguments: the name of an object, or its owner (such as a model) and its name."""

    prefix: str = "vlm"

    queue = _owned("queue")  #: stream of request ids; an entry is deleted when its request ends
    #: Stream of the ids of batch requests that are not in the queue yet.
    backlog = _owned("backlog")
    #: Sorted set of reservations; score: expiry of the call (ms), or 0 from its end until the next submit.
    reservations = _owned("reservations")
    #: Hash of sums of reservations: `tokens` of all tenants; `requests:TENANT` and `tokens:TENANT` of each tenant.
    usage = _owned("usage")
    #: Hash of a tenant's token buckets per minute: `requests` and `tokens` -> theoretical arrival time (ms).
    rates = _owned_named("rates")

    def request(self, model: str, request_id: str) -> str:
        """Hash: state, attempt (the fencing token), failures, tokens, entry, deadline_ms, listeners, payload ..."""
        return self.requests(model) + request_id

    requests = _owned("request:")  #: prefix of the keys of a model's requests
    #: List of the accepted events in order; each item is one or more JSON objects.
    log = _owned_named("log")

    def result(self, model: str, request_id: str, attempt: int | str) -> str:
        """The result of one attempt that is too large for the log: raw bytes."""
        return f"{self.prefix}:{{{model}}}:result:{request_id}@{attempt}"

    #: Stream of JSON arrays of events for one gateway; it exists only while the gateway lives.
    mailbox = _owned_named("mailbox")
    #: The worker that last served requests with this affinity key.
    preferred_worker = _owned_named("home")
    #: The worker that last looked for expired leases. Until the key expires, no other worker looks.
    scan = _owned("scan")
    #: Stream of a worker's wakeups: ids of requests that are reserved for it, and queue entries that it has lost.
    wakeups = _owned_named("bell")
    #: Set of the tenants whose requests a worker ran when its engine failed.
    crash = _owned_named("crash")
    #: Hash of cancellations of requests that a worker ran: tenant -> time of the last cancellation (ms).
    left = _owned_named("left")
    #: Dead-letter stream: id, reason, attempt and worker of failed requests; never their content.
    dead = _owned("dead")
    stream = _named("stream")  #: a gateway's record of a resumable request
    #: Hash of the used shards: name -> time until which the shard may have requests (epoch seconds).
    shards = _key("shards")
    confirmation = _key("confirmation")  #: written before each `WAIT` for a replica
    lease = _named("lease")  #: holder of an exclusive lease, such as a batch's lease
    #: A conversation with its last answer, which later requests continue (MessagePack).
    record = _owned_named("record")
    records = _owned("records")  #: sorted set of the names of a tenant's records, by expiry (ms)
    #: Hash of the sizes of a tenant's records: name -> bytes; empty name -> total bytes.
    record_sizes = _owned("record-sizes")
    record_reply = _owned_named("record-reply")  #: reply of a script on records, for a retry
    #: Hash of a session of an application: `record` (JSON), `state`, and the number of its tasks by outcome.
    session = _tagged("session")
    #: Hash of a session's tasks: id -> `STATE RECORD` (JSON).
    session_tasks = _tagged("session", ":tasks")
    #: Hash of a session's tasks without a recorded end: id -> record (JSON).
    session_open = _tagged("session", ":open")
    session_order = _tagged("session", ":order")  #: sorted set of task ids, by creation time
    #: Sorted set of an application's open sessions; member: `ID MIN_INSTANCES MAX_INSTANCES`, score: expiry (s).
    session_limits = _named("session-limits")
    sessions = _named("sessions")  #: sorted set of the ids of a tenant's sessions, by creation time
    blob = _tagged("blob")  #: bytes by their hash, such as an encoded image
    #: Sorted set of the requests that need a blob, by expiry (ms).
    blob_holders = _tagged("blob", ":holders")
    #: A worker's record (JSON); it expires when the worker stops announcing itself.
    worker = _named("worker")
    workers = _key("workers")  #: set of worker ids whose records may exist
    #: The card (JSON) of a model that a worker announced within the last day.
    model = _named("model")
    #: Hash of the adapters to load for a model: name -> source (JSON).
    adapters = _owned("adapters")
    models = _key("models")  #: set of model names whose cards may exist
    #: Hash of the current deployments: name -> `VERSION RECORD` (JSON).
    apps = _key("apps")
    #: Hash of the slots of a deployment that were claimed recently: id -> `TIME_MS NODE`.
    claims = _named("claims")
    #: List of the latest lines that instances of a deployment have logged (JSON).
    app_log = _named("app-log")
    #: Hash of API keys: name -> `VERSION RECORD` (JSON); empty name -> random token, replaced by each change.
    api_keys = _key("api-keys")
    guests = _key("guests")  #: hash of callers with a token: tenant -> `KEY:NAME`
    #: Stream of audit entries: requests to change keys, deployments, nodes and adapters.
    audit = _key("audit")
    #: Prefix of one hash per day (days since 1970): `KIND TENANT MODEL` -> sum (`count_usage.lua`).
    spent = _key("spent:")

    def budget(self, tenant: str, period: str) -> str:
        """Hash of a tenant's nano-dollars in a month or day: `spent`, `reserved`. Suffix `:open`: its reservations."""
        return f"{self.prefix}:budget:{tenant}:{period}"

    nodes = _key("nodes")  #: set of node ids whose records may exist
    #: A node's record (JSON); it expires when the node stops announcing itself.
    node = _named("node")

    def node_drain(self, node_id: str) -> str:
        """Exists while a node is told to drain."""
        return f"{self.node(node_id)}:drain"


def keys_of_calls(keys: RedisKeys, model: str, request_ids: Iterable[str]) -> list[str]:
    """Keys of each call and of its log, in the order that scripts expect."""
    found = []
    for request_id in request_ids:
        found += (keys.request(model, request_id), keys.log(model, request_id))
    return found


def cancel_arguments(keys: RedisKeys, model: str) -> dict[str, str | int]:
    return {
        "group": GROUP,
        "spent": keys.spent,
        "model": model,
        "keep_ms": to_ms(AFTER_END_S),
        "left": keys.left(model, ""),
        "left_ttl_ms": to_ms(LEFT_TTL_S),
        "wakeups": keys.wakeups(model, ""),
    }


class RedisStore:
    """The keys and the connection. `_ask` and `_run` repeat idempotent commands and scripts after a lost reply."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._keys = RedisKeys(prefix)
        self._sender = RedisSender(redis)
        self._confirmer = Confirmer(redis, self._keys.confirmation)
        self._confirm = self._confirmer.confirm
        #: Keys whose values could not be decoded when they were last read.
        self._unreadable: set[str] = set()

    async def _ask(self, *command: str | bytes | int) -> Any:
        return await retry_idempotent(lambda: self._sender.execute(*command))

    async def _run(self, script: Script, keys: Sequence[str], *raw: bytes, **arguments: Any) -> Any:
        packed = named(*raw, **arguments)
        return await retry_idempotent(lambda: self._sender.run(script, keys, packed))

    async def _members(
        self, index: str, key_of: Callable[[str], str], decode: Callable[[bytes], Member]
    ) -> list[Member]:
        """The values of a set's members. Members whose value has expired are removed from the set."""
        names = await self._ask("SMEMBERS", index)
        if not names:
            return []
        keys = [key_of(name.decode(errors="replace")) for name in names]
        values = await self._ask("MGET", *keys)
        gone = [name for name, value in zip(names, values, strict=True) if value is None]
        if gone:
            await self._sender.execute("SREM", index, *gone)
        return [
            member
            for key, value in zip(keys, values, strict=True)
            if value is not None and (member := self._decode(key, value, decode)) is not None
        ]

    def _decode(self, key: str, value: bytes, decode: Callable[[bytes], Member]) -> Member | None:
        """Decode a value. If it is invalid, log an error and return None."""
        try:
            member = decode(value)
        except (msgspec.MsgspecError, ValueError) as error:
            if key not in self._unreadable:
                logger.error("cannot read %s, skipping it: %s", key, error)
                self._unreadable.add(key)
            return None
        self._unreadable.discard(key)
        return member

    async def _withdraw(self, index: str, name: str, *keys: str) -> None:
        """Delete keys, and the name from the index."""
        for key in keys:
            await self._sender.execute("DEL", key)
        await self._sender.execute("SREM", index, name)

    async def close(self) -> None:
        await self._confirmer.close()
        await self._sender.close()
