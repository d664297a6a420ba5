"""Starts the server of an engine as a child process, which ends with the worker."""

import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from engines.base import EngineLoadFailed, EngineStartError
from engines.child_process import LogForwarder
from engines.upstream import guard
from engines.upstream.dialect import Dialect
from engines.upstream.settings import UpstreamSettings

_ENVIRONMENT = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_PREFIXES = (
    "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "HF_", "XDG_", "VLLM_", "SGLANG_", "GGML_", "NCCL_", "RAY_", "OMP_", "TORCH_",
)  # fmt: skip


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def command_of(settings: UpstreamSettings, dialect: Dialect, port: int) -> list[str]:
    program = shlex.split(settings.command) or list(dialect.program)
    return [*program, *dialect.arguments(port), *shlex.split(settings.arguments)]


class ServerProcess:
    """A running server, whose processes end with this process, even if this process is killed."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        """Raises: EngineStartError."""
        program = shutil.which(command[0])
        if program is None:
            raise EngineStartError(
                f"{command[0]} is not installed: install it, or name it with --engine-command, or connect to a "
                "running server with --url"
            )
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in _ENVIRONMENT or name.startswith(_PREFIXES)
        }
        kept |= environment
        self.name = command[0]
        self._process = subprocess.Popen(
            [sys.executable, guard.__file__, program, *command[1:]], env=kept, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, bufsize=0,
        )  # fmt: skip
        assert self._process.stdout is not None
        self._log = LogForwarder(self._process.stdout)

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raises: EngineLoadFailed if the server has ended."""
        code = self._process.poll()
        if code is not None:
            raise EngineLoadFailed(
                f"{self.name} ended with exit code {code}{self._log.last_words()}"
            )

    def close(self) -> None:
        """Stop the server and all of its processes. Idempotent."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(guard.STOP_S)
        assert self._process.stdin is not None
        self._process.stdin.close()  # the guard sends SIGKILL after some seconds
        self._process.wait()
