"""The benchmark of the engine alone: scenarios, batch sizes, rounds in turn, and the report.

Called by `vlm bench engine`. All cells share one engine and take turns, so that what else the machine does falls on
all of them alike. The model is loaded and warmed up, and each cell run once, before anything is measured.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.engine.cost import ModelCost
from benchmarks.engine.machine import Machine, measure_machine, peak_bytes
from benchmarks.engine.measure import Run, WorkCounter, run_requests
from benchmarks.engine.report import Row, show_report, to_figures, to_row
from benchmarks.engine.scenario import SCENARIOS, RequestMaker, Scenario
from benchmarks.tables import measuring
from deploy.capacity import write_figures
from engines.base import EngineStartError, RequestError
from engines.core.engine import BatchingEngine
from engines.registry import create_engine
from engines.torch_backend.loading.load import choose_device, choose_dtype
from engines.torch_backend.models.llava import Llava
from engines.torch_backend.runner import TorchRunner


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure. Fields mean what the command's options say."""

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
        """Load the model. Raises: what loading raises; ValueError for an unknown scenario."""
        if set(options.scenarios) - SCENARIOS.keys():
            raise ValueError(f"scenarios are {', '.join(SCENARIOS)}")
        self.options = options
        self.device = choose_device(options.device)
        self.dtype = choose_dtype(options.dtype, self.device)
        settings = {
            "model": options.model,
            "device": options.device,
            "dtype": options.dtype,
            "quantization": options.quantization,
            "max_num_seqs": max(options.batch_sizes) + 1,  # and a late one
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
        self._maker = RequestMaker(model.config, engine.max_model_len)

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
        """One round of one cell; a late request comes to streams that are long enough for it. Raises: RequestError."""
        if not scenario.is_late:
            requests = self._maker.make(scenario, batch_size, self.options.num_tokens)
            return run_requests(self.engine, self._counter, requests)
        length = self.engine.max_model_len
        streams = self._maker.make(SCENARIOS["decode"], batch_size, length)
        [late] = self._maker.make(scenario, 1, length)
        return run_requests(self.engine, self._counter, streams, late)

    def run_all(self) -> list[Row]:
        """All cells: once unmeasured, then in turn. Raises: RequestError."""
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
        self.machine = measure_machine(self.device, self.dtype)  # its matrices are no cell's memory
        return [
            to_row(cell[0].name, cell[1], runs[cell], self.machine, peaks[cell]) for cell in cells
        ]


def run(options: BenchOptions, figures: Path | None = None) -> None:
    """The command. Raises: SystemExit with the reason."""
    try:
        bench = Bench(options)
        rows = bench.run_all()
        if figures is not None:
            write_figures(figures, to_figures(bench.machine, options.model, rows))
    except (EngineStartError, RequestError, ValueError) as error:
        raise SystemExit(f"bench engine: {error}") from None
    show_report(bench.machine, bench.describe(), rows)
