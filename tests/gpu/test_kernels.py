"""On a GPU: every kernel is right on shapes of real models, graphs are captured, and all fast ways give one answer.

The interpreter's tests (`tests/engines/torch_backend/ops/test_triton_kernels.py`) run compiled here, too.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from engines.torch_backend.graphs.cuda_graph import SamplingKind
from engines.torch_backend.models.config import TextConfig
from engines.torch_backend.ops.registry import Op, Site, choose, discover
from tests.factories_torch import make_text_config
from tests.gpu.test_cuda import answers, core, load, make_requests, tiny
from tests.triton_device import REAL_SHAPES, import_kernels

pytestmark = pytest.mark.gpu

__all__ = ["tiny"]
KERNELS = [op for op in discover() if any(c.name == "triton" for c in op.candidates)]
CUDA = torch.device("cuda")
FAST = (*(op.name for op in KERNELS), "paged_attention.triton_varlen", "cuda_graph")


def make_text(shape: str) -> TextConfig:
    return make_text_config(max_position_embeddings=4096, **REAL_SHAPES[shape])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", REAL_SHAPES)
@pytest.mark.parametrize("op", KERNELS, ids=lambda op: op.name)
def test_a_kernel_is_right_on_a_real_shape(op: Op, shape: str, dtype: torch.dtype) -> None:
    [kernel] = [candidate for candidate in op.candidates if candidate.name == "triton"]
    assert not op.complaint(kernel, Site(CUDA, dtype, make_text(shape), 16))


@pytest.mark.parametrize("num_sequences", [1, 16, 64])
@pytest.mark.parametrize("shape", REAL_SHAPES)
def test_long_contexts_are_split_and_joined(shape: str, num_sequences: int) -> None:
    text = make_text(shape)
    pool = Site(CUDA, torch.bfloat16, text).pool()  # 8 blocks, named again and again
    tables = torch.arange(256, device=CUDA, dtype=torch.int32).remainder(8).repeat(num_sequences, 1)
    lengths = torch.linspace(1, 4096, num_sequences, device=CUDA).to(torch.int64)
    query = torch.randn(
        num_sequences, text.num_heads, text.head_dim, device=CUDA, dtype=torch.bfloat16
    )
    found = import_kernels("paged_attention").attend_decodes(pool, 0, query, tables, lengths)
    slots = tables.repeat_interleave(16, 1).long() * 16 + torch.arange(4096, device=CUDA) % 16
    keys, values = (x.transpose(1, 2) for x in pool.read(0, slots))
    mask = torch.arange(4096, device=CUDA) < lengths[:, None]
    expected = scaled_dot_product_attention(
        query[:, :, None], keys, values, attn_mask=mask[:, None, None], enable_gqa=True
    )
    assert_close(found, expected.flatten(1), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", REAL_SHAPES)
def test_this_torch_has_varlen_attention(shape: str, dtype: torch.dtype) -> None:
    """Without it prompts are computed one after another; which torch has it is worth knowing."""
    ops = choose(Site(CUDA, dtype, make_text(shape)))
    assert ops.uses("paged_attention", "triton_varlen")


def test_every_fast_way_is_taken(tiny: Path) -> None:
    _, runner = core(load(tiny, "cuda", dtype="bfloat16"))
    assert all(runner.ops.uses(op.name) for op in KERNELS)
    assert runner.ops.uses("paged_attention", "triton_varlen")
    assert runner.graphs is not None
    met = {(size, SamplingKind.GREEDY) for size in (1, 2, 4, 8, 16, 24, 32)}
    assert met <= set(runner.graphs.captured)


@pytest.mark.parametrize("off", [*((name,) for name in FAST), FAST], ids=lambda off: "+".join(off))
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_what_is_switched_off_changes_no_answer(
    tiny: Path, quantization: str, off: tuple[str, ...]
) -> None:
    # without the CPU's kernels, whose towers and heads are int8 too
    on_cpu = load(tiny, "cpu", quantization=quantization, disabled_ops=("cpu",))
    on_gpu = load(tiny, "cuda", quantization=quantization, disabled_ops=off)
    assert answers(on_gpu, make_requests(on_gpu)) == answers(on_cpu, make_requests(on_cpu))


@pytest.mark.parametrize(
    "sampling", [{"top_p": 0.9, "top_k": 50}, {"num_logprobs": 3}, {}], ids=str
)
def test_graphs_sample_what_is_sampled_without(tiny: Path, sampling: dict[str, Any]) -> None:
    found = []
    for off in ((), ("cuda_graph",)):
        loaded = load(tiny, "cuda", disabled_ops=off)
        requests = [
            replace(
                r,
                sampling=msgspec.structs.replace(r.sampling, temperature=0.8, seed=5, **sampling),
            )
            for r in make_requests(loaded)
        ]
        found.append(answers(loaded, requests))
    assert found[0] == found[1]
