"""Token masks of an answer that is constrained by a grammar. Called by samplers.

The masks depend only on the tokens of the answer, which are replayed after a preemption or on another worker.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shared.protocol import ErrorCode

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from engines.text.grammar import Drafter

#: CPU time limit of an answer's masks: an initial amount, and an addition per token. The slowest mask is not counted,
#: because a thread's CPU time may include a pause of the virtual machine.
BURST_S = 0.1
_TOKEN_S = 0.005
#: CPU time limit of one draft; an answer that exceeds it gets no more drafts.
DRAFT_S = 0.005
_SHOWN = 64  #: last tokens of the answer that drafts and `Narrow` see
IDLE = 4  #: tokens without a forced continuation after which drafting pauses until punctuation
#: Idle count after punctuation, so that drafting pauses again after 2 tokens without a forced continuation.
_BEHIND_SIGN = 2

TOO_COMPLEX = (
    "The grammar takes too long to evaluate at this point of the answer: send a simpler grammar."
)
BROKEN = "The answer cannot be continued within its grammar: send a different grammar."
#: Part of llguidance's error for a token that the grammar forbids; other errors are exceeded limits.
_MISMATCH = "doesn't satisfy the grammar"


class ConstraintFailure(Exception):
    """No mask can be computed. The request fails with this message."""

    def __init__(self, message: str, code: ErrorCode = ErrorCode.ENGINE_FAILURE) -> None:
        super().__init__(message)
        self.code = code


#: Removes tokens from a mask, given the last tokens of the answer.
Narrow = Callable[[bytes, Items[int]], bytes]


@dataclass(eq=False)
class Constraint:
    _matcher: "LLMatcher"
    drafts: "Drafter | None" = None
    speller: "Drafter | None" = None  #: tokenizes forced text; None: any tokenization is allowed
    _narrow: Narrow | None = None
    source: str = ""  #: the grammar without reasoning, in the syntax of llguidance
    _num_consumed: int = 0
    _mask: bytes | None = None  # at the matcher's position
    _cpu_s: float = 0.0
    _slowest_s: float = 0.0
    _num_idle: int = 0  # tokens since the last forced continuation

    def begin(self) -> "Constraint":
        """Copy the constraint for the start of another answer."""
        assert self._num_consumed == 0
        return replace(self, _matcher=self._matcher.deep_copy())

    def is_silent(self, token_ids: Items[int]) -> bool:
        """Whether no draft is possible after these tokens: without a drafter, or within free text."""
        drafts = self.drafts
        return drafts is None or (self._num_idle >= IDLE and not drafts.resumes(token_ids[-1]))

    def mask(self, token_ids: Items[int], num_prompt_tokens: int) -> bytes:
        """Bit mask of the tokens that are allowed next, lowest token id first. Raises: ConstraintFailure."""
        num_output_tokens = len(token_ids) - num_prompt_tokens
        if self._mask is None or num_output_tokens != self._num_consumed:
            self._roll_back(num_output_tokens)
            new = list(token_ids[num_prompt_tokens + self._num_consumed :])
            started_s = time.thread_time()
            self._mask = self._advance(new)
            last = list(token_ids[max(num_prompt_tokens, len(token_ids) - _SHOWN) :])
            if self._narrow is not None:
                self._mask = self._narrow(self._mask, last)
            if self.speller and (forced := self.speller.spell(self._matcher, last)) is not None:
                self._mask = _only(self._mask, forced)
            self._num_consumed = num_output_tokens
            spent_s = time.thread_time() - started_s
            self._cpu_s += spent_s
            self._slowest_s = max(self._slowest_s, spent_s)
            if self._cpu_s - self._slowest_s > BURST_S + _TOKEN_S * num_output_tokens:
                raise ConstraintFailure(TOO_COMPLEX, ErrorCode.GRAMMAR_TOO_COMPLEX)
        return self._mask

    def _advance(self, new: list[int]) -> bytes:
        if new and not self._matcher.consume_tokens(new):
            if _MISMATCH in self._matcher.get_error():
                raise ConstraintFailure(BROKEN)
            raise ConstraintFailure(TOO_COMPLEX, ErrorCode.GRAMMAR_TOO_COMPLEX)
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise ConstraintFailure(TOO_COMPLEX, ErrorCode.GRAMMAR_TOO_COMPLEX)
        if not any(mask):
            raise ConstraintFailure(BROKEN)
        return mask

    def _roll_back(self, num_output_tokens: int) -> None:
        """Undo tokens of a step that was discarded. Raises: ConstraintFailure."""
        excess = self._num_consumed - num_output_tokens
        if excess > 0:
            if not self._matcher.rollback(excess):
                raise ConstraintFailure(BROKEN)
            self._num_consumed = num_output_tokens

    def draft(self, token_ids: Items[int], num_prompt_tokens: int) -> list[int]:
        """Probable next tokens; empty if nothing is forced."""
        num_output_tokens = len(token_ids) - num_prompt_tokens
        drafts = self.drafts
        if drafts is None or num_output_tokens < self._num_consumed or self.is_silent(token_ids):
            return []
        started_s = time.thread_time()
        if new := list(token_ids[num_prompt_tokens + self._num_consumed :]):
            if not self._matcher.consume_tokens(new):
                return []  # `mask` raises the error
            self._num_consumed, self._mask = num_output_tokens, None
        if self._matcher.is_error():
            return []
        output = list(token_ids[max(num_prompt_tokens, len(token_ids) - _SHOWN) :])
        found = drafts.draft(self._matcher, output)
        resumes = drafts.resumes(token_ids[-1])
        self._num_idle = 0 if found else _BEHIND_SIGN if resumes else self._num_idle + 1
        if time.thread_time() - started_s > DRAFT_S:
            self.drafts = None
        return found


def _only(mask: bytes, token_id: int) -> bytes:
    """A mask of `token_id` only, if `mask` allows it; else `mask`."""
    place, bit = token_id // 8, 1 << token_id % 8
    if place >= len(mask) or not mask[place] & bit:
        return mask
    return bytes(place) + bytes([bit]) + bytes(len(mask) - place - 1)
