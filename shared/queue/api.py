"""The interfaces of the request queue, for gateways and workers. The Redis implementation is in this package.

The queue does not decode calls and events. All methods are idempotent and may be repeated after an error. The attempt
number of a claim fences all earlier attempts. All methods raise QueueUnavailable.
"""

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from msgspec import Struct

from shared.protocol import Envelope, ErrorCode

#: A possible poison request is cleared after this many new tokens: it may run beside others, and a loss of its worker no
#: longer counts as a crash of the request.
CLEARED_AFTER_TOKENS = 8

Ending = Literal["finished", "failed"]


def shard_of(call_id: str) -> str:
    """The name of the shard of a call; '' where there is one Redis, or a call is from before there were shards."""
    return call_id.partition("@")[2]


class QueueError(Exception):
    """Base class of the queue's errors."""


class QueueRefused(QueueError):
    """A limit refuses the call. `reason` is one of `REASONS`; `wait_s` is 0 if unknown."""

    def __init__(self, reason: str, wait_s: float) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_s = wait_s


#: Reasons of a refusal: the limits of the fleet, then those of a tenant (`key_`).
REASONS = (
    "queue_full",
    "open_tokens",
    "key_open",
    "key_share",
    "key_requests",
    "key_tokens",
    "key_budget",
)


class DuplicateRequest(QueueError):
    """A call with this id is known already."""


class UnknownBudget(QueueError):
    """Redis does not know what the tenant has spent: `set_spent`, then submit again."""


class QueueUnavailable(QueueError):
    """The queue cannot be reached or is out of memory; the command may or may not have run."""


class Affinity(Struct, frozen=True):
    """The affinity key of a request, and the workers that can serve it."""

    name: str  #: hash of the first image or the long prefix
    num_workers: int
    num_seats: int  #: calls that each worker runs at once


#: home: reserved for the preferred worker; new: no worker is preferred; busy: the preferred worker has more than its
#: share, or other requests wait; gone: the preferred worker is gone; empty: without affinity.
AffinityOutcome = Literal["", "home", "new", "busy", "gone"]


@dataclass(frozen=True, slots=True)
class RequestState:
    """The state of a call: queued, running, finished, failed or cancelled."""

    state: str
    attempt: int
    num_output_tokens: int  #: accepted so far
    remaining_s: float  #: until the deadline; after the end: until Redis deletes it


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Length and age of a model's queue. `age_s`: of the oldest call that no worker has read, without the backlog."""

    num_open: int  #: calls that wait or run
    num_backlog: int  #: batch calls among them that no worker has been given
    age_s: float


class Claim(Struct, frozen=True, eq=False):
    """One attempt at a call. Units: seconds by the queue's clock at the time of the claim."""

    id: str
    reply_to: str
    payload: bytes  #: the call, as its gateway encoded it
    log: tuple[bytes, ...]  #: events of earlier attempts
    entry_id: bytes  #: id of its queue entry
    attempt: int  #: the fencing token
    failures: int  #: crash count: lost workers that count against the request
    is_last_chance: bool  #: the call fails at its next crash
    waited_s: float  #: since it was submitted
    remaining_s: float  #: until its deadline

    @property
    def may_be_poison(self) -> bool:
        return self.failures > 0


class Publication(Struct, frozen=True, eq=False):
    """Events of one call, repeated unchanged until the queue answers.

    `number`: ordinal within the claim, from 1. `num_tokens`: output tokens before these events.
    """

    claim: Claim
    number: int
    num_tokens: int
    num_new_tokens: int  #: output tokens that these events add
    events: bytes  #: JSON objects, separated by commas
    ending: Ending | None = None  #: set if these events end the call
    dead_reason: str = ""  #: reason of the entry in the dead-letter stream; empty: none
    result: bytes = b""  #: data too large for an event; read by `GatewayQueue.result`
    keep_s: float = 0.0  #: minimum time to keep the ended call
    usage: tuple[int, int] | None = (
        None  #: prompt tokens and the cached ones among them, if these events tell
    )


class Limits(Struct, frozen=True):
    """Limits of one model, over all gateways; 0: unlimited."""

    max_tokens: int = 0  #: of all open calls; shared by the tenants
    max_tenant_requests: int = 0  #: open at once
    max_tenant_requests_per_minute: int = 0
    max_tenant_tokens_per_minute: int = 0
    has_budget: bool = False  #: then all requests of the tenant are on one shard


