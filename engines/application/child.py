"""Runs one process of an application: exchanges JSON lines with it, and checks its resource usage."""

import errno
import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal

import msgspec
import psutil

from engines.application.sandbox import find_sandbox, make_command, make_environment, tmpfs_bytes
from engines.application.settings import ApplicationSettings
from engines.base import EngineStartError
from engines.child_process import LogForwarder
from shared.protocol import is_deeper

_PIECE_BYTES = 64 * 1024
_CHECK_S = 0.5  # between checks of the resource usage
_STOP_S = 2.0
#: Shorter secrets are not masked, because they could be common words.
_LEAST_CONCEALED = 6


class ChildFailed(Exception):
    """The process ended or violated a limit."""


class Reply(msgspec.Struct):
    type: Literal["ready", "entered", "left", "item", "result", "error"]
    value: msgspec.Raw = msgspec.Raw(b"null")
    message: str = ""


_replies = msgspec.json.Decoder(Reply)
_TOO_DEEP = Reply("error", message="the output is nested too deeply")
#: Maximum nesting of a value. On Python 3.11, msgspec decodes 998 levels, including those of the message around it.
_MAX_LEVELS = 800


class Variables(msgspec.Struct, frozen=True):
    """Environment variables of an application, which a node passes in an anonymous file."""

    plain: dict[str, str] = {}
    secrets: dict[str, str] = {}

    @property
    def all(self) -> dict[str, str]:
        return self.plain | self.secrets

    def concealer(self) -> Callable[[str], str]:
        """A function that masks secrets in a text, multi-line secrets line by line."""
        parts = {line.strip() for value in self.secrets.values() for line in value.splitlines()}
        shown = [re.escape(part) for part in parts if len(part) >= _LEAST_CONCEALED]
        if not shown:
            return lambda text: text
        pattern = re.compile("|".join(sorted(shown, key=len, reverse=True)))
        return lambda text: pattern.sub("***", text)


def read_variables(number: int) -> Variables:
    """Read and close the file of the variables. Raises: EngineStartError."""
    if number < 0:
        return Variables()
    try:
        with os.fdopen(number, "rb") as file:
            return msgspec.json.decode(file.read(), type=Variables)
    except (OSError, msgspec.MsgspecError):
        raise EngineStartError(
            "VLM_ENGINE__VARIABLES_FD: only a node may set it, to an open file of variables; unset it"
        ) from None


class Child:
    def __init__(self, settings: ApplicationSettings, variables: Variables) -> None:
        """Raises: EngineStartError, ChildFailed."""
        self._settings = settings
        self._conceal = variables.concealer()
        command = make_command(settings)
        self._scratch = Path(mkdtemp(prefix="vlm-app-"))
        try:
            self._process = subprocess.Popen(
                command, env=make_environment(settings, self._scratch, variables.all), cwd=settings.model,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True, bufsize=0,
            )  # fmt: skip
        except OSError as error:
            shutil.rmtree(self._scratch, ignore_errors=True)
            why = error.strerror
            if error.errno == errno.E2BIG:
                why = "its environment variables and secrets are too long for the kernel (see ulimit -s)"
            raise ChildFailed(f"it cannot be started: {why}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        os.set_blocking(self._in.fileno(), False)
        self._unsent = bytearray()
        self._unread = bytearray()
        self._log = LogForwarder(self._process.stderr, self._conceal)
        self._looked_at = time.monotonic()
        self.memory_bytes = 0  #: memory of all its processes at the last check

    def send(self, message: bytes) -> None:
        """Queue a message for the process; `receive` writes it."""
        self._unsent += message + b"\n"

    def receive(self, timeout_s: float) -> list[Reply]:
        self._check_usage()
        writing = [self._in] if self._unsent else []
        readable, writable, _ = select.select([self._out], writing, [], timeout_s)
        if writable:
            with suppress(BlockingIOError, BrokenPipeError):
                del self._unsent[: os.write(self._in.fileno(), self._unsent[:_PIECE_BYTES])]
        if not readable:
            return []
        data = os.read(self._out.fileno(), _PIECE_BYTES)
        if not data:
            raise ChildFailed(self._describe_end())
        *lines, rest = (self._unread + data).split(b"\n")
        self._unread = rest
        if len(rest) > self._settings.max_output_bytes + 1024:
            raise ChildFailed(
                f"it wrote a line of more than {self._settings.max_output_bytes} bytes"
            )
        return [self._decode(bytes(line)) for line in lines]

    def _decode(self, line: bytes) -> Reply:
        try:
            reply = _replies.decode(line)
        except RecursionError:
            return _TOO_DEEP
        except msgspec.MsgspecError:
            shown = self._conceal(line.decode(errors="replace"))[:80]
            raise ChildFailed(f"it wrote a line that is not a message: {shown!r}") from None
        if is_deeper(bytes(reply.value), _MAX_LEVELS):
            return _TOO_DEEP
        if reply.message:
            reply.message = self._conceal(reply.message)
        return reply

    def _check_usage(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < _CHECK_S:
            return
        self._looked_at = now
        num_threads = num_bytes = 0
        with suppress(psutil.Error):
            root = psutil.Process(self._process.pid)
            for inner in root.children()[:1] if find_sandbox(self._settings) else ():
                num_bytes += tmpfs_bytes(inner.pid)
            for process in (root, *root.children(recursive=True)):
                with suppress(psutil.Error):
                    num_threads += process.num_threads()
                    num_bytes += process.memory_info().rss
        self.memory_bytes = num_bytes
        settings = self._settings
        if settings.memory_bytes and num_bytes > settings.memory_bytes:
            raise ChildFailed(
                f"it used {num_bytes} bytes of memory; the limit is {settings.memory_bytes}"
            )
        if num_threads > settings.max_processes + 8:
            raise ChildFailed(
                f"it started {num_threads} threads; the limit is {settings.max_processes + 8}"
            )

    def _describe_end(self) -> str:
        try:
            code = self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        # like a shell, bubblewrap reports a signal as exit code 128 + its number
        number = -code if code < 0 else code - 128 if 128 < code < 160 else 0
        with suppress(ValueError):
            if number:
                return f"it was ended by {signal.Signals(number).name}" + self._log.last_words()
        return f"it ended with exit code {code}" + self._log.last_words()

    def close(self, grace_s: float = 0.0) -> None:
        """Kill all its processes after `grace_s`. Idempotent."""
        with suppress(OSError):
            self._in.close()
        if grace_s:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        own: list[psutil.Process] = []
        with suppress(psutil.Error):  # including children outside its process group
            own = psutil.Process(self._process.pid).children(recursive=True)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in own:
            with suppress(psutil.Error):
                process.kill()
        self._process.wait()
        self._out.close()
        shutil.rmtree(self._scratch, ignore_errors=True)
