"""Whether a request may come in at all: how many are open, and whether the gateway is about to stop."""

import math
import random
import time
from collections import deque
from types import TracebackType

from gateway.errors import Overloaded

_WINDOW_S = 10.0
_MAX_RETRY_AFTER_S = 30


class Admission:
    """Counts open requests. A context manager around each of them: `with admission:`."""

    def __init__(self, max_open: int) -> None:
        self.max_open = max_open
        self.num_open = 0
        self.is_draining = False
        self._ended_at: deque[float] = deque(maxlen=1000)

    def __enter__(self) -> None:
        """Let one in. Raises: Overloaded."""
        if self.is_draining:
            raise Overloaded(
                "draining",
                "The server is shutting down.",
                code="server_overloaded",
                retry_after_s=1,
            )
        if self.num_open >= self.max_open:
            raise self.overloaded("open_requests")
        self.num_open += 1

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let it go."""
        self.num_open -= 1
        self._ended_at.append(time.monotonic())

    def overloaded(self, reason: str) -> Overloaded:
        """The error for one request too many."""
        return Overloaded(
            reason,
            "The server is overloaded; retry later.",
            code="server_overloaded",
            retry_after_s=self.retry_after_s(),
        )

    def retry_after_s(self) -> int:
        """When the requests open now will have ended, by the pace of the last seconds; jittered."""
        since = time.monotonic() - _WINDOW_S
        num_ended = sum(ended_at > since for ended_at in self._ended_at)
        wait_s = self.num_open * _WINDOW_S / num_ended if num_ended else 1.0
        jittered_s = wait_s * random.uniform(0.75, 1.25)
        return max(1, min(_MAX_RETRY_AFTER_S, math.ceil(jittered_s)))
