"""A process that has imported an engine and waits to be told what to serve: a model at rest starts sooner by that.

The node keeps one while a deployment rests that has run there. It becomes a worker by one line on its standard
input, the environment of that worker.
"""

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from worker.node.environment import plain_environment
from worker.node.supervisor import Pauses

MAX_LINE_BYTES = 64 * 1024  #: of what a worker may say in one line

logger = logging.getLogger(__name__)


class Spare:
    """A process that waits; it is taken once, or stopped."""

    def __init__(self, kind: str, process: asyncio.subprocess.Process) -> None:
        self.kind = kind
        self._process = process

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def become(self, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
        """Have it be a worker with this environment."""
        assert self._process.stdin is not None
        with suppress(OSError):  # one that has just ended is found out by who waits for it
            self._process.stdin.write(json.dumps(dict(environment)).encode() + b"\n")
            await self._process.stdin.drain()
        return self._process

    async def stop(self) -> None:
        if self.is_alive:
            with suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()


class Standby:
    """The one spare process of a node, which does not see the variables `hidden`."""

    def __init__(self, hidden: frozenset[str] = frozenset()) -> None:
        self._hidden = hidden
        self._spare: Spare | None = None
        self._pauses = Pauses()
        self._not_before = 0.0

    async def keep(self, kind: str | None) -> bool:
        """Have one for this engine, or none; returns whether there is one.

        One that has ended is replaced after a while, which grows.
        """
        spare = self._spare
        if spare is not None and (spare.kind != kind or not spare.is_alive):
            self._spare = None
            if not spare.is_alive:
                pause_s = self._pauses.next_s()
                self._not_before = time.monotonic() + pause_s
                logger.warning("the spare process ended; again in %.1f s", pause_s)
            await spare.stop()
        if kind is not None and self._spare is None and time.monotonic() >= self._not_before:
            self._pauses.started()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "worker.node.standby_worker", kind, str(os.getpid())),
                env=plain_environment(self._hidden),
                start_new_session=True,
                stdin=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=MAX_LINE_BYTES,
            )
            self._spare = Spare(kind, process)
        return self._spare is not None

    def take(self) -> Spare | None:
        """The process, which is the caller's from now on."""
        spare, self._spare = self._spare, None
        return spare
