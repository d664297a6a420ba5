"""The one thread that calls the engine, and the bridge between it and the event loop.

Nobody polls: commands wake the thread through a condition, and what a step has to say wakes the
loop once. Tokens of an answer that is wanted whole wait for something that is awaited.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from msgspec import Struct

from engines.base import Engine, EngineInput, EngineOutput, EngineStats, LoadedEngine, RequestError

logger = logging.getLogger(__name__)

#: Steps may be far shorter than it takes to say how the engine is.
STATS_EVERY_S = 0.005
CLOSE_WITHIN_S = 5.0
#: How long tokens wait that nobody reads as they come; the steps between wake nobody.
HOLD_S = 0.05


class EngineBroken(Exception):
    """The engine raised out of a step: its state is unknown, and the process should end."""


class Added(Struct, frozen=True):
    """The engine accepted a request at `at` (`time.monotonic`)."""

    request_id: str
    at: float


class Rejected(Struct, frozen=True):
    """The engine refused a request."""

    request_id: str
    error: RequestError


EngineEvent = Added | Rejected | EngineOutput
Command = EngineInput | str | None  #: to add; the id of what to abort; None: end


class EngineThread:
    """Makes the engine, adds, aborts and steps, all in one thread. Methods are called on the loop."""

    def __init__(
        self,
        create: Callable[[], LoadedEngine],
        on_events: Callable[[list[EngineEvent]], None] = lambda events: None,
    ) -> None:
        self._create = create
        self.on_events = on_events  #: called on the loop
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[LoadedEngine] = self._loop.create_future()
        self._broken: asyncio.Future[None] = self._loop.create_future()
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._unsent: list[Command] = []  # commands of this turn of the loop
        self._events: deque[EngineEvent] = deque()
        self._emitted_at = 0.0  # when the loop was woken last, `time.monotonic`
        self._patient: set[str] = set()  # requests whose tokens may wait
        self._is_waking = False  # the loop was woken and has not taken the events yet
        self._is_held = False  # the loop could do nothing with them now
        self._wake: Callable[[], None] = lambda: None  # the engine's
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.stats = EngineStats()  #: a few milliseconds old at most
        self.step_started_at: float | None = None  #: `time.monotonic`; None while the engine rests

    async def start(self) -> LoadedEngine:
        """Make the engine and begin to serve. Raises: whatever making it raises."""
        self._thread.start()
        return await self._loaded

    def add(self, request: EngineInput, *, is_patient: bool = False) -> None:
        """Hand over a request; `Added` or `Rejected` follows.

        Where it `is_patient`, what comes before its last output may come late.
        """
        if is_patient:
            self._patient.add(request.request_id)
        self._send(request)

    def abort(self, request_id: str) -> None:
        """Have the engine forget a request. Events that are on their way may still arrive."""
        self._patient.discard(request_id)
        self._send(request_id)

    def note_end(self, request_id: str) -> None:
        """The request's last output has arrived."""
        self._patient.discard(request_id)

    def hold(self) -> None:
        """Keep the events of steps back until `release`."""
        self._is_held = True

    def release(self) -> None:
        """Emit, at once, the events of steps since `hold`."""
        self._is_held = False  # first: what is emitted from now on wakes the loop again
        if self._events:
            self._deliver()

    def _send(self, command: Command) -> None:
        """Wake the thread at the end of this turn of the loop: it needs the interpreter's lock."""
        if not self._unsent:
            self._loop.call_soon(self._send_all)
        self._unsent.append(command)

    def _send_all(self) -> None:
        unsent, self._unsent = self._unsent, []
        for command in unsent:
            self._commands.put(command)
        self._wake()

    async def wait_until_broken(self) -> None:
        """Return never. Raises: EngineBroken when a step raises."""
        await asyncio.shield(self._broken)

    async def close(self) -> None:
        """Close the engine and end the thread; waits for the present step, but not for ever."""
        self._send_all()
        self._commands.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, CLOSE_WITHIN_S)
        self._broken.cancel()

    # In the thread

    def _run(self) -> None:
        try:
            loaded = self._create()
        except BaseException as error:
            self._call(_fail, self._loaded, error)
            return
        self.stats, self._wake = loaded.engine.stats(), loaded.engine.wake
        self._call(_succeed, self._loaded, loaded)
        try:
            self._serve(loaded.engine)
        except Exception as error:
            self.step_started_at = None
            logger.exception("the engine broke")
            broken = EngineBroken(f"{type(error).__name__}: {error}")
            self._call(_fail, self._broken, broken)
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
            self.step_started_at = now = time.monotonic()  # adding may hang as well
            events: list[EngineEvent] = []
            if commands:
                events += [answer for command in commands if (answer := _apply(engine, command))]
                has_work = engine.has_work()
            if has_work:
                events += engine.step()
            has_work = engine.has_work()
            if not has_work or now - looked_at > STATS_EVERY_S:
                self.stats, looked_at = engine.stats(), now
            self.step_started_at = None
            self._emit(events, now)

    def _next_commands(self, has_work: bool) -> list[EngineInput | str] | None:
        """What has arrived; waits for something if there is no work. None: the thread is to end."""
        commands: list[EngineInput | str] = []
        while not (has_work or commands) or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return None
            commands.append(command)
        return commands

    def _emit(self, events: list[EngineEvent], now: float) -> None:
        """Leave events for the loop; wake it only if an earlier wake-up is not still to come."""
        if not events:
            return
        self._events.extend(events)
        if self._is_waking or self._is_held:
            return
        if now - self._emitted_at > HOLD_S or not all(map(self._can_wait, events)):
            self._is_waking, self._emitted_at = True, now
            self._call(self._deliver)

    def _can_wait(self, event: EngineEvent) -> bool:
        """Whether it comes before the end of a patient request."""
        if event.request_id not in self._patient or isinstance(event, Rejected):
            return False
        return isinstance(event, Added) or not (event.finish_reason or event.error)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(function, *arguments)

    # On the loop

    def _deliver(self) -> None:
        self._is_waking = False  # first: what is emitted from now on wakes the loop again
        self.on_events([self._events.popleft() for _ in range(len(self._events))])


def _apply(engine: Engine, command: EngineInput | str) -> EngineEvent | None:
    if isinstance(command, str):
        engine.abort(command)
        return None
    try:
        engine.add(command)
    except RequestError as error:
        return Rejected(command.request_id, error)
    return Added(command.request_id, time.monotonic())


def _succeed(future: "asyncio.Future[LoadedEngine]", loaded: LoadedEngine) -> None:
    if not future.done():
        future.set_result(loaded)


def _fail(future: "asyncio.Future[object]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
