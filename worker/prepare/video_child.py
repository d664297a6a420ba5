"""A child process of the worker that decodes untrusted videos and audio, sandboxed like `decoder_child`.

For each file, the worker sends a head (`Head` or `AudioHead`) and the file's descriptor; the child answers with
`VideoInfo` or `AudioInfo`. For a video, the worker then sends times as JSON, and the child answers with the size of
each frame, whose pixels follow. For audio, the worker sends a rate, and the child answers with messages of samples,
the last one empty. An answer is a status (`VALUE` or `REFUSAL`) and a message; after a refusal, the next file follows.
"""

import io
import os
import socket
from contextlib import suppress
from typing import Any

import av.logging
import msgspec
from PIL import Image

from engines.audio_decoder import CODECS as AUDIO_CODECS
from engines.audio_decoder import AudioFile
from engines.base import FrameLimits, InvalidImage
from engines.child_process import READY, receive_message, send_message
from engines.video_decoder import CODECS, FrameFile, VideoFile, open_video
from shared.protocol import FRAMES_TYPE
from worker.prepare.decoder_child import allow_cpu, run
from worker.prepare.video_pool import PIECE_BYTES, REFUSAL, SIZE, VALUE, AudioHead, Head, Refusal


def serve(sock: socket.socket, max_cpu_s: int) -> None:
    """Decode until the worker disconnects. Raises: EOFError, OSError."""
    sock.sendall(READY)
    while True:
        head = msgspec.json.decode(receive_message(sock), type=Head | AudioHead)
        _, numbers, _, _ = socket.recv_fds(sock, 1, 1)
        if not numbers:
            raise EOFError
        allow_cpu(max_cpu_s)
        with os.fdopen(numbers[0], "rb") as file:
            try:
                try:
                    if isinstance(head, AudioHead):
                        _serve_audio(sock, AudioFile(file, *msgspec.structs.astuple(head)))
                    else:
                        _serve_video(sock, open_video(file, *msgspec.structs.astuple(head)))
                except MemoryError:
                    raise InvalidImage("The file takes too much memory to decode.") from None
            except InvalidImage as error:
                _send(sock, REFUSAL, msgspec.json.encode(Refusal(str(error), error.param)))


def _serve_video(sock: socket.socket, video: VideoFile | FrameFile) -> None:
    _send(sock, VALUE, msgspec.json.encode(video.info))
    times = msgspec.json.decode(receive_message(sock), type=list[float])
    for image in video.frames(times):
        _send(sock, VALUE, SIZE.pack(*image.size))
        send_message(sock, image.tobytes())


def _serve_audio(sock: socket.socket, audio: AudioFile) -> None:
    _send(sock, VALUE, msgspec.json.encode(audio.info))
    rate = msgspec.json.decode(receive_message(sock), type=int)
    piece = bytearray()
    for samples in audio.samples(rate) if rate else ():
        piece += samples
        if len(piece) >= PIECE_BYTES:
            _send(sock, VALUE, bytes(piece))
            piece = bytearray()
    for rest in (bytes(piece), b"") if piece else (b"",):
        _send(sock, VALUE, rest)


def _send(sock: socket.socket, status: bytes, message: bytes) -> None:
    sock.sendall(status)
    send_message(sock, message)


def load_decoders() -> None:
    """Decode a generated clip, so that PyAV and Pillow load all modules before the process is confined."""
    av.logging.set_level(None)
    for name in (*CODECS, *AUDIO_CODECS):
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
    list(VideoFile(file, "video/mp4", limits, 60.0).frames([0.0, 0.2]))
    with suppress(InvalidImage):
        VideoFile(io.BytesIO(b"\x1aE\xdf\xa3"), "video/webm", limits, 60.0)
    _load_audio()
    jpeg = io.BytesIO()
    Image.new("RGB", (8, 8)).save(jpeg, "JPEG")
    frames = io.BytesIO(msgspec.msgpack.encode([jpeg.getvalue()]))
    list(open_video(frames, FRAMES_TYPE, limits, 1.0, 0.0, 0.0, 1.0).frames([0.0]))


def _load_audio() -> None:
    for form, media_type in (("wav", "audio/wav"), ("mp4", "audio/mp4")):
        file = io.BytesIO()
        with av.open(file, "w", format=form) as container:
            stream: Any = container.add_stream("pcm_s16le" if form == "wav" else "aac", rate=8000)
            frame = av.AudioFrame("s16" if form == "wav" else "fltp", "mono", 1024)
            frame.rate = 8000
            for plane in frame.planes:
                plane.update(bytes(plane.buffer_size))
            container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        list(AudioFile(file, media_type, 60.0, 2).samples(16_000))


if __name__ == "__main__":
    run(load_decoders, serve)
