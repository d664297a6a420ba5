"""Which tokens may come next, where an answer is held to a grammar: a function of the tokens so far.

Nothing of it is kept elsewhere: whoever continues an answer, after a preemption or on another
worker, replays its tokens. Asked by samplers.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Protocol

from shared.protocol import ErrorCode

#: Processor time of masks: at the start of an answer, and for each token more.
BURST_S = 0.1
_TOKEN_S = 0.005
#: Of a draft: an answer for which one takes longer gets no more of them.
DRAFT_S = 0.005
_SHOWN = 64  #: tokens of the answer that drafts and `Narrow` see
IDLE = 4  #: words that nothing followed of: then it is a text, which goes on until a sign
#: As many of them count as seen behind a sign: the words next to it tell names and choices from a text.
_BEHIND_SIGN = 2

TOO_COMPLEX = (
    "The grammar takes too long to follow at this place of the answer: send a simpler one."
)
BROKEN = "The answer cannot be continued as its grammar asks for."
#: Of llguidance's error for a token that the grammar does not allow; all others are of its limits.
_MISMATCH = "doesn't satisfy the grammar"


class ConstraintFailure(Exception):
    """No mask can be made. The request ends; the message is fit for the client's eyes."""

    def __init__(self, message: str, code: ErrorCode = ErrorCode.ENGINE_FAILURE) -> None:
        super().__init__(message)
        self.code = code


class Matcher(Protocol):
    """A grammar and a place in it, as llguidance has it. Nothing of it raises."""

    def deep_copy(self) -> "Matcher":
        """Another one at the same place."""
        ...

    def consume_tokens(self, sampled_tokens: list[int]) -> bool:
        """Go on; False and an error for tokens that do not follow."""
        ...

    def validate_tokens(self, tokens: list[int]) -> int:
        """How many of these may follow."""
        ...

    def compute_ff_bytes(self) -> bytes: ...

    def rollback(self, num_tokens: int) -> bool:
        """Go back by so many tokens."""
        ...

    def compute_bitmask(self) -> bytes:
        """A bit for each token, lowest first; whole words of 32."""
        ...

    def is_error(self) -> bool:
        """Whether a limit was reached, or a token did not follow."""
        ...

    def get_error(self) -> str:
        """Which of both it was; empty if neither."""
        ...


class Drafts(Protocol):
    """Guesses what follows where a matcher is."""

    def draft(self, matcher: Matcher, output: list[int]) -> list[int]:
        """Tokens that may come behind these; the matcher stays where it is."""
        ...

    def is_turn(self, token_id: int) -> bool:
        """Whether something may follow of a token though nothing did of those before it."""
        ...


#: Forbids tokens of a mask, given the last tokens of the answer.
Narrow = Callable[[bytes, Items[int]], bytes]


class Constraint:
    """A grammar that one answer is held to."""

    def __init__(
        self, matcher: Matcher, drafts: Drafts | None = None, narrow: Narrow | None = None
    ) -> None:
        self._matcher = matcher
        self.drafts = drafts
        self._narrow = narrow
        self._num_consumed = 0
        self._mask: bytes | None = None  # of the place where the matcher is
        self._cpu_s = 0.0
        self._num_idle = 0  # tokens since something followed of one

    def begin(self) -> "Constraint":
        """The same for another answer, from its start."""
        assert self._num_consumed == 0
        return Constraint(self._matcher.deep_copy(), self.drafts, self._narrow)

    def is_silent(self, token_ids: Items[int]) -> bool:
        """Whether it guesses nothing behind these: it does not, or they are amid a text."""
        drafts = self.drafts
        return drafts is None or (self._num_idle >= IDLE and not drafts.is_turn(token_ids[-1]))

    def mask(self, token_ids: Items[int], num_prompt_tokens: int) -> bytes:
        """A bit for each token that may follow these, the lowest first. Raises: ConstraintFailure."""
        num_output_tokens = len(token_ids) - num_prompt_tokens
        if self._mask is None or num_output_tokens != self._num_consumed:
            self._go_back(num_output_tokens)
            new = list(token_ids[num_prompt_tokens + self._num_consumed :])
            started_s = time.thread_time()
            self._mask = self._advance(new)
            if self._narrow is not None:
                last = token_ids[max(num_prompt_tokens, len(token_ids) - _SHOWN) :]
                self._mask = self._narrow(self._mask, last)
            self._num_consumed = num_output_tokens
            self._cpu_s += time.thread_time() - started_s
            if self._cpu_s > BURST_S + _TOKEN_S * num_output_tokens:
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

    def _go_back(self, num_output_tokens: int) -> None:
        """A step that was taken back has shown tokens that are none yet."""
        excess = self._num_consumed - num_output_tokens
        if excess > 0:
            if not self._matcher.rollback(excess):
                raise ConstraintFailure(BROKEN)
            self._num_consumed = num_output_tokens

    def draft(self, token_ids: Items[int], num_prompt_tokens: int) -> list[int]:
        """Tokens that will probably follow these; none where nothing is forced, or it takes long."""
        num_output_tokens = len(token_ids) - num_prompt_tokens
        drafts = self.drafts
        if drafts is None or num_output_tokens < self._num_consumed or self.is_silent(token_ids):
            return []
        started_s = time.thread_time()
        if new := list(token_ids[num_prompt_tokens + self._num_consumed :]):
            if not self._matcher.consume_tokens(new):
                return []  # the mask will say why
            self._num_consumed, self._mask = num_output_tokens, None
        if self._matcher.is_error():
            return []
        output = list(token_ids[max(num_prompt_tokens, len(token_ids) - _SHOWN) :])
        found = drafts.draft(self._matcher, output)
        is_turn = drafts.is_turn(token_ids[-1])
        self._num_idle = 0 if found else _BEHIND_SIGN if is_turn else self._num_idle + 1
        if time.thread_time() - started_s > DRAFT_S:
            self.drafts = None
        return found
