"""Runs an application's tasks one at a time in a process that is restarted when it ends.

A task whose process ended is retried once in a new process, unless the task has streamed output. Each process enters a session
before it runs the session's first task.
"""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engines.application.child import Child, ChildFailed, Reply, read_variables
from engines.application.sandbox import find_sandbox
from engines.application.settings import ApplicationSettings
from engines.base import (
    Capabilities,
    Engine,
    EngineCall,
    EngineLoadFailed,
    EngineOutput,
    EngineStartError,
    EngineStats,
    InvalidRequest,
    LoadedEngine,
    PreparedImage,
    Progress,
)
from shared.protocol import ErrorCode, FinishReason, Priority, Run, RunOutput, StageTimings, Usage

POLL_S = 0.05
MAX_TRIES = 2  #: tries of a task whose process ended
MAX_ENTERS = 3  #: attempts to enter a session
_MAX_STARTS = 3  # consecutive failed starts before the worker gives up
_ENTER_PAUSE_S = 0.5
_STOP_S = 2.0

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class TaskInput:
    request_id: str
    priority: Priority
    task: Run
    common_data: bytes
    waiting_since: float
    begun_at: float = 0.0
    entered_at: float = 0.0
    num_tries: int = 0
    num_enters: int = 0
    not_before: float = 0.0  #: time of the next attempt to enter
    num_published: int = 0
    num_bytes: int = 0
    lines: list[str] = field(default_factory=list)
    is_cancelled: bool = False


