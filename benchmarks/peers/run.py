"""The comparison: systems take turns at each workload, round by round.

Called by `vlm bench peers`. What else the machine does falls so on all of them alike.
"""

import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.engine.machine import measure_machine
from benchmarks.make_checkpoint import LLAVA_SHAPES, SHAPES, make_checkpoint
from benchmarks.peers.fleet import Fleet, PeerFailure
from benchmarks.peers.install import LLAMA_CPP_VERSION, is_installed
from benchmarks.peers.peer import DECODERS, SYSTEMS, TEXT_WORKLOADS, WORKLOADS, Workload
from benchmarks.peers.prompts import IMAGE_SIZE, ExamplePrompts
from benchmarks.peers.results import Result, Results
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.llava import VLMConfig
from engines.torch_backend.models.registry import find_family

#: Of `--quick`: layers of a random model, and seconds after which no measurement starts.
_QUICK_LAYERS, _QUICK_S = 6, 270


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """What to compare. Fields mean what the command's options say."""

    model: Path | str  #: a directory, or a shape of random weights
    systems: tuple[str, ...]
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    rounds: int = 3
    num_threads: int = 2
    device: str = "cpu"
    folder: Path = Path(".cache/peers")
    one_by_one: bool = False
    max_layers: int | None = None
    limit_s: float | None = None

    @property
    def quick(self) -> "PeerOptions":
        """Five minutes: fewer layers, two workloads, two rounds; llama.cpp only if it is installed already."""
        has_llama_cpp = is_installed(self.folder)
        systems = [x for x in self.systems if has_llama_cpp or not x.startswith("llama.cpp")]
        return replace(
            self, systems=tuple(systems), workloads=("decode-1", "prefill"), rounds=2, max_layers=_QUICK_LAYERS,
            limit_s=_QUICK_S,
        )  # fmt: skip


