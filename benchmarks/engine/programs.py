"""Decode steps of a text model by the native, lowered and generic programs and by transformers, on one thread.

Times are CPU times, which depend little on the load of the machine.
"""

import engines.torch_backend  # noqa: F401  isort: skip - before torchvision

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.make_checkpoint import make_checkpoint
from benchmarks.tables import new_table, show
from engines.base import EngineStartError
from engines.core.sequence import Batch, ScheduledSequence
from engines.core.sequence import Sequence as Tokens
from engines.torch_backend.layers.linear import METHODS
from engines.torch_backend.loading.weights import load_model
from engines.torch_backend.models.generic.family import GenericFamily
from engines.torch_backend.models.hf_config import read_fields
from engines.torch_backend.models.registry import find_family
from engines.torch_backend.ops.registry import cpu_ops
from engines.torch_backend.runner import TorchRunner
from engines.torch_backend.settings import TorchSettings
from shared.protocol import SamplingParams

NUM_STEPS = 12
_BLOCK_SIZE = 16
_DEFAULT = Path(".cache/programs/llama-125m")
_CPU = torch.device("cpu")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

#: batch size to milliseconds of CPU time per step
Measure = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class ProgramOptions:
    """The options of the command."""

    model: Path | None = None
    precisions: tuple[str, ...] = ("float32", "bfloat16", "int8", "int4")
    batch_sizes: tuple[int, ...] = (1, 8)
    num_context: int = 256
    rounds: int = 5


@dataclass(frozen=True, slots=True)
class StepTime:
    """Median CPU time of one program at one batch size. Units: milliseconds per step."""

    precision: str
    batch_size: int
    program: str
    step_ms: float
    speed: float  #: relative to the first program of this precision


class Program:
    """A program of the torch engine, with a context of random keys and values."""

    def __init__(
        self, model_dir: Path, options: ProgramOptions, precision: str, program: str
    ) -> None:
        """Raises: what loading raises."""
        family, config = find_family(model_dir)
        if program != "native":
            family = GenericFamily(lowers=program == "lowered")
            config = family.check(read_fields(model_dir))
        dtype = _DTYPES.get(precision, torch.float32)
        ops = cpu_ops("fast")
        model = load_model(model_dir, family, config, _CPU, dtype, METHODS.get(precision), ops=ops)
        num_tokens = options.num_context + 2 * NUM_STEPS
        num_blocks = -(-num_tokens // _BLOCK_SIZE) * max(options.batch_sizes)
        settings = TorchSettings(
            num_kv_blocks=num_blocks,
            block_size=_BLOCK_SIZE,
            max_model_len=num_tokens,
            num_threads=1,
        )
        self.runner = TorchRunner(model, settings, _CPU, dtype, ops=ops)
        self._num_context = options.num_context
        self._blocks = -(-num_tokens // _BLOCK_SIZE)
        for pool in self.runner.kv_pools:
            pool.data.normal_()

    def __call__(self, batch_size: int) -> float:
        sequences = []
        for number in range(batch_size):
            ids = [5 + number] * (self._num_context + 1)
            sequence = Tokens(str(number), ids, len(ids), SamplingParams(temperature=0))
            sequence.num_computed_tokens = self._num_context
            sequence.block_ids = list(range(number * self._blocks, (number + 1) * self._blocks))
            sequences.append(sequence)
        self._step(sequences)
        began_s = time.process_time()
        for _ in range(NUM_STEPS):
            self._step(sequences)
        return (time.process_time() - began_s) / NUM_STEPS * 1e3

    def _step(self, sequences: list[Tokens]) -> None:
        result = self.runner.run(Batch([ScheduledSequence(each, 1) for each in sequences]))
        for sequence, choice in zip(sequences, result.choices, strict=True):
            assert choice is not None
            sequence.num_computed_tokens += 1
            sequence.token_ids.append(choice.token_id)


class Generate:
    """Transformers' `generate`: the time of several steps less that of one."""

    def __init__(self, model_dir: Path, num_context: int, dtype: torch.dtype) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()
        self._num_context = num_context

    @torch.inference_mode()
    def __call__(self, batch_size: int) -> float:
        ids = torch.randint(5, 300, (batch_size, self._num_context))
        return (self._run(ids, NUM_STEPS + 1) - self._run(ids, 1)) / NUM_STEPS * 1e3

    def _run(self, ids: torch.Tensor, num_tokens: int) -> float:
        began_s = time.process_time()
        self._model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), min_new_tokens=num_tokens, max_new_tokens=num_tokens,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        return time.process_time() - began_s


def measure(options: ProgramOptions, report: Callable[[str], None]) -> list[StepTime]:
    """Interleave the programs of each precision. Raises: what loading raises."""
    torch.set_num_threads(1)
    disable_progress_bar()
    model_dir = options.model or _DEFAULT
    if options.model is None and not _DEFAULT.exists():
        report(f"making {_DEFAULT}")
        make_checkpoint("llama-125m", _DEFAULT)
    results: list[StepTime] = []
    for precision in options.precisions:
        report(f"{precision}: loading")
        programs = _load(model_dir, options, precision)
        times: dict[tuple[int, str], list[float]] = {}
        for number in range(options.rounds):
            report(f"{precision}: round {number + 1} of {options.rounds}")
            for size in options.batch_sizes:
                for name, program in programs.items():
                    times.setdefault((size, name), []).append(program(size))
        for (size, name), each in times.items():
            first = median(times[size, next(iter(programs))])
            results.append(StepTime(precision, size, name, median(each), first / median(each)))
    return results


def _load(model_dir: Path, options: ProgramOptions, precision: str) -> dict[str, Measure]:
    is_native = not isinstance(find_family(model_dir)[0], GenericFamily)
    names = ("native", "lowered", "generic") if is_native else ("lowered", "generic")
    programs: dict[str, Measure] = {
        name: Program(model_dir, options, precision, name) for name in names
    }
    if precision in _DTYPES:
        programs["generate"] = Generate(model_dir, options.num_context, _DTYPES[precision])
    return programs


def run(options: ProgramOptions, as_json: bool) -> None:
    """Measure and print. Raises: SystemExit with the reason."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        try:
            results = measure(options, lambda text: bar.update(task, description=text))
        except (EngineStartError, ValueError, OSError) as error:
            raise SystemExit(f"bench programs: {error}") from None
    if as_json:
        return print(json.dumps([asdict(result) for result in results], indent=2))
    table = new_table("", "precision", "batch", "program", "ms a step", "speed")
    for r in results:
        table.add_row(
            r.precision, str(r.batch_size), r.program, f"{r.step_ms:.1f}", f"{r.speed:.2f}"
        )
    show(table)
