"""What a worker holds of a call, and what it says about it: between the worker's loops and the queue."""

from dataclasses import dataclass
from typing import Any, Literal

#: A suspect that has come so many tokens further will hardly end this worker: it needs to be alone no longer, and the
#: loss of the worker is no evidence against it.
CLEARED_AFTER_TOKENS = 8

Ending = Literal["finished", "failed"]


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """One attempt at a call. Units: seconds by Redis's clock at the time of the claim."""

    id: str
    reply_to: str
    payload: bytes  #: the call, as its gateway encoded it
    log: tuple[bytes, ...]  #: what earlier attempts have published
    entry_id: bytes
    attempt: int  #: the fencing token
    failures: int  #: workers that were lost while they tried it, as far as this counts against it
    is_last_chance: bool  #: one more failure and the call is given up
    waited_s: float  #: since it was enqueued
    remaining_s: float  #: until its deadline

    @property
    def is_suspect(self) -> bool:
        """Whether a worker may have died of it."""
        return self.failures > 0


@dataclass(frozen=True, slots=True, eq=False)
class Publication:
    """What one publish says about one call; sent again unchanged until Redis has answered.

    `number` counts the publications of the claim from 1; `num_tokens` the output tokens before this one.
    """

    claim: Claim
    number: int
    num_tokens: int
    num_new_tokens: int  #: output tokens that these events add
    events: bytes  #: encoded, with commas between
    ending: Ending | None = None  #: how the call ends, if it does
    dead_reason: str = ""  #: why the call goes to the dead letters, if it does

    def to_item(self) -> dict[str, Any]:
        """The publish script's view of it."""
        return {
            "attempt": self.claim.attempt,
            "number": self.number,
            "index": self.num_tokens,
            "count": self.num_new_tokens,
        }

    def to_ending(self) -> dict[str, Any]:
        """The finish script's view of it. A failure ends a call wherever its tokens stand."""
        return {
            "id": self.claim.id,
            "entry": self.claim.entry_id.decode(),
            "attempt": self.claim.attempt,
            "state": self.ending,
            "index": self.num_tokens if self.ending == "finished" else None,
            "count": self.num_new_tokens,
            "reason": self.dead_reason,
        }
