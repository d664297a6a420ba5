"""Selects the inputs of a step, and caches results by input, with limits of memory and age. Torch-free.

The oldest input is always included, so no input starves; the remaining budget is for inputs of similar length. This
limits padding. Models without padding compute rows of one length in one attention call.
"""

import time
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from operator import attrgetter
from typing import Any

NOT_FINITE = "The model's numbers for an input are not finite: send another input."
_key = attrgetter("key")
#: Overhead of a cache entry.
_ENTRY_BYTES = 256


@dataclass(eq=False, slots=True)
class Row:
    """One prepared input of a call. A step has rows of one kind."""

    content: Any  #: private to the model
    num_tokens: int
    kind: str = "text"
    num_image_tokens: int = 0
    num_padding: int = 0  #: padding among its tokens
    #: Rows of equal kind, options and identity have equal results; empty: not cached.
    identity: bytes = b""
    dimensions: int = 0  #: dimensions of the vector; 0: all, or a score
    is_normalized: bool = True
    result: bytes = b""  #: little-endian float32
    error: str = ""  #: why the row has no result; the call fails with this message
    number: int = field(default=0, init=False)  #: order of arrival
    cache_key: bytes = field(default=b"", init=False)  #: empty: not cached

    @property
    def key(self) -> tuple[int, int]:
        """Sort key among rows of its kind: length, then age."""
        return self.num_tokens, self.number


class Waiting:
    """Waiting rows, ordered by age and by length."""

    def __init__(self) -> None:
        self._by_age: OrderedDict[int, Row] = OrderedDict()
        self._by_length: dict[str, list[Row]] = {}
        self._num_added = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._by_age)

    def add(self, row: Row) -> None:
        self._num_added += 1
        row.number = self._num_added
        self._by_age[row.number] = row
        insort(self._by_length.setdefault(row.kind, []), row, key=_key)
        self.num_tokens += row.num_tokens

    def remove(self, row: Row) -> None:
        del self._by_age[row.number]
        rows = self._by_length[row.kind]
        del rows[bisect_left(rows, row.key, key=_key)]
        self.num_tokens -= row.num_tokens

    def take(self, max_tokens: int, max_rows: int) -> list[Row]:
        """Remove the rows of the next step, shortest first: at least the oldest one, regardless of its length."""
        oldest = next(iter(self._by_age.values()))
        rows = self._by_length[oldest.kind]
        begin = bisect_left(rows, oldest.key, key=_key)
        end, num_tokens = begin + 1, oldest.num_tokens
        while end - begin < max_rows:
            nearest = _nearer(rows, begin - 1, end, oldest.num_tokens)
            if nearest is None or num_tokens + rows[nearest].num_tokens > max_tokens:
                break
            num_tokens += rows[nearest].num_tokens
            begin, end = min(begin, nearest), max(end, nearest + 1)
        taken = rows[begin:end]
        del rows[begin:end]
        for row in taken:
            del self._by_age[row.number]
        self.num_tokens -= num_tokens
        return taken


def _nearer(rows: list[Row], below: int, above: int, num_tokens: int) -> int | None:
    """The index of the row whose length is nearer; the shorter row if both are equally near."""
    if below < 0 or above >= len(rows):
        return above if above < len(rows) else below if below >= 0 else None
    shorter_by = num_tokens - rows[below].num_tokens
    return below if shorter_by <= rows[above].num_tokens - num_tokens else above


def cache_key(tenant: str, row: Row) -> bytes:
    """The key of an input's result, salted by tenant; empty: not cached."""
    if not row.identity:
        return b""
    salt = tenant.encode("utf-8", "surrogatepass")
    options = f" {row.kind} {row.dimensions} {row.is_normalized} ".encode()
    return sha256(b"%d %s" % (len(salt), salt) + options + row.identity).digest()


class ResultCache:
    """A cache of results by input. Not thread-safe."""

    def __init__(
        self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`max_bytes` 0: disabled."""
        self.is_on = max_bytes > 0
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()

    def find(self, key: bytes) -> bytes | None:
        """The cached result, if it has not expired."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        result, made_at = entry
        if self._clock() - made_at > self._ttl_s:
            del self._entries[key]
            self.num_bytes -= _num_bytes(result)
            return None
        self._entries.move_to_end(key)
        return result

    def keep(self, key: bytes, result: bytes) -> None:
        """Add a result, and evict the least recently used results."""
        if key in self._entries:
            return
        self._entries[key] = result, self._clock()
        self.num_bytes += _num_bytes(result)
        while self.num_bytes > self._max_bytes:
            _, (oldest, _) = self._entries.popitem(last=False)
            self.num_bytes -= _num_bytes(oldest)


def _num_bytes(result: bytes) -> int:
    return len(result) + _ENTRY_BYTES
