"""The other ranks of an engine, as processes that rank 0 starts, speaks to, and does not outlive.

Each has a socket of its own to rank 0. They have no address of Redis and no keys, and end when rank 0 does.
"""

import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from engines.base import EngineStartError
from engines.child_process import ChildProcess, receive_message, send_message
from engines.torch_backend.parallel.process_mesh import ProcessMesh
from engines.torch_backend.settings import TorchSettings

#: Of a worker whose engine broke.
EXIT_BROKEN = 71
#: How long the worker has to give back its requests after a rank is gone, before it ends anyhow.
GRACE_S = 5.0
_CHILD = "engines.torch_backend.loading.rank"
_START_TIMEOUT_S = 300.0  #: to import torch on a busy machine
#: What a rank reads of this process's environment: where compilers, devices and caches are.
_VARIABLES = ("PATH", "HOME", "TMPDIR", "LANG", "CC", "CXX", "LD_LIBRARY_PATH", "XDG_CACHE_HOME")
_PREFIXES = ("CUDA_", "NVIDIA_", "NCCL_", "OMP_", "MKL_", "KMP_", "TRITON_")

logger = logging.getLogger(__name__)


class RankLost(RuntimeError):
    """A process that has a part of the model is gone."""


class RankStart(msgspec.Struct, frozen=True):
    """What a rank has to know; sent as JSON."""

    rank: int
    size: int
    meeting_place: str
    directory: str
    device: str
    dtype: str
    settings: dict[str, object]


class Rank(ChildProcess):
    """A process with a part of the model."""

    def __init__(self, number: int, start: RankStart) -> None:
        self.number = number
        self.error = ""  #: why it could not start, in its words
        super().__init__(_CHILD, environment=_environment(), is_silent=False)
        self.send(msgspec.json.encode(start))

    def send(self, message: bytes) -> None:
        """Raises: RankLost."""
        try:
            send_message(self.socket, message)
        except OSError:
            raise RankLost(f"rank {self.number} is gone") from None

    def begin(self) -> None:
        """Wait until it listens. Raises: EngineStartError."""
        try:
            self.wait_until_ready(_START_TIMEOUT_S)
        except (EOFError, OSError):
            raise EngineStartError(
                f"rank {self.number} does not start; its last lines say why"
            ) from None
        self.socket.settimeout(None)

    def wait(self) -> int:
        """Its exit code; blocks until it has ended."""
        with suppress(EOFError, OSError):
            self.error = receive_message(self.socket).decode(errors="replace")
        return self.process.wait()


class Ranks:
    """All of them; `mesh` is rank 0's place among them."""

    def __init__(
        self,
        settings: TorchSettings,
        directory: Path,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Start all ranks; they load their parts meanwhile. Raises: EngineStartError."""
        self._is_closed = False
        self._folder = tempfile.mkdtemp(prefix="vlm-ranks-")  # for this user alone
        self._ranks: list[Rank] = []
        self._watchers: list[threading.Thread] = []
        try:
            self.mesh = self._start(settings, directory, device, dtype)
        except BaseException:
            self.close()
            raise

    def _start(
        self, settings: TorchSettings, directory: Path, device: torch.device, dtype: torch.dtype
    ) -> ProcessMesh:
        size, meeting_place = settings.tensor_parallel, Path(self._folder) / "store"
        directory = directory.absolute()  # a rank has another working directory
        for number in range(1, size):
            start = RankStart(
                number, size, str(meeting_place), str(directory), str(device_of(device, number)),
                str(dtype).removeprefix("torch."), settings.model_dump(mode="json"),
            )  # fmt: skip
            self._ranks.append(Rank(number, start))
        for rank in self._ranks:
            rank.begin()
            watcher = threading.Thread(target=self._watch, args=(rank,), name="ranks", daemon=True)
            self._watchers.append(watcher)
            watcher.start()
        return ProcessMesh(0, size, device_of(device, 0), meeting_place)

    def explain(self, error: Exception) -> Exception:
        """Why the engine does not start: in the words of a rank, if it was one that could not."""
        until = time.monotonic() + 1.0
        for watcher in self._watchers:  # one that failed ends the others, but speaks first
            watcher.join(max(0.0, until - time.monotonic()))
        failed = [rank for rank in self._ranks if rank.error and rank.error != str(error)]
        if failed:
            return EngineStartError(f"rank {failed[0].number}: {failed[0].error}")
        gone = [rank for rank in self._ranks if rank.process.returncode]
        if gone and not isinstance(error, EngineStartError):
            return EngineStartError(f"rank {gone[0].number} {_ended(gone[0])} while it started")
        return error

    def close(self) -> None:
        self._is_closed = True
        for rank in self._ranks:
            rank.close()
        if hasattr(self, "mesh"):
            self.mesh.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def send(self, message: bytes) -> None:
        """To all of them. Raises: RankLost."""
        for rank in self._ranks:
            rank.send(message)

    def _watch(self, rank: Rank) -> None:
        """End this process some time after a rank: it cannot compute, even where a device waits for ever."""
        rank.wait()
        if self._is_closed:
            return
        logger.critical(
            "rank %d %s; a worker ends with any of its ranks", rank.number, _ended(rank)
        )
        time.sleep(GRACE_S)
        if not self._is_closed:
            os._exit(EXIT_BROKEN)


def device_of(device: torch.device, rank: int) -> torch.device:
    """A rank's, where rank 0 has this one. Raises: EngineStartError if there are not so many."""
    if device.type == "cpu":
        return device
    index = (device.index or 0) + rank
    if index >= (count := torch.cuda.device_count()):
        raise EngineStartError(
            f"rank {rank} wants the device cuda:{index}, but torch sees {count} GPUs; use a smaller "
            "--tensor-parallel"
        )
    return torch.device(device.type, index)


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name in _VARIABLES or name.startswith(_PREFIXES)
    }


def _ended(rank: Rank) -> str:
    code = rank.process.returncode
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
