"""A child process of the worker that decodes untrusted images, one after another.

The child has neither API keys nor the address of Redis, and its memory and CPU time are limited. Where the kernel
supports it, the child cannot open files or sockets. An image that crashes the child fails alone.
The worker writes a file to shared memory, and the child overwrites it with RGB pixels or an error message. A request on
the socket is the file's size and the expected width and height; an answer is width, height and length of the error.
"""

import io
import mmap
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from PIL import Image, MpoImagePlugin, TiffImagePlugin  # noqa: F401 - Pillow loads them when first needed

from engines.base import InvalidImage
from engines.child_process import READY, confine, receive, restrict
from engines.image_decoder import FORMATS, decode_image

REQUEST = struct.Struct(">QII")  #: bytes of the file, width, height
ANSWER = struct.Struct(">III")  #: width, height, bytes of an error message or 0


def allow_cpu(max_cpu_s: int) -> None:
    """Limit the CPU time from now on; the kernel kills the process beyond it."""
    used_s = time.process_time()
    with suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used_s) + 1 + max_cpu_s, hard))


def serve(sock: socket.socket, max_cpu_s: int, memory_fd: int) -> None:
    """Decode until the worker disconnects. Raises: EOFError, OSError."""
    memory = mmap.mmap(memory_fd, 0)
    sock.sendall(READY)
    while True:
        num_bytes, width, height = REQUEST.unpack(receive(sock, REQUEST.size))
        data = memory[:num_bytes]
        allow_cpu(max_cpu_s)
        try:
            image = decode_image(data, (width, height))
            body, answer = image.tobytes(), (*image.size, 0)
        except InvalidImage as error:
            body = str(error).encode()
            answer = width, height, len(body)
        memory[: len(body)] = body
        sock.sendall(ANSWER.pack(*answer))


def load_decoders() -> None:
    """Make Pillow load all modules before the process is confined."""
    Image.init()
    exif = Image.Exif()
    exif[0x0112] = 3
    for form in FORMATS:
        file = io.BytesIO()
        options = {} if form == "GIF" else {"exif": exif}
        Image.new("RGBA" if form == "PNG" else "RGB", (8, 8)).save(file, form, **options)
        decode_image(file.getvalue(), (8, 8))


def run(load: Callable[[], None], serve: Callable[..., None]) -> None:
    """Load, enter the sandbox, and serve.

    Command line: file descriptor of the socket, limits of memory in bytes and of CPU time in s, other file descriptors.
    """
    number, max_bytes, max_cpu_s, *fds = map(int, sys.argv[1:])
    load()
    restrict(max_bytes)
    confine()
    with socket.socket(fileno=number) as sock, suppress(EOFError, OSError):
        serve(sock, max_cpu_s, *fds)


if __name__ == "__main__":
    run(load_decoders, serve)
