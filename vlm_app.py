"""What an application imports, and what runs it: this file, and Python's standard library.

    from vlm_app import Application

    class Captioner(Application):
        def setup(self, context): ...       # once a process: load what takes long
        def enter(self, common_data): ...   # once a session
        def run(self, task): ...            # JSON in, JSON out; or yield pieces of it
        def leave(self): ...                # when the process drops a session

The process reads one JSON object a line, and answers each by one or more; a program in any other language may do the
same, on its standard input and output:

    {"type":"setup",...}                           {"type":"ready"}
    {"type":"enter","session":S,"common_data":D}   {"type":"entered"}
    {"type":"run","session":S,"input":I}           {"type":"item","value":V} ... {"type":"result","value":V}
    {"type":"leave","session":S}                   {"type":"left"}
    {"type":"cancel"}                              nothing of its own: the run that it ends is answered
    any of them                                    {"type":"error","message":M}

`session` is empty for tasks of no session, before which nobody enters. `input` and `common_data` come last. What an
application prints goes to the log of its node.
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
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

__all__ = ["Application", "Context", "TaskCancelled", "TaskError"]


class TaskError(Exception):
    """The task cannot be done; whoever asked reads the message."""


class TaskCancelled(BaseException):
    """Raised in `run` when nobody waits for its task any more."""


@dataclass(frozen=True)
class Context:
    """What a process is given."""

    package: Path  #: the application's files, to read
    name: str = ""  #: under which it is deployed, `@` and its version
    device: str = "cpu"  #: or `cuda`


class Application:
    """Base of applications. Each session has a shallow copy: what `setup` loads is shared, what `enter` keeps is not."""

    def setup(self, context: Context) -> None:
        """Load what all tasks need."""

    def enter(self, common_data: Any) -> None:
        """Begin a session, with what its tasks have in common."""

    def run(self, task: Any) -> Any:
        """Do a task; its result, or the pieces of it that are yielded. Raises: TaskError."""
        raise NotImplementedError

    def leave(self) -> None:
        """Let go of a session: others came after it, or the process stops."""


class _Runner:
    """Serves one application, a message after another; cancelling alone does not wait for its turn."""

    def __init__(self, entry: str, reader: int, writer: int) -> None:
        self._entry = entry
        self._lines = os.fdopen(reader, "rb")
        self._out = os.fdopen(writer, "wb", buffering=0)
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        self._sessions: dict[str, Application] = {}
        self._application = Application()
        self._can_cancel = False
        self._is_cancelled = False

    def serve(self) -> None:
        """Answer until the parent hangs up."""
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
            problem = f"what `run` gives is no JSON: {error}"
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
        self._is_cancelled, self._can_cancel = False, True
        try:
            value = application.run(message["input"])
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
    """Run the application that `module:Class` names, on standard input and output."""
    reader, writer = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # what is printed is no answer
    if isinstance(sys.stdout, io.TextIOWrapper):  # the log has a line when it is printed
        sys.stdout.reconfigure(line_buffering=True)
    _Runner(entry, reader, writer).serve()
