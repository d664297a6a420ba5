"""`vlm bench media`: CPU time of decoding frames of a long video in the worker's child, and in vLLM's loaders."""

import io
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import av  # pyright: ignore[reportMissingImports]
import numpy as np
import psutil
from PIL import Image

from benchmarks.tables import new_table, show
from engines.base import sample_evenly
from shared.protocol import ImageRef, VideoOptions
from shared.settings.limits import LimitSettings
from worker.prepare.video_pool import VideoPool

FPS = 30
SIZE = (1920, 1080)
_NUM_PICTURES = 90  #: different pictures of the video, which then repeat


def make_video(seconds: int) -> Path:
    """A cached H.264 file that shows a moving box. x264 chooses the key frames, at most 250 frames apart."""
    path = Path(f".cache/media/{seconds}s.mp4")
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    pictures = list(_pictures())
    with av.open(str(unfinished), "w", format="mp4") as container:
        options = {"preset": "veryfast", "crf": "30"}
        stream: Any = container.add_stream("libx264", rate=FPS, options=options)
        stream.width, stream.height = SIZE
        stream.pix_fmt = "yuv420p"
        for number in range(seconds * FPS):
            picture = pictures[number % len(pictures)]
            picture.pts = number
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
    unfinished.rename(path)
    return path


def _pictures() -> Iterator[Any]:
    rows, columns = np.mgrid[0 : SIZE[1], 0 : SIZE[0]]
    shades = ((rows + columns) // 12).astype(np.uint8)
    back = Image.fromarray(np.stack([shades, shades // 2, 255 - shades], axis=2))
    for number in range(_NUM_PICTURES):
        image = back.copy()
        place = number * (SIZE[0] - 200) // _NUM_PICTURES
        image.paste((250, 200, 0), (place, 400, place + 200, 600))
        yield av.VideoFrame.from_image(image).reformat(format="yuv420p")


def run(seconds: int, num_frames: int, rounds: int, vllm: Path | None) -> None:
    path = make_video(seconds)
    data = path.read_bytes()
    ours: list[float] = []
    theirs: dict[str, list[float]] = {}
    pool = VideoPool(1, LimitSettings())
    try:
        _measure_ours(pool, data, 1)  # it starts the child
        for _ in range(rounds):
            ours.append(_measure_ours(pool, data, num_frames))
            for name, cpu_s in _measure_vllm(vllm, path, num_frames) if vllm else ():
                theirs.setdefault(name, []).append(cpu_s)
    finally:
        pool.close()
    title = f"{num_frames} frames of {seconds} s at {SIZE[0]}x{SIZE[1]}, {len(data) / 1e6:.1f} MB"
    table = new_table(title, "", "CPU s (median)", "ours / theirs")
    table.add_row("our child and its caller", f"{median(ours):.2f}", "")
    for name, times in theirs.items():
        table.add_row(name, f"{median(times):.2f}", f"{median(ours) / median(times):.2f}")
    show(table)


def _measure_vllm(python: Path, video: Path, num_frames: int) -> list[tuple[str, float]]:
    """CPU seconds of vLLM's loaders, by name."""
    script = Path(__file__).with_name("vllm_video.py")
    answer = subprocess.run(
        [python, script, video, str(num_frames)], check=True, capture_output=True, text=True
    )
    rows = [line.rsplit(" ", 1) for line in answer.stdout.splitlines() if line.startswith("vLLM")]
    return [(name, float(cpu_s)) for name, cpu_s in rows]


def _measure_ours(pool: VideoPool, data: bytes, num_frames: int) -> float:
    """CPU seconds of the child and of this process."""
    ref = ImageRef("", len(data), "video/mp4", 0, 0, video=VideoOptions(num_frames=num_frames))

    def spent_s() -> float:
        used = [child.cpu_times() for child in psutil.Process().children()]
        return sum(each.user + each.system for each in used) + time.process_time()

    started = spent_s()
    with pool.open(io.BytesIO(data), ref) as video:
        assert len(video.frames(sample_evenly(video))) == num_frames
        return spent_s() - started