class ApplicationEngine(Engine[TaskInput]):
    """One application. A process that ended is restarted with the next step."""

    def __init__(self, settings: ApplicationSettings) -> None:
        """Blocks until the application is set up. Raises: EngineStartError, EngineLoadFailed."""
        self._settings = settings
        self._variables = read_variables(settings.variables_fd)
        self._waiting: deque[TaskInput] = deque()
        self._current: TaskInput | None = None
        self._child: Child | None = None
        self._state = "starting"  # or idle, entering, leaving, running
        self._cancel_until = 0.0
        self._ready_by = 0.0
        #: sessions that this process has entered, the most recently used last
        self._sessions: OrderedDict[str, None] = OrderedDict()
        self._num_starts = 0  # starts since the last success
        self._stats = EngineStats()
        try:
            child = self._start()
            while self._state == "starting":
                self._receive(child)
        except ChildFailed as error:
            self.close()
            raise EngineLoadFailed(f"setup: {error}") from None

    def capabilities(self) -> Capabilities:
        return Capabilities(max_num_seqs=1, tasks=("run",))

    def prepare(self, call: EngineCall, images: Sequence[PreparedImage]) -> TaskInput:
        assert isinstance(call.task, Run)
        return TaskInput(
            call.request_id, call.priority, call.task, call.common_data, time.monotonic()
        )

    def add(self, request: TaskInput) -> None:
        """Queue a task; interactive tasks precede batch tasks. Raises: InvalidRequest."""
        present = [*self._waiting, *([self._current] if self._current else [])]
        if any(each.request_id == request.request_id and not each.is_cancelled for each in present):
            raise InvalidRequest(f"request id {request.request_id!r} is in use")
        if request.priority is Priority.BATCH:
            self._waiting.append(request)
            return
        place = sum(each.priority is not Priority.BATCH for each in self._waiting)
        self._waiting.insert(place, request)

    def abort(self, request_id: str) -> None:
        """Drop a task. A running task is cancelled; its process is killed if the task has not ended after `grace_s`."""
        current = self._current
        if current is None or current.request_id != request_id or current.is_cancelled:
            self._waiting = deque(each for each in self._waiting if each.request_id != request_id)
            return
        current.is_cancelled = True
        if self._state in ("starting", "idle") or self._child is None:
            self._current = None
            return
        self._cancel_until = time.monotonic() + self._settings.grace_s
        if self._state == "running":
            self._child.send(b'{"type":"cancel"}')

    def has_work(self) -> bool:
        return bool(self._waiting) or self._current is not None

    def step(self) -> list[EngineOutput]:
        """Process replies, waiting at most `POLL_S`. Raises: EngineLoadFailed if the application does not start."""
        self._stats.num_steps += 1
        try:
            child = self._child or self._start()
            if self._state == "idle":
                self._begin(child)
            return self._receive(child)
        except ChildFailed as error:
            return self._handle_exit(error)

    # The process

    def _start(self) -> Child:
        settings = self._settings
        self._state, self._num_starts = "starting", self._num_starts + 1
        self._ready_by = time.monotonic() + settings.start_s
        self._sessions.clear()
        self._child = child = Child(settings, self._variables)
        device = "cuda" if settings.uses_gpu else "cpu"
        child.send(
            _line(type="setup", package=settings.model, name=settings.served_name, device=device)
        )
        return child

    def _handle_exit(self, error: ChildFailed) -> list[EngineOutput]:
        """Handle the end of the process: fail or retry its task."""
        was, task = self._state, self._current
        logger.warning("the application's process is gone while %s: %s", was, error)
        child, self._child, self._state = self._child, None, "starting"
        self._cancel_until = 0.0
        if child is not None:
            child.close()
        if was == "starting" and self._num_starts >= _MAX_STARTS:
            raise EngineLoadFailed(f"setup: {error}")
        if was == "starting" or task is None:
            return []
        if task.is_cancelled:
            self._current = None
            return []
        if was == "entering":
            return self._enter_failed(task, str(error))
        if task.num_published or task.num_tries >= MAX_TRIES:
            times = "" if task.num_tries < 2 else f" {task.num_tries} times"
            message = f"The application's process did not survive the task{times}: {error}"
            return self._fail(task, ErrorCode.REQUEST_KILLS_WORKERS, message)
        task.lines.clear()
        task.num_bytes = 0
        return []

    # A task

    def _begin(self, child: Child) -> None:
        """Enter the session of the next task, or start the task."""
        if self._current is None:
            if not self._waiting:
                return
            self._current = self._waiting.popleft()
            self._current.begun_at = time.monotonic()
        task, now = self._current, time.monotonic()
        session = task.task.session
        if not session or session in self._sessions:
            if session:
                self._sessions.move_to_end(session)
            task.num_tries += 1
            task.entered_at = task.entered_at or now
            self._state, self._cancel_until = "running", 0.0
            name, _, ending = task.request_id.partition("@")  # [SHARD@]ATTEMPT.NUMBER
            attempt = ending.rpartition("@")[2].partition(".")[0]
            # Each attempt of the queue has MAX_TRIES numbers, one per try; numbers of unneeded tries are skipped.
            number = MAX_TRIES * (int(attempt or 1) - 1) + task.num_tries
            told = {"task_id": task.task.id or name, "attempt": number}
            child.send(_line(type="run", session=session, **told, input=task.task.input))
        elif len(self._sessions) >= self._settings.max_sessions:
            oldest, _ = self._sessions.popitem(last=False)
            self._state = "leaving"
            child.send(_line(type="leave", session=oldest))
        elif now >= task.not_before:
            task.num_enters += 1
            self._state = "entering"
            common_data = msgspec.Raw(task.common_data or b"null")
            child.send(_line(type="enter", session=session, common_data=common_data))

    def _receive(self, child: Child) -> list[EngineOutput]:
        outputs: list[EngineOutput] = []
        for reply in child.receive(POLL_S):
            outputs += self._take(reply)
        self._stats.memory_bytes = {"application": child.memory_bytes}
        if self._state == "starting" and time.monotonic() > self._ready_by:
            raise ChildFailed(f"not ready within {self._settings.start_s:g} s")
        if self._cancel_until and time.monotonic() > self._cancel_until:
            raise ChildFailed("it did not end a task that was cancelled")
        return outputs

    def _take(self, reply: Reply) -> list[EngineOutput]:
        match self._state, reply.type, self._current:
            case "starting", "ready", _:
                self._state, self._num_starts = "idle", 0
            case "starting", "error", _:
                raise ChildFailed(reply.message)
            case "leaving", "left" | "error", _:
                self._become_idle()
            case "entering", "entered", TaskInput() as task:
                self._sessions[task.task.session] = None
                self._become_idle()
            case "entering", "error", TaskInput() as task:
                self._become_idle()
                return [] if task.is_cancelled else self._enter_failed(task, reply.message)
            case "running", "item", TaskInput() as task:
                return self._on_item(task, reply)
            case "running", "result" | "error", TaskInput() as task:
                return self._end(task, reply)
            case _:
                raise ChildFailed(f"it sent {reply.type!r} while it was {self._state}")
        return []

    def _become_idle(self) -> None:
        """Mark the process as idle. A task that was cancelled meanwhile is done."""
        self._state, self._cancel_until = "idle", 0.0
        if self._current is not None and self._current.is_cancelled:
            self._current = None

    def _enter_failed(self, task: TaskInput, message: str) -> list[EngineOutput]:
        """Retry entering a session, at most `MAX_ENTERS` times."""
        if task.num_enters >= MAX_ENTERS:
            text = f"The session cannot be entered, tried {task.num_enters} times: {message}"
            return self._fail(task, ErrorCode.TASK_FAILED, text)
        task.not_before = time.monotonic() + _ENTER_PAUSE_S * 2 ** (task.num_enters - 1)
        return []

    def _on_item(self, task: TaskInput, reply: Reply) -> list[EngineOutput]:
        task.num_bytes += len(bytes(reply.value))
        if task.num_bytes > self._settings.max_output_bytes:
            most = self._settings.max_output_bytes
            raise ChildFailed(f"it sent more than {most} bytes for one task")
        line = msgspec.json.encode(RunOutput(item=_in_line(reply.value))).decode()
        if task.is_cancelled:
            return []
        if not task.task.is_streamed:
            task.lines.append(line)
            return []
        return [self._output(task, [line])]

    def _end(self, task: TaskInput, reply: Reply) -> list[EngineOutput]:
        self._become_idle()
        if task.is_cancelled:
            return []
        if reply.type == "error":
            return self._fail(task, ErrorCode.TASK_FAILED, reply.message)
        if len(bytes(reply.value)) + task.num_bytes > self._settings.max_output_bytes:
            most = self._settings.max_output_bytes
            text = f"The task's output is larger than {most} bytes: return less output."
            return self._fail(task, ErrorCode.TASK_FAILED, text)
        line = msgspec.json.encode(RunOutput(output=_in_line(reply.value))).decode()
        output = self._output(task, [*task.lines, line])
        output.usage = Usage(0, task.num_published)
        output.finish_reason = FinishReason.STOP
        output.timings = self._timings(task)
        self._current = None
        return [output]

    def _output(self, task: TaskInput, lines: Sequence[str]) -> EngineOutput:
        index = task.num_published
        task.num_published += len(lines)
        return EngineOutput(
            task.request_id, index, text="".join(f"{line}\n" for line in lines),
            usage=None if index else Usage(0), num_without_id=len(lines),
        )  # fmt: skip

    def _fail(self, task: TaskInput, code: ErrorCode, message: str) -> list[EngineOutput]:
        self._current = None
        timings = self._timings(task)
        return [EngineOutput(task.request_id, error=message, error_code=code, timings=timings)]

    def _timings(self, task: TaskInput) -> StageTimings:
        """Entering the session counts as prefill, running the task as decode."""
        now = time.monotonic()
        entered_at = task.entered_at or now
        return StageTimings(
            queue_s=task.begun_at - task.waiting_since,
            prefill_s=entered_at - task.begun_at,
            decode_s=now - entered_at,
        )

    def stats(self) -> EngineStats:
        self._stats.num_running = int(self._current is not None)
        self._stats.num_waiting = len(self._waiting)
        self._stats.num_waiting_batch = sum(
            each.priority is Priority.BATCH for each in self._waiting
        )
        return self._stats

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close(grace_s=0.0 if self._state == "starting" else _STOP_S)


def _in_line(value: msgspec.Raw) -> msgspec.Raw:
    """Replace carriage returns between JSON values: in a stream, they would end the line."""
    data = bytes(value)
    return msgspec.Raw(data.replace(b"\r", b" ")) if b"\r" in data else value


def _line(**message: object) -> bytes:
    return msgspec.json.encode(message)


def load_application_engine(
    settings: ApplicationSettings, progress: Progress | None
) -> LoadedEngine:
    """Set up an application. Raises: EngineStartError, EngineLoadFailed."""
    if not settings.entry and not settings.command:
        raise EngineStartError(
            "set VLM_ENGINE__ENTRY to module:Class, or VLM_ENGINE__COMMAND to a program"
        )
    if find_sandbox(settings) is None:
        logger.warning("the application runs without bubblewrap: limits alone are not a sandbox")
    engine = ApplicationEngine(settings)
    name = settings.served_name or Path(settings.model).name
    card = engine.card(name, max_model_len=0, vocab_size=0, supports_images=False)
    return LoadedEngine(engine, card)
