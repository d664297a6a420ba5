"""The benchmark of the engine alone: scenarios, batch sizes, rounds in turn, and the report.

Called by `vlm bench engine`. All cells share one engine and take turns, so that what else the machine does falls on
all of them alike. The model is loaded and warmed up, and each cell run once, before anything is measured.
"""

import json
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.engine.cost import ModelCost
from benchmarks.engine.machine import Machine, measure_machine, peak_bytes
from benchmarks.engine.measure import Run, WorkCounter, run_in_turn, run_requests
from benchmarks.engine.report import Cost, Row, show_report, to_figures, to_json, to_row
from benchmarks.engine.scenario import SCENARIOS, USUAL, RequestMaker, Scenario
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
    cpu_kernels: Literal["fast", "exact"] = "fast"
    scenarios: tuple[str, ...] = USUAL
    batch_sizes: tuple[int, ...] = (1, 4, 16)
    num_tokens: int = 64
    rounds: int = 3
    speculation: tuple[str, ...] = ("off",)


class Bench:
    """An engine under measurement."""

    machine: Machine  #: set by `run_all`
    costs: list[Cost]  #: as well: of speculation, where it was measured with and without

    def __init__(self, options: BenchOptions) -> None:
        """Load the model. Raises: what loading raises; ValueError for an unknown scenario."""
        unknown = set(options.scenarios) - SCENARIOS.keys()
        if unknown or min(options.batch_sizes) < 1:
            raise ValueError(f"scenarios are {', '.join(SCENARIOS)}; batch sizes are at least 1")
        if not {"ngram", "off"}.issuperset(options.speculation):
            raise ValueError("speculation is ngram, off, or both")
        self.options = options
        self.device = choose_device(options.device)
        self.dtype = choose_dtype(options.dtype, self.device)
        num_seqs = max(options.batch_sizes) + 1  # and a late one
        settings = {
            "model": options.model,
            "device": options.device,
            "dtype": options.dtype,
            "quantization": options.quantization,
            "cpu_kernels": options.cpu_kernels,
            "max_num_seqs": num_seqs,
            "speculation": "ngram",
        }
        self._settings = settings
        engine = create_engine(settings).engine
        assert isinstance(engine, BatchingEngine)
        assert isinstance(engine.runner, TorchRunner)
        self.engine = engine
        self._stats = engine.stats()
        self._speculators = {"ngram": engine.scheduler.speculator, "off": None}
        model = engine.runner.model
        assert isinstance(model, Llava)
        self._counter = WorkCounter(engine.runner, ModelCost(model, self.dtype))
        engine.runner = self._counter  # pyright: ignore[reportAttributeAccessIssue]
        self._maker = RequestMaker(model.config, engine.max_model_len, engine.prepare)

    def describe(self) -> dict[str, Any]:
        """What the numbers belong to."""
        stats = self._stats
        return {
            "model": self.options.model,
            "dtype": str(self.dtype).removeprefix("torch."),
            "quantization": self.options.quantization,
            "weight_bytes": stats.memory_bytes["weights"],
            "kv_cache_bytes": stats.memory_bytes["kv_cache"],
            "startup_s": {phase: round(seconds, 3) for phase, seconds in stats.startup_s.items()},
        }

    def run(self, scenario: Scenario, batch_size: int, speculation: str) -> Run:
        """One round of one cell. Raises: RequestError."""
        self.engine.scheduler.speculator = self._speculators[speculation]
        if scenario.is_late:
            return self._run_late(scenario, batch_size)
        requests = self._maker.make(scenario, batch_size, self.options.num_tokens)
        if scenario.is_repeated:
            run_requests(self.engine, self._counter, requests)
            requests = [self._maker.again(request) for request in requests]
        return run_requests(self.engine, self._counter, requests)

    def _run_late(self, scenario: Scenario, num_streams: int) -> Run:
        """Streams of `decode`, long enough for the late one's prompt."""
        length = self.engine.max_model_len
        streams = self._maker.make(SCENARIOS["decode"], num_streams, length)
        [late] = self._maker.make(scenario, 1, length)
        return run_requests(self.engine, self._counter, streams, late)

    def _compare(self, cells: list[tuple[Scenario, int]]) -> list[Cost]:
        """What guessing costs of a processor; the engine is closed then. Raises: RequestError, RuntimeError."""
        if self.device.type != "cpu":
            return []
        self.engine.close()  # two more stand in its place
        costs = []
        with ExitStack() as opened:
            engines = []
            for each in ("ngram", "off"):
                engine = create_engine({**self._settings, "speculation": each}).engine
                assert isinstance(engine, BatchingEngine)
                opened.callback(engine.close)
                engines.append(engine)
            self._maker.prepare = engines[0].prepare
            make, num_tokens = self._maker.make, self.options.num_tokens
            for scenario, size in cells:
                ratios = []
                for _ in range(self.options.rounds + 1):
                    requests = [make(scenario, size, num_tokens) for _ in engines]
                    with_it, without = run_in_turn(engines, requests)
                    ratios.append(with_it / without)
                costs.append(Cost.of(scenario.name, size, ratios[1:]))
        return costs

    def run_all(self) -> list[Row]:
        """All cells: once unmeasured, then in turn. Raises: RequestError."""
        options = self.options
        cells = [
            (SCENARIOS[name], size, speculation)
            for name in options.scenarios
            for size in options.batch_sizes
            for speculation in options.speculation
        ]
        runs: dict[tuple[Scenario, int, str], list[Run]] = {cell: [] for cell in cells}
        peaks: dict[tuple[Scenario, int, str], int] = {}
        for scenario, size, speculation in cells:
            self.run(replace(scenario, num_output_tokens=2), size, speculation)
        turns = [cell for _ in range(options.rounds) for cell in cells]
        for cell in measuring(turns):
            runs[cell].append(self.run(*cell))
            peaks[cell] = peak_bytes(self.device)
        self.machine = measure_machine(self.device, self.dtype)  # its matrices are no cell's memory
        several = len(options.speculation) > 1
        compared = dict.fromkeys(cell[:2] for cell in cells if several and not cell[0].is_late)
        self.costs = self._compare(list(compared)) if compared else []
        return [
            to_row(
                f"{cell[0].name} {cell[2]}" if several else cell[0].name,
                cell[1],
                runs[cell],
                self.machine,
                peaks[cell],
            )
            for cell in cells
        ]


def run(options: BenchOptions, as_json: bool, figures: Path | None = None) -> None:
    """The command. Raises: SystemExit with the reason."""
    try:
        bench = Bench(options)
        rows = bench.run_all()
        if figures is not None:
            write_figures(figures, to_figures(bench.machine, options.model, rows))
    except (EngineStartError, RequestError, ValueError) as error:
        raise SystemExit(f"bench engine: {error}") from None
    if as_json:
        print(json.dumps(to_json(bench.machine, bench.describe(), rows, bench.costs), indent=2))
    else:
        show_report(bench.machine, bench.describe(), rows, bench.costs)
