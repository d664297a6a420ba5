"""The Python library of applications, and the process that runs them. Needs only the standard library.

    from vlm_app import Application

    class Captioner(Application):
        def setup(self, context): ...       # once per process: slow preparations
        def enter(self, common_data): ...   # once per session, in each process that serves it
        def run(self, task): ...            # JSON in, JSON out; or yield the result in pieces
                                            # each task runs at least once: see Application.run
        def leave(self): ...                # when the process drops a session

The process reads JSON lines from standard input, and answers each with one or more lines on standard output. A program
in any other language can implement the same protocol:

    {"type":"setup",...}                           {"type":"ready"}
    {"type":"enter","session":S,"common_data":D}   {"type":"entered"}
    {"type":"run","session":S,"task_id":T,"attempt":N,"input":I}
                                                   {"type":"item","value":V} ... {"type":"result","value":V}
    {"type":"leave","session":S}                   {"type":"left"}
    {"type":"cancel"}                              no answer; the cancelled run answers with an error
    any message that fails                         {"type":"error","message":M}

`session` is empty for a task without a session, and no `enter` precedes it. `input` and `common_data` are the last
fields of their messages. The output of `print` goes to the log of the node.

A client of a deployed application uses sessions of the gateway:

    from vlm_app import Session

    with Session.open("captioner", common_data={"language": "en"}) as session:
        session.submit(*images)
        for task in session.results():  # in submission order, each as soon as it has ended
            print(task.output if task.error is None else task.error)
"""

import copy
import importlib
import inspect
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

__all__ = [
    "Application", "Context", "Session", "SessionError", "TaskCancelled", "TaskError", "TaskResult",
]  # fmt: skip


class TaskError(Exception):
    """Raise it in `run` to fail the task. The client receives the message."""


class TaskCancelled(BaseException):
    """Raised in `run` when its task was cancelled or is past its deadline."""


@dataclass(frozen=True)
class Context:
    """The argument of `setup`."""

    package: Path  #: directory of the application's files, read-only
    name: str = ""  #: name of the deployment, `@` and the version
    device: str = "cpu"  #: `cpu` or `cuda`


class Application:
    """Base class of applications. Each session has a shallow copy: `setup` sets shared state, `enter` the session's."""

    def setup(self, context: Context) -> None:
        """Load models and other data that all tasks need."""

    def enter(self, common_data: Any) -> None:
        """Begin a session. `common_data`: the data that its tasks share."""

    def run(self, task: Any) -> Any:
        """Return the result of a task, or yield pieces of it.

        A task runs at least once: if a process, worker or node is lost, it runs again. A `run`
        with side effects declares `def run(self, task, *, task_id, attempt)`. `task_id` is the same
        in each attempt, and unique in its session. `attempt` is 1 in the first attempt and larger in
        later ones: earlier attempts may already have had side effects.

        Raises: TaskError.
        """
        raise NotImplementedError

    def leave(self) -> None:
        """End a session in this process, because newer sessions evict it or the process stops."""


