"""Our complete engine as a peer, from `add` to the token's text, without HTTP and queue.

Runs in a separate process. Each sequence of a batch decodes after a context of random keys and values, because
computing sixteen real prompts would take minutes. Random values are read as fast as real ones.
"""

import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.prompts import ExamplePrompts
from engines.core.engine import BatchingEngine
from engines.core.runner import ComputedStep, ModelRunner, StepResult, TokenChoice
from engines.core.sequence import Batch, EngineRequest, Prompt
from engines.registry import create_engine
from engines.torch_backend.runner import TorchRunner

_BLOCK_SIZE = 16
_MAX_STEPS = 128


class Ours:
    def __init__(
        self, checkpoint: Path, precision: str, num_threads: int, max_batch_size: int
    ) -> None:
        """Load and warm up. Raises: the errors of loading."""
        is_dtype = precision in ("float32", "bfloat16")
        self._prompts = ExamplePrompts(checkpoint)
        self._num_context = self._prompts.num_tokens
        num_blocks = -(-(self._num_context + _MAX_STEPS) // _BLOCK_SIZE)
        settings = {
            "model": str(checkpoint),
            "device": "cpu",
            "dtype": precision if is_dtype else "auto",
            "quantization": "none" if is_dtype else precision,
            "num_threads": num_threads,
            "max_num_seqs": max_batch_size,
            "max_num_batched_tokens": max_batch_size * num_blocks * _BLOCK_SIZE,
            "num_kv_blocks": max_batch_size * num_blocks,
            "block_size": _BLOCK_SIZE,
            "speculation": "off",
        }
        engine = create_engine(settings).engine
        assert isinstance(engine, BatchingEngine)
        assert isinstance(engine.runner, TorchRunner)
        self.engine, self.runner = engine, engine.runner
        self._skipping = _SkippingRunner(engine.runner)
        for pool in engine.runner.kv_pools:
            pool.data.normal_()  # else all memory pages are one page of zeros, which is read from the CPU cache

    def decode(self, batch_size: int, num_steps: int) -> float:
        """Time of whole engine steps."""
        for _ in range(batch_size):
            self.engine.add(self._request(self._num_context - 1, num_steps + 2))
        self.engine.runner = self._skipping  # pyright: ignore[reportAttributeAccessIssue]
        self.engine.step()
        self.engine.runner = self.runner
        self.engine.step()
        started = time.perf_counter()
        for _ in range(num_steps):
            self.engine.step()
        elapsed = time.perf_counter() - started
        assert not self.engine.has_work()
        return elapsed

    def prefill(self) -> float:
        """Time of a text request with one output token."""
        return self._run(self._request(self._num_context, 1))

    def image(self) -> float:
        """Encode an image as the runner does, without its cache."""
        images = self._prompts.make().images
        started = time.perf_counter()
        with torch.inference_mode():
            self.runner.model.encode(images, torch.device("cpu"), self.runner._dtype)
        return time.perf_counter() - started

    def first_token(self) -> float:
        """Time of an image request with one output token."""
        return self._run(self._prompts.request(self._prompts.make(), 1))

    def _run(self, request: EngineRequest) -> float:
        started = time.perf_counter()
        self.engine.add(request)
        while self.engine.has_work():
            for output in self.engine.step():
                assert output.error is None, output.error
        return time.perf_counter() - started

    def _request(self, num_text: int, max_tokens: int) -> EngineRequest:
        return self._prompts.request(Prompt(self._prompts.text(num_text)), max_tokens)


class _SkippingRunner:
    """Replaces a runner: samples token 5 without computing anything."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def launch(self, batch: Batch) -> ComputedStep:
        choices = [TokenChoice(5) if item.samples else None for item in batch.items]
        return ComputedStep(StepResult(choices))
