"""The benchmark of the engine: scenarios, batch sizes, interleaved rounds, and the report.

Called by `vlm bench engine`. All cells (pairs of a scenario and a batch size) share one engine and are interleaved, so
that other load on the machine affects them equally. The model is warmed up, and each cell runs once, before the first
measurement. Every request is new, so that caches have no effect.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.engine.cost import ModelCost
from benchmarks.engine.machine import Machine, measure_machine, peak_bytes
from benchmarks.engine.measure import Run, WorkCounter, run_requests
from benchmarks.engine.report import Row, show_report, to_figures
from benchmarks.peers.peer import NUM_TEXT_TOKENS
from benchmarks.peers.prompts import ExamplePrompts
from benchmarks.tables import measuring
from deploy.capacity import write_figures
from engines.core.engine import BatchingEngine
from engines.core.sequence import EngineRequest, Prompt
from engines.packages.resolve import resolve_model
from engines.registry import create_engine
from engines.torch_backend.loading.load import choose_device, choose_dtype
from engines.torch_backend.models.llava import Llava
from engines.torch_backend.runner import TorchRunner


@dataclass(frozen=True, slots=True)
class Scenario:
    """Numbers of text tokens in the prompt and of output tokens; None: the command's option."""

    name: str
    num_text_tokens: int
    num_output_tokens: int | None = None
    has_image: bool = False
    is_late: bool = False  #: one late request arrives while `batch_size` requests stream


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("decode", 16),
        Scenario("prefill", 512, num_output_tokens=1),
        Scenario("image", 32, has_image=True),
        Scenario("mixed", 32, num_output_tokens=1, has_image=True, is_late=True),
    )
}


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options of the command."""

    model: str = "shapes"
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "none"
    scenarios: tuple[str, ...] = tuple(SCENARIOS)
    batch_sizes: tuple[int, ...] = (1, 4, 16)
    num_tokens: int = 64
    rounds: int = 3


class Bench:
    machine: Machine  #: set by `run_all`

    def __init__(self, options: BenchOptions) -> None:
        """Load the model. Raises: the errors of loading; ValueError for an unknown scenario."""
        if set(options.scenarios) - SCENARIOS.keys():
            raise ValueError(f"unknown scenario: choose from {', '.join(SCENARIOS)}")
        self.options = options
        self.device = choose_device(options.device)
        self.dtype = choose_dtype(options.dtype, self.device)
        settings = {
            "model": options.model,
            "device": options.device,
            "dtype": options.dtype,
            "quantization": options.quantization,
            "max_num_seqs": max(options.batch_sizes) + 1,  # plus a late request
        }
        engine = create_engine(settings).engine
        assert isinstance(engine, BatchingEngine)
        assert isinstance(engine.runner, TorchRunner)
        self.engine = engine
        self._stats = engine.stats()
        model = engine.runner.model
        assert isinstance(model, Llava)
        self._counter = WorkCounter(engine.runner, ModelCost(model, self.dtype))
        engine.runner = self._counter  # pyright: ignore[reportAttributeAccessIssue]
        self._prompts = ExamplePrompts(resolve_model(options.model))

    def describe(self) -> dict[str, Any]:
        stats = self._stats
        return {
            "model": self.options.model,
            "dtype": str(self.dtype).removeprefix("torch."),
            "quantization": self.options.quantization,
            "weight_bytes": stats.memory_bytes["weights"],
            "kv_cache_bytes": stats.memory_bytes["kv_cache"],
            "startup_s": {phase: round(seconds, 3) for phase, seconds in stats.startup_s.items()},
        }

    def run(self, scenario: Scenario, batch_size: int) -> Run:
        """Run a scenario once. A late request joins streams that outlast its prompt. Raises: RequestError."""
        num_tokens = self.engine.max_model_len if scenario.is_late else self.options.num_tokens
        streaming = SCENARIOS["decode"] if scenario.is_late else scenario
        requests = [self._request(streaming, num_tokens) for _ in range(batch_size)]
        late = self._request(scenario, num_tokens) if scenario.is_late else None
        return run_requests(self.engine, self._counter, requests, late)

    def _request(self, scenario: Scenario, num_tokens: int) -> EngineRequest:
        """A request with `num_tokens` output tokens, unless the scenario sets them; limited to the model's context."""
        length, num_slots = self.engine.max_model_len, 0
        if scenario.has_image:
            num_slots = self._prompts.num_tokens - NUM_TEXT_TOKENS
        num_tokens = min(scenario.num_output_tokens or num_tokens, max(2, length // 2))
        num_text = max(1, min(scenario.num_text_tokens, length - num_tokens - num_slots))
        if scenario.has_image:
            return self._prompts.request(self._prompts.make(num_text), num_tokens)
        return self._prompts.request(Prompt(self._prompts.text(num_text)), num_tokens)

    def run_all(self) -> list[Row]:
        """Run all cells: once without measuring, then interleaved. Raises: RequestError."""
        options = self.options
        cells = [
            (SCENARIOS[name], size) for name in options.scenarios for size in options.batch_sizes
        ]
        runs: dict[tuple[Scenario, int], list[Run]] = {cell: [] for cell in cells}
        peaks: dict[tuple[Scenario, int], int] = {}
        for scenario, size in cells:
            self.run(replace(scenario, num_output_tokens=2), size)
        for cell in measuring(options.rounds * cells):
            runs[cell].append(self.run(*cell))
            peaks[cell] = peak_bytes(self.device)
        self.machine = measure_machine(self.device, self.dtype)  # last: it would raise `peak_bytes`
        return [Row(cell[0].name, cell[1], runs[cell], peaks[cell]) for cell in cells]


def run(options: BenchOptions, figures: Path | None = None) -> None:
    """The command. Raises: EngineStartError, RequestError, ValueError."""
    bench = Bench(options)
    rows = bench.run_all()
    if figures is not None:
        write_figures(figures, to_figures(bench.machine, options.model, rows))
    show_report(bench.machine, bench.describe(), rows)
