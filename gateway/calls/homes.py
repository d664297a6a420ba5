"""Who may have in its caches what a request brings: requests that share their first image, or a long beginning, share
a home, the worker that last served one of them. Pure, but for the directory of workers.
"""

import hashlib

from gateway.calls.models import ModelDirectory
from shared.protocol import Call, Generate, Priority
from shared.queue.api import Home

#: A prompt's text is known by so many characters at its beginning; to compute less of it anew takes no time.
PREFIX_CHARS = 4000


class Homes:
    """Names what requests share. `grace_s`: how long a home has them for itself; 0: there are none."""

    def __init__(self, models: ModelDirectory, grace_s: float) -> None:
        self._models = models
        self.grace_s = grace_s

    def find(self, call: Call) -> Home | None:
        """The home of a call; None where it shares nothing, or one worker serves all."""
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
        return Home(digest, num_workers, self._models.num_seats[call.model])


def _prefix(task: Generate) -> str:
    """The beginning of all text, or nothing if it is short."""
    pieces, num_missing = [], PREFIX_CHARS
    for text in task.texts():
        pieces.append(text[:num_missing])
        num_missing -= len(pieces[-1])
        if num_missing == 0:
            return "".join(pieces)
    return ""