class SessionError(Exception):
    """The gateway refused a request. `status`: HTTP status; `code`: error code."""

    def __init__(self, message: str, status: int, code: str | None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class TaskResult:
    """The result of an ended task. `error`: the reason why it has no output; None if it has output."""

    id: str
    state: str  #: succeed, failed or cancelled
    output: Any = None
    error: str | None = None


class Session:
    """A session of a deployed application, through the gateway's API. Not thread-safe."""

    _PIECE = 1000  # maximum tasks in one request
    _WAIT_S = 30

    def __init__(self, session_id: str, *, url: str = "", api_key: str = "") -> None:
        """Use an existing session. `url` and `api_key` default to VLM_URL and VLM_API_KEY."""
        self.id = session_id
        url = (url or os.environ.get("VLM_URL") or "http://127.0.0.1:8000").rstrip("/")
        self._url = url if "://" in url else f"http://{url}"
        self._api_key = api_key or os.environ.get("VLM_API_KEY", "")
        self._submitted: list[str] = []

    @classmethod
    def open(
        cls, application: str, *, url: str = "", api_key: str = "", **options: Any
    ) -> "Session":
        """Open a session. `options`: common_data, priority, idle_s, timeout_s. Raises: SessionError, OSError."""
        session = cls("", url=url, api_key=api_key)
        path = f"/v1/applications/{urllib.parse.quote(application)}/sessions"
        session.id = session._ask("POST", path, options)["id"]
        return session

    def submit(self, *inputs: Any) -> list[str]:
        """Submit a task per input. Returns their ids. Waits while the queue is full. Raises: SessionError, OSError."""
        tasks = [{"id": uuid.uuid4().hex, "input": each} for each in inputs]
        for first in range(0, len(tasks), self._PIECE):
            some = tasks[first : first + self._PIECE]
            self._ask("POST", f"/v1/sessions/{self.id}/tasks", {"tasks": some})
        ids = [task["id"] for task in tasks]
        self._submitted += ids
        return ids

    def result(self, task_id: str) -> TaskResult:
        """Wait for the end of a task. Raises: SessionError, OSError."""
        path = f"/v1/sessions/{self.id}/tasks/{task_id}?wait={self._WAIT_S}"
        while True:
            found = self._ask("GET", path)
            if found["state"] in ("pending", "running"):
                continue
            if "output" in found:
                return TaskResult(task_id, found["state"], found["output"])
            error = found.get("error", {}).get("message", f"The task is {found['state']}.")
            return TaskResult(task_id, found["state"], error=error)

    def results(self) -> Iterator[TaskResult]:
        """Yield the results of submitted tasks, each only once, in submission order."""
        while self._submitted:
            result = self.result(self._submitted[0])
            self._submitted.pop(0)
            yield result

    def close(self) -> None:
        """Close the session to new tasks, and cancel waiting tasks. Raises: SessionError, OSError."""
        self._ask("POST", f"/v1/sessions/{self.id}:close", {})

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request, and retry it after `retry-after`. Task ids make retries safe."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, method=method)
        request.add_header("content-type", "application/json")
        if self._api_key:
            request.add_header("authorization", f"Bearer {self._api_key}")
        while True:
            try:
                with urllib.request.urlopen(request, timeout=self._WAIT_S + 30) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as failed:
                pause, error = failed.headers.get("retry-after", ""), self._error(failed)
                is_spent = error.code == "insufficient_quota"  # the wait could last a month
                if failed.code not in (429, 503) or not pause.isdigit() or is_spent:
                    raise error from None
            time.sleep(int(pause))

    def _error(self, failed: urllib.error.HTTPError) -> SessionError:
        try:
            error = json.load(failed)["error"]
            return SessionError(error["message"], failed.code, error["code"])
        except (ValueError, KeyError, TypeError):
            return SessionError(f"the gateway answers {failed.code}", failed.code, None)


class _Runner:
    """Serves one application. Messages are handled in order, except for `cancel`, which is handled immediately."""

    def __init__(self, entry: str, reader: int, writer: int) -> None:
        self._entry = entry
        self._lines = os.fdopen(reader, "rb")
        self._out = os.fdopen(writer, "wb", buffering=0)
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        self._sessions: dict[str, Application] = {}
        self._application = Application()
        self._optional: list[str] = []  # optional parameters that `run` accepts
        self._can_cancel = False
        self._is_cancelled = False

    def serve(self) -> None:
        """Answer messages until standard input is closed."""
        signal.signal(signal.SIGUSR1, self._on_cancel)
        threading.Thread(target=self._read, daemon=True).start()
        while (line := self._messages.get()) is not None:
            self._say(self._answer(line))
        for session in list(self._sessions):
            self._answer(json.dumps({"type": "leave", "session": session}))

    def _read(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        for line in self._lines:
            if line.startswith(b'{"type":"cancel"'):
                self._is_cancelled = True
                signal.pthread_kill(main, signal.SIGUSR1)
            else:
                self._is_cancelled = False
                self._messages.put(line)
        self._messages.put(None)

    def _on_cancel(self, number: int, frame: Any) -> None:
        if self._can_cancel and self._is_cancelled:
            self._can_cancel = False
            raise TaskCancelled

    def _answer(self, line: bytes | str) -> dict[str, Any]:
        try:
            message = json.loads(line)
            return getattr(self, "_" + message["type"])(message)
        except TaskCancelled:
            return {"type": "error", "message": "cancelled"}
        except TaskError as error:
            return {"type": "error", "message": str(error)}
        except Exception as error:
            traceback.print_exc()
            return {"type": "error", "message": f"{type(error).__name__}: {error}"}

    def _say(self, answer: dict[str, Any]) -> None:
        try:
            line = _encode(answer)
        except (TypeError, ValueError, RecursionError) as error:
            problem = f"the result of `run` is not JSON: {error}"
            line = _encode({"type": "error", "message": problem})
        data = memoryview(line + b"\n")
        while data:
            data = data[self._out.write(data) :]

    def _setup(self, message: dict[str, Any]) -> dict[str, Any]:
        package = Path(message["package"])
        sys.path.insert(0, str(package))
        module, _, name = self._entry.partition(":")
        kind: Any = importlib.import_module(module)  # noqa: TID251 (the entry names it)
        for part in name.split("."):
            kind = getattr(kind, part)
        self._application = kind()
        parameters = inspect.signature(self._application.run).parameters.values()
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        names = {each.name for each in parameters if each.kind is not each.VAR_POSITIONAL}
        self._optional = [n for n in ("task_id", "attempt") if takes_all or n in names]
        self._application.setup(Context(package, message["name"], message["device"]))
        return {"type": "ready"}

    def _enter(self, message: dict[str, Any]) -> dict[str, Any]:
        application = copy.copy(self._application)
        application.enter(message["common_data"])
        self._sessions[message["session"]] = application
        return {"type": "entered"}

    def _run(self, message: dict[str, Any]) -> dict[str, Any]:
        session = message["session"]
        application = self._sessions[session] if session else self._application
        self._can_cancel = True
        try:
            if self._is_cancelled:
                raise TaskCancelled
            told = {name: message[name] for name in self._optional}
            value = application.run(message["input"], **told)
            if isinstance(value, Iterator):
                for item in value:
                    self._can_cancel = False
                    self._say({"type": "item", "value": item})
                    self._can_cancel = True
                    if self._is_cancelled:
                        raise TaskCancelled
                value = None
            elif inspect.iscoroutine(value):
                value.close()
                raise TypeError("`run` is a coroutine: write it without async")
        finally:
            self._can_cancel = False
        return {"type": "result", "value": value}

    def _leave(self, message: dict[str, Any]) -> dict[str, Any]:
        application = self._sessions.pop(message["session"], None)
        if application is not None:
            application.leave()
        return {"type": "left"}


def _encode(answer: dict[str, Any]) -> bytes:
    """JSON in UTF-8. Raises: TypeError, ValueError, RecursionError."""
    line = json.dumps(answer, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return line.encode("utf-8", "replace" if answer["type"] == "error" else "strict")


def serve(entry: str) -> None:
    """Serve the application `module:Class` on standard input and output."""
    reader, writer = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # printed lines must not be read as answers
    if isinstance(sys.stdout, io.TextIOWrapper):  # write each printed line to the log immediately
        sys.stdout.reconfigure(line_buffering=True)
    _Runner(entry, reader, writer).serve()
