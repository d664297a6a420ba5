"""Cache-aware routing: requests with the same first image, or the same long prefix, prefer the worker that last served
one of them. Pure, except for the directory of workers.
"""

import hashlib

from gateway.calls.models import ModelDirectory
from shared.protocol import Call, Generate, Priority
from shared.queue.api import Affinity

#: Number of leading characters that form the affinity key. Recomputing a shorter prefix is cheap.
PREFIX_CHARS = 4000


class PrefixAffinity:
    """Finds affinity keys. `grace_s`: how long a request is reserved for its preferred worker; 0 disables affinity."""

    def __init__(self, models: ModelDirectory, grace_s: float) -> None:
        self._models = models
        self.grace_s = grace_s

    def find(self, call: Call) -> Affinity | None:
        """The affinity of a call. None for a short prompt without images, or with a single worker."""
        if self.grace_s <= 0 or call.priority is Priority.BATCH:
            return None
        num_workers = self._models.num_workers[call.model]
        if num_workers < 2 or not isinstance(call.task, Generate):
            return None
        shared = call.task.images[0].sha256 if call.task.images else _prefix(call.task)
        if not shared:
            return None
        name = "\0".join((call.tenant, call.adapter, shared)).encode(errors="surrogatepass")
        digest = hashlib.blake2b(name, digest_size=16).hexdigest()
        return Affinity(digest, num_workers, self._models.num_seats[call.model])


def _prefix(task: Generate) -> str:
    """The leading text, or an empty string if the text is short."""
    pieces, num_missing = [], PREFIX_CHARS
    for text in task.texts():
        pieces.append(text[:num_missing])
        num_missing -= len(pieces[-1])
        if num_missing == 0:
            return "".join(pieces)
    return ""