class Comparison:
    """Systems and workloads of one run."""

    def __init__(self, options: PeerOptions) -> None:
        """Raises: ValueError for an unknown system or workload; UnsupportedCheckpoint."""
        unknown = set(options.workloads) - WORKLOADS.keys()
        if unknown:
            raise ValueError(f"workloads are {', '.join(WORKLOADS)}")
        self.options = options
        self._began_s = time.monotonic()
        strange = [name for name in options.systems if name not in SYSTEMS]
        if strange:
            raise ValueError(f"no system is called {strange[0]!r}; there are {', '.join(SYSTEMS)}")
        self.systems = list(options.systems)
        self.workloads = [WORKLOADS[name] for name in options.workloads]
        self.checkpoint = _find_checkpoint(options)
        if any(system.startswith("llama.cpp:") for system in self.systems):
            self._check_llama_cpp()
        self.num_context = ExamplePrompts(self.checkpoint).num_tokens

    def _check_llama_cpp(self) -> None:
        reason = None
        if self.options.device != "cpu":
            reason = "llama.cpp computes on the CPU here"
        elif isinstance(config := find_family(self.checkpoint)[1], VLMConfig):
            return
        elif getattr(config.full.get_text_config(decoder=True), "model_type", "") not in DECODERS:
            reason = f"llama.cpp's decoders are written of {', '.join(DECODERS)} alone here"
        elif not {*self.options.workloads} <= {*TEXT_WORKLOADS}:
            texts = ",".join(TEXT_WORKLOADS)
            raise ValueError(
                "llama.cpp's towers are written of LLaVA's checkpoints alone here; ask for "
                f"--workloads {texts}, or leave it out of --systems"
            )
        if reason:
            raise ValueError(f"{reason}; leave it out of --systems")

    def about(self) -> dict[str, str | int]:
        """Model, software, and the rates that limit decoding and prefill, measured before the systems start."""
        torch.set_num_threads(self.options.num_threads)
        machine = measure_machine(torch.device(self.options.device), torch.bfloat16)
        return {
            "model": self.checkpoint.name,
            "context": self.num_context,
            "image": "x".join(map(str, IMAGE_SIZE)),
            "device": machine.device,
            "memory": f"{machine.bytes_per_s / 1e9:.1f} GB/s",
            "bfloat16 product": f"{machine.flops_per_s / 1e9:,.0f} GFLOP/s",
            "threads": self.options.num_threads,
            "torch": version("torch"),
            "transformers": version("transformers"),
            "llama-cpp-python": LLAMA_CPP_VERSION,
        }

    def measure(self) -> Iterator[Result]:
        """All systems at one workload after another; a system's result again whenever more of it is known.

        Raises: PeerFailure, and what installing raises.
        """
        options = {
            "checkpoint": str(self.checkpoint),
            "num_threads": self.options.num_threads,
            "device": self.options.device,
            "max_batch_size": max(workload.batch_size for workload in self.workloads),
            "num_context": self.num_context,
            "files": str(self.options.folder / "gguf" / self.checkpoint.name),
        }
        self._print(
            f"{self.checkpoint.name}: {len(self.systems)} systems at {len(self.workloads)} workloads "
            f"({', '.join(workload.name for workload in self.workloads)}), {self.options.rounds} rounds"
        )
        groups = [[x] for x in self.systems] if self.options.one_by_one else [self.systems]
        for systems in groups:
            with Fleet(systems, self.options.folder, options, self._print) as fleet:
                for number, workload in enumerate(self.workloads):
                    self._print(f"{workload.name}, {number + 1} of {len(self.workloads)} workloads")
                    yield from self._take_turns(fleet, systems, workload)

    def _take_turns(self, fleet: Fleet, systems: list[str], workload: Workload) -> Iterator[Result]:
        """What is known of a system after each of its turns."""
        if workload.task == "decode":  # the first touches weights and chooses caches
            for system in systems:
                fleet.ask(system, workload)
        seconds: dict[str, list[float]] = {system: [] for system in systems}
        for number in range(self.options.rounds):
            for system in systems:
                if self._is_over():
                    return
                seconds[system].append(fleet.ask(system, workload))
                result = self._result(system, workload, seconds[system])
                value = f"{result.values[-1]:,.1f} {result.unit}"
                self._print(f"  round {number + 1} of {self.options.rounds}: {system} {value}")
                yield result

    def _is_over(self) -> bool:
        limit_s = self.options.limit_s
        return limit_s is not None and time.monotonic() - self._began_s > limit_s

    def _print(self, text: str) -> None:
        elapsed_s = int(time.monotonic() - self._began_s)
        print(f"[{elapsed_s // 60}:{elapsed_s % 60:02}] {text}", file=sys.stderr, flush=True)

    def _result(self, system: str, workload: Workload, seconds: list[float]) -> Result:
        return Result(
            system=system,
            workload=workload.name,
            unit=workload.unit,
            values=[workload.value(each, self.num_context) for each in seconds],
            load_average=os.getloadavg()[0],
        )


def run(options: PeerOptions, as_json: bool) -> None:
    """The command. Raises: SystemExit with the reason."""
    try:
        comparison = Comparison(options)
        results = Results(comparison.about())
        try:
            for result in comparison.measure():
                results.add([result])
        except KeyboardInterrupt:
            if not results.by_cell:
                raise SystemExit(130) from None
            print("cut: what is known by now", file=sys.stderr)
    except (PeerFailure, UnsupportedCheckpoint, ValueError, OSError) as error:
        raise SystemExit(f"bench peers: {error}") from None
    if as_json:
        print(results.to_json(), end="")
    else:
        results.show()


def _find_checkpoint(options: PeerOptions) -> Path:
    """A directory, or random weights of a shape, or of its first layers."""
    shape, num_layers = str(options.model), options.max_layers
    if shape not in (*LLAVA_SHAPES, *SHAPES):
        return Path(shape)
    directory = options.folder / (shape if num_layers is None else f"{shape}-{num_layers}-layers")
    if not directory.exists():
        print(f"making {directory}", file=sys.stderr, flush=True)
        part = directory.with_name(f"{directory.name}.part")
        shutil.rmtree(part, ignore_errors=True)  # of a run that was cut
        make_checkpoint(shape, part, num_layers=num_layers)
        part.rename(directory)
    return directory
