"""What gateways and workers ask of a queue. The Redis implementation lies beside it.

A queue carries envelopes: it never reads a call or an event. Methods may be called again after an error: a repeated
call changes nothing. A claim's attempt number fences all earlier attempts. All methods raise QueueUnavailable.
"""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from msgspec import Struct

from shared.protocol import Envelope

#: A suspect that has come so many tokens further will hardly end this worker: it needs to be alone no longer, and the
#: loss of the worker is no evidence against it.
CLEARED_AFTER_TOKENS = 8

Ending = Literal["finished", "failed"]


class QueueError(Exception):
    """Base of the reasons for which a queue does not do what it is asked."""


class QueueRefused(QueueError):
    """There is no room for the call. `reason` is one of `REASONS`; `wait_s` is 0 where nobody knows."""

    def __init__(self, reason: str, wait_s: float) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_s = wait_s


#: Why a call may be refused: the fleet is full, or one tenant has what it may have.
REASONS = ("queue_full", "open_tokens", "key_open", "key_share", "key_requests", "key_tokens")


class DuplicateRequest(QueueError):
    """A call with this id is known already."""


class QueueUnavailable(QueueError):
    """The queue cannot be reached or takes no more data; nothing is known to have changed."""


class Affinity(Struct, frozen=True):
    """What a request shares with others that one worker may have served, and the workers among whom it is to be shared."""

    name: str  #: of what it shares
    num_workers: int
    num_seats: int  #: calls that each worker runs at once


#: What became of a request with a home: put aside for it; nobody has served its like; its worker has more than its
#: share or others wait already; its worker is gone. Empty where it has none.
AffinityOutcome = Literal["", "home", "new", "busy", "gone"]


@dataclass(frozen=True, slots=True)
class RequestState:
    """How a call stands. `state`: queued, running, finished, failed or cancelled."""

    state: str
    attempt: int
    num_output_tokens: int  #: accepted so far
    remaining_s: float  #: until the deadline; after the end: until it is forgotten


@dataclass(frozen=True, slots=True)
class QueueStats:
    """One model's queue. `age_s`: how long the oldest call waits that no worker has read, without the backlog."""

    num_open: int  #: calls that wait or run
    num_backlog: int  #: batch calls among them that no worker has been given
    age_s: float


class Claim(Struct, frozen=True, eq=False):
    """One attempt at a call. Units: seconds by the queue's clock at the time of the claim."""

    id: str
    reply_to: str
    payload: bytes  #: the call, as its gateway encoded it
    log: tuple[bytes, ...]  #: what earlier attempts have published
    entry_id: bytes  #: the queue's own
    attempt: int  #: the fencing token
    failures: int  #: workers that were lost while they tried it, as far as this counts against it
    is_last_chance: bool  #: one more failure and the call is given up
    waited_s: float  #: since it was submitted
    remaining_s: float  #: until its deadline

    @property
    def may_be_poison(self) -> bool:
        """Whether a worker may have died of it."""
        return self.failures > 0


class Publication(Struct, frozen=True, eq=False):
    """What one publish says about one call; sent again unchanged until the queue has answered.

    `number` counts the publications of the claim from 1; `num_tokens` the output tokens before this one.
    """

    claim: Claim
    number: int
    num_tokens: int
    num_new_tokens: int  #: output tokens that these events add
    events: bytes  #: encoded, with commas between
    ending: Ending | None = None  #: how the call ends, if it does
    dead_reason: str = ""  #: why the call goes to the dead letters, if it does
    result: bytes = b""  #: what is too large for an event; `GatewayQueue.result` gives it
    keep_s: float = 0.0  #: so long an ended call is kept at least


class Limits(Struct, frozen=True):
    """Of one model, for all gateways together; 0 means any."""

    max_tokens: int = 0  #: that all open calls may come to; tenants share them
    max_tenant_requests: int = 0  #: open at once
    max_tenant_requests_per_minute: int = 0
    max_tenant_tokens_per_minute: int = 0


class Reservation(Struct, frozen=True):
    """What the calls of one request count as: each with the same tokens."""

    model: str
    tenant: str
    request_ids: tuple[str, ...]
    num_tokens: int  #: of prompt and answer, taken from the tenant's minute
    num_answer_tokens: int  #: among them; what the answer does not come to is refunded
    num_open_tokens: int  #: while it is open: more than `num_tokens` where it takes more memory
    limits: Limits

    @property
    def is_refundable(self) -> bool:
        """Whether a minute was charged."""
        return self.limits.max_tenant_tokens_per_minute > 0


