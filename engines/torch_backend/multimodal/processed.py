"""The output of a checkpoint's processor for one image, video or audio."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor

from engines.core.sequence import ImageInput
from shared.protocol import MediaKind

#: Token types of slots.
TYPES: Mapping[str, int] = {"image": 1, "video": 2, "audio": 3}
#: Number of slots of a chunk: enough for efficient matrix products, few enough for the caches of a CPU.
CHUNK_SLOTS = 256
#: Inputs whose first number is the number of steps.
_COUNT_STEPS = frozenset({"video_grid_thw", "num_frames_per_video"})


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """The model's inputs for an image, video or audio, and its text in the prompt."""

    inputs: Mapping[str, Any]
    text: str
    num_slots: int
    #: The image's result in a prompt with several images, if it is different.
    among_others: "ProcessedImage | None" = None
    #: For each slot, the index of a visual indicator's feature, or -1 for the image's next row; empty: all -1.
    indicators: tuple[int, ...] = ()
    kind: MediaKind = "image"
    #: Kind of the slot tokens in its text; in some models, videos use image slots.
    slots_of: MediaKind = "image"
    slot_id: int | None = None
    num_frames: int = 0  #: of a video
    #: Number of slots of each step. Steps are parts of equal size that are encoded independently, such as video frames.
    step_slots: tuple[int, ...] = ()
    step_dim: int = 0  #: dimension of the steps in the pixels; other inputs use the first dimension
    kept: Tensor | None = None  #: mask of the encoder's rows that have slots; None: the first rows

    @property
    def nbytes(self) -> int:
        own = sum(x.nbytes for x in self.inputs.values() if isinstance(x, Tensor))
        return own + (self.among_others.nbytes if self.among_others else 0)

    def steps(self, start: int, stop: int) -> "ProcessedImage":
        """The steps `start` to `stop - 1`."""

        def part(x: Any, dim: int = 0) -> Any:
            if not isinstance(x, Tensor) or x.shape[dim] % len(self.step_slots):
                return x
            size = x.shape[dim] // len(self.step_slots)
            return x.narrow(dim, start * size, (stop - start) * size)

        inputs = {}
        for name, x in self.inputs.items():
            if name in _COUNT_STEPS:
                inputs[name] = x.clone()
                inputs[name].view(-1)[0] = stop - start
            else:
                inputs[name] = part(x, self.step_dim if name.startswith("pixel_") else 0)
        slots = self.step_slots[start:stop]
        return replace(
            self, inputs=inputs, num_slots=sum(slots), step_slots=slots, kept=part(self.kept)
        )


def equal_steps(num_slots: int, num_steps: int) -> tuple[int, ...]:
    """The number of slots of each step if all steps have the same number, else ()."""
    return () if num_slots % num_steps else (num_slots // num_steps,) * num_steps


def split(image: ImageInput) -> list[ImageInput]:
    """Split a processed image into chunks of about `CHUNK_SLOTS` slots. The decoder can start after the first chunk."""
    pixels: ProcessedImage = image.pixels
    num_steps = len(pixels.step_slots)
    size = max(1, CHUNK_SLOTS * num_steps // max(1, pixels.num_slots))
    if size >= num_steps:
        return [image]
    chunks = []
    slots = np.concatenate([np.arange(start, stop) for start, stop in image.slot_runs])
    ends = [0, *accumulate(pixels.step_slots)]
    for start in range(0, num_steps, size):
        stop = min(start + size, num_steps)
        own = slots[ends[start] : ends[stop]]
        first, last = int(own[0]), int(own[-1])
        runs = np.split(own - first, np.flatnonzero(np.diff(own) > 1) + 1)
        chunks.append(
            replace(
                image,
                offset=image.offset + first,
                num_tokens=last + 1 - first,
                image_hash=f"{image.image_hash}, steps {start} to {stop}",
                pixels=pixels.steps(start, stop),
                slots=tuple((int(run[0]), int(run[-1]) + 1) for run in runs),
            )
        )
    return chunks
