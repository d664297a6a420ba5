"""Images decoded in child processes: what a hostile file does to a decoder, it does to a process
without rights.

Called from the threads of `Preprocessor`; each call has a child for itself. A child that dies or
takes too long costs the one image, and is replaced; so is one that has decoded many.
"""

import logging
import math
import time
from queue import SimpleQueue

from PIL import Image

from engines.base import InvalidImage
from engines.child_process import ChildProcess, can_filter, receive
from engines.image_decoder import CANNOT_DECODE
from worker.prepare import decoder_child
from worker.prepare.decoder_child import ANSWER, REQUEST

MAX_IMAGES = 1000  #: of one child's life: what leaks, leaks no further
TOO_LONG = "The image takes too long to decode: send a smaller or simpler one."
_BASE_BYTES = 512 * 1024 * 1024  #: address space of an idle child, and room for its libraries
_BYTES_PER_PIXEL = 32  #: a decoded image, its copies with transparency composited, and the answer
_WAITING_RATIO = 3.0  #: whole time of an image over its CPU time, on a busy machine
_SOCKET_BYTES = 1024 * 1024

logger = logging.getLogger(__name__)


class Child(ChildProcess):
    def __init__(self, max_pixels: int, max_cpu_s: float) -> None:
        self.num_images = 0
        self.is_lost = False  #: whether it is of no more use
        self._timeout_s = _WAITING_RATIO * max_cpu_s
        max_bytes = _BASE_BYTES + _BYTES_PER_PIXEL * max_pixels
        super().__init__(
            decoder_child.__name__, max_bytes, math.ceil(max_cpu_s), buffer_bytes=_SOCKET_BYTES
        )

    def decode(self, data: bytes, size: tuple[int, int]) -> Image.Image:
        """An RGB image. Raises: InvalidImage; EOFError, OSError (timeouts too) if the child is of no more use."""
        self.wait_until_ready()
        self.num_images += 1
        until = time.monotonic() + self._timeout_s
        self.socket.settimeout(self._timeout_s)
        self.socket.sendall(REQUEST.pack(len(data), *size))
        self.socket.sendall(data)
        is_image, num_bytes, width, height = ANSWER.unpack(receive(self.socket, ANSWER.size, until))
        if num_bytes > 3 * max(size) ** 2 + 4096 or (is_image and num_bytes != 3 * width * height):
            raise EOFError  # no answer of ours
        body = receive(self.socket, num_bytes, until)
        if not is_image:
            raise InvalidImage(body.decode(errors="replace"))
        return Image.frombuffer("RGB", (width, height), body, "raw", "RGB", 0, 1)


class DecoderPool:
    """As many children as images are decoded at a time; they are started when first needed."""

    def __init__(self, num_processes: int, max_pixels: int, max_cpu_s: float) -> None:
        self._max_pixels = max_pixels
        self._max_cpu_s = max_cpu_s
        self._idle: SimpleQueue[Child | None] = SimpleQueue()  # None: one may be started
        self._children: set[Child] = set()
        self._is_closed = False
        for _ in range(num_processes):
            self._idle.put(None)

    def start(self) -> None:
        """Start all children now, so that the first image need not wait for one."""
        if not can_filter():
            logger.warning(
                "this kernel filters no system calls: decoders may open files and sockets"
            )
        for _ in range(self._idle.qsize()):
            self._idle.put(self._idle.get() or self._start_child())

    def decode(self, data: bytes, size: tuple[int, int] | None) -> Image.Image:
        """Decode in the next child that is free. Raises: InvalidImage; OSError if none can be started."""
        assert size is not None
        child = self._idle.get()
        try:
            child = child or self._start_child()
            return self._decode_in(child, data, size)
        finally:
            if child is not None and (child.is_lost or child.num_images >= MAX_IMAGES):
                child = self._replace(child)
            self._idle.put(child)

    def _decode_in(self, child: Child, data: bytes, size: tuple[int, int]) -> Image.Image:
        try:
            return child.decode(data, size)
        except (EOFError, OSError) as error:
            child.is_lost = True
            logger.warning("a decoder was lost over an image: %s", type(error).__name__)
            is_late = isinstance(error, TimeoutError)
            raise InvalidImage(TOO_LONG if is_late else CANNOT_DECODE) from None

    def _start_child(self) -> Child:
        child = Child(self._max_pixels, self._max_cpu_s)
        self._children.add(child)
        return child

    def _replace(self, child: Child) -> Child | None:
        """End a child and start another, which is ready by the time it is needed."""
        self._children.discard(child)
        child.close()
        try:
            return None if self._is_closed else self._start_child()
        except OSError as error:
            logger.error("cannot start a decoder: %s", type(error).__name__)
            return None

    def close(self) -> None:
        """End all children; images in their hands are lost."""
        self._is_closed = True
        for child in list(self._children):
            child.close()
