"""A child process of the worker that decodes untrusted images, one after another.

It has no keys and no address of Redis, its memory and CPU time are limited, and where the kernel supports it, it
cannot open files or sockets. It may crash on an image.
A request on the socket is size and admitted width and height, then the file; an answer is a status, width and height,
then RGB pixels or an error message.
"""

import io
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
ANSWER = struct.Struct(">?QII")  #: whether it is pixels, bytes that follow, width, height


def allow_cpu(max_cpu_s: int) -> None:
    """Limit the CPU time from now on; the kernel kills the process beyond it."""
    used_s = time.process_time()
    with suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used_s) + 1 + max_cpu_s, hard))


def answer(data: bytes, size: tuple[int, int]) -> tuple[bytes, bytes]:
    """Head and body of the answer to an image."""
    try:
        image = decode_image(data, size)
    except InvalidImage as error:
        text = str(error).encode()
        return ANSWER.pack(False, len(text), 0, 0), text
    pixels = image.tobytes()
    return ANSWER.pack(True, len(pixels), image.width, image.height), pixels


def serve(sock: socket.socket, max_cpu_s: int) -> None:
    """Decode until the worker disconnects. Raises: EOFError, OSError."""
    sock.sendall(READY)
    while True:
        num_bytes, width, height = REQUEST.unpack(receive(sock, REQUEST.size))
        data = bytes(receive(sock, num_bytes))
        allow_cpu(max_cpu_s)
        for part in answer(data, (width, height)):
            sock.sendall(part)


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


def run(load: Callable[[], None], serve: Callable[[socket.socket, int], None]) -> None:
    """Load, enter the sandbox, and serve. Arguments: number of the socket, limits of memory in bytes and CPU in s."""
    number, max_bytes, max_cpu_s = (int(argument) for argument in sys.argv[1:4])
    load()
    restrict(max_bytes)
    confine()
    with socket.socket(fileno=number) as sock, suppress(EOFError, OSError):
        serve(sock, max_cpu_s)


if __name__ == "__main__":
    run(load_decoders, serve)
