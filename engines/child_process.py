"""Child processes that communicate over a socket, and do not inherit the environment's addresses and keys.

A child calls `restrict` and `confine` before it reads untrusted input. They limit its memory and, where the kernel
supports seccomp, deny access to files, sockets, programs and other processes. Input that crashes the child does not
affect the parent. Used by the worker's image decoders and the grammar compiler.
"""

import ctypes
import errno
import logging
import platform
import re
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

READY = b"!"  #: the first byte that a child sends

_SOURCE = Path(__file__).parent.parent
_START_S = 60.0
_LENGTH = struct.Struct(">Q")
_LOG_PIECE_BYTES = 64 * 1024
#: Rate limit of a process's log: burst and bytes per second.
_LOG_BYTES, _LOG_BYTES_PER_S = 64 * 1024, 8 * 1024
_NUM_LINES = 300  #: last lines of the log that are searched for the cause of an exit
#: An exception in a log, except vLLM's last one, which only refers to the root cause above it.
_EXCEPTION = re.compile(r"\b[A-Za-z_.]+(?:Error|Exception): (?!.*root cause above).*")

_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
#: Denied system calls of a confined child, on x86-64 and 64-bit Arm.
_DENIED = {
    "x86_64": {
        "open": 2, "creat": 85, "openat": 257, "openat2": 437, "open_by_handle_at": 304, "socket": 41, "connect": 42,
        "socketpair": 53, "fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "kill": 62, "ptrace": 101,
        "process_vm_readv": 310, "process_vm_writev": 311, "pidfd_open": 434, "pidfd_getfd": 438, "io_uring_setup": 425,
        "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "keyctl": 250, "add_key": 248, "request_key": 249,
    },
    "aarch64": {
        "openat": 56, "openat2": 437, "open_by_handle_at": 265, "socket": 198, "connect": 203, "socketpair": 199,
        "execve": 221, "execveat": 281, "kill": 129, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271,
        "pidfd_open": 434, "pidfd_getfd": 438, "io_uring_setup": 425, "bpf": 280, "perf_event_open": 241,
        "userfaultfd": 282, "keyctl": 219, "add_key": 217, "request_key": 218,
    },
}  # fmt: skip


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jump_true", ctypes.c_uint8),
        ("jump_false", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction)))


