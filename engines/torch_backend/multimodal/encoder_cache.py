"""Projected image features by image, so that an image seen again is not encoded again.

Owned by the runner. Entries that a running request still reads are pinned and stay whatever the
limit says; the others are evicted in the order of their last use. Units: bytes.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from torch import Tensor

#: (tenant's salt, image hash): what one tenant showed does not make another's answer faster
ImageKey = tuple[str, str]


@dataclass(slots=True)
class _Entry:
    features: Tensor
    readers: set[str] = field(default_factory=set)


class EncoderCache:
    """Least-recently-used cache of feature tensors, bounded in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[ImageKey, _Entry] = OrderedDict()
        self._pinned: dict[str, set[ImageKey]] = {}  # by request
        self.num_bytes = 0
        self.num_queries = 0
        self.num_hits = 0

    def __contains__(self, key: ImageKey) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def is_pinned_by(self, request_id: str, key: ImageKey) -> bool:
        return key in self._pinned.get(request_id, ())

    def count_query(self, *, hit: bool) -> None:
        """Note that a request asked for an image, and whether encoding it was spared."""
        self.num_queries += 1
        self.num_hits += hit

    def put(self, key: ImageKey, features: Tensor) -> None:
        """Keep features. The entry must be pinned before anything else may displace it."""
        assert key not in self._entries
        self._entries[key] = _Entry(features)
        self.num_bytes += features.nbytes

    def pin(self, request_id: str, key: ImageKey) -> Tensor:
        """The features of an image, held for a request. Raises: KeyError if they are not here."""
        entry = self._entries[key]
        self._entries.move_to_end(key)
        entry.readers.add(request_id)
        self._pinned.setdefault(request_id, set()).add(key)
        return entry.features

    def unpin(self, request_id: str, key: ImageKey) -> None:
        """The request has read all of an image. Idempotent."""
        keys = self._pinned.get(request_id, set())
        keys.discard(key)
        if not keys:
            self._pinned.pop(request_id, None)
        if key in self._entries:
            self._entries[key].readers.discard(request_id)
        self._evict()

    def release(self, request_id: str) -> None:
        """The request has ended. Idempotent."""
        for key in list(self._pinned.get(request_id, ())):
            self.unpin(request_id, key)

    def clear(self) -> None:
        """Forget every image and all counts."""
        self.__init__(self._max_bytes)

    def check_integrity(self) -> None:
        """Compare both books with each other, and the bytes with the tensors. Raises: AssertionError."""
        readers: dict[str, set[ImageKey]] = {}
        for key, entry in self._entries.items():
            for request_id in entry.readers:
                readers.setdefault(request_id, set()).add(key)
        assert readers == self._pinned, "pins and readers disagree"
        assert self.num_bytes == sum(entry.features.nbytes for entry in self._entries.values())

    def _evict(self) -> None:
        """Drop unread entries, the longest unused first, until the rest fits."""
        if self.num_bytes <= self._max_bytes:
            return
        for key in [key for key, entry in self._entries.items() if not entry.readers]:
            self.num_bytes -= self._entries.pop(key).features.nbytes
            if self.num_bytes <= self._max_bytes:
                return
