"""Which inputs share a step.

The oldest input is always in; what is left of the budget goes to the inputs nearest to it in length. So a step has
little to pad where a model pads, and none where it does not: there, rows of one length share one attention call.
Nobody starves: an input is in at the latest when all that came before it are.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False, slots=True)
class Row:
    """One input of a call, ready to be computed. Rows of different kinds share no step."""

    content: Any  #: the model's own
    num_tokens: int
    kind: str = "text"
    num_image_tokens: int = 0
    num_padding: int = 0  #: of its tokens, those that only fill it up
    identity: bytes = b""  #: equal for rows of a kind with equal results; empty: unknown
    result: bytes = b""  #: little-endian float32
    number: int = field(default=0, init=False)  #: in the order of arrival
    cache_key: bytes = field(default=b"", init=False)  #: empty: its result is its call's alone
    followers: list["Row"] = field(default_factory=list, init=False)  #: that wait for its result

    @property
    def key(self) -> tuple[int, int]:
        """Its place among rows of its kind: by length, then by age."""
        return self.num_tokens, self.number


class Waiting:
    """Rows that wait, by age and by length."""

    def __init__(self) -> None:
        self._by_age: OrderedDict[int, Row] = OrderedDict()
        self._by_length: dict[str, list[tuple[tuple[int, int], Row]]] = {}
        self._num_added = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._by_age)

    def add(self, row: Row) -> None:
        """Take a row; it is the youngest."""
        self._num_added += 1
        row.number = self._num_added
        self._by_age[row.number] = row
        insort(self._by_length.setdefault(row.kind, []), (row.key, row), key=_key)
        self.num_tokens += row.num_tokens

    def remove(self, row: Row) -> None:
        """Forget a row, if it still waits."""
        if self._by_age.pop(row.number, None) is None:
            return
        rows = self._by_length[row.kind]
        del rows[bisect_left(rows, row.key, key=_key)]
        self.num_tokens -= row.num_tokens

    def take(self, max_tokens: int, max_rows: int) -> list[Row]:
        """The rows of the next step, shortest first: at least the oldest, however long it is."""
        oldest = next(iter(self._by_age.values()))
        rows = self._by_length[oldest.kind]
        begin = bisect_left(rows, oldest.key, key=_key)
        end, num_tokens = begin + 1, oldest.num_tokens
        while end - begin < max_rows:
            nearest = _nearer(rows, begin - 1, end, oldest.num_tokens)
            if nearest is None or num_tokens + rows[nearest][1].num_tokens > max_tokens:
                break
            num_tokens += rows[nearest][1].num_tokens
            begin, end = min(begin, nearest), max(end, nearest + 1)
        taken = [row for _, row in rows[begin:end]]
        del rows[begin:end]
        for row in taken:
            del self._by_age[row.number]
        self.num_tokens -= num_tokens
        return taken

    def clear(self) -> None:
        self._by_age.clear()
        self._by_length.clear()
        self.num_tokens = 0


def _key(item: tuple[tuple[int, int], Row]) -> tuple[int, int]:
    return item[0]


def _nearer(
    rows: list[tuple[tuple[int, int], Row]], below: int, above: int, num_tokens: int
) -> int | None:
    """Which of two places holds the row that is nearer in length; of equal ones the shorter."""
    if below < 0 or above >= len(rows):
        return above if above < len(rows) else below if below >= 0 else None
    shorter_by = num_tokens - rows[below][1].num_tokens
    return below if shorter_by <= rows[above][1].num_tokens - num_tokens else above
