"""How many tokens a step may still compute while it is planned.

Used by the scheduler alone.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class TokenBudget:
    """New tokens that a step may still compute, and how many of them for prompts."""

    num_tokens: int
    num_prefill_tokens: int

    def share(self, num_pending: int) -> int:
        """How many of a sequence's pending tokens fit; one alone is no prompt."""
        if num_pending > self.num_prefill_tokens and num_pending > 1:
            num_pending = self.num_prefill_tokens
        return num_pending if num_pending < self.num_tokens else self.num_tokens

    def take(self, num_new: int, num_pending: int, *, is_late: bool = False) -> None:
        """Spend a share; who is late takes none of what others' prompts may have."""
        self.num_tokens -= num_new
        if num_pending > 1 and not is_late:
            self.num_prefill_tokens -= num_new
