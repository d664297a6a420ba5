"""The comparison: systems take turns at each workload, round by round.

Called by `vlm bench peers`. What else the machine does falls so on all of them alike.
"""

import shutil
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.engine.machine import measure_machine
from benchmarks.make_checkpoint import LLAVA_SHAPES, make_checkpoint
from benchmarks.peers.fleet import Peer, PeerFailure, run_peers
from benchmarks.peers.install import LLAMA_CPP_VERSION, is_installed
from benchmarks.peers.peer import SYSTEMS, WORKLOADS, Workload
from benchmarks.peers.prompts import IMAGE_SIZE, ExamplePrompts
from benchmarks.peers.results import Results, show_results
from benchmarks.tables import in_turn
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.llava import VLMConfig
from engines.torch_backend.models.registry import find_family

FOLDER = Path(".cache/peers")
QUICK_WORKLOADS = ("decode-1", "prefill")
#: Of `--quick`: layers of a random model, rounds, and seconds after which no measurement starts.
_QUICK_LAYERS, _QUICK_ROUNDS, _QUICK_S = 6, 2, 270


class Comparison:
    """Systems and workloads of one run; `results` are those that are known so far."""

    def __init__(
        self,
        model: str,
        systems: Sequence[str],
        workloads: Sequence[str],
        *,
        rounds: int = 3,
        num_threads: int = 2,
        is_quick: bool = False,
        folder: Path = FOLDER,
    ) -> None:
        """`model`: a directory, or a shape of random weights. Raises: ValueError, UnsupportedCheckpoint."""
        self._began_s = time.monotonic()
        self._limit_s = _QUICK_S if is_quick else float("inf")
        if is_quick:  # llama.cpp only if it is installed already
            workloads, rounds = QUICK_WORKLOADS, _QUICK_ROUNDS
            systems = [each for each in systems if is_installed(folder, each.partition(":")[0])]
        for names, known in ((systems, SYSTEMS), (workloads, WORKLOADS)):
            if strange := [name for name in names if name not in known]:
                raise ValueError(f"{strange[0]!r} is unknown; there are {', '.join(known)}")
        self._systems, self._workloads = systems, [WORKLOADS[name] for name in workloads]
        self._rounds, self._num_threads, self._folder = rounds, num_threads, folder
        self._checkpoint = _find_checkpoint(model, folder, _QUICK_LAYERS if is_quick else None)
        is_llava = isinstance(find_family(self._checkpoint)[1], VLMConfig)
        if not is_llava and any(system.startswith("llama.cpp:") for system in systems):
            raise ValueError("llama.cpp reads only LLaVA here; leave it out of --systems")
        self._num_context = ExamplePrompts(self._checkpoint).num_tokens
        self.results: Results = {}

    def about(self) -> dict[str, str | int]:
        """Model, software, and the rates that limit decoding and prefill, measured before the systems start."""
        torch.set_num_threads(self._num_threads)
        machine = measure_machine(torch.device("cpu"), torch.bfloat16)
        return {
            "model": self._checkpoint.name,
            "context": self._num_context,
            "image": "x".join(map(str, IMAGE_SIZE)),
            "device": machine.device,
            "memory": f"{machine.bytes_per_s / 1e9:.1f} GB/s",
            "bfloat16 product": f"{machine.flops_per_s / 1e9:,.0f} GFLOP/s",
            "threads": self._num_threads,
            "torch": version("torch"),
            "transformers": version("transformers"),
            "llama-cpp-python": LLAMA_CPP_VERSION,
        }

    def measure(self) -> None:
        """All systems at one workload after another. Raises: PeerFailure, and what installing raises."""
        options = {
            "checkpoint": str(self._checkpoint),
            "num_threads": self._num_threads,
            "max_batch_size": max(workload.batch_size for workload in self._workloads),
            "num_context": self._num_context,
            "folder": str(self._folder),
        }
        with run_peers(self._systems, self._folder, options, self._print) as peers:
            for workload in self._workloads:
                self._measure(workload, peers)

    def _measure(self, workload: Workload, peers: dict[str, Peer]) -> None:
        if workload.task == "decode":  # the first touches weights and chooses caches
            for peer in peers.values():
                peer.ask(workload.task, **workload.arguments)
        for number, system in in_turn(self._rounds, self._systems):
            if time.monotonic() - self._began_s > self._limit_s:
                return
            seconds = peers[system].ask(workload.task, **workload.arguments)
            value = workload.value(seconds, self._num_context)
            self.results.setdefault((system, workload.name), []).append(value)
            done = f"{workload.name}, round {number + 1} of {self._rounds}"
            self._print(f"{done}: {system} {value:,.1f} {workload.unit}")

    def _print(self, text: str) -> None:
        elapsed_s = int(time.monotonic() - self._began_s)
        print(f"[{elapsed_s // 60}:{elapsed_s % 60:02}] {text}", file=sys.stderr, flush=True)


def run(
    model: str, systems: Sequence[str], workloads: Sequence[str], rounds: int, num_threads: int,
    is_quick: bool,
) -> None:  # fmt: skip
    """The command. Raises: SystemExit with the reason."""
    try:
        comparison = Comparison(
            model, systems, workloads, rounds=rounds, num_threads=num_threads, is_quick=is_quick
        )
        about = comparison.about()
        try:
            comparison.measure()
        except KeyboardInterrupt:
            print("cut: what is known by now", file=sys.stderr)
    except (PeerFailure, UnsupportedCheckpoint, ValueError, OSError) as error:
        raise SystemExit(f"bench peers: {error}") from None
    show_results(about, comparison.results)


def _find_checkpoint(model: str, folder: Path, num_layers: int | None) -> Path:
    if model not in LLAVA_SHAPES:
        return Path(model)
    directory = folder / (model if num_layers is None else f"{model}-{num_layers}-layers")
    if not directory.exists():
        print(f"making {directory}", file=sys.stderr, flush=True)
        part = directory.with_name(f"{directory.name}.part")
        shutil.rmtree(part, ignore_errors=True)  # of a run that was cut
        make_checkpoint(model, part, num_layers=num_layers)
        part.rename(directory)
    return directory
