"""What the benchmark asks of an engine: requests of random tokens and random images, all added at once.

Every request is new, so that no cache helps, but in `repeat`, which asks again what `image` would. Answers are of one
length and ignore the end token. Those of `edit`, `noise` and `fresh` are given, and the model is held to them; those of
`letters` are sampled at temperature 2, all others are greedy. Images come as pixels: decoding them is not the engine's.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import torch
from msgspec.structs import replace

from engines.base import EngineCall, PreparedImage
from engines.core.constraint import Constraint
from engines.core.sequence import EngineRequest, ImageInput
from engines.torch_backend.models.llava import VLMConfig
from shared.protocol import Generate, Grammar, SamplingParams, TokensPart


@dataclass(frozen=True, slots=True)
class Scenario:
    """Numbers of prompt tokens (beside the image's) and of output tokens; None: as many as were asked for."""

    name: str
    num_text_tokens: int
    num_output_tokens: int | None = None
    has_image: bool = False
    is_repeated: bool = False
    is_late: bool = False  #: one comes while as many as the batch size stream
    #: That the model is held to: its prompt, of as many tokens, with one of 20 replaced; a few at random; or each once.
    #: Or its own, of ASCII letters and spaces by a grammar that forces nothing: what grammars' drafts pass over.
    answer: Literal["own", "edit", "noise", "fresh", "letters"] = "own"


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("decode", 16),
        Scenario("prefill", 512, num_output_tokens=1),
        Scenario("image", 32, has_image=True),
        Scenario("repeat", 32, has_image=True, is_repeated=True),
        Scenario("mixed", 32, num_output_tokens=1, has_image=True, is_late=True),
        Scenario("edit", 0, answer="edit"),
        Scenario("noise", 16, answer="noise"),
        Scenario("fresh", 16, answer="fresh"),
        Scenario("letters", 16, answer="letters"),
    )
}
#: Those that are measured unless others are asked for.
USUAL = tuple(name for name, scenario in SCENARIOS.items() if scenario.answer == "own")
_EDITED_EVERY = 20
_NUM_WORDS = 8
_LETTERS = 8  #: more than a token of most vocabularies has


class ForcedTokens:
    """A `Matcher` that allows one sequence of tokens, and then any."""

    def __init__(self, token_ids: Items[int], vocab_size: int, position: int = 0) -> None:
        self._token_ids = token_ids
        self._vocab_size = vocab_size
        self._position = position

    def deep_copy(self) -> "ForcedTokens":
        return ForcedTokens(self._token_ids, self._vocab_size, self._position)

    def validate_tokens(self, tokens: list[int]) -> int:
        allowed = self._token_ids[self._position : self._position + len(tokens)]
        pairs = zip(allowed, tokens, strict=False)
        return next((n for n, (old, token) in enumerate(pairs) if old != token), len(tokens))

    def consume_tokens(self, sampled_tokens: list[int]) -> bool:
        if self.validate_tokens(sampled_tokens) < len(sampled_tokens):
            return False
        self._position += len(sampled_tokens)
        return True

    def rollback(self, num_tokens: int) -> bool:
        self._position -= num_tokens
        return self._position >= 0

    def compute_ff_bytes(self) -> bytes:
        return b""  # the tokens must follow, however else their bytes could be tokenized

    def compute_bitmask(self) -> bytes:
        bits = (1 << self._vocab_size) - 1
        if self._position < len(self._token_ids):
            bits = 1 << self._token_ids[self._position]
        return bits.to_bytes((self._vocab_size + 31) // 32 * 4, "little")

    def is_error(self) -> bool:
        return False

    def get_error(self) -> str:
        return ""


class RequestMaker:
    """Requests for one model, from a seed."""

    def __init__(
        self,
        config: VLMConfig,
        max_model_len: int,
        prepare: Callable[[EngineCall, Items[PreparedImage]], EngineRequest],
        seed: int = 0,
    ) -> None:
        self._config = config
        self.prepare = prepare  #: of the engine that is asked
        self._max_model_len = max_model_len
        self._random = Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._num_made = 0

    def make(self, scenario: Scenario, count: int, num_tokens: int) -> list[EngineRequest]:
        """`num_tokens` of output each, unless the scenario says; shortened to the model's context."""
        return [self._make_one(scenario, num_tokens) for _ in range(count)]

    def again(self, request: EngineRequest) -> EngineRequest:
        """The same question under another id."""
        return EngineRequest(
            self._next_id(), request.prompt_token_ids, request.sampling, request.images
        )

    def _make_one(self, scenario: Scenario, num_tokens: int) -> EngineRequest:
        num_slots = self._config.tokens_per_image if scenario.has_image else 0
        num_tokens = min(scenario.num_output_tokens or num_tokens, max(2, self._max_model_len // 2))
        num_text = num_tokens if scenario.answer == "edit" else scenario.num_text_tokens
        num_text = min(num_text, self._max_model_len - num_tokens - num_slots)
        request_id = self._next_id()
        images = ()
        if scenario.has_image:
            images = (ImageInput(0, num_slots, request_id, self._pixels()),)
        token_ids = [self._config.image_token_id] * num_slots + self._text(max(num_text, 1))
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        if scenario.answer == "letters":
            grammar = Grammar("regex", f"[a-z ]{{{_LETTERS * num_tokens}}}", "structured_outputs")
            sampling = replace(sampling, temperature=2.0)  # likely ones repeat themselves
            task = Generate((), sampling, grammar=grammar, prompt=TokensPart(tuple(token_ids)))
            return self.prepare(EngineCall(request_id, task), ())
        answer = self._answer(scenario, token_ids, num_tokens)
        vocab_size = self._config.text.vocab_size
        matcher: Any = ForcedTokens(
            answer, vocab_size
        )  # has the methods of a matcher that are called
        constraint = Constraint(matcher) if answer else None
        return EngineRequest(request_id, token_ids, sampling, images, constraint=constraint)

    def _answer(self, scenario: Scenario, prompt: list[int], num_tokens: int) -> list[int]:
        if scenario.answer == "noise":
            return self._random.choices(self._text(_NUM_WORDS), k=num_tokens)
        if scenario.answer == "own":
            return []
        if scenario.answer == "fresh":
            others = set(range(self._config.text.vocab_size)) - {self._config.image_token_id}
            return self._random.sample(sorted(others), num_tokens)
        answer = list(prompt)
        for start in range(0, len(answer), _EDITED_EVERY):
            length = min(_EDITED_EVERY, len(answer) - start)
            [answer[start + self._random.randrange(length)]] = self._text(1)
        return answer

    def _text(self, count: int) -> list[int]:
        ids = (self._random.randrange(self._config.text.vocab_size) for _ in range(count))
        return [0 if token_id == self._config.image_token_id else token_id for token_id in ids]

    def _pixels(self) -> torch.Tensor:
        size = self._config.vision.image_size
        return torch.randn(3, size, size, generator=self._generator)

    def _next_id(self) -> str:
        self._num_made += 1
        return f"bench-{self._num_made}"
