"""A step as whole numbers: what rank 0 has scheduled, for those that compute their shares of it.

Features of images, the only other numbers of a step, go from device to device.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engines.core.request import ImageInput
from engines.core.sequence import ScheduledSequence, Sequence
from engines.torch_backend.models.registry import ImageSlots
from shared.protocol import SamplingParams

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pack(sections: Items[np.ndarray | Items[int]]) -> bytes:
    """Sections of whole numbers, each behind its length."""
    arrays = [np.asarray(section, dtype=np.int64).ravel() for section in sections]
    lengths = np.array([len(arrays), *map(len, arrays)], dtype=np.int64)
    return b"".join(part.tobytes() for part in (lengths, *arrays))


def unpack(data: bytes | bytearray) -> list[np.ndarray]:
    """The sections of `pack`."""
    numbers = np.frombuffer(data, dtype=np.int64)
    count = int(numbers[0])
    ends = 1 + count + np.cumsum(numbers[1 : 1 + count])
    return np.split(numbers[: ends[-1]], [1 + count, *ends[:-1]])[1:]


@dataclass(frozen=True, slots=True)
class Step:
    """A step before its features are there."""

    items: list[ScheduledSequence]
    inputs: Tensor  #: token ids, and one or several rows of positions; (1 + R, N)
    rows: list[int]  #: the tokens behind which scores are wanted
    slots: list[tuple[int, int]]  #: of image features: the place in the flat batch, and how many
    width: int  #: of features
    dtype: torch.dtype  #: of features
    image_form: bytes  #: what the model has to know of them


@dataclass(slots=True)
class StepWriter:
    """Numbers the requests of rank 0."""

    _numbers: dict[str, int] = field(default_factory=dict)
    _released: list[int] = field(default_factory=list)
    _count: int = 0

    def release(self, request_id: str) -> None:
        """Tell of a request's end with the next step. Idempotent."""
        if (number := self._numbers.pop(request_id, None)) is not None:
            self._released.append(number)

    def write(
        self,
        items: list[ScheduledSequence],
        inputs: Tensor,
        rows: list[int],
        images: list[ImageSlots],
        image_form: bytes,
    ) -> list[np.ndarray | Items[int]]:
        """The sections of a step. Shapes: inputs (1 + R, N), on the CPU."""
        heads: list[int] = []
        wholes: list[int] = []
        for place, item in enumerate(items):
            table = item.sequence.block_ids
            asked = item.sequence.num_prompt_tokens
            heads += (self._number(item), item.start, item.num_new_tokens, asked, len(table))
            for image in item.images if item.num_new_tokens > 1 else ():
                if image.is_whole:
                    runs = [number for run in image.slot_runs for number in run]
                    wholes += (place, image.offset, image.num_tokens, len(runs), *runs)
        blocks = [block for item in items for block in item.sequence.block_ids]
        slots = [number for image in images for number in (image.start, len(image.features))]
        first = images[0].features if images else torch.empty(0, 0)
        form = [first.shape[1], _DTYPES.index(first.dtype), *image_form] if images else []
        released, self._released = self._released, []
        return [
            heads, blocks, rows, inputs.shape[:1], inputs.numpy(), wholes, slots, form, released,
        ]  # fmt: skip

    def _number(self, item: ScheduledSequence) -> int:
        number = self._numbers.get(item.sequence.request_id)
        if number is None:
            number = self._numbers[item.sequence.request_id] = self._count
            self._count += 1
        return number


@dataclass(slots=True)
class StepReader:
    """The sequences of rank 0, as far as others have to know them: by numbers, without tokens."""

    _sequences: dict[int, Sequence] = field(default_factory=dict)

    def read(self, sections: list[np.ndarray]) -> tuple[Step, list[str]]:
        """A step, and the ids of requests that have ended."""
        heads, blocks, rows, height, inputs, wholes, slots, form, released = sections
        ended = [str(number) for number in released.tolist() if self._sequences.pop(number, None)]
        items: list[ScheduledSequence] = []
        first = 0
        for number, start, num_new, asked, num_blocks in heads.reshape(-1, 5).tolist():
            sequence = self._sequences.get(number)
            if sequence is None:
                sequence = Sequence(str(number), [], asked, SamplingParams())
                self._sequences[number] = sequence
            sequence.block_ids = blocks[first : first + num_blocks].tolist()
            sequence.num_computed_tokens = start
            sequence.images = ()
            first += num_blocks
            items.append(ScheduledSequence(sequence, num_new))
        for place, image in _images(wholes.tolist()):
            items[place].sequence.images += (image,)
        width, dtype, *image_form = form.tolist() or (0, 0)
        pairs = [(start, count) for start, count in slots.reshape(-1, 2).tolist()]
        table = torch.from_numpy(inputs.reshape(int(height[0]), -1).copy())
        step = Step(
            items, table, rows.tolist(), pairs, width, _DTYPES[dtype], bytes(image_form)
        )  # fmt: skip
        return step, ended


def _images(numbers: list[int]) -> Iterator[tuple[int, ImageInput]]:
    """Those whose slots see each other, and the places of their items."""
    while numbers:
        place, offset, num_tokens, length = numbers[:4]
        ends = numbers[4 : 4 + length]
        numbers = numbers[4 + length :]
        runs = tuple(zip(ends[::2], ends[1::2], strict=True))
        yield place, ImageInput(offset, num_tokens, "", None, runs, is_whole=True)
