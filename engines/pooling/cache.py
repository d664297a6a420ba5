"""LRU cache of results by input, with limits of memory and age. Torch-free."""

import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256

#: Overhead of an entry.
_ENTRY_BYTES = 256


def cache_key(tenant: str, kind: str, identity: bytes) -> bytes:
    """The key of an input's result, salted by tenant."""
    salt = tenant.encode("utf-8", "surrogatepass")
    return sha256(b"%d %s %s " % (len(salt), salt, kind.encode()) + identity).digest()


class ResultCache:
    """Not thread-safe."""

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
        """Add a result, evicting the least recently used ones."""
        if key in self._entries:
            return
        self._entries[key] = result, self._clock()
        self.num_bytes += _num_bytes(result)
        while self.num_bytes > self._max_bytes:
            _, (oldest, _) = self._entries.popitem(last=False)
            self.num_bytes -= _num_bytes(oldest)

    def clear(self) -> None:
        self._entries.clear()
        self.num_bytes = 0


def _num_bytes(result: bytes) -> int:
    return len(result) + _ENTRY_BYTES
