"""All keys in Redis, with content and time to live.

The keys of one model share the hash tag `{model}`, those of one blob its hash. Every key expires, so that a crash
leaves nothing behind.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from redis.asyncio import Redis

from shared.redis.client import Command, RedisSender, Script, named, retry_idempotent
from shared.redis.confirm import Confirmer

Member = TypeVar("Member")

logger = logging.getLogger(__name__)

GROUP = "workers"  #: the consumer group of every queue
RELEASED_CONSUMER = "released"  #: owner of released entries

#: A request and its log outlive the deadline, for late readers.
AFTER_DEADLINE_S = 60.0
#: A request and its log outlive the end, to repair gaps and recognise retries.
AFTER_END_S = 60.0
#: Idle queues; longer than the longest deadline.
QUEUE_TTL_S = 48 * 3600.0
#: A gateway whose mailbox expired counts as gone.
MAILBOX_TTL_S = 30.0
MAX_MAILBOX_ENTRIES = 20_000
DEAD_TTL_S = 7 * 24 * 3600.0
MAX_DEAD_ENTRIES = 10_000
#: A blob outlives its last request: the conversation may continue.
BLOB_LINGER_S = 30.0
#: Nodes read the tenants of a crash soon after it.
CRASH_TTL_S = 600.0
#: A crash so soon after a running request was cancelled may be due to that request.
LEFT_TTL_S = 10.0
#: A preferred worker is remembered for this long; caches rarely keep an image or prefix longer.
AFFINITY_TTL_S = 600.0
#: Nothing is reserved for a worker that does not renew its stream of wakeups.
WAKEUPS_TTL_S = 10.0
#: A model is listed for this long after its last worker.
MODEL_TTL_S = 24 * 3600.0


def to_ms(seconds: float) -> int:
    """Whole milliseconds, at least 1."""
    return max(1, round(seconds * 1000))


@dataclass(frozen=True, slots=True)
class RedisKeys:
    """The keys under one prefix."""

    prefix: str = "vlm"

    def queue(self, model: str) -> str:
        """Stream of request ids; an entry is deleted when its request ends."""
        return f"{self.prefix}:{{{model}}}:queue"

    def backlog(self, model: str) -> str:
        """Stream of the ids of batch requests that are not in the queue yet."""
        return f"{self.prefix}:{{{model}}}:backlog"

    def reservations(self, model: str) -> str:
        """Sorted set of the reservations of open calls, by expiry (ms); 0 after the end of the call."""
        return f"{self.prefix}:{{{model}}}:reservations"

    def usage(self, model: str) -> str:
        """Hash of the sums of the reservations: tokens, and requests and tokens by tenant."""
        return f"{self.prefix}:{{{model}}}:usage"

    def rates(self, model: str, tenant: str) -> str:
        """Hash of a tenant's token buckets, requests and tokens per minute: theoretical arrival time (ms)."""
        return f"{self.prefix}:{{{model}}}:rates:{tenant}"

    def request(self, model: str, request_id: str) -> str:
        """Hash: state, attempt (the fencing token), failures, tokens, entry, deadline_ms, listeners, payload ..."""
        return self.requests(model) + request_id

    def requests(self, model: str) -> str:
        """Prefix of the keys of a model's requests."""
        return f"{self.prefix}:{{{model}}}:request:"

    def log(self, model: str, request_id: str) -> str:
        """List of the accepted events in order; each item is one or more JSON objects."""
        return f"{self.prefix}:{{{model}}}:log:{request_id}"

    def result(self, model: str, request_id: str, attempt: int | str) -> str:
        """The result of one attempt that is too large for the log: raw bytes."""
        return f"{self.prefix}:{{{model}}}:result:{request_id}@{attempt}"

    def mailbox(self, model: str, gateway_id: str) -> str:
        """Stream of JSON arrays of events for one gateway; it exists only while the gateway lives."""
        return f"{self.prefix}:{{{model}}}:mailbox:{gateway_id}"

    def preferred_worker(self, model: str, digest: str) -> str:
        """The worker that last served requests with this affinity key."""
        return f"{self.prefix}:{{{model}}}:home:{digest}"

    def scan(self, model: str) -> str:
        """The worker that last looked for expired leases. Until the key expires, no other worker does."""
        return f"{self.prefix}:{{{model}}}:scan"

    def wakeups(self, model: str, worker_id: str) -> str:
        """Stream of the requests reserved for a worker, and of entries that it lost; it exists while the worker reads it."""
        return f"{self.prefix}:{{{model}}}:bell:{worker_id}"

    def crash(self, model: str, worker_id: str) -> str:
        """Set of the tenants whose requests a worker ran when its engine failed."""
        return f"{self.prefix}:{{{model}}}:crash:{worker_id}"

    def left(self, model: str, worker_id: str) -> str:
        """Hash of the tenants who cancelled a request that a worker ran, by the time (ms) of the last cancellation."""
        return f"{self.prefix}:{{{model}}}:left:{worker_id}"

    def dead(self, model: str) -> str:
        """Dead-letter stream: id, reason, attempt and worker of failed requests; never their content."""
        return f"{self.prefix}:{{{model}}}:dead"

    def stream(self, request_id: str) -> str:
        """A gateway's record of a resumable request."""
        return f"{self.prefix}:stream:{request_id}"

    @property
    def shards(self) -> str:
        """Hash of the shards that were used: until when each may have requests (epoch seconds)."""
        return f"{self.prefix}:shards"

    @property
    def confirmation(self) -> str:
        """Written before each `WAIT` for a replica."""
        return f"{self.prefix}:confirmation"

    def lease(self, name: str) -> str:
        """Holder of an exclusive lease, such as that of a batch."""
        return f"{self.prefix}:lease:{name}"

    def record(self, owner: str, name: str) -> str:
        """A conversation with its last answer, which later requests continue (MessagePack)."""
        return f"{self.prefix}:{{{owner}}}:record:{name}"

    def records(self, owner: str) -> str:
        """Sorted set of the names of a tenant's records, by expiry (ms)."""
        return f"{self.prefix}:{{{owner}}}:records"

    def record_sizes(self, owner: str) -> str:
        """Hash of the sizes of a tenant's records by name, and of the total under the empty name."""
        return f"{self.prefix}:{{{owner}}}:record-sizes"

    def record_reply(self, owner: str, call: str) -> str:
        """The reply of a call on records, for its retry."""
        return f"{self.prefix}:{{{owner}}}:record-reply:{call}"

    def session(self, session_id: str) -> str:
        """Hash of a session of an application: its record (JSON), its state, and tasks by outcome."""
        return f"{self.prefix}:session:{{{session_id}}}"

    def session_tasks(self, session_id: str) -> str:
        """Hash of a session's tasks by id: state, and record (JSON)."""
        return f"{self.prefix}:session:{{{session_id}}}:tasks"

    def session_open(self, session_id: str) -> str:
        """Hash of the records of tasks whose end no client has read."""
        return f"{self.prefix}:session:{{{session_id}}}:open"

    def session_limits(self, application: str) -> str:
        """Sorted set of an application's open sessions, `ID MIN MAX` of instances, by expiry (s)."""
        return f"{self.prefix}:session-limits:{application}"

    def sessions(self, owner: str) -> str:
        """Sorted set of the ids of a tenant's sessions, by creation time."""
        return f"{self.prefix}:sessions:{owner}"

    def blob(self, sha256: str) -> str:
        """Bytes by their hash, such as an encoded image."""
        return f"{self.prefix}:blob:{{{sha256}}}"

    def blob_holders(self, sha256: str) -> str:
        """Sorted set of the requests that need a blob, by expiry (ms)."""
        return f"{self.prefix}:blob:{{{sha256}}}:holders"

    def worker(self, worker_id: str) -> str:
        """A worker's record (JSON); it expires when the worker stops announcing itself."""
        return f"{self.prefix}:worker:{worker_id}"

    @property
    def workers(self) -> str:
        """Set of worker ids whose records may exist."""
        return f"{self.prefix}:workers"

    def model(self, name: str) -> str:
        """The card (JSON) of a model that a worker announced within the last day."""
        return f"{self.prefix}:model:{name}"

    def adapters(self, model: str) -> str:
        """Hash of the adapters to load for a model, by name: source (JSON)."""
        return f"{self.prefix}:{{{model}}}:adapters"

    @property
    def models(self) -> str:
        """Set of model names whose cards may exist."""
        return f"{self.prefix}:models"

    @property
    def apps(self) -> str:
        """Hash of the current deployments by name: the version of the record, and the record (JSON)."""
        return f"{self.prefix}:apps"

    def claims(self, name: str) -> str:
        """Hash of the slots of a deployment that were claimed recently, by id: time (ms) and node."""
        return f"{self.prefix}:claims:{name}"

    def app_log(self, name: str) -> str:
        """List of the latest lines that instances of a deployment have logged (JSON)."""
        return f"{self.prefix}:app-log:{name}"

    @property
    def api_keys(self) -> str:
        """Hash of the records of API keys, by name; the empty name has a token of the last change."""
        return f"{self.prefix}:api-keys"

    @property
    def guests(self) -> str:
        """Hash of the names of callers with a token, `KEY:NAME`, by tenant."""
        return f"{self.prefix}:guests"

    @property
    def audit(self) -> str:
        """Stream of audit entries: requests to change keys, deployments, nodes and adapters."""
        return f"{self.prefix}:audit"

    @property
    def spent(self) -> str:
        """Prefix of a hash for each day since 1970: sums of tokens and costs by tenant and model."""
        return f"{self.prefix}:spent:"

    def budget(self, tenant: str, period: str) -> str:
        """Hash of the nano-dollars that a tenant spent and reserved in a month or day. `:open`: set of reservations."""
        return f"{self.prefix}:budget:{tenant}:{period}"

    @property
    def nodes(self) -> str:
        """Set of node ids whose records may exist."""
        return f"{self.prefix}:nodes"

    def node(self, node_id: str) -> str:
        """A node's record (JSON); it expires when the node stops announcing itself."""
        return f"{self.prefix}:node:{node_id}"

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
        #: Values that the last read could not decode, by key.
        self._unreadable: set[str] = set()

    async def _ask(self, *command: str | bytes | int) -> Any:
        return await retry_idempotent(lambda: self._sender.execute(*command))

    async def _run(self, script: Script, keys: Sequence[str], *raw: bytes, **arguments: Any) -> Any:
        packed = named(*raw, **arguments)
        return await retry_idempotent(lambda: self._sender.run(script, keys, packed))

    async def _confirm(self, *proofs: Command) -> None:
        """Wait until a replica has the writes that `proofs` read, if there is a replica. Raises: RedisError."""
        await self._confirmer.confirm(*proofs)

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
        """The decoded value; None, and an error in the log, if it is invalid."""
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
