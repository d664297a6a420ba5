"""A warm process has imported an engine and waits for a model, so that a deployment at zero instances starts faster.

A node keeps one while a deployment that ran there has zero instances. It becomes a worker when it reads the worker's
environment, one line of JSON, from its stdin.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from shared.process import Pauses
from worker.node.environment import plain_environment
from worker.node.supervisor import send, start_process

logger = logging.getLogger(__name__)


class WarmProcess:
    def __init__(self, kind: str, process: asyncio.subprocess.Process) -> None:
        self.kind = kind
        self._process = process

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def become(self, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
        """Turn the process into a worker with this environment."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended; the caller handles that
            self._process.stdin.write(json.dumps(dict(environment)).encode() + b"\n")
            await self._process.stdin.drain()
        return self._process

    async def stop(self) -> None:
        send(self._process, signal.SIGKILL)
        await self._process.wait()


class Standby:
    """The warm process of a node. `hidden`: variables that it does not inherit."""

    def __init__(self, hidden: frozenset[str] = frozenset()) -> None:
        self._hidden = hidden
        self._warm: WarmProcess | None = None
        self._pauses = Pauses()
        self._not_before = 0.0

    async def keep(self, kind: str | None) -> None:
        """Keep one warm process of the engine `kind`, or no process if None. Failures are retried after a pause."""
        warm = self._warm
        if warm is not None and (warm.kind != kind or not warm.is_alive):
            self._warm = None
            if not warm.is_alive:
                pause_s = self._pauses.next_s()
                self._not_before = time.monotonic() + pause_s
                logger.warning("the warm process ended; restarting in %.1f s", pause_s)
            await warm.stop()
        if kind is not None and self._warm is None and time.monotonic() >= self._not_before:
            self._pauses.started()
            environment = plain_environment(self._hidden)
            process = await start_process(
                *("worker.node.standby", kind), environment=environment, is_piped=True
            )
            self._warm = WarmProcess(kind, process)

    def take(self) -> WarmProcess | None:
        warm, self._warm = self._warm, None
        return warm


def main(kind: str, parent: int) -> int:
    """Import the engine, wait for an environment, and run the worker. Returns the exit code."""
    from engines.registry import engine_kinds  # noqa: PLC0415 - the node does not need these
    from shared.process import die_with_parent  # noqa: PLC0415
    from shared.settings import SettingsError  # noqa: PLC0415
    from shared.settings.load import load_settings  # noqa: PLC0415
    from shared.telemetry.logs import setup_logging  # noqa: PLC0415
    from worker.main import run_worker  # noqa: PLC0415

    die_with_parent(parent)
    engine_kinds()[kind].load_all()
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    os.environ.clear()
    os.environ.update(json.loads(line))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    try:
        settings = load_settings()
    except SettingsError as error:
        print(error, file=sys.stderr)
        return os.EX_CONFIG
    setup_logging(settings.logs, "worker")
    return run_worker(settings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[3])))
