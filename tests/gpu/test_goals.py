"""The table of speeds on one large GPU, LLaVA-1.5-7B's shape with random weights: prints it, and holds it to its goals.

On demand, for it writes a checkpoint of 14 GB and takes minutes:

    GPU_GOALS=1 pytest tests/gpu/test_goals.py -s

Limits are those of an H200 (4.3 TB/s, 790 TFLOP/s in bfloat16) for what a step must read and multiply.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from benchmarks.engine.cost import ModelCost
from benchmarks.engine.measure import Run, WorkCounter, run_requests
from benchmarks.engine.scenario import RequestMaker, Scenario
from benchmarks.make_checkpoint import make_checkpoint
from engines.core.engine import BatchingEngine
from engines.registry import create_engine
from engines.torch_backend.runner import TorchRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif("GPU_GOALS" not in os.environ, reason="GPU_GOALS=1 takes minutes"),
]

ROUNDS = 3
SHORT = Scenario("decode", 16)
CONTEXT_512 = Scenario("decode, context 512", 448)
IMAGE = Scenario("image", 64, has_image=True)


class Engine:
    """An engine of the 7B shape, and what measures it."""

    def __init__(self, model: Path, *, quantization: str = "none", **config: Any) -> None:
        limits = {
            "max_num_seqs": 64,
            "max_num_batched_tokens": 8192,
            "max_model_len": 2048,
            "max_images_per_step": 64,
            "enable_prefix_cache": False,
            "encoder_cache_bytes": 0,
        }
        settings = {
            "model": str(model),
            "device": "cuda",
            "dtype": "bfloat16",
            "quantization": quantization,
        }
        loaded = create_engine({**settings, **limits, **config}).engine
        assert isinstance(loaded, BatchingEngine)
        assert isinstance(loaded.runner, TorchRunner)
        self.engine = loaded
        self.runner = loaded.runner
        self._counter = WorkCounter(loaded.runner, ModelCost(self.runner.model, torch.bfloat16))
        self._maker = RequestMaker(self.runner.model.config, loaded.max_model_len)

    def run(self, scenario: Scenario, count: int, num_tokens: int = 128) -> list[Run]:
        """Once unmeasured, then `ROUNDS` times."""
        runs = [
            run_requests(self.engine, self._counter, self._maker.make(scenario, count, num_tokens))
            for _ in range(ROUNDS + 1)
        ]
        return runs[1:]

    def decode_rate(self, scenario: Scenario, count: int) -> float:
        """Output tokens a second of all sequences together, while all of them decode."""
        tpots = [median(run.tpots) for run in self.run(scenario, count)]
        return count / median(tpots)

    def image_rate(self, count: int = 64) -> float:
        """Images a second through tower and projector."""
        size = self.runner.model.config.vision.image_size
        pixels = torch.randn(count, 3, size, size, device="cuda", dtype=torch.bfloat16)
        times = []
        with torch.inference_mode():
            for _ in range(ROUNDS + 1):
                torch.cuda.synchronize()
                started = time.perf_counter()
                self.runner.model.encode_images(pixels)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - started)
        return count / median(times[1:])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("goals") / "llava-1.5-7b"
    make_checkpoint("llava-1.5-7b", directory, seed=0)
    yield directory
    for file in directory.iterdir():
        file.unlink()


def report(what: str, value: float, goal: float, limit: float, unit: str) -> str | None:
    """Print a row of the table. Returns: what is wrong with it."""
    print(f"| {what} | {value:,.1f} {unit} | {goal:,} | {limit:,} | {value / limit:.0%} |")
    is_met = value <= goal if unit == "ms" else value >= goal
    return None if is_met else f"{what}: {value:.1f} {unit}, goal {goal}"


@pytest.mark.parametrize(
    ("quantization", "goal", "limit"), [("none", 255, 325), ("int8", 420, 638), ("int4", 600, 1161)]
)
def test_one_stream(model: Path, quantization: str, goal: int, limit: int) -> None:
    engine = Engine(model, quantization=quantization)
    rate = engine.decode_rate(SHORT, 1)
    engine.engine.close()
    assert not report(f"decode, batch 1, {quantization}", rate, goal, limit, "tok/s")


def test_64_streams(model: Path) -> None:
    engine = Engine(model)
    rate = engine.decode_rate(CONTEXT_512, 64)
    engine.engine.close()
    assert not report(f"batch 64, {CONTEXT_512.name}", rate, 6300, 9054, "tok/s")


def test_images(model: Path) -> None:
    engine = Engine(model)
    first = 1000 * median(run.ttfts[0] for run in engine.run(IMAGE, 1, num_tokens=2))
    encoded = engine.image_rate()
    served = median(64 / run.elapsed_s for run in engine.run(IMAGE, 64))
    engine.engine.close()
    complaints = [
        report("first token, image and 64 tokens", first, 18, 11.1, "ms"),
        report("encoding", encoded, 1000, 2025, "images/s"),
        report("64 requests, image and 64 tokens to 128", served, 26, 35, "requests/s"),
    ]
    assert not list(filter(None, complaints))
