"""What the benchmark asks of an engine: requests of random tokens and random images, all added at once.

Every request is new, so that no cache helps. Answers are greedy, of one length, and ignore the end token. Images come as pixels: decoding them is not the engine's.
"""

from dataclasses import dataclass
from random import Random

import torch

from engines.core.sequence import EngineRequest, ImageInput
from engines.torch_backend.models.llava import VLMConfig
from shared.protocol import SamplingParams


@dataclass(frozen=True, slots=True)
class Scenario:
    """Numbers of prompt tokens (beside the image's) and of output tokens; None: as many as were asked for."""

    name: str
    num_text_tokens: int
    num_output_tokens: int | None = None
    has_image: bool = False
    is_late: bool = False  #: one comes while as many as the batch size stream


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("decode", 16),
        Scenario("prefill", 512, num_output_tokens=1),
        Scenario("image", 32, has_image=True),
        Scenario("mixed", 32, num_output_tokens=1, has_image=True, is_late=True),
    )
}


class RequestMaker:
    def __init__(self, config: VLMConfig, max_model_len: int) -> None:
        self._config = config
        self._max_model_len = max_model_len
        self._random = Random(0)
        self._generator = torch.Generator().manual_seed(0)
        self._num_made = 0

    def make(self, scenario: Scenario, count: int, num_tokens: int) -> list[EngineRequest]:
        """`num_tokens` of output each, unless the scenario says; shortened to the model's context."""
        return [self._make_one(scenario, num_tokens) for _ in range(count)]

    def _make_one(self, scenario: Scenario, num_tokens: int) -> EngineRequest:
        num_slots = self._config.tokens_per_image if scenario.has_image else 0
        num_tokens = min(scenario.num_output_tokens or num_tokens, max(2, self._max_model_len // 2))
        num_text = min(scenario.num_text_tokens, self._max_model_len - num_tokens - num_slots)
        self._num_made += 1
        request_id = f"bench-{self._num_made}"
        images = ()
        if scenario.has_image:
            images = (ImageInput(0, num_slots, request_id, self._pixels()),)
        token_ids = [self._config.image_token_id] * num_slots + self._text(max(num_text, 1))
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return EngineRequest(request_id, token_ids, sampling, images)

    def _text(self, count: int) -> list[int]:
        ids = (self._random.randrange(self._config.text.vocab_size) for _ in range(count))
        return [0 if token_id == self._config.image_token_id else token_id for token_id in ids]

    def _pixels(self) -> torch.Tensor:
        size = self._config.vision.image_size
        return torch.randn(3, size, size, generator=self._generator)
