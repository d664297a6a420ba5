"""Ends the process when a step of the engine does not: a wedged device is helped only by a new process."""

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

EXIT_WEDGED = 70

logger = logging.getLogger(__name__)


class Watchdog:
    """A thread that looks how long the present step has been going on."""

    def __init__(
        self,
        longest_s: float,
        started_at: Callable[[], float | None],
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._longest_s = longest_s
        self._started_at = started_at
        self._end_process = end_process
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @property
    def is_stuck(self) -> bool:
        """Whether the present step has taken too long."""
        started_at = self._started_at()
        return started_at is not None and time.monotonic() - started_at > self._longest_s

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self._longest_s / 4)):
            if self.is_stuck:
                logger.critical("a step has taken longer than %.0f s; ending", self._longest_s)
                faulthandler.dump_traceback(file=sys.__stderr__ or 2)
                self._end_process(EXIT_WEDGED)
                return
