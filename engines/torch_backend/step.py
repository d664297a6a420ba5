"""The inputs of one step, built once by the runner and read by models and operators.

Shape letters: N new tokens, S sequences, W blocks of the longest context, R positions of a token, C hidden width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
import numpy as np
import torch
from torch import Tensor


class SequenceRows(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one sequence: rows `start` to `stop - 1` of the step."""

    start: int
    num_new: int
    num_computed: int  #: tokens of earlier steps
    block_ids: list[int]
    request_id: str = ""
    num_prompt_tokens: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.num_new

    @property
    def num_context(self) -> int:
        """Tokens of the sequence after this step."""
        return self.num_computed + self.num_new


class BidirectionalSpan(msgspec.Struct, frozen=True, array_like=True):
    """Rows `start` to `stop - 1` attend to tokens up to index `last` of their sequence."""

    start: int
    stop: int
    last: int
    ignores_window: bool = False  #: whether the rows attend to earlier tokens beyond the window


@dataclass(frozen=True, slots=True)
class ImageSlots:
    """Features of an image, video or audio for the rows from `start`. Shapes: features (slots, C)."""

    start: int
    features: Tensor
    kind: str = "image"
    slots_of: str = "image"  #: see `ProcessedImage` in multimodal/processed.py

    def place(self, embeddings: Tensor) -> None:
        """Write the features over the first channels of their rows. Shapes: embeddings (N, C or more)."""
        stop, width = self.start + len(self.features), self.features.shape[1]
        embeddings[self.start : stop, :width] = self.features.to(embeddings.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """The new tokens of a step, sequence by sequence; sequences with one new token come first."""

    sequences: Sequence[SequenceRows]
    num_decodes: int  #: number of sequences with one new token, which come first
    token_ids: Tensor  #: (N,)
    positions: Tensor  #: (N,), or (R, N)
    indices: Tensor  #: (N,), index of each token in its sequence
    slots: Tensor  #: (N,), KV cache slots of the new keys and values
    block_tables: Tensor  #: (S, W), int32; shorter rows are padded with the sequence's first block
    row_offsets: Tensor  #: (S + 1,)
    lengths: Tensor  #: (S,), tokens of each context
    sampled_rows: list[int] = field(default_factory=list)  #: rows whose logits are needed
    images: list[ImageSlots] = field(default_factory=list)
    bidirectional: list[BidirectionalSpan] = field(default_factory=list)
    adapters: Sequence[Any] = ()  #: adapter or None of each sequence; empty if no sequence has one

    @classmethod
    def create(
        cls,
        sequences: Sequence[SequenceRows],
        block_size: int,
        device: torch.device,
        token_ids: Sequence[int] = (),
        positions: Sequence[Sequence[int]] = (),
        **others: Any,
    ) -> Self:
        """`positions` has R rows of N; by default, positions are the indices. `others`: values of further fields."""
        indices: list[int] = []
        slots: list[int] = []
        offsets, lengths = [0], []
        for each in sequences:
            offsets.append(each.stop)
            lengths.append(each.num_context)
            if each.num_new == 1:  # faster than numpy for single tokens
                block, offset = divmod(each.num_computed, block_size)
                indices.append(each.num_computed)
                slots.append(each.block_ids[block] * block_size + offset)
                continue
            own = np.arange(each.num_computed, each.num_context)
            blocks = np.asarray(each.block_ids)[own // block_size]
            indices += own.tolist()
            slots += (blocks * block_size + own % block_size).tolist()
        tables = np.empty((len(sequences), -(-max(lengths) // block_size)), dtype=np.int32)
        for row, each, length in zip(tables, sequences, lengths, strict=True):
            count = -(-length // block_size)
            row[:count] = each.block_ids[:count]
            row[count:] = each.block_ids[0]
        rows = [indices, slots, token_ids or indices, *(positions or [indices])]
        of_tokens = torch.tensor(rows).to(device)
        of_sequences = torch.tensor([offsets, [*lengths, 0]]).to(device)
        return cls(
            sequences=sequences,
            num_decodes=sum(each.num_new == 1 for each in sequences),
            token_ids=of_tokens[2],
            positions=of_tokens[3] if len(rows) == 4 else of_tokens[3:],
            indices=of_tokens[0],
            slots=of_tokens[1],
            block_tables=torch.from_numpy(tables).to(device),
            row_offsets=of_sequences[0],
            lengths=of_sequences[1, :-1],
            **others,
        )
