"""An answer that begins with the rest of its prompt, so that the tokens of the prompt have logprobs.

The prompt's first token alone is computed as such; the others are held to be what they are, as by a grammar.
"""

from collections.abc import Collection
from collections.abc import Sequence as Items

from msgspec.structs import replace

from engines.base import InvalidRequest, PromptTooLong
from engines.core.constraint import Constraint
from shared.protocol import SamplingParams


class Echo:
    """A `Matcher`: these tokens, and then any."""

    def __init__(self, token_ids: Items[int], vocab_size: int, place: int = 0) -> None:
        self._token_ids = token_ids
        self._vocab_size = vocab_size
        self._place = place

    def deep_copy(self) -> "Echo":
        """Another one at the same place."""
        return Echo(self._token_ids, self._vocab_size, self._place)

    def validate_tokens(self, tokens: list[int]) -> int:
        """How many of these may follow."""
        known = self._token_ids[self._place : self._place + len(tokens)]
        pairs = zip(known, tokens, strict=False)
        return next((n for n, (old, token) in enumerate(pairs) if old != token), len(tokens))

    def consume_tokens(self, sampled_tokens: list[int]) -> bool:
        """Go on; False for tokens that do not follow."""
        if self.validate_tokens(sampled_tokens) < len(sampled_tokens):
            return False
        self._place += len(sampled_tokens)
        return True

    def rollback(self, num_tokens: int) -> bool:
        """Go back by so many tokens."""
        self._place -= num_tokens
        return self._place >= 0

    def compute_ff_bytes(self) -> bytes:
        """Not known: tokens must follow, however else their bytes could be spelled."""
        return b""

    def compute_bitmask(self) -> bytes:
        """A bit for each token, lowest first; whole words of 32."""
        num_bytes = (self._vocab_size + 31) // 32 * 4
        if self._place >= len(self._token_ids):
            bits = (1 << self._vocab_size) - 1
        else:
            bits = 1 << self._token_ids[self._place]
        return bits.to_bytes(num_bytes, "little")

    def is_error(self) -> bool:
        """It knows none."""
        return False


def echo(
    token_ids: list[int],
    sampling: SamplingParams,
    vocab_size: int,
    max_model_len: int,
    eos_token_ids: Collection[int],
) -> tuple[SamplingParams, Constraint]:
    """How to answer with the tokens behind the first, and then with as many as were asked for.

    Raises: PromptTooLong, InvalidRequest.
    """
    rest = token_ids[1:]
    if not set(rest).isdisjoint(eos_token_ids):
        problem = (
            "its tokens have no logprobs, as one of them ends an answer: leave out echo or logprobs"
        )
        raise InvalidRequest(problem, "prompt")
    num_asked = sampling.max_tokens or 0
    if len(token_ids) + num_asked > max_model_len:
        raise PromptTooLong(
            f"the model's maximum context length is {max_model_len} tokens; the prompt has"
            f" {len(token_ids)} and {num_asked} more are asked for"
        )
    matcher = Echo(rest, vocab_size)
    return replace(sampling, max_tokens=len(rest) + num_asked), Constraint(matcher)
