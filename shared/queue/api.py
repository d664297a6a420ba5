"""The interfaces of the request queue, for gateways and workers. The Redis implementation is in this package.

The queue does not decode calls and events. All methods are idempotent and may be repeated after an error. The attempt
number of a claim fences all earlier attempts. All methods raise QueueUnavailable.
"""

from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from msgspec import Struct

from shared.protocol import Envelope, ErrorCode

#: New tokens after which a possible poison request is cleared. A cleared request can run in a batch with other requests,
#: and the loss of its worker does not add to its crash count.
CLEARED_AFTER_TOKENS = 8

Ending = Literal["finished", "failed"]


def shard_of(call_id: str) -> str:
    """The name of the shard of a call; '' if the call was submitted to a single Redis server."""
    return call_id.partition("@")[2]


#: Reasons of a refusal: the limits of all tenants together, then of one tenant (`key_`).
Reason = Literal[
    "queue_full", "open_tokens", "key_open", "key_share", "key_requests", "key_tokens", "key_budget"
]


class QueueRefused(Exception):
    """A call exceeds a limit. `wait_s`: time until a retry may succeed; 0 if unknown."""

    def __init__(self, reason: Reason, wait_s: float) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_s = wait_s


class DuplicateRequest(Exception):
    """A call with this id exists already."""


class UnknownBudget(Exception):
    """Redis has no budget of the tenant. Call `set_spent`, then submit again."""


class QueueUnavailable(Exception):
    """The queue cannot be reached or is out of memory; the command may or may not have run."""


class Affinity(Struct, frozen=True):
    """The affinity key of a request, and the workers that can serve it."""

    name: str  #: hash of the first image or the long prefix
    num_workers: int
    num_seats: int  #: maximum calls that each worker runs concurrently


#: home: reserved for the preferred worker; new: no worker is preferred; busy: the preferred worker has more than its
#: share, or other requests wait; gone: the preferred worker is gone; empty: without affinity.
AffinityOutcome = Literal["", "home", "new", "busy", "gone"]


@dataclass(frozen=True, slots=True)
class RequestState:
    """The state of a call: queued, running, finished, failed or cancelled."""

    state: str
    attempt: int
    num_output_tokens: int  #: accepted so far
    remaining_s: float  #: open call: until its deadline; ended call: until Redis deletes its record


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Length and age of a model's queue. `age_s`: wait of the oldest unclaimed call, not counting the backlog."""

    num_open: int  #: calls that wait or run
    num_backlog: int  #: batch calls among `num_open` that are not in the queue yet
    age_s: float
    is_whole: bool = True  #: False: a shard does not answer, and may have more calls


class Claim(Struct, frozen=True, eq=False):
    """One attempt at a call. Units: seconds by the queue's clock at the time of the claim."""

    id: str
    reply_to: str
    payload: bytes  #: the call, as its gateway encoded it
    log: tuple[bytes, ...]  #: events of earlier attempts
    entry_id: bytes  #: id of its queue entry
    attempt: int  #: the fencing token
    failures: int  #: the request's crash count
    is_last_chance: bool  #: the call fails at its next crash
    waited_s: float  #: since it was submitted
    remaining_s: float  #: until its deadline

    @property
    def may_be_poison(self) -> bool:
        return self.failures > 0


class Publication(Struct, frozen=True, eq=False):
    """Events of one call. After a lost reply, the same publication is sent again unchanged."""

    claim: Claim
    number: int  #: ordinal within the claim, from 1
    num_tokens: int  #: output tokens before these events
    num_new_tokens: int  #: output tokens that these events add
    events: bytes  #: JSON objects, separated by commas
    ending: Ending | None = None  #: set if the last event ends the call
    dead_reason: str = ""  #: reason of the entry in the dead-letter stream; empty: none
    result: bytes = b""  #: data too large for an event; gateways read it with `GatewayQueue.result`
    keep_s: float = 0.0  #: minimum time to keep the ended call
    #: Prompt tokens, and how many of them were cached. None: these events do not report usage.
    usage: tuple[int, int] | None = None


class Limits(Struct, frozen=True):
    """Limits of one model, over all gateways; 0: unlimited."""

    max_tokens: int = 0  #: of all open calls together
    max_tenant_requests: int = 0  #: open requests of a tenant
    max_tenant_requests_per_minute: int = 0
    max_tenant_tokens_per_minute: int = 0
    has_budget: bool = False  #: the tenant has a budget, so all its requests are on one shard


class Reservation(Struct, frozen=True):
    """The usage that each call of a request reserves."""

    model: str
    tenant: str
    request_ids: tuple[str, ...]
    num_tokens: int  #: of prompt and answer, charged to the tokens per minute
    num_answer_tokens: int  #: of the answer alone; the unused part is refunded
    num_open_tokens: int  #: reserved while the call is open; may exceed `num_tokens` if the call needs more memory
    limits: Limits