class ChildProcess:
    def __init__(
        self,
        module: str,
        *arguments: int,
        buffer_bytes: int = 0,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Run `python -m module NUMBER arguments...`; NUMBER is the file descriptor of its socket. Raises: OSError.

        `buffer_bytes`: size of the socket's send buffers; 0: the system's default. The child inherits `pass_fds`.
        """
        self._is_ready = False
        self.socket, theirs = socket.socketpair()
        with theirs:
            if buffer_bytes:
                for end in (self.socket, theirs):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
            number = theirs.fileno()
            numbers = map(str, (number, *arguments, *pass_fds))
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", module, *numbers], pass_fds=(number, *pass_fds), cwd="/",
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    env={"PYTHONPATH": str(_SOURCE)}, start_new_session=True,
                )  # fmt: skip
            except OSError:
                self.socket.close()
                raise

    def wait_until_ready(self) -> None:
        """Return when the child has sent `READY`. Raises: EOFError, OSError (including TimeoutError)."""
        if not self._is_ready:
            receive(self.socket, len(READY), time.monotonic() + _START_S)
            self._is_ready = True

    def close(self) -> None:
        """Kill the child. Idempotent."""
        self.process.kill()
        self.process.wait()
        self.socket.close()


class LogForwarder:
    """Forwards the output of a process to stderr, rate limited."""

    def __init__(self, file: IO[bytes], conceal: Callable[[str], str] = str) -> None:
        self._file = file
        self._conceal = conceal
        self._lines: deque[str] = deque(maxlen=_NUM_LINES)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        left, then, dropped, held = float(_LOG_BYTES), time.monotonic(), 0, b""
        with self._file as file:
            while data := file.read(_LOG_PIECE_BYTES):
                now = time.monotonic()
                left, then = min(_LOG_BYTES, left + (now - then) * _LOG_BYTES_PER_S), now
                if len(data) > left:
                    dropped += len(data)
                    continue
                left -= len(data)
                if dropped:
                    logger.warning("dropped %d bytes of the process's log", dropped)
                    dropped = 0
                # whole lines: a secret that is split between two pieces would not be masked
                held += data
                end = max(held.rfind(b"\n"), held.rfind(b"\r")) + 1
                if len(held) > _LOG_PIECE_BYTES:
                    end = len(held)
                self._say(held[:end])
                held = held[end:]
            self._say(held)

    def _say(self, data: bytes) -> None:
        text = self._conceal(data.decode(errors="replace"))
        self._lines.extend(text.splitlines())
        print(text, end="", file=sys.stderr, flush=True)

    def last_words(self) -> str:
        """The last exception, or else the last line, to append to a message."""
        self._thread.join(0.2)
        found = (match[0] for line in reversed(self._lines) if (match := _EXCEPTION.search(line)))
        last = next(found, self._lines[-1] if self._lines else "")
        return f": {last[:300]}" if last else ""


def send_message(sock: socket.socket, message: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(message)))
    sock.sendall(message)


def receive_message(
    sock: socket.socket, until: float | None = None, max_bytes: int | None = None
) -> bytearray:
    """Receive a message of `send_message`. Raises: EOFError if it exceeds `max_bytes`; the errors of `receive`."""
    (length,) = _LENGTH.unpack(receive(sock, _LENGTH.size, until))
    if max_bytes is not None and length > max_bytes:
        raise EOFError
    return receive(sock, length, until)


def receive(sock: socket.socket, num_bytes: int, until: float | None = None) -> bytearray:
    """Receive the next bytes. `until`: deadline on `time.monotonic`. Raises: EOFError, TimeoutError, OSError."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        if until is not None:
            sock.settimeout(max(0.001, until - time.monotonic()))
        count = sock.recv_into(view)
        if count == 0:
            raise EOFError
        view = view[count:]
    return data


def restrict(max_bytes: int) -> None:
    """Limit memory to `max_bytes`, and disable file writes and core dumps."""
    for limit, most in (
        (resource.RLIMIT_AS, max_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError, OSError):  # not all systems have all limits
            resource.setrlimit(limit, (most, most))


def can_filter() -> bool:
    """Whether system calls can be filtered on this machine."""
    if sys.platform != "linux" or platform.machine() not in _AUDIT_ARCH:
        return False
    # For a filter at address 0, the kernel returns EFAULT if it supports filters, else EINVAL.
    libc = ctypes.CDLL(None, use_errno=True)
    return (
        libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, None, 0, 0) == -1
        and ctypes.get_errno() == errno.EFAULT
    )


def confine() -> bool:
    """Irrevocably deny this process access to files, sockets, programs and other processes.

    Call it after all modules are loaded. Returns False if the kernel does not support it.
    Source: Linux, Documentation/userspace-api/seccomp_filter.rst.
    """
    if not can_filter():
        return False
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06  # opcodes of classic BPF
    deny, allow = 0x0005_0000 | errno.EPERM, 0x7FFF_0000
    numbers = sorted(_DENIED[platform.machine()].values())
    code = [
        (load, 0, 0, 4),  # the architecture
        (equal, 1, 0, _AUDIT_ARCH[platform.machine()]),
        (give, 0, 0, deny),
        (load, 0, 0, 0),  # the system call's number
        (at_least, len(numbers) + 1, 0, 0x4000_0000),  # calls of the x32 ABI
        *((equal, len(numbers) - i, 0, number) for i, number in enumerate(numbers)),
        (give, 0, 0, allow),
        (give, 0, 0, deny),
    ]
    filters = (_Instruction * len(code))(*(_Instruction(*line) for line in code))
    program = _Program(len(code), filters)
    libc = ctypes.CDLL(None, use_errno=True)
    return (
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
        and libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) == 0
    )


def hide_process() -> bool:
    """Hide environment and memory from the user's other processes; no core dumps. Returns False if unsupported."""
    return sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) == 0
