"""The comparison: the systems are measured alternately, round by round, for each workload.

Other load on the machine therefore affects all systems equally. Called by `vlm bench peers`.
"""

import shutil
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.engine.machine import measure_machine
from benchmarks.make_checkpoint import LLAVA_SHAPES, make_checkpoint
from benchmarks.peers.fleet import Peer, run_peers
from benchmarks.peers.install import LLAMA_CPP_VERSION, is_installed
from benchmarks.peers.peer import SYSTEMS, WORKLOADS
from benchmarks.peers.prompts import IMAGE_SIZE, ExamplePrompts
from benchmarks.tables import Spread, in_turn, new_table, show
from engines.torch_backend.models.llava import VLMConfig
from engines.torch_backend.models.registry import find_family

FOLDER = Path(".cache/peers")
_report = partial(print, file=sys.stderr, flush=True)
QUICK_WORKLOADS = ("decode-1", "prefill")
#: With `--quick`: layers of a random model, rounds, and seconds after which no measurement starts.
_QUICK_LAYERS, _QUICK_ROUNDS, _QUICK_S = 6, 2, 270


def run(
    model: str, systems: Sequence[str], workloads: Sequence[str], rounds: int, num_threads: int,
    is_quick: bool,
) -> None:  # fmt: skip
    """The command. `model`: a directory or a random shape. Raises: UnsupportedCheckpoint, ValueError, OSError."""
    ends_at = time.monotonic() + (_QUICK_S if is_quick else float("inf"))
    if is_quick:  # llama.cpp only if it is installed already
        workloads, rounds = QUICK_WORKLOADS, _QUICK_ROUNDS
        systems = [each for each in systems if is_installed(FOLDER, each.partition(":")[0])]
    for names, known in ((systems, SYSTEMS), (workloads, WORKLOADS)):
        if strange := [name for name in names if name not in known]:
            raise ValueError(f"{strange[0]!r} is unknown: choose from {', '.join(known)}")
    checkpoint = _find_checkpoint(model, _QUICK_LAYERS if is_quick else None)
    is_llava = isinstance(find_family(checkpoint)[1], VLMConfig)
    if not is_llava and any(system.startswith("llama.cpp:") for system in systems):
        raise ValueError("llama.cpp is measured with LLaVA only: omit it in --systems")
    num_context = ExamplePrompts(checkpoint).num_tokens
    title = _describe(checkpoint, num_context, num_threads)
    options = {
        "checkpoint": str(checkpoint),
        "num_threads": num_threads,
        "max_batch_size": max(WORKLOADS[name].batch_size for name in workloads),
        "num_context": num_context,
        "folder": str(FOLDER),
    }
    columns = [f"{name}\n{WORKLOADS[name].unit}" for name in workloads]
    table = new_table("median and minimum-maximum", "system", *columns)
    with run_peers(systems, FOLDER, options) as peers:
        found = [_measure(name, peers, rounds, num_context, ends_at) for name in workloads]
    for system in systems:
        values = (of[system] for of in found)
        table.add_row(system, *(Spread.of(each).text() if each else "" for each in values))
    show(title, table)


def _describe(checkpoint: Path, num_context: int, num_threads: int) -> str:
    """Model, software, and the rates that limit decoding and prefill, measured before the systems start."""
    torch.set_num_threads(num_threads)
    machine = measure_machine(torch.device("cpu"), torch.bfloat16)
    versions = (f"{name} {version(name)}" for name in ("torch", "transformers"))
    return (
        f"{checkpoint.name}, context of {num_context} tokens, images of {IMAGE_SIZE}; {machine.device}, "
        f"{num_threads} threads, {machine.bytes_per_s / 1e9:.1f} GB/s, {machine.flops_per_s / 1e9:,.0f} GFLOP/s in "
        f"bfloat16; {', '.join(versions)}, llama-cpp-python {LLAMA_CPP_VERSION}"
    )


def _measure(
    name: str, peers: dict[str, Peer], rounds: int, num_context: int, ends_at: float
) -> dict[str, list[float]]:
    """Values of each system in the unit of the workload. Raises: OSError."""
    workload = WORKLOADS[name]
    if workload.task == "decode":  # the first run reads the weights and chooses caches
        for peer in peers.values():
            peer.ask(workload.task, **workload.arguments)
    found: dict[str, list[float]] = {system: [] for system in peers}
    for number, system in in_turn(rounds, list(peers)):
        if time.monotonic() > ends_at:
            break
        seconds = peers[system].ask(workload.task, **workload.arguments)
        value = workload.value(seconds, num_context)
        found[system].append(value)
        _report(f"{name}, round {number + 1} of {rounds}: {system} {value:,.1f} {workload.unit}")
    return found


def _find_checkpoint(model: str, num_layers: int | None) -> Path:
    if model not in LLAVA_SHAPES:
        return Path(model)
    directory = FOLDER / (model if num_layers is None else f"{model}-{num_layers}-layers")
    if not directory.exists():
        _report(f"making {directory}")
        part = directory.with_name(f"{directory.name}.part")
        shutil.rmtree(part, ignore_errors=True)  # left by an interrupted run
        make_checkpoint(model, part, num_layers=num_layers)
        part.rename(directory)
    return directory
