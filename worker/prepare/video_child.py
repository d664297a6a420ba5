"""A child process of the worker that decodes videos of strangers, confined as `decoder_child` is.

On a socket, for each video: a head (the arguments of `open_video` without its first) and the file; the answer is
`VideoInfo`. Then times, as JSON; the answer is a message of pixels for each. An answer is a status (`VALUE`, `REFUSAL`)
and a message; a refusal ends the video.
"""

import io
import socket
from contextlib import suppress

import av.logging
import msgspec
from PIL import Image

from engines.base import FrameLimits, InvalidImage
from engines.child_process import (
    READY,
    receive_message,
    send_message,
)
from engines.video_decoder import CODECS, FrameFile, VideoFile, open_video
from shared.protocol import FRAMES_TYPE
from worker.prepare.decoder_child import allow_cpu, run
from worker.prepare.video_pool import REFUSAL, SIZE, VALUE, Head, Refusal


def serve(sock: socket.socket, max_cpu_s: int) -> None:
    """Decode until the worker hangs up. Raises: EOFError, OSError."""
    sock.sendall(READY)
    while True:
        head = msgspec.json.decode(receive_message(sock), type=Head)
        data = bytes(receive_message(sock))
        allow_cpu(max_cpu_s)
        try:
            try:
                _serve_one(sock, open_video(data, *msgspec.structs.astuple(head)))
            except MemoryError:
                raise InvalidImage("The video takes too much memory to decode.") from None
        except InvalidImage as error:
            _send(sock, REFUSAL, msgspec.json.encode(Refusal(str(error), error.param)))


def _serve_one(sock: socket.socket, video: VideoFile | FrameFile) -> None:
    _send(sock, VALUE, msgspec.json.encode(video.info))
    times = msgspec.json.decode(receive_message(sock), type=list[float])
    for image in video.frames(times):
        _send(sock, VALUE, SIZE.pack(*image.size) + image.tobytes())


def _send(sock: socket.socket, status: bytes, message: bytes) -> None:
    sock.sendall(status)
    send_message(sock, message)


def load_decoders() -> None:
    """Decode a clip that is made here, so that PyAV and Pillow load what they load when first needed."""
    av.logging.set_level(None)
    for name in CODECS:
        av.Codec(name, "r")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for shade in (0, 90, 180):
            frame = av.VideoFrame.from_image(Image.new("RGB", (64, 64), (shade,) * 3))
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    limits = FrameLimits(64 * 64, 2 * 64 * 64)
    list(VideoFile(file.getvalue(), "video/mp4", limits, 60.0).frames([0.0, 0.2]))
    with suppress(InvalidImage):
        VideoFile(b"\x1aE\xdf\xa3", "video/webm", limits, 60.0)
    jpeg = io.BytesIO()
    Image.new("RGB", (8, 8)).save(jpeg, "JPEG")
    frames = msgspec.msgpack.encode([jpeg.getvalue()])
    list(open_video(frames, FRAMES_TYPE, limits, 1.0, 0.0, 0.0, 1.0).frames([0.0]))


if __name__ == "__main__":
    run(load_decoders, serve)
