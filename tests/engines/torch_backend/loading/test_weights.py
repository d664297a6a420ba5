"""Weights are loaded unchanged and in little memory; a checkpoint that does not match its config is refused by name."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlavaForConditionalGeneration

from benchmarks.make_checkpoint import make_checkpoint
from engines.torch_backend.layers.linear import METHODS
from engines.torch_backend.loading import weights as module
from engines.torch_backend.loading.weights import ModelTooLarge, load_model
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.llava import Llava
from engines.torch_backend.models.registry import find_family
from engines.torch_backend.ops.registry import cpu_ops
from tests.engines.torch_backend.models.family_table import text, write_checkpoint
from tests.long import few

CPU = torch.device("cpu")
TIED = {"text_config": {"tie_word_embeddings": True}}


def load(directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Llava:
    return load_model(directory, *find_family(directory), CPU, dtype, **options)


def check_same_weights(a: Llava, b: Llava) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def edit(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replaces weights of a single-file checkpoint; None removes one. `__` in a name stands for a dot."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, value in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if value is not None:
            tensors[name.replace("__", ".")] = value
    save_file(tensors, file)


def test_one_file_and_many_shards_give_the_same_model(tiny: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    make_checkpoint("tiny", sharded, max_shard_bytes=60_000)
    check_same_weights(load(tiny), load(sharded))

    shard = sorted(sharded.glob("model-*.safetensors"))[-1]
    shard.unlink()
    with pytest.raises(UnsupportedCheckpoint, match=f"names {shard.name}"):
        load(sharded)


@pytest.mark.parametrize("changes", [{}, TIED])
def test_a_checkpoint_saved_by_transformers_is_the_same_model(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """transformers 5 saves under other names than those of published files."""
    make_checkpoint("tiny", tmp_path / "tiny", changes=changes)
    theirs = LlavaForConditionalGeneration.from_pretrained(tmp_path / "tiny", dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "again")

    check_same_weights(load(tmp_path / "tiny"), load(tmp_path / "again"))


def test_a_head_that_differs_from_the_embeddings_is_not_tied_to_them(tmp_path: Path) -> None:
    write_checkpoint(text("Llama", "Llama", tie_word_embeddings=True), tmp_path)
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    for head in (table, table + 1):
        edit(tmp_path, lm_head__weight=head.clone())
        theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
        ours = load(tmp_path).language_model
        found = (ours.model.embed_tokens if ours.lm_head is None else ours.lm_head).weight
        assert torch.equal(found, theirs.lm_head.weight)
        assert torch.equal(found, head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_have_the_requested_dtype_and_are_mapped_if_stored_in_it(
    tiny: Path, dtype: torch.dtype
) -> None:
    model = load(tiny, dtype)

    assert {value.dtype for value in model.state_dict().values()} == {dtype}
    assert not any(value.is_meta for value in [*model.parameters(), *model.buffers()])
    assert not any(value.requires_grad for value in model.parameters())
    assert not model.training
    ranges = mapped_ranges(tiny / "model.safetensors")
    assert bool(ranges) == (dtype is torch.bfloat16)
    if ranges:
        weights = model.language_model.state_dict().values()
        assert all(any(value.data_ptr() in part for part in ranges) for value in weights)
    # Replacing the file by another one, as `save_file` and downloads do, changes nothing.
    before = model.language_model.model.embed_tokens.weight.clone()
    edit(tiny, language_model__model__embed_tokens__weight=torch.zeros(4, 4))
    assert torch.equal(model.language_model.model.embed_tokens.weight, before)


def test_kernels_read_the_mapped_matrices_of_the_decoder(tiny: Path) -> None:
    """Converted to float32 like other weights, they would double the memory and give the same results."""
    ops = cpu_ops("fast")
    if not ops.is_native:
        pytest.skip("no C++ compiler")

    model = load(tiny, torch.float32, ops=ops)

    ranges = mapped_ranges(tiny / "model.safetensors")
    weights = model.language_model.state_dict()
    matrices = [value for value in weights.values() if value.dim() == 2]
    assert matrices
    assert all(value.dtype is torch.bfloat16 for value in matrices)
    assert all(any(value.data_ptr() in part for part in ranges) for value in matrices)
    others = [value for value in model.state_dict().values() if value.dim() != 2]
    assert {value.dtype for value in others} == {torch.float32}


def mapped_ranges(file: Path) -> list[range]:
    """Returns the address ranges of this process at which a file is mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    parts = [line.split(maxsplit=5) for line in lines if line.endswith(str(file))]
    return [range(*(int(end, 16) for end in part[0].split("-"))) for part in parts]


INDEX = json.dumps({"weight_map": {"a": "../secret.safetensors"}})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 100), r"model\.safetensors is damaged"),
        (lambda d: (d / "model.safetensors.index.json").write_text(INDEX), "outside the checkpoint"),
        (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "unpickling can run any code"),
        (lambda d: (d / "model.safetensors").unlink(), r"no model\.safetensors"),
        (lambda d: edit(d, language_model__model__norm__weight=torch.zeros(3)), r"norm\.weight is \(3,\).* \(64,\)"),
    ],
)  # fmt: skip
def test_files_without_readable_weights_are_refused(
    change: Callable[[Path], None], reason: str, tiny: Path
) -> None:
    change(tiny)
    with pytest.raises(UnsupportedCheckpoint, match=reason):
        load(tiny)


