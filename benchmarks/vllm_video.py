"""Run by a Python with vLLM: prints the CPU seconds of its video loaders for a file. Arguments: file, frames."""

import sys
import time
from pathlib import Path

import vllm  # pyright: ignore[reportMissingImports]
from vllm.multimodal.video import VideoBackend  # pyright: ignore[reportMissingImports]

video, num_frames = sys.argv[1:]
data = Path(video).read_bytes()
for loader in ("opencv", "pyav"):
    began_s = time.process_time()
    try:
        frames, _ = VideoBackend.load_bytes(data, num_frames=int(num_frames), backend=loader)
    except ValueError:
        continue  # versions from 0.29 have no PyAV loader
    assert len(frames) == int(num_frames)
    print(f"vLLM {vllm.__version__} {loader} {time.process_time() - began_s}")
