"""A warm process has imported an engine and waits for a model, so that a deployment at zero instances starts sooner.

A node has one while a deployment that has run there is at zero. One line on its stdin, the environment of a worker,
makes it that worker.
"""

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from contextlib import suppress

from worker.node.environment import plain_environment
from worker.node.supervisor import Pauses, start_process

logger = logging.getLogger(__name__)


class WarmProcess:
    """A process that waits for its environment."""

    def __init__(self, kind: str, process: asyncio.subprocess.Process) -> None:
        self.kind = kind
        self._process = process

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def become(self, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
        """Make it a worker with this environment."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended: the caller waits for that
            self._process.stdin.write(json.dumps(dict(environment)).encode() + b"\n")
            await self._process.stdin.drain()
        return self._process

    async def stop(self) -> None:
        if self.is_alive:
            with suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()


class Standby:
    """The warm process of a node; it does not inherit the variables `hidden`."""

    def __init__(self, hidden: frozenset[str] = frozenset()) -> None:
        self._hidden = hidden
        self._warm: WarmProcess | None = None
        self._pauses = Pauses()
        self._not_before = 0.0

    async def keep(self, kind: str | None) -> bool:
        """Start or stop it, so that there is one for this engine, or none. Returns whether there is one.

        After it ends by itself, the next one starts after a growing pause.
        """
        warm = self._warm
        if warm is not None and (warm.kind != kind or not warm.is_alive):
            self._warm = None
            if not warm.is_alive:
                pause_s = self._pauses.next_s()
                self._not_before = time.monotonic() + pause_s
                logger.warning("the warm process ended; again in %.1f s", pause_s)
            await warm.stop()
        if kind is not None and self._warm is None and time.monotonic() >= self._not_before:
            self._pauses.started()
            environment = plain_environment(self._hidden)
            process = await start_process(
                *("worker.node.standby_worker", kind), environment=environment, is_piped=True
            )
            self._warm = WarmProcess(kind, process)
        return self._warm is not None

    def take(self) -> WarmProcess | None:
        """Hand the process over to the caller."""
        warm, self._warm = self._warm, None
        return warm
