"""The interface of a compared system, and the workloads.

Every result is a duration in seconds, without loading, warm-up and preparation.
"""

from dataclasses import dataclass
from typing import Literal

#: text tokens in addition to the image, in `first_token` and in the length of every context
NUM_TEXT_TOKENS = 32

#: `decode`: steps of one token per sequence, after contexts of the length of an image prompt. `prefill`: a new text
#: prompt of that length, up to its next token. `image`: tower and projector on one new image, from pixels to features.
#: `first_token`: a new image and text, up to the first token.
Task = Literal["decode", "prefill", "image", "first_token"]


@dataclass(frozen=True, slots=True)
class Workload:
    """A task; for decoding, with a batch size and a number of steps."""

    name: str
    task: Task
    unit: Literal["tok/s", "ms"] = "ms"
    batch_size: int = 1
    num_steps: int = 0

    @property
    def arguments(self) -> dict[str, int]:
        if not self.num_steps:
            return {}
        return {"batch_size": self.batch_size, "num_steps": self.num_steps}

    def value(self, seconds: float, num_context: int) -> float:
        """A result in the workload's unit. `num_context`: tokens of an image prompt."""
        if self.unit == "ms":
            return seconds * 1e3
        num_tokens = self.batch_size * self.num_steps if self.task == "decode" else num_context
        return num_tokens / seconds


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("decode-1", "decode", "tok/s", 1, 16),
        Workload("decode-4", "decode", "tok/s", 4, 8),
        Workload("decode-16", "decode", "tok/s", 16, 4),
        Workload("prefill", "prefill", "tok/s"),
        Workload("image", "image"),
        Workload("first-token", "first_token"),
    )
}

_PRECISIONS = {
    "ours": ("float32", "bfloat16", "int8", "int4"),
    "transformers": ("float32", "bfloat16"),
    "llama.cpp": ("F32", "F16", "BF16", "Q8_0", "Q4_0"),
}
#: Systems as maker and precision, such as `transformers:bfloat16`.
SYSTEMS = [f"{maker}:{each}" for maker, several in _PRECISIONS.items() for each in several]
