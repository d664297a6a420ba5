"""What a worker holds of a request, and what it says about it: between the worker's loops and the queue.

It must not know Redis's commands; it knows what the scripts want to be told.
"""

from dataclasses import dataclass

from shared.protocol import Call, CallEvent, Failed, Finished, Tokens, encode

#: A suspect that has come so many tokens further will hardly end this worker: it needs to be alone no longer, and the
#: loss of the worker is no evidence against it.
CLEARED_AFTER_TOKENS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """One attempt at a request. Units: seconds by Redis's clock at the time of the claim."""

    request: Call
    entry_id: bytes
    attempt: int  #: the fencing token
    failures: int  #: workers that were lost while they tried it, as far as this counts against it
    is_last_chance: bool  #: one more failure and the request is given up
    output_token_ids: tuple[int, ...]  #: what earlier attempts have published
    waited_s: float  #: since it was enqueued
    remaining_s: float  #: until its deadline

    @property
    def is_suspect(self) -> bool:
        """Whether a worker may have died of it."""
        return self.failures > 0


@dataclass(frozen=True, slots=True, eq=False)
class Publication:
    """What one publish says about one request; sent again unchanged until Redis has answered.

    `number` counts the publications of the claim from 1; `num_tokens` the output tokens before this one.
    """

    claim: Claim
    number: int
    num_tokens: int
    events: tuple[CallEvent, ...]
    dead_reason: str = ""  #: why the request goes to the dead letters, if it does

    @property
    def terminal(self) -> Finished | Failed | None:
        """The event that ends the request, if this publication does."""
        last = self.events[-1]
        return last if isinstance(last, Finished | Failed) else None

    @property
    def num_new_tokens(self) -> int:
        """Output tokens that these events add."""
        return sum(len(event.token_ids) for event in self.events if isinstance(event, Tokens))

    def to_item(self) -> tuple[int, int, int, int, bytes]:
        """The publish script's view of it."""
        tokens = self.num_tokens, self.num_new_tokens
        return self.claim.attempt, self.number, *tokens, self._encoded()

    def to_ending(self) -> tuple[str, bytes, int, str, int | str, int, str, bytes]:
        """The finish script's view of it. A failure ends a request wherever its tokens stand."""
        is_whole = isinstance(self.terminal, Finished)
        return (
            self.claim.request.id,
            self.claim.entry_id,
            self.claim.attempt,
            "finished" if is_whole else "failed",
            self.num_tokens if is_whole else "",
            self.num_new_tokens,
            self.dead_reason,
            self._encoded(),
        )

    def _encoded(self) -> bytes:
        return b",".join([encode(event) for event in self.events])
