"""The thread that runs the engine, its bridge to the event loop, and a watchdog for hung steps.

Commands wake the thread, and the events of a step wake the loop once. Tokens of answers that are not streamed are
delayed by up to `HOLD_S`.
"""

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue

from msgspec import Struct

from engines.base import Engine, EngineInput, EngineOutput, EngineStats, LoadedEngine, RequestError

logger = logging.getLogger(__name__)

#: Minimum interval between reads of the engine's statistics, which can take longer than a step.
STATS_EVERY_S = 0.005
IDLE_S = 1.0  #: longest pause between calls of `has_work`, by which an idle engine reports that its server is lost
CLOSE_WITHIN_S = 5.0
EXIT_WEDGED = 70
#: Maximum delay of tokens of answers that are not streamed.
HOLD_S = 0.05


class EngineBroken(Exception):
    """A step raised an exception. The engine's state is unknown, so the process must end."""


class Added(Struct, frozen=True):
    """The engine accepted a request at `at` (`time.monotonic`)."""

    request_id: str
    at: float


class Rejected(Struct, frozen=True):
    request_id: str
    error: RequestError


EngineEvent = Added | Rejected | EngineOutput
Command = EngineInput | str | None  #: add an input, abort a request by its id, or end the thread


class EngineThread:
    """Creates the engine and runs it in one thread. Call its methods on the event loop."""

    def __init__(self, create: Callable[[], LoadedEngine]) -> None:
        self._create = create
        #: Called on the event loop, with the events since the last call.
        self.on_events: Callable[[list[EngineEvent]], None] = lambda events: None
        self._loop = asyncio.get_running_loop()
        self._loaded: Future[LoadedEngine] = Future()
        self._broken: Future[None] = Future()
        for future in (self._loaded, self._broken):
            future.set_running_or_notify_cancel()  # a cancelled caller must not cancel the future
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._unsent: list[Command] = []  # commands of this iteration of the loop
        self._events: deque[EngineEvent] = deque()
        self._emitted_at = 0.0  # when the loop was woken last, `time.monotonic`
        self._patient: set[str] = set()  # requests whose tokens may be delayed
        self._is_waking = False  # the loop was woken, and has not handled the events yet
        self._is_held = False  # see `hold`
        self._wake: Callable[[], None] = lambda: None  # `Engine.wake`
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.stats = EngineStats()  #: a few milliseconds old at most
        self.step_started_at: float | None = None  #: `time.monotonic`; None between steps

    async def start(self) -> LoadedEngine:
        """Create the engine and start the thread. Raises: what `create` raises."""
        self._thread.start()
        return await asyncio.wrap_future(self._loaded)

    def add(self, request: EngineInput, *, is_patient: bool = False) -> None:
        """Add a request; `Added` or `Rejected` follows. `is_patient`: events before the last output may be delayed."""
        if is_patient:
            self._patient.add(request.request_id)
        self._send(request)

    def abort(self, request_id: str) -> None:
        self._patient.discard(request_id)
        self._send(request_id)

    def note_end(self, request_id: str) -> None:
        self._patient.discard(request_id)

    def hold(self) -> None:
        """Hold back events until `release`."""
        self._is_held = True

    def release(self) -> None:
        """Deliver the events since `hold`."""
        self._is_held = False  # before the delivery, so that later events wake the loop
        if self._events:
            self._deliver()

    def _send(self, command: Command) -> None:
        """Queue a command, and wake the thread after this iteration of the loop: until then it would await the GIL."""
        if not self._unsent:
            self._loop.call_soon(self._send_all)
        self._unsent.append(command)

    def _send_all(self) -> None:
        unsent, self._unsent = self._unsent, []
        for command in unsent:
            self._commands.put(command)
        self._wake()

    def is_stuck(self, longest_s: float) -> bool:
        """Whether the current step has taken longer than `longest_s`."""
        started_at = self.step_started_at
        return started_at is not None and time.monotonic() - started_at > longest_s

    async def wait_until_broken(self) -> None:
        """Wait until a step raises. Raises: EngineBroken."""
        await asyncio.wrap_future(self._broken)

    async def close(self) -> None:
        """Close the engine and end the thread; waits up to `CLOSE_WITHIN_S` for the current step."""
        self._send_all()
        self._commands.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, CLOSE_WITHIN_S)

    # In the thread

    def _run(self) -> None:
        try:
            loaded = self._create()
        except BaseException as error:
            self._loaded.set_exception(error)
            return
        self.stats, self._wake = loaded.engine.stats(), loaded.engine.wake
        self._loaded.set_result(loaded)
        try:
            self._serve(loaded.engine)
        except Exception as error:
            self.step_started_at = None
            logger.exception("the engine broke")
            self._broken.set_exception(EngineBroken(f"{type(error).__name__}: {error}"))
        finally:
            with suppress(Exception):
                loaded.engine.close()

    def _serve(self, engine: Engine) -> None:
        looked_at = 0.0
        has_work = False
        while True:
            commands = self._next_commands(has_work)
            if commands is None:
                return
            self.step_started_at = now = time.monotonic()  # `add` may hang as well
            events: list[EngineEvent] = []
            events += [answer for command in commands if (answer := _apply(engine, command))]
            if engine.has_work():
                events += engine.step()
            has_work = engine.has_work()
            if not has_work or now - looked_at > STATS_EVERY_S:
                self.stats, looked_at = engine.stats(), now
            self.step_started_at = None
            self._emit(events, now)

    def _next_commands(self, has_work: bool) -> list[EngineInput | str] | None:
        """Commands that have arrived; waits up to `IDLE_S` for one if there is no work. None: end the thread."""
        commands: list[EngineInput | str] = []
        with suppress(Empty):
            while not (has_work or commands) or not self._commands.empty():
                command = self._commands.get(timeout=IDLE_S)
                if command is None:
                    return None
                commands.append(command)
        return commands

    def _emit(self, events: list[EngineEvent], now: float) -> None:
        """Queue events for the loop, and wake it unless it was woken already."""
        if not events:
            return
        self._events.extend(events)
        if self._is_waking or self._is_held:
            return
        if now - self._emitted_at > HOLD_S or not all(map(self._can_wait, events)):
            self._is_waking, self._emitted_at = True, now
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._deliver)

    def _can_wait(self, event: EngineEvent) -> bool:
        """Whether an event may be delayed: it belongs to a patient request and does not end it."""
        if event.request_id not in self._patient or isinstance(event, Rejected):
            return False
        return isinstance(event, Added) or not (event.finish_reason or event.error)

    # On the loop

    def _deliver(self) -> None:
        self._is_waking = False  # before the delivery, so that later events wake the loop
        self.on_events([self._events.popleft() for _ in range(len(self._events))])


def _apply(engine: Engine, command: EngineInput | str) -> EngineEvent | None:
    if isinstance(command, str):
        engine.abort(command)
        return None
    at = time.monotonic()  # the engine's own times begin within `add`
    try:
        engine.add(command)
    except RequestError as error:
        return Rejected(command.request_id, error)
    return Added(command.request_id, at)


def start_watchdog(engine: EngineThread, longest_s: float) -> threading.Event:
    """Start a thread that ends the process when a step hangs, because only a new process recovers a hung device.

    Set the event to end the thread.
    """
    stopped = threading.Event()

    def watch() -> None:
        while not stopped.wait(min(1.0, longest_s / 4)):
            if engine.is_stuck(longest_s):
                logger.critical("a step has taken longer than %.0f s; exiting", longest_s)
                faulthandler.dump_traceback(file=sys.__stderr__ or 2)
                os._exit(EXIT_WEDGED)

    threading.Thread(target=watch, name="watchdog", daemon=True).start()
    return stopped
