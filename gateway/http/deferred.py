"""What is left to do of requests that are answered - metrics, log lines - put off until nobody
waits for it.

It is done when the next request has gone to the queue and the gateway waits for a worker, or a
moment later, or before anybody looks at what it feeds.
"""

import asyncio
import logging
from collections.abc import Callable
from contextvars import Context, copy_context

logger = logging.getLogger(__name__)

#: Where no request follows, the accounts of the last one wait this long.
LONGEST_WAIT_S = 0.02


class DeferredTasks:
    """Calls in the order in which they came. Used on the event loop alone."""

    def __init__(self) -> None:
        self._calls: list[tuple[Context, Callable[[], None]]] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, call: Callable[[], None]) -> None:
        """Have this called soon, once."""
        self._calls.append((copy_context(), call))  # it logs under the id of its own request
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LONGEST_WAIT_S, self.run)

    def run(self) -> None:
        """Call all that waits.

        What one of them raises is logged, and keeps no other from being called.
        """
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        calls, self._calls = self._calls, []
        for context, call in calls:
            try:
                context.run(call)
            except Exception:
                logger.exception("a request could not be accounted for")
