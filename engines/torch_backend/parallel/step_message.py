"""A step as whole numbers: what rank 0 has scheduled, for those that compute their shares of it.

Features of images, the only other numbers of a step, go from device to device.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch
from torch import Tensor

from engines.core.request import ImageInput
from engines.core.sequence import ScheduledSequence, Sequence
from engines.torch_backend.lora.peft import LowRank
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
    #: adapters that others have, by which number
    _adapters: WeakKeyDictionary[Any, int] = field(default_factory=WeakKeyDictionary)
    _dropped: list[int] = field(default_factory=list)

    def introduce(self, items: list[ScheduledSequence]) -> list[list[np.ndarray | Items[int]]]:
        """Sections of each adapter that others do not have yet; they are given it once."""
        found = []
        for item in items:
            adapter: Any = item.sequence.adapter
            if adapter is not None and adapter not in self._adapters:
                self._count += 1
                number = self._adapters[adapter] = self._count
                finalize(adapter, self._dropped.append, number)
                found.append(write_adapter(number, adapter.stored))
                adapter.stored.clear()
        return found

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
            adapter = self._adapters.get(item.sequence.adapter, 0) if item.sequence.adapter else 0
            number = self._number(item)
            heads += (number, item.start, item.num_new_tokens, asked, len(table), adapter)
            for image in item.images if item.num_new_tokens > 1 else ():
                if image.is_whole:
                    runs = [number for run in image.slot_runs for number in run]
                    wholes += (place, image.offset, image.num_tokens, len(runs), *runs)
        blocks = [block for item in items for block in item.sequence.block_ids]
        slots = [number for image in images for number in (image.start, len(image.features))]
        first = images[0].features if images else torch.empty(0, 0)
        form = [first.shape[1], _DTYPES.index(first.dtype), *image_form] if images else []
        released, self._released = self._released, []
        dropped = [self._dropped.pop() for _ in range(len(self._dropped))]
        return [
            heads, blocks, rows, inputs.shape[:1], inputs.numpy(), wholes, slots, form, released, dropped,
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
    adapters: dict[int, Any] = field(default_factory=dict)  #: by the numbers that rank 0 gave them

    def read(self, sections: list[np.ndarray]) -> tuple[Step, list[str]]:
        """A step, and the ids of requests that have ended."""
        heads, blocks, rows, height, inputs, wholes, slots, form, released, dropped = sections
        for number in dropped.tolist():
            self.adapters.pop(number, None)
        ended = [str(number) for number in released.tolist() if self._sequences.pop(number, None)]
        items: list[ScheduledSequence] = []
        first = 0
        for number, start, num_new, asked, num_blocks, adapter in heads.reshape(-1, 6).tolist():
            sequence = self._sequences.get(number)
            if sequence is None:
                sequence = Sequence(str(number), [], asked, SamplingParams())
                self._sequences[number] = sequence
            sequence.block_ids = blocks[first : first + num_blocks].tolist()
            sequence.num_computed_tokens = start
            sequence.images = ()
            sequence.adapter = self.adapters[adapter] if adapter else None
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


def write_adapter(number: int, stored: Mapping[str, LowRank]) -> list[np.ndarray | Items[int]]:
    """Sections of an adapter: its matrices, by the names of maps."""
    shapes: list[int] = []
    parts: list[np.ndarray] = []
    for change in stored.values():
        shapes += (*change.down.shape, *change.up.shape)
        scaled = change.up.float() * change.scale
        parts += [change.down.float().contiguous().numpy().ravel(), scaled.numpy().ravel()]
    numbers = np.concatenate(parts)
    padded = np.pad(numbers, (0, len(numbers) % 2)).view(np.int64)  # two numbers in a word
    return [[number], list("\n".join(stored).encode()), shapes, padded]


def read_adapter(sections: list[np.ndarray]) -> tuple[int, dict[str, LowRank]]:
    """What `write_adapter` has written."""
    number, names, shapes, words = sections
    numbers = torch.from_numpy(words.copy()).view(torch.float32)
    stored: dict[str, LowRank] = {}
    start = 0
    sizes = shapes.reshape(-1, 4).tolist()
    for name, (rank, width, height, _) in zip(
        bytes(names.tolist()).decode().split("\n"), sizes, strict=True
    ):
        middle, stop = start + rank * width, start + rank * (width + height)
        down, up = numbers[start:middle].view(rank, width), numbers[middle:stop].view(height, rank)
        stored[name] = LowRank(down, up, 1.0)
        start = stop
    return int(number[0]), stored
