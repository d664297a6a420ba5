"""Large media on a CPU beside a stream: the stream continues, and the watchdog does not end the worker."""

import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from PIL import Image

import engines.torch_backend  # noqa: F401 - before transformers
from engines.base import PreparedImage
from engines.registry import create_engine
from tests.engines.torch_backend.models.family_table import qwen, write_checkpoint
from tests.engines.upstream.asking import Clip, make_call
from tests.factories_images import png_url
from tests.integration.fleet_process import start_fleet
from tests.long import IS_LONG, long

SCALE, NUM_LAYERS, WATCHDOG_S = (2, 6, 10) if IS_LONG else (1, 1, 3)
#: The long form has the widths of Qwen2.5-VL's tower, which has 32 layers.
WIDTHS = {
    "hidden_size": 640 * SCALE, "intermediate_size": 1710 * SCALE, "num_heads": 8 * SCALE, "out_hidden_size": 64,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
    "fullatt_block_indexes": [0],
}  # fmt: skip
LONGEST_GAP_S = 5.0


def write_model(directory: Path, num_layers: int = NUM_LAYERS) -> None:
    tower = {**WIDTHS, "depth": num_layers}
    family = qwen("Qwen2.5-VL", "Qwen2_5_VL", tower, max_position_embeddings=8192)
    create: Any = family.create_processor

    def create_processor() -> Any:
        processor = create()
        processor.image_processor.size = {"shortest_edge": 3136, "longest_edge": 12_845_056}
        return processor

    run = "<|vision_start|><|video_pad|><|vision_end|>"
    family = replace(family, create_processor=create_processor, video_placeholder=run)
    write_checkpoint(family, directory)


@pytest.mark.timeout(400)  # 130 s on a busy machine
def test_a_stream_continues_beside_a_photo_and_the_worker_lives(tmp_path: Path) -> None:
    write_model(tmp_path / "photos")
    told_at: list[float] = []
    begun, is_answered = threading.Event(), threading.Event()

    def read(client: OpenAI) -> None:
        while not is_answered.is_set():
            stream = client.chat.completions.create(
                model="photos", messages=[{"role": "user", "content": "hello"}], stream=True,
                max_tokens=6000, temperature=1, extra_body={"ignore_eos": True},
            )  # fmt: skip
            for _ in stream:
                told_at.append(time.monotonic())
                begun.set()
                if is_answered.is_set():
                    break

    with (
        start_fleet(
            tmp_path / "serve", "--model", str(tmp_path / "photos"), engine="torch",
            VLM_ENGINE__DTYPE="float32", VLM_WORKER__WATCHDOG_S=str(WATCHDOG_S), VLM_ENGINE__NUM_THREADS="2",
        ) as served,
        OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):  # fmt: skip
        worker = client.models.retrieve("photos")
        assert worker.limits["scaled_image_pixels"] == 1024 * 1024  # type: ignore[attr-defined]
        reader = threading.Thread(target=read, args=[client])
        reader.start()
        assert begun.wait(60)
        asked_at = time.monotonic()
        photo = Image.effect_noise((2048, 1536), 64).convert("RGB")
        content: Any = [
            {"type": "image_url", "image_url": {"url": png_url(photo)}},
            {"type": "text", "text": "What is it?"},
        ]
        try:
            answer = client.chat.completions.create(
                model="photos", messages=[{"role": "user", "content": content}], max_tokens=3,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
        finally:
            is_answered.set()
            answered_at = time.monotonic()
            reader.join(60)
        details: Any = answer.usage and answer.usage.prompt_tokens_details
        assert 1200 < details.image_tokens <= worker.limits["max_image_tokens"]  # type: ignore[attr-defined]
        assert client.models.retrieve("photos").created == worker.created
    beside = [at for at in told_at if asked_at <= at <= answered_at]
    gaps = [later - before for before, later in pairwise(beside)]
    assert len(gaps) > 20
    assert max(gaps) < LONGEST_GAP_S


@long("families")
def test_a_stream_waits_at_most_250_ms_beside_a_video_of_64_frames(tmp_path: Path) -> None:
    """Measured in CPU time of the engine's thread, which other processes do not affect."""
    write_model(tmp_path, num_layers=1)
    values = {"kind": "torch", "device": "cpu", "dtype": "float32", "model": str(tmp_path)}
    engine: Any = create_engine(values).engine
    video = PreparedImage("video", engine.prepare_video(Clip(336, 64, 64, 2.0)))
    engine.add(engine.prepare(make_call("stream", max_tokens=4000, ignore_eos=True), []))
    engine.step()
    engine.add(engine.prepare(make_call("video", num_images=1, max_tokens=1), [video]))
    names, told_at = set[str](), [time.thread_time()]
    while "video" not in names:
        names = {output.request_id for output in engine.step() if output.token_ids}
        told_at += [time.thread_time()] * ("stream" in names)
    gaps = sorted(later - before for before, later in pairwise(told_at))
    assert len(gaps) > 50
    assert gaps[int(0.99 * len(gaps))] <= 0.25
