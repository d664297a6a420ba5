"""Decodes images in sandboxed child processes, because files are untrusted and may attack the decoder.

Threads of `preparer.Preprocessor` call the pool, each with its own child. If a child dies or takes too long, only its
current file fails, and the child is replaced. A child is also replaced after many files.
"""

import logging
import math
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from tempfile import TemporaryFile
from weakref import WeakKeyDictionary

import msgspec
from PIL import Image

from engines.base import InvalidImage
from engines.child_process import ChildProcess, can_filter, receive
from engines.image_decoder import CANNOT_DECODE
from worker.prepare import decoder_child
from worker.prepare.decoder_child import ANSWER, REQUEST

TOO_LONG = "The image takes too long to decode: send a smaller or simpler one."
TOO_LARGE = "The image is larger than this worker's limits: send a smaller one."
_BASE_BYTES = 512 * 1024 * 1024  #: address space of an idle child, with its libraries
_BYTES_PER_PIXEL = 32  #: a decoded image, its copies with transparency composited, and the answer
_WAITING_RATIO = 3.0  #: limit of the wall time, as a multiple of the limit of the CPU time
_SOCKET_BYTES = 1024 * 1024
_KEPT_BYTES = 4 * 1024 * 1024  #: a child's shared memory is freed after larger images
_MAX_ERROR_BYTES = 1024

logger = logging.getLogger(__name__)


class Child(ChildProcess):
    """One decoding process."""

    def __init__(
        self, module: str, max_bytes: int, max_cpu_s: float, fds: Sequence[int] = ()
    ) -> None:
        self.num_files = 0
        self.is_lost = False  #: whether the child must be replaced
        super().__init__(
            module, max_bytes, math.ceil(max_cpu_s), buffer_bytes=_SOCKET_BYTES, pass_fds=fds
        )

    @contextmanager
    def talking(self, cannot_decode: str, too_long: str) -> Iterator[None]:
        """Convert failures of the child within the block. Raises: InvalidImage if the child dies or is too slow."""
        try:
            self.wait_until_ready()
            yield
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            self.is_lost = True
            logger.warning("a decoder process failed on a file: %s", type(error).__name__)
            is_late = isinstance(error, TimeoutError) or self._was_stopped()
            raise InvalidImage(too_long if is_late else cannot_decode) from None

    def _was_stopped(self) -> bool:
        """Whether the child exceeded its CPU time."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(1.0) == -signal.SIGXCPU
        return False


class ChildPool:
    """A fixed number of children, each for one file at a time, started on first use."""

    module: str
    max_files: int  #: files after which a child is replaced, to bound memory leaks

    def __init__(self, num_processes: int, max_bytes: int, max_cpu_s: float) -> None:
        self._max_bytes = max_bytes
        self._max_cpu_s = max_cpu_s
        self.timeout_s = _WAITING_RATIO * max_cpu_s
        self._idle: SimpleQueue[Child | None] = SimpleQueue()  # None: a child to start
        self._children: set[Child] = set()
        self._is_closed = False
        for _ in range(num_processes):
            self._idle.put(None)

    def start(self) -> None:
        """Start all children now, so that the first files do not wait for their start."""
        if not can_filter():
            logger.warning(
                "this kernel cannot filter system calls: decoders may open files and sockets"
            )
        for _ in range(self._idle.qsize()):
            self._idle.put(self._idle.get() or self._start_child())

    @contextmanager
    def borrow(self) -> Iterator[Child]:
        """The next free child, for one file. Raises: OSError if no child can be started."""
        child = self._idle.get()
        try:
            child = child or self._start_child()
            child.num_files += 1
            yield child
        finally:
            if child is not None and (child.is_lost or child.num_files >= self.max_files):
                child = self._replace(child)
            self._idle.put(child)

    def _start_child(self, *fds: int) -> Child:
        child = Child(self.module, self._max_bytes, self._max_cpu_s, fds)
        self._children.add(child)
        return child

    def _replace(self, child: Child) -> Child | None:
        """End a child, and start its replacement before it is needed."""
        self._children.discard(child)
        child.close()
        try:
            return None if self._is_closed else self._start_child()
        except OSError as error:
            logger.error("cannot start a decoder: %s", type(error).__name__)
            return None

    def close(self) -> None:
        """End all children; the files that they are decoding fail."""
        self._is_closed = True
        for child in list(self._children):
            child.close()


class DecoderPool(ChildPool):
    """Decodes images. Files and pixels are passed in memory that this process shares with each child."""

    module = decoder_child.__name__
    max_files = 1000

    def __init__(
        self, num_processes: int, max_file_bytes: int, max_pixels: int, max_cpu_s: float
    ) -> None:
        self._shared_bytes = max(max_file_bytes, 3 * max_pixels)
        self._memories: WeakKeyDictionary[Child, mmap.mmap] = WeakKeyDictionary()
        max_bytes = _BASE_BYTES + _BYTES_PER_PIXEL * max_pixels + self._shared_bytes
        super().__init__(num_processes, max_bytes, max_cpu_s)

    def _start_child(self, *fds: int) -> Child:
        is_linux = sys.platform == "linux"
        with os.fdopen(os.memfd_create("images"), "r+b") if is_linux else TemporaryFile() as file:
            file.truncate(self._shared_bytes)
            memory = mmap.mmap(file.fileno(), self._shared_bytes)
            child = super()._start_child(*fds, file.fileno())
        self._memories[child] = memory
        return child

    def decode(self, data: bytes, size: tuple[int, int] | None) -> Image.Image:
        """An RGB image. Raises: InvalidImage; OSError if no child can be started."""
        assert size is not None
        num_bytes = 3 * size[0] * size[1]
        used = max(len(data), num_bytes)
        if used > self._shared_bytes:
            raise InvalidImage(TOO_LARGE)
        with self.borrow() as child, child.talking(CANNOT_DECODE, TOO_LONG):
            memory = self._memories[child]
            memory[: len(data)] = data
            child.socket.settimeout(self.timeout_s)
            child.socket.sendall(REQUEST.pack(len(data), *size))
            answer = receive(child.socket, ANSWER.size, time.monotonic() + self.timeout_s)
            width, height, error_bytes = ANSWER.unpack(answer)
            if error_bytes > _MAX_ERROR_BYTES or sorted((width, height)) != sorted(size):
                raise EOFError  # not a valid answer
            if error_bytes:
                raise InvalidImage(memory[:error_bytes].decode(errors="replace"))
            with memoryview(memory) as view, view[:num_bytes] as pixels:
                image = Image.frombytes("RGB", (width, height), pixels)
            if used > _KEPT_BYTES and sys.platform == "linux":
                memory.madvise(mmap.MADV_REMOVE)
        return image
