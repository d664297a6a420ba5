"""Measures one run of a scenario on an engine: arrival times of tokens, and the work of the steps.

TTFT, TPOT, ITL and the rates are those of `docs/performance.md`.
"""

import math
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from benchmarks.engine.cost import ModelCost, Work
from engines.core.engine import BatchingEngine
from engines.core.runner import ModelRunner, StepResult
from engines.core.sequence import Batch, EngineRequest, shorten

#: tokens of each stream before the late request arrives
NUM_ALONE = 8


class WorkCounter:
    """Wraps a runner, and sums the work of its steps."""

    def __init__(self, runner: ModelRunner, cost: ModelCost) -> None:
        self._runner = runner
        self._cost = cost
        self.steps: list[Work] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, batch: Batch) -> Any:
        """Launch a step. `wait` counts its work."""
        before = self._num_encoded()
        step = self._runner.launch(batch)
        num_images = self._num_encoded() - before

        def wait() -> StepResult:
            result = step.wait()
            computed = filter(None, shorten(batch.items, result.num_computed))
            self.steps.append(self._cost.step(Batch(list(computed)), num_images))
            return result

        return SimpleNamespace(can_be_followed=step.can_be_followed, wait=wait)

    def _num_encoded(self) -> int:
        num_queries, num_hits, _ = self._runner.encoder_cache_counts()
        return num_queries - num_hits


@dataclass(slots=True)
class Run:
    """The result of a run. Times are seconds since its start; lengths are tokens.

    `late_at`: when the late request was added. Its first token ends the run.
    """

    elapsed_s: float
    token_times: dict[str, list[float]]
    num_prompt_tokens: int
    num_images: int
    steps: list[Work] = field(default_factory=list)
    late_at: float | None = None

    @property
    def num_output_tokens(self) -> int:
        return sum(len(times) for times in self.token_times.values())

    @property
    def ttfts(self) -> list[float]:
        """Time to first token of each request, or only of the late request."""
        if self.late_at is not None:
            return [self.elapsed_s - self.late_at]
        return [times[0] for times in self.token_times.values()]

    @property
    def tpots(self) -> list[float]:
        """Time per output token after the first, of each request with several tokens."""
        several = (times for times in self.token_times.values() if len(times) > 1)
        return [(times[-1] - times[0]) / (len(times) - 1) for times in several]

    @property
    def _gaps(self) -> list[tuple[float, float]]:
        """Begin and end of each gap between two outputs of a request. An output may have several tokens."""
        lists = self.token_times.values()
        return [(a, b) for times in lists for a, b in pairwise(times) if b > a]

    @property
    def itls(self) -> list[float]:
        """Gaps between neighbouring outputs, of all requests together."""
        return [b - a for a, b in self._gaps]

    @property
    def slowdown(self) -> float | None:
        """The 99th percentile of the streams' gaps while the late prompt is computed, divided by the earlier median."""
        if self.late_at is None:
            return None
        alone = [b - a for a, b in self._gaps if b <= self.late_at]
        beside = sorted(b - a for a, b in self._gaps if b > self.late_at)
        beside = beside or [self.elapsed_s - self.late_at]  # no stream has had an output since
        return beside[math.ceil(0.99 * len(beside)) - 1] / statistics.median(alone)

    def rates(self) -> dict[str, float]:
        """Output tokens, all tokens, images, bytes and operations per second."""
        amounts = {
            "output_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "images": self.num_images,
            "bytes": sum(work.num_bytes for work in self.steps),
            "flops": sum(work.num_flops for work in self.steps),
        }
        return {f"{name}_per_s": amount / self.elapsed_s for name, amount in amounts.items()}

    def roofline_ratio(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The minimum time of these steps on this machine, divided by the measured time."""
        least_s = sum(work.least_s(bytes_per_s, flops_per_s) for work in self.steps)
        return least_s / self.elapsed_s


def run_requests(
    engine: BatchingEngine,
    counter: WorkCounter,
    requests: list[EngineRequest],
    late: EngineRequest | None = None,
) -> Run:
    """Add all requests and step until the last token; with a late request, until the first token of that request.

    Raises: RequestError, RuntimeError for a failed request.
    """
    counter.steps = []
    every = [*requests, *([late] if late else [])]
    times: dict[str, list[float]] = {request.request_id: [] for request in every}
    started = time.perf_counter()
    for request in requests:
        engine.add(request)
    added_s = now = 0.0
    while not times[late.request_id] if late else engine.has_work():
        if late and not added_s and min(len(times[r.request_id]) for r in requests) > NUM_ALONE:
            engine.add(late)
            added_s = time.perf_counter() - started
        outputs = engine.step()
        now = time.perf_counter() - started
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            times[output.request_id] += [now] * len(output.token_ids)
    if late:
        for name in times:
            engine.abort(name)
        del times[late.request_id]
    return Run(
        elapsed_s=now,
        token_times=times,
        num_prompt_tokens=sum(len(request.prompt_token_ids) for request in every),
        num_images=sum(len(request.images) for request in every),
        steps=counter.steps,
        late_at=added_s if late else None,
    )