@pytest.mark.parametrize("scheme", [None, *METHODS])
def test_the_checked_memory_is_that_of_the_weights(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, scheme: str | None
) -> None:
    chosen = METHODS[scheme] if scheme else None
    taken = sum(value.nbytes for value in load(tiny, scheme=chosen).state_dict().values())

    monkeypatch.setattr(module, "free_bytes", lambda device: taken)
    load(tiny, scheme=chosen)
    monkeypatch.setattr(module, "free_bytes", lambda device: taken - 1)
    monkeypatch.setattr(module.StoredTensor, "map", lambda _: pytest.fail("weights were read"))
    words = f"in float32{f' and {scheme}' if scheme else ''}, but cpu has"
    with pytest.raises(ModelTooLarge, match=rf"0\.0 GiB {words} 0\.0 GiB available"):
        load(tiny, scheme=chosen)


# One process imports everything and forks for each measurement, because imports are slow. `ru_maxrss` cannot be
# used: a child starts with its parent's value.
MEASURE_PEAKS = """
import json, os, re, sys
from pathlib import Path
import torch
from engines.torch_backend.ops.registry import cpu_ops
from engines.torch_backend.models.registry import find_family
from engines.torch_backend.loading.weights import load_model
from engines.torch_backend.layers.linear import METHODS
torch.set_num_threads(1)
torch.zeros(8, 8) @ torch.zeros(8, 8)
def num_bytes(field):
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\\s+(\\d+) kB", status)[1]) * 1024
def load(directory, dtype, scheme, ops):
    found, device = find_family(directory), torch.device("cpu")
    return load_model(directory, *found, device, dtype, scheme, ops=ops).state_dict().values()
def measure(dtype, scheme, kernels):
    how = getattr(torch, dtype), METHODS.get(scheme), cpu_ops(kernels)
    load(Path(sys.argv[1]), *how)  # a fork holds no page of code until it has run
    before = num_bytes("VmRSS")
    weights = load(Path(sys.argv[2]), *how)
    touched = [value.view(torch.uint8).flatten()[::64].sum() for value in weights if value.dim()]
    return (num_bytes("VmHWM") - before) / sum(value.nbytes for value in weights)
for case in json.loads(sys.argv[3]):
    told, tells = os.pipe()
    if (child := os.fork()) == 0:
        os.write(tells, str(measure(*case)).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print(float(os.read(told, 100)), flush=True)
"""
PRECISIONS = {
    ("float32", "none", "off"): 1.2,
    ("float32", "int4", "off"): 1.3,
    ("float32", "int8", "fast"): 1.4,
    ("bfloat16", "none", "off"): 1.2,
    ("bfloat16", "int4", "off"): 1.3,
    ("float32", "int4", "fast"): 1.5,
}
MEASURED = few(PRECISIONS, list(PRECISIONS)[3:])  # each one is loaded twice


@pytest.mark.timeout(600)  # compiles and loads; the test checks memory only
def test_peak_memory_is_little_above_the_model(tmp_path: Path) -> None:
    """Measures the peak memory over the model's 180 MB. All weights are read, because only then mapped pages count."""
    small, large = tmp_path / "small", tmp_path / "large"
    text = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6}
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2}
    make_checkpoint("tiny", small)
    make_checkpoint("tiny", large, changes={"text_config": text, "vision_config": vision})
    command = [sys.executable, "-c", MEASURE_PEAKS, small, large, json.dumps(MEASURED)]
    # Freed matrices must be returned to the system. Otherwise glibc keeps those below 32 MiB, and whether later ones
    # fit into them differs between machines. The matrices of a 7B model are larger.
    threshold = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
    environment = os.environ | threshold
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    peaks = dict(zip(MEASURED, map(float, done.stdout.split()), strict=True))
    assert all(peak <= PRECISIONS[case] for case, peak in peaks.items()), peaks


@pytest.mark.parametrize(
    ("name", "scheme", "value"),
    [
        ("model.embed_tokens.weight", None, torch.nan),
        ("model.norm.weight", "int8", torch.inf),
        ("model.layers.1.mlp.down_proj.weight", None, -torch.inf),
        ("model.layers.1.mlp.down_proj.weight", "int8", torch.nan),
    ],
)
def test_weights_that_are_not_finite_are_refused_by_name(
    name: str, scheme: str | None, value: float, tiny: Path
) -> None:
    name = f"language_model.{name}"
    weight = load_file(tiny / "model.safetensors")[name].clone()
    weight.view(-1)[-1] = value
    edit(tiny, **{name.replace(".", "__"): weight})

    with pytest.raises(UnsupportedCheckpoint, match=rf"weight {re.escape(name)} .*not finite"):
        load(tiny, scheme=METHODS[scheme] if scheme else None, ops=cpu_ops("fast"))


def test_generic_models_refuse_weights_that_are_not_finite(tmp_path: Path) -> None:
    write_checkpoint(text("Qwen3", "Qwen3", head_dim=16), tmp_path)
    name = "model.layers.0.self_attn.q_norm.weight"
    edit(tmp_path, **{name.replace(".", "__"): torch.full((16,), torch.nan)})

    with pytest.raises(UnsupportedCheckpoint, match=rf"weight {re.escape(name)} .*not finite"):
        load(tmp_path)
