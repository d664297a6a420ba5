"""Admission control: open requests, memory for bodies, and draining."""

import math
import random
import time
from collections import deque

from gateway.http.errors import Overloaded

_WINDOW_S = 10.0
_MAX_RETRY_AFTER_S = 30


class Admission:
    """Counts open requests. A context manager around each of them: `with admission:`."""

    def __init__(self, max_open: int, max_body_bytes: int) -> None:
        self.max_open = max_open
        self.max_body_bytes = max_body_bytes
        self.num_body_bytes = 0  #: of requests that are not queued yet
        self.num_open = 0
        self.is_draining = False
        self._ended_at: deque[float] = deque(maxlen=1000)

    def __enter__(self) -> None:
        """Admit a request. Raises: Overloaded."""
        if self.is_draining:
            raise Overloaded(
                "draining",
                "The server is shutting down; retry.",
                code="server_overloaded",
                retry_after_s=1,
            )
        if self.num_open >= self.max_open:
            raise self.overloaded("open_requests")
        self.num_open += 1

    def __exit__(self, *_: object) -> None:
        self.num_open -= 1
        self._ended_at.append(time.monotonic())

    def hold_body(self) -> "HeldBody":
        """A counter of a body's memory, to be used as a context manager."""
        return HeldBody(self)

    def overloaded(self, reason: str) -> Overloaded:
        """The error for a request beyond a limit."""
        return Overloaded(
            reason,
            "The server is overloaded; retry later.",
            code="server_overloaded",
            retry_after_s=self.retry_after_s(),
        )

    def retry_after_s(self) -> int:
        """Seconds until the open requests are likely to have ended, by the recent rate; jittered."""
        since = time.monotonic() - _WINDOW_S
        num_ended = sum(ended_at > since for ended_at in self._ended_at)
        wait_s = self.num_open * _WINDOW_S / num_ended if num_ended else 1.0
        jittered_s = wait_s * random.uniform(0.75, 1.25)
        return max(1, min(_MAX_RETRY_AFTER_S, math.ceil(jittered_s)))


class HeldBody:
    """Memory that one request's body uses. `with held:` releases it."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count received bytes. A single request is never refused. Raises: Overloaded."""
        admission = self._admission
        self._num_bytes += num_bytes
        admission.num_body_bytes += num_bytes
        if self._num_bytes < admission.num_body_bytes > admission.max_body_bytes:
            raise admission.overloaded("body_bytes")

    def __enter__(self) -> "HeldBody":
        return self

    def __exit__(self, *_: object) -> None:
        self._admission.num_body_bytes -= self._num_bytes