class Quotas(Protocol):
    """What becomes of reservations. They are made as a call is submitted, and released as it ends."""

    async def refund(self, reservation: Reservation) -> bool:
        """Give a tenant's minute back what answers did not come to, or charge it for what they came to beyond.

        Does so once. False if one of the answers has not ended, and this is to be called again. Raises:
        QueueUnavailable.
        """
        ...


class GatewayQueue(Protocol):
    """The gateways' end of all models' queues."""

    async def submit(
        self,
        choices: Sequence[Envelope],
        *,
        timeout_s: float,
        max_waiting: int,
        reservation: Reservation | None = None,
        affinity: Affinity | None = None,
    ) -> AffinityOutcome:
        """Queue the calls of one request, all or none; their deadline is `timeout_s` from now by the queue's clock.

        At most `max_waiting` calls of one priority wait that nobody works on, or this request alone. `reservation`:
        what they count as, where there are quotas. `affinity`: they are put aside for the worker that last served such, if
        it has room; `share` lets others have them. Raises: QueueRefused, DuplicateRequest.
        """
        ...

    async def share(self, model: str, request_ids: Sequence[str]) -> int:
        """Let every worker have calls that their affinity has not claimed; returns how many. Others are left alone."""
        ...

    async def cancel(self, model: str, request_ids: Sequence[str]) -> None:
        """Cancel calls, whatever their state; unknown and ended ones are ignored."""
        ...

    async def state(self, model: str, request_id: str) -> RequestState | None:
        """How a call stands; None if it is not known."""
        ...

    async def states(self, model: str, request_ids: Sequence[str]) -> list[RequestState | None]:
        """How calls stand, many in a script."""
        ...

    async def events(self, model: str, request_id: str) -> list[bytes]:
        """Every event of a call that was accepted so far, encoded, in order: repairs a gap in the mailbox."""
        ...

    async def result(
        self, model: str, request_id: str, attempt: int, *, is_last: bool
    ) -> bytes | None:
        """What an attempt published beside its events; None where it is gone. `is_last`: nobody asks again."""
        ...

    async def stats(self, model: str) -> QueueStats:
        """How full a model's queue is."""
        ...

    async def close(self) -> None: ...


class Mailbox(Protocol):
    """Where the events of one gateway's calls arrive."""

    @property
    def gateway_id(self) -> str:
        """The name by which calls say where their events go."""
        ...

    async def open(self, models: Iterable[str]) -> None:
        """Take events of these models too."""
        ...

    def events(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield what workers publish, for ever: the model, and encoded events. Outages raise nothing."""
        ...

    async def close(self) -> None:
        """Take no more events, hang up."""
        ...


class WorkerQueue(Protocol):
    """One worker's end of one model's queue."""

    @property
    def num_backlog(self) -> int:
        """Batch calls that waited when a method of this queue last looked."""
        ...

    @property
    def num_claims(self) -> Mapping[str, int]:
        """Claims made so far: new, reclaimed, reconciled."""
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
        """Claim up to `count` calls, batch ones where nobody else waits; does not wait."""
        ...

    async def reclaim(self, count: int) -> list[Claim]:
        """Claim up to `count` calls whose lease has run out."""
        ...

    async def reconcile(self) -> list[Claim]:
        """Claim what is ours but whose claim never reached us; look at the backlog and tidy up."""
        ...

    async def begin(self, claim: Claim) -> bool:
        """Say that a suspect starts to run: from now on a loss is blamed on it. Returns whether it is still ours."""
        ...

    async def publish(self, publications: Sequence[Publication]) -> dict[str, str]:
        """Send events. Returns the calls that were refused, and why: they are no longer this worker's.

        Reasons: gone, cancelled, ended, fenced, gap.
        """
        ...

    async def renew(self, claims: Iterable[Claim]) -> dict[str, str]:
        """Keep the leases. Returns the calls that are no longer ours, and why."""
        ...

    async def cancel_deserted(self, claims: Iterable[Claim]) -> list[Claim]:
        """Cancel those whose gateway is gone, and return them."""
        ...

    async def release(self, claims: Iterable[Claim], *, is_crash: bool = False) -> int:
        """Give calls back for others to take at once; returns how many.

        `is_crash`: the attempt counts as a failure of the call, as if the worker had died of it.
        """
        ...

    async def leave(self, keep: Iterable[Claim] = ()) -> None:
        """Give back all that is ours beyond `keep`, and be forgotten once nothing is; call it when nobody claims."""
        ...

    async def close(self) -> None: ...
