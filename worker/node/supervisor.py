"""The supervisor of one machine: starts processes by their `vlm` command lines, watches them, drains them in order.

Processes that end are restarted with exponential backoff. Until all processes are ready, the node ends if a process
fails three times. One failure of the gateway (`must_start`) is enough: then its port or settings are wrong.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from shared.process import Pauses

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 64 * 1024  #: maximum length of a line of a child's stderr
MAX_STARTS = 3  #: maximum starts of a process until all processes are ready


class NodeError(Exception):
    """The node could not start or had to stop; the message has the reason and the remedy.

    `exit_code`: exit code of `vlm serve`. The message is empty if the failed process has logged the reason.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def describe_end(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def run_options(module: str) -> list[str]:
    """Python's options that run a module; `-P`, unless this process imports from its working directory."""
    with suppress(FileNotFoundError):  # the directory was removed
        if {"", os.getcwd()}.intersection(sys.path):
            return ["-m", module]
    return ["-P", "-m", module]  # a project there may have modules with the names of ours


async def start_process(
    module: str,
    *arguments: str,
    environment: Mapping[str, str],
    is_piped: bool = False,
    pass_fds: Sequence[int] = (),
) -> asyncio.subprocess.Process:
    """Run `python -m module arguments...` in a new session, so that Ctrl-C reaches only the parent.

    The child ends with this process. `is_piped`: its stdin and stderr are pipes.
    """
    pipe = asyncio.subprocess.PIPE if is_piped else None
    return await asyncio.create_subprocess_exec(
        *(sys.executable, *run_options(module), *arguments, "--die-with-parent", str(os.getpid())),
        env=environment,
        start_new_session=True,
        stdin=pipe,
        stderr=pipe,
        limit=MAX_LINE_BYTES,
        pass_fds=pass_fds,
    )


def send(process: asyncio.subprocess.Process | None, number: signal.Signals) -> None:
    """Send a signal to a process, if it runs."""
    if process is not None and process.returncode is None:
        with suppress(ProcessLookupError):
            process.send_signal(number)


async def end_process(process: asyncio.subprocess.Process, within_s: float, name: str) -> None:
    """Drain a process, and kill it if it exceeds its time."""
    send(process, signal.SIGTERM)
    try:
        async with asyncio.timeout(within_s):
            await process.wait()
    except TimeoutError:
        logger.warning("%s did not stop in time; killed", name)
        send(process, signal.SIGKILL)
        await process.wait()


@dataclass(slots=True)
class Child:
    """One process of the node, by its arguments to `vlm`."""

    name: str
    arguments: list[str]
    environment: dict[str, str]
    must_start: bool = False
    process: asyncio.subprocess.Process | None = None
    pauses: Pauses = field(default_factory=Pauses)

    async def start(self) -> None:
        self.pauses.started()
        self.process = await start_process("vlm", *self.arguments, environment=self.environment)


@dataclass(slots=True)
class Node:
    """Processes in the order of their start; the last one is drained first.

    `wait_until_ready` returns when all processes are ready. `stop_within_s`: time for each process to drain.
    """

    children: list[Child]
    wait_until_ready: Callable[[], Awaitable[Any]]
    stop_within_s: float
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    was_ready: bool = False

    async def run(self, on_ready: Callable[[Any], None]) -> None:
        """Start all, call `on_ready` with the result of `wait_until_ready`, stop all at the end. Raises: NodeError."""
        try:
            for child in self.children:
                await child.start()
            async with asyncio.TaskGroup() as tasks:
                watchers = [tasks.create_task(self._watch(child)) for child in self.children]
                ready = tasks.create_task(self._announce(on_ready))
                await self.stopping.wait()
                for task in (*watchers, ready):
                    task.cancel()
        except* NodeError as group:
            raise group.exceptions[0] from None
        finally:
            await self.stop()

    async def _announce(self, on_ready: Callable[[Any], None]) -> None:
        found = await self.wait_until_ready()
        self.was_ready = True
        on_ready(found)

    async def _watch(self, child: Child) -> None:
        num_starts = 0
        while True:
            num_starts += 1
            assert child.process is not None
            code = await child.process.wait()
            # Later, a worker may exit with this code for a temporary reason, such as too little free memory.
            if code == os.EX_CONFIG and not self.was_ready:
                raise NodeError("", exit_code=code)
            end = describe_end(code)
            if not self.was_ready and (child.must_start or num_starts == MAX_STARTS):
                times = "" if child.must_start else f" in {MAX_STARTS} starts"
                hint = "; see its last log lines" if code > 0 else ""
                raise NodeError(f"{child.name} {end}{times} before it was ready{hint}")
            pause_s = child.pauses.next_s()
            logger.warning("%s %s; restarting in %.1f s", child.name, end, pause_s)
            await asyncio.sleep(pause_s)
            await child.start()

    async def stop(self) -> None:
        """Stop the last process, the gateway, before the workers that its requests need. Kill late processes."""
        *others, last = self.children
        await self._stop(last)
        await asyncio.gather(*(self._stop(child) for child in others))

    def kill(self) -> None:
        for child in self.children:
            send(child.process, signal.SIGKILL)

    async def _stop(self, child: Child) -> None:
        if child.process is not None:
            await end_process(child.process, self.stop_within_s, child.name)
