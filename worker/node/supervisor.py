"""A small fleet on one machine: starts Redis, workers and a gateway, watches them, stops them in order.

Called by `vlm serve`. It knows processes and their command lines; it must not know what they do inside.
A worker that ends is started again, with growing pauses; a gateway or Redis that ends stops the fleet.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
STABLE_AFTER_S = 60.0


class FleetError(Exception):
    """The fleet could not start or had to stop; the message says why and what to do next.

    `exit_code` is what `vlm serve` ends with. An empty message: the process that failed has said it.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(slots=True)
class Child:
    """One process of the fleet, by its arguments to `vlm`."""

    name: str
    arguments: list[str]
    environment: dict[str, str]
    restart: bool
    process: asyncio.subprocess.Process | None = None
    started_at: float = 0.0
    pause_s: float = FIRST_PAUSE_S

    async def start(self) -> None:
        """Start it in a session of its own, so that Ctrl-C reaches only the supervisor."""
        self.started_at = time.monotonic()
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "vlm", *self.arguments, "--die-with-parent"),
            env=self.environment,
            cwd=Path.cwd(),
            start_new_session=True,
        )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    def next_pause_s(self) -> float:
        """How long to wait before the next start: short after a long life, doubling otherwise."""
        if time.monotonic() - self.started_at > STABLE_AFTER_S:
            self.pause_s = FIRST_PAUSE_S
        pause_s, self.pause_s = self.pause_s, min(self.pause_s * 2, LONGEST_PAUSE_S)
        return pause_s


@dataclass(slots=True)
class Fleet:
    """The processes of `vlm serve`: workers, and the gateway last."""

    children: list[Child]
    url: str
    stop_within_s: float
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    was_ready: bool = False

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Start all, call `on_ready` when the gateway can answer, stop all at the end. Raises: FleetError."""
        try:
            for child in self.children:
                await child.start()
            async with asyncio.TaskGroup() as tasks:
                watchers = [tasks.create_task(self._watch(child)) for child in self.children]
                ready = tasks.create_task(self._announce(on_ready))
                await self.stopping.wait()
                for task in (*watchers, ready):
                    task.cancel()
        except* FleetError as group:
            raise group.exceptions[0] from None
        finally:
            await self.stop()

    async def _announce(self, on_ready: Callable[[], None]) -> None:
        await wait_until_ready(self.url)
        self.was_ready = True
        on_ready()

    async def _watch(self, child: Child) -> None:
        while True:
            assert child.process is not None
            code = await child.process.wait()
            # Later, the same code of a worker has a cause that may pass, such as too little free memory.
            if code == os.EX_CONFIG and not self.was_ready:
                raise FleetError("", exit_code=code)
            if not child.restart:
                raise FleetError(
                    f"{child.name} ended with exit code {code}; its last lines say why"
                )
            pause_s = child.next_pause_s()
            logger.warning("%s ended with exit code %s; again in %.1f s", child.name, code, pause_s)
            await asyncio.sleep(pause_s)
            await child.start()

    async def stop(self) -> None:
        """Stop the last first, so that a gateway can finish with its workers; kill what outlasts its time."""
        *workers, gateway = self.children
        await self._stop(gateway)
        await asyncio.gather(*(self._stop(worker) for worker in workers))

    async def _stop(self, child: Child) -> None:
        if child.process is None:
            return
        child.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(child.process.wait(), self.stop_within_s)
        except TimeoutError:
            logger.warning("%s did not stop in time; killed", child.name)
            child.signal(signal.SIGKILL)
            await child.process.wait()


async def wait_until_ready(url: str, pause_s: float = 0.1) -> None:
    """Return when the gateway says that it and a worker are ready. Waits as long as that takes."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=2.0) as client:
        while True:
            with suppress(httpx.HTTPError):
                if (await client.get("/readyz")).is_success:
                    return
            await asyncio.sleep(pause_s)


def free_port(host: str) -> int:
    """A port that nobody listens on at this moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def check_port_free(host: str, port: int) -> None:
    """Raises: FleetError when somebody listens there already."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise FleetError(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another with --port"
            ) from None


async def stop_on_signals(fleet: Fleet) -> None:
    """Let SIGINT and SIGTERM stop the fleet; a second one kills what is left."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if fleet.stopping.is_set():
            for child in fleet.children:
                child.signal(signal.SIGKILL)
        fleet.stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
