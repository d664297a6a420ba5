"""Members of a mesh, each with its share of a decoder, compute together what one with all of it computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.linear import METHODS
from engines.torch_backend.layers.rotary import RotaryTable
from engines.torch_backend.loading.make_checkpoint import make_checkpoint
from engines.torch_backend.loading.quantize_checkpoint import quantize_checkpoint
from engines.torch_backend.loading.weights import load_model
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.registry import FamilyModel, find_family
from engines.torch_backend.ops.registry import CpuKernels, cpu_ops
from engines.torch_backend.parallel.mesh import SINGLE, Mesh
from engines.torch_backend.step import SequenceRows, StepInputs
from tests.engines.torch_backend.parallel.threads import Table, ThreadMesh, on_members

CPU = torch.device("cpu")
WIDE = {
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
BIASED = {"attention_bias": True, "mlp_bias": True}


def load(directory: Path, mesh: Mesh, scheme: str | None, kernels: CpuKernels) -> FamilyModel:
    ops = cpu_ops(kernels)
    chosen = METHODS[scheme] if scheme else None
    found = find_family(directory)
    model = load_model(directory, *found, CPU, torch.float32, chosen, ops=ops, mesh=mesh)
    model.bind(ops, torch.float32)
    return model


@torch.inference_mode()
def compute_logits(model: FamilyModel, kernels: CpuKernels) -> Tensor:
    """Of a prompt, and of a token behind each of two others."""
    text = model.language_model.text
    sequences = [SequenceRows(0, 1, 0, [2]), SequenceRows(1, 7, 0, [0])]
    pool = KVCachePool(text, 3, 16, torch.float32, CPU)
    rotary = RotaryTable(text, 64, torch.float32, CPU)
    found = []
    for _ in range(2):
        inputs = StepInputs.create(sequences, 16, CPU)
        ids = torch.arange(len(inputs.slots)) * 37 % text.vocab_size
        rotation = rotary.at(inputs.indices)
        attend = cpu_ops(kernels)["paged_attention"](text.num_heads, pool, inputs, rotation)
        hidden = model.language_model(model.embed(ids, ()), attend)
        found.append(model.language_model.logits(hidden))
        sequences = [SequenceRows(0, 1, 1, [2]), SequenceRows(1, 1, 7, [0])]
    return torch.cat(found)


@pytest.mark.parametrize("kernels", ["off", "exact"])
@pytest.mark.parametrize("scheme", [None, *METHODS])
@pytest.mark.parametrize(
    "changes",
    [{}, BIASED, {"tie_word_embeddings": True}, {"vocab_size": 401}],
    ids=["plain", "biased", "tied", "odd vocabulary"],
)
def test_shares_give_the_logits_of_the_whole(
    tmp_path: Path, changes: dict[str, Any], scheme: str | None, kernels: CpuKernels
) -> None:
    make_checkpoint("tiny", tmp_path / "t", changes={"text_config": WIDE | changes})
    whole = load(tmp_path / "t", SINGLE, scheme, kernels)
    expected = compute_logits(whole, kernels)

    def compute(mesh: Mesh) -> Tensor:
        share = load(tmp_path / "t", mesh, scheme, kernels)
        assert num_bytes(share) < 0.6 * num_bytes(whole)
        return compute_logits(share, kernels)

    limit = 1e-5 if kernels == "off" or scheme is None else 1e-3  # activations of 16 bits
    for found in on_members(2, compute):
        assert (found - expected).abs().max() <= limit * expected.abs().max()


def num_bytes(model: FamilyModel) -> int:
    layers = model.language_model.model.layers
    return sum(value.nbytes for value in layers.state_dict().values())


@pytest.mark.parametrize("scheme", [None, *METHODS])
def test_several_members_have_one_head_where_there_are_fewer(
    tmp_path: Path, scheme: str | None
) -> None:
    text = {**WIDE, **BIASED, "head_dim": 64}  # whole groups of inputs for each
    make_checkpoint("tiny", tmp_path / "t", changes={"text_config": text})
    expected = compute_logits(load(tmp_path / "t", SINGLE, scheme, "off"), "off")

    found = on_members(
        4, lambda mesh: compute_logits(load(tmp_path / "t", mesh, scheme, "off"), "off")
    )

    for logits in found:
        assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("scheme", METHODS)
def test_a_checkpoint_that_is_quantized_already_is_shared(tmp_path: Path, scheme: str) -> None:
    make_checkpoint("tiny", tmp_path / "t", changes={"text_config": WIDE | BIASED})
    quantize_checkpoint(tmp_path / "t", tmp_path / "q", scheme)
    expected = compute_logits(load(tmp_path / "q", SINGLE, None, "off"), "off")

    found = on_members(
        2, lambda mesh: compute_logits(load(tmp_path / "q", mesh, None, "off"), "off")
    )

    for logits in found:
        assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("size", "changes", "scheme", "words"),
    [
        (3, {}, None, "3 devices cannot share 4 num_heads.*--tensor-parallel to 2, 4$"),
        (
            6,
            {
                "hidden_size": 96,
                "intermediate_size": 192,
                "num_attention_heads": 12,
                "num_key_value_heads": 4,
            },
            None,
            "6 devices cannot share 4 heads.*--tensor-parallel to 2, 4, 12$",
        ),
        (
            2,
            {"intermediate_size": 97},
            None,
            "2 devices cannot share 97 intermediate_size.*--tensor-parallel to 1$",
        ),
        (2, {"intermediate_size": 160}, "int4", "2 devices cannot share 160 .* groups of 32"),
    ],
)
def test_what_members_cannot_share_is_refused(
    tmp_path: Path, size: int, changes: dict[str, Any], scheme: str | None, words: str
) -> None:
    make_checkpoint("tiny", tmp_path / "t", changes={"text_config": WIDE | changes})

    with pytest.raises(UnsupportedCheckpoint, match=words):
        load(tmp_path / "t", ThreadMesh(0, Table(size)), scheme, "off")