class Reservation(Struct, frozen=True):
    """The usage that the calls of one request reserve, the same for each."""

    model: str
    tenant: str
    request_ids: tuple[str, ...]
    num_tokens: int  #: of prompt and answer, charged to the tokens per minute
    num_answer_tokens: int  #: of the answer alone; the unused part is refunded
    num_open_tokens: int  #: while open; more than `num_tokens` if it needs more memory
    limits: Limits

    @property
    def is_refundable(self) -> bool:
        """Whether tokens per minute were charged."""
        return self.limits.max_tenant_tokens_per_minute > 0


class Budget(Struct, frozen=True):
    """What a tenant may spend in a month or day. Units: nano-dollars, seconds."""

    period: str  #: name of the month or day
    most: int
    reserved: int  #: by each call while it is open: its maximum cost
    ttl_s: float


class Charge(Struct, frozen=True):
    """How the calls of one request are counted when they end. Units: nano-dollars."""

    num_images: tuple[int, ...] = (0,)  #: of each prompt, which equally many calls share
    prices: tuple[float, float, float, float] = (
        0.0,
        0.0,
        0.0,
        0.0,
    )  #: of an input, cached, output token, image
    budget: Budget | None = None
    #: Counted of the first call: the request with its input, the input of its prompt, or its output alone.
    counts: Literal["request", "prompt", "output"] = "request"

    def of_call(self, index: int, num_calls: int) -> "Charge":
        prompt, place = divmod(index, num_calls // len(self.num_images))
        counts = "output" if place else "prompt" if index else self.counts
        return Charge((self.num_images[prompt],), self.prices, self.budget, counts)


class Submission(Struct, frozen=True):
    """The calls of one request, and what limits them."""

    choices: Sequence[Envelope]
    timeout_s: float  #: until their deadline, from now by the queue's clock
    max_waiting: int  #: calls of a priority that wait at most, or the calls of one request
    reservation: Reservation | None = None  #: of each call, if there are quotas
    affinity: Affinity | None = (
        None  #: they may be reserved for the preferred worker; `share` ends that
    )
    charge: Charge | None = None
    #: Token ids that the only choice has published under another id; the answer goes on after them.
    earlier: Sequence[int] = ()


class Submitted(Struct, frozen=True):
    """What the queue tells about calls that it has taken."""

    affinity: AffinityOutcome = ""
    #: Seconds until the limits of requests and of tokens per minute are whole again; None: unlimited, or unknown.
    full_in_s: tuple[float, float] | None = None


class OpenRequest(Struct, frozen=True):
    """A request that waits or runs."""

    id: str  #: with the number of the choice
    key: str  #: the tenant; for operators, the name of its key
    model: str
    worker: str  #: empty: it waits
    age_s: float
    num_tokens: int  #: of output so far


class GatewayQueue(Protocol):
    """The gateway's side of the queues of all models."""

    def place(
        self, request_id: str, tenant: str, limits: Limits | None, affinity: Affinity | None
    ) -> str:
        """The end of the ids of a new request's calls, which names its shard; empty where there is one Redis."""
        ...

    def is_lost(self, request_id: str) -> bool:
        """Whether the shard of a call is down for so long that the call has to be submitted to another."""
        ...

    async def submit(self, calls: Submission) -> Submitted:
        """Queue the calls of one request, all or none. Raises: QueueRefused, DuplicateRequest."""
        ...

    async def share(self, model: str, request_ids: Sequence[str]) -> int:
        """Return reserved calls that are not claimed to the end of the queue; returns how many there were."""
        ...

    async def cancel(
        self, model: str, request_ids: Sequence[str], *, is_lost: bool = False
    ) -> None:
        """Cancel calls; unknown and ended ones are ignored. `is_lost`: they were queued again, and are not counted."""
        ...

    async def refund(self, reservation: Reservation) -> bool:
        """Refund the unused tokens of ended calls, or charge those beyond the reservation; once for each call.

        Returns False if a call has not ended: then call it again.
        """
        ...

    async def state(self, model: str, request_id: str) -> RequestState | None:
        """The state of a call; None if it is unknown."""
        ...

    async def usage(self, day: int, *, skips_down: bool) -> list[dict[str, int]]:
        """What ended calls used on a day since 1970 (UTC), of each server that has any, or only of those that answer.

        Sums of requests, input, cached and output tokens, images and costs (nano-dollars), by `KIND TENANT MODEL`. Under
        the empty name is when the server began to count.
        """
        ...

    async def set_spent(self, call_id: str, tenant: str, budget: Budget, amount: int) -> None:
        """Create the budget of the tenant of a new call, with what it has spent, or raise what it has spent to that."""
        ...

    async def raise_usage(self, day: int, sums: Mapping[str, int]) -> None:
        """Raise sums of `usage`, as one server had them, where that server has lower ones for the same beginning."""
        ...

    async def raise_spent(self, period: str, spent: Mapping[str, int]) -> None:
        """Raise what tenants have spent of their budgets of a month or day; tenants without one are left out."""
        ...

    async def open_requests(self, models: Collection[str], limit: int) -> list[OpenRequest]:
        """The newest calls that wait or run, newest first."""
        ...

    async def states(self, model: str, request_ids: Sequence[str]) -> list[RequestState | None]: ...

    async def events(self, model: str, request_id: str) -> list[bytes]:
        """The log of a call: its accepted events in order, to repair a gap in the mailbox."""
        ...

    async def listen(self, model: str, request_id: str, gateway_id: str) -> RequestState | None:
        """The state of a call; while it is open, this gateway's mailbox receives its events too."""
        ...

    async def forget(self, model: str, request_id: str, *, failed_only: bool) -> None:
        """Delete a call that has ended, or only a failed one, and its log, which frees its id."""
        ...

    async def confirm(self, model: str, request_ids: Sequence[str]) -> None:
        """Wait until a replica has the calls, if there is a replica."""
        ...

    async def result(
        self, model: str, request_id: str, attempt: int, *, is_last: bool
    ) -> bytes | None:
        """The `Publication.result` of an attempt; None if it is deleted. `is_last`: delete it."""
        ...

    async def stats(self, model: str) -> QueueStats: ...

    async def servers(self) -> dict[str, dict[str, str]]:
        """What each server says of itself (`INFO`), by shard; nothing of those that do not answer."""
        ...

    async def fail_all(self, model: str, code: ErrorCode, message: str) -> int:
        """Fail the calls of a model that no worker will serve, oldest first; returns how many."""
        ...

    async def crash_tenants(self, model: str, worker_id: str) -> frozenset[str]:
        """The tenants whose requests a worker ran when it ended; empty names are of fleets without keys."""
        ...

    async def open(self) -> None:
        """Connect before the first request."""
        ...

    async def close(self) -> None: ...


class Mailbox(Protocol):
    """The stream of events for one gateway."""

    @property
    def gateway_id(self) -> str:
        """The `reply_to` of this gateway's calls."""
        ...

    async def open(self, models: Iterable[str]) -> None:
        """Receive events of these models too."""
        ...

    def events(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield model and encoded events, for ever. Outages raise nothing."""
        ...

    async def close(self) -> None:
        """Delete the mailboxes and disconnect."""
        ...


class WorkerQueue(Protocol):
    """A worker's side of the queue of one model."""

    @property
    def num_backlog(self) -> int:
        """Batch calls in the backlog, at the last look."""
        ...

    @property
    def num_claims(self) -> Mapping[str, int]:
        """Claims so far, by kind: new, reclaimed, reconciled."""
        ...

    @property
    def num_fenced(self) -> int:
        """Publications refused because another worker owns the call."""
        ...

    async def read(self, count: int, block_s: float) -> list[Claim]:
        """Claim up to `count` waiting calls, and the few that are reserved for this worker; wait for the first.

        Calls may be reserved for a worker from its first read on.
        """
        ...

    async def take(self, count: int) -> list[Claim]:
        """Claim up to `count` calls without waiting: batch calls if no interactive ones wait."""
        ...

    async def reclaim(self, count: int) -> list[Claim]: ...

    async def take_scan(self, every_s: float) -> bool:
        """Whether this worker may call `reclaim` now: one worker in `every_s`, because it reads all claims."""
        ...

    async def end_scan(self) -> None:
        """Let all workers call `reclaim`: there are expired leases."""
        ...

    async def reconcile(self) -> list[Claim]:
        """Claim calls whose claim reply was lost, look at the backlog, and clean up. Call it at each heartbeat."""
        ...

    async def begin(self, claim: Claim) -> bool:
        """Mark a possible poison request as started: from now on a loss counts as a crash. Returns whether it is ours."""
        ...

    async def publish(self, publications: Sequence[Publication]) -> dict[str, str]:
        """Send events. Returns the refused calls, which are no longer this worker's, with the reason.

        Reasons: gone, cancelled, ended, fenced, gap.
        """
        ...

    async def renew(self, claims: Iterable[Claim]) -> dict[str, str]:
        """Renew the leases. Returns the refused calls with the reason, as `publish`."""
        ...

    async def cancel_deserted(self, claims: Iterable[Claim]) -> list[Claim]: ...

    async def release(self, claims: Iterable[Claim], *, is_crash: bool = False) -> int:
        """Return calls to the queue; returns how many.

        `is_crash`: the attempt counts as a crash of the request.
        """
        ...

    async def leave(self, keep: Iterable[Claim] = ()) -> None:
        """Return all calls but `keep` to the queue, and delete this consumer if none are left. Stop claiming first."""
        ...

    async def close(self) -> None: ...
