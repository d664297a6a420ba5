"""Penalties for tokens that a sequence contains, updated incrementally."""

import numpy as np

from engines.core.sequence import Sequence

_FIRST_CAPACITY = 64
_TAIL = 64  #: more tokens than one step can withdraw


class TokenCounts:
    """Distinct tokens of one sequence, with the factor and the amount of their penalties.

    A step costs one update for each new or withdrawn token. A withdrawn token keeps its row, with no-op values.
    """

    def __init__(self, sequence: Sequence) -> None:
        self._sampling = sequence.sampling
        self._num_prompt_tokens = sequence.num_prompt_tokens
        self._noted = list(sequence.token_ids)
        ids, rows, totals = np.unique(
            np.asarray(self._noted, dtype=np.int64), return_inverse=True, return_counts=True
        )
        outputs = np.bincount(rows[self._num_prompt_tokens :], minlength=len(ids))
        self._rows = {token_id: row for row, token_id in enumerate(ids.tolist())}
        capacity = 2 * len(ids) + _FIRST_CAPACITY
        self._ids = _grown(ids, capacity)
        self._counts = _grown(np.stack([totals, outputs]), capacity)  # in total, in the output
        self._values = np.zeros((2, capacity), np.float32)  # factors, amounts
        self._update(slice(0, len(ids)))

    def follow(self, sequence: Sequence) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids, the divisors of their scores, and the amounts to subtract. Shapes: (distinct,) each."""
        token_ids, noted = sequence.token_ids, self._noted
        while noted[-_TAIL:] != token_ids[max(0, len(noted) - _TAIL) : len(noted)]:
            token_id = noted.pop()
            self._count(token_id, len(noted), -1)
        for token_id in token_ids[len(noted) :]:
            self._count(token_id, len(noted), 1)
            noted.append(token_id)
        size = len(self._rows)
        factors, amounts = self._values[:, :size]
        return self._ids[:size], factors, amounts

    def _count(self, token_id: int, position: int, change: int) -> None:
        row = self._rows.setdefault(token_id, len(self._rows))
        if row == len(self._ids):
            self._ids, self._counts, self._values = (
                _grown(array, 2 * row) for array in (self._ids, self._counts, self._values)
            )
        self._ids[row] = token_id
        self._counts[: 1 + (position >= self._num_prompt_tokens), row] += change
        self._update(slice(row, row + 1))

    def _update(self, rows: slice) -> None:
        sampling, (totals, outputs) = self._sampling, self._counts[:, rows]
        self._values[0, rows] = np.where(totals > 0, sampling.repetition_penalty, 1.0)
        self._values[1, rows] = sampling.frequency_penalty * outputs
        self._values[1, rows] += sampling.presence_penalty * (outputs > 0)


def _grown(array: np.ndarray, capacity: int) -> np.ndarray:
    grown = np.zeros((*array.shape[:-1], capacity), array.dtype)
    grown[..., : array.shape[-1]] = array
    return grown