class Budget(Struct, frozen=True):
    """The amount that a tenant may spend in a month or day. Units: nano-dollars, seconds."""

    period: str  #: name of the month or day
    most: int
    reserved: int  #: maximum cost of each call, reserved while the call is open
    ttl_s: float


class Charge(Struct, frozen=True):
    """How the calls of one request are counted when they end. Units: nano-dollars."""

    num_images: tuple[int, ...] = (0,)  #: of each prompt; all prompts have the same number of calls
    #: Price of an input, cached and output token, and of an image.
    prices: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    budget: Budget | None = None
    #: What the first call counts. `request`: request, input and output; `prompt`: input and output; `output`: output.
    counts: Literal["request", "prompt", "output"] = "request"

    def of_call(self, index: int, num_calls: int) -> "Charge":
        prompt, place = divmod(index, num_calls // len(self.num_images))
        counts = "output" if place else "prompt" if index else self.counts
        return Charge((self.num_images[prompt],), self.prices, self.budget, counts)


class Submission(Struct, frozen=True):
    """The calls of one request, with their limits."""

    choices: Sequence[Envelope]
    timeout_s: float  #: until their deadline, from now by the queue's clock
    max_waiting: int  #: maximum of waiting calls of this priority; an empty queue accepts a request with more calls
    reservation: Reservation | None = None  #: of each call, if there are quotas
    #: If set, the calls may be reserved for the preferred worker until `share` is called.
    affinity: Affinity | None = None
    charge: Charge | None = None
    #: Token ids that the only choice has already published under another call id. The answer continues after them.
    earlier: Sequence[int] = ()


class Submitted(Struct, frozen=True):
    affinity: AffinityOutcome = ""
    #: Seconds until the token buckets of requests and of tokens per minute are full; None: unlimited, or unknown.
    full_in_s: tuple[float, float] | None = None


class OpenRequest(Struct, frozen=True):
    """A request that waits or runs."""

    id: str  #: with the number of the choice
    key: str  #: the tenant; for operators, it is replaced with the name of its API key
    model: str
    worker: str  #: empty while the request waits
    age_s: float
    num_tokens: int  #: of output so far


class GatewayQueue(Protocol):
    """The gateway's side of the queues of all models."""

    def place(
        self, request_id: str, tenant: str, limits: Limits | None, affinity: Affinity | None
    ) -> str:
        """The suffix of a new request's call ids, which names the shard; empty with a single Redis server."""
        return ""

    def is_lost(self, request_id: str) -> bool:
        """True if the shard of a call has been down for so long that the call must be submitted to another shard."""
        return False

    async def submit(self, calls: Submission) -> Submitted:
        """Queue the calls of one request, all or none. Raises: QueueRefused, DuplicateRequest."""
        ...

    async def share(self, model: str, request_ids: Sequence[str]) -> int:
        """Move reserved calls that are unclaimed to the end of the queue. Returns the number of moved calls."""
        ...

    async def cancel(
        self, model: str, request_ids: Sequence[str], *, is_lost: bool = False
    ) -> None:
        """Cancel calls. Unknown and ended calls are ignored. `is_lost`: do not count usage: the calls run elsewhere."""
        ...

    async def refund(self, reservation: Reservation) -> bool:
        """Settle ended calls once: refund unused tokens, or charge further tokens. Returns False if a call is open."""
        ...

    async def state(self, model: str, request_id: str) -> RequestState | None:
        """The state of a call; None if it is unknown."""
        [state] = await self.states(model, [request_id])
        return state

    async def usage(self, day: int, *, skips_down: bool) -> list[dict[str, int]]:
        """Usage of ended calls on a day (days since 1970, UTC), per server. `skips_down`: skip servers that are down.

        Keys are `KIND TENANT MODEL`; kinds are requests, input, cached and output tokens, images, costs (nano-dollars).
        The value of the empty key is the time at which the server began to count.
        """
        ...

    async def set_spent(self, call_id: str, tenant: str, budget: Budget, amount: int) -> None:
        """Raise the spent amount of a tenant's budget to `amount`, or create the budget, on the shard of `call_id`."""
        ...

    async def raise_usage(self, day: int, sums: Mapping[str, int]) -> None:
        """Raise a server's usage to `sums`, which `usage` returned for this server before Redis lost writes."""
        ...

    async def raise_spent(self, period: str, spent: Mapping[str, int]) -> None:
        """Raise the spent amount of tenants' budgets for a month or day. Tenants without a budget are skipped."""
        ...

    async def open_requests(self, models: Collection[str], limit: int) -> list[OpenRequest]:
        """The newest calls that wait or run, newest first."""
        ...

    async def states(self, model: str, request_ids: Sequence[str]) -> list[RequestState | None]: ...

    async def events(self, model: str, request_id: str) -> list[bytes]:
        """The accepted events of a call in order, to repair a gap in the mailbox."""
        ...

    async def listen(self, model: str, request_id: str, gateway_id: str) -> RequestState | None:
        """The state of a call. If the call is open, the mailbox of `gateway_id` receives its further events too."""
        ...

    async def forget(self, model: str, request_id: str, *, failed_only: bool) -> None:
        """Delete an ended call (`failed_only`: only a failed call) and its log, so that its id can be used again."""
        ...

    async def confirm(self, model: str, request_ids: Sequence[str]) -> None:
        """Wait until a replica has the calls, if there is a replica."""
        ...

    async def result(
        self, model: str, request_id: str, attempt: int, *, is_last: bool
    ) -> bytes | None:
        """The `Publication.result` of an attempt; None if deleted. `is_last`: delete the result after reading."""
        ...

    async def stats(self, model: str) -> QueueStats: ...

    async def servers(self) -> dict[str, dict[str, str]]:
        """The fields of Redis's `INFO` by shard; no fields if the ACL denies `INFO`. Shards that are down are left out."""
        ...

    async def fail_all(self, model: str, code: ErrorCode, message: str) -> int:
        """Fail waiting calls of a model that no worker will serve, oldest first. Returns the number of failed calls."""
        ...

    async def crash_tenants(self, model: str, worker_id: str) -> frozenset[str]:
        """The tenants whose requests a worker was running when it ended. The tenant is empty without API keys."""
        ...

    async def open(self) -> None:
        """Connect before the first request."""
        ...

    async def close(self) -> None: ...


class Mailbox(Protocol):
    """The stream of events for one gateway."""

    gateway_id: str  #: the `reply_to` of this gateway's calls

    async def open(self, models: Iterable[str]) -> None:
        """Start to receive events of `models`."""
        ...

    def events(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield pairs of a model and encoded events, without end. Outages are logged and do not raise."""
        ...

    async def close(self) -> None:
        """Delete the mailboxes and disconnect."""
        ...


class WorkerQueue(Protocol):
    """A worker's side of the queue of one model."""

    num_claims: Counter[str]  #: total number by kind: new, reclaimed, reconciled

    @property
    def num_backlog(self) -> int:
        """Number of batch calls in the backlog, as last read."""
        ...

    @property
    def num_fenced(self) -> int:
        """Publications refused because another worker owns the call."""
        ...

    async def read(self, count: int, block_s: float) -> list[Claim]:
        """Claim up to `count` waiting calls, plus calls reserved for this worker. Waits up to `block_s` for a call.

        After a worker's first read, calls may be reserved for it.
        """
        ...

    async def take(self, count: int) -> list[Claim]:
        """Claim up to `count` calls without blocking. Batch calls are claimed if no interactive calls wait."""
        ...

    async def reclaim(self, count: int) -> list[Claim]: ...

    async def take_scan(self, every_s: float) -> bool:
        """Returns True for one worker in each `every_s`: it may call `reclaim`, which reads all claims."""
        ...

    async def end_scan(self) -> None:
        """End the period of `take_scan`, so that all workers can call `reclaim`: more leases may have expired."""
        ...

    async def reconcile(self) -> list[Claim]:
        """Claim calls whose claim reply was lost, update `num_backlog`, and clean up. Call this at each heartbeat."""
        ...

    async def begin(self, claim: Claim) -> bool:
        """Mark a possible poison request as started: the loss of its worker is now a crash. False: another worker owns it."""
        ...

    async def publish(self, publications: Sequence[Publication]) -> dict[str, str]:
        """Publish events. Returns the calls that are refused, with the reason: gone, cancelled, ended, fenced or gap."""
        ...

    async def renew(self, claims: Iterable[Claim]) -> dict[str, str]:
        """Renew the leases. Returns refused calls as `publish` does."""
        ...

    async def cancel_deserted(self, claims: Iterable[Claim]) -> list[Claim]: ...

    async def release(self, claims: Iterable[Claim], *, is_crash: bool = False) -> int:
        """Queue calls again. Returns the number of queued calls. `is_crash`: add 1 to the requests' crash counts."""
        ...

    async def leave(self, keep: Iterable[Claim] = ()) -> None:
        """Queue all calls again, except `keep`. Without calls, delete the consumer. Claiming must have stopped."""
        ...

    async def close(self) -> None: ...
