"""All layers of a decoder in one call."""

import torch
from torch import Tensor
from torch.nn import functional as F

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.norm import RMSNorm
from engines.torch_backend.layers.rotary import RotaryTable
from engines.torch_backend.ops import linear, native
from engines.torch_backend.ops.decoder_chain.cpu import build
from engines.torch_backend.ops.decoder_chain.reference import CallByCall, CreateChain, LayerProducts
from engines.torch_backend.ops.linear.reference import LinearKernel, Prologue
from engines.torch_backend.ops.paged_attention import OP as ATTENTION
from engines.torch_backend.ops.registry import Candidate, Op, Site
from engines.torch_backend.step import SequenceRows, StepInputs

_SEQUENCES = [SequenceRows(0, 1, 2, [7]), SequenceRows(1, 1, 90, [5, 0, 3, 9, 8, 2])]


def _example(create: CreateChain, site: Site) -> list[Tensor]:
    """Compute two layers with kernels that other operators' examples test."""
    text = site.text
    width, inner, heads = text.hidden_size, text.intermediate_size, text.num_heads * text.head_dim
    kv = text.num_kv_heads * text.head_dim
    bind, attention = (op.candidates[0].build(site) for op in (linear.OPS[0], ATTENTION))
    norm = RMSNorm(width, 1e-5).requires_grad_(False)

    def product(before: Prologue, *shapes: tuple[int, int]) -> LinearKernel:
        parts = [linear.make_float(site, shape) for shape in shapes]
        for part in parts:
            part.weight.div_(8)
        return bind(parts, before, torch.float32)

    layer = LayerProducts(
        product(Prologue(norm=norm), (heads, width), (kv, width), (kv, width)),
        product(Prologue(), (width, heads)),
        product(Prologue(norm=norm), (inner, width), (inner, width)),
        product(Prologue(gate=F.silu), (width, inner)),
    )
    inputs = StepInputs.create(_SEQUENCES, 16, site.device)
    pool = KVCachePool(text, 10, 16, torch.float32, site.device)
    for stored in (x for number in range(text.num_layers) for x in pool.blocks(number)):
        stored.copy_(site.numbers(*stored.shape))
    rotation = RotaryTable.create(text, 128, torch.float32, site.device).at(inputs.indices)
    chain = create([layer] * text.num_layers)
    assert chain is not None
    x = site.numbers(2, width)
    before = x.clone()
    chain(x, attention(text.num_heads, pool, inputs, rotation), text.num_layers)
    assert not torch.equal(x, before), "the chain computes nothing"
    return [x, *pool.blocks(0), *pool.blocks(1)]


OP = Op(
    "decoder_chain",
    CallByCall,
    (Candidate("cpu", build, native.lacks, tolerance=lambda site: 0.0),),
    _example,
)
