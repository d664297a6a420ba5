"""All layers of a decoder in one call of a C++ kernel, whose threads synchronise between its parts.

Results are bitwise equal to separate calls. Without Python between the operations, a decode step takes 10 % less time.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from engines.torch_backend.ops import native
from engines.torch_backend.ops.decoder_chain.reference import Chain, CreateChain, LayerProducts
from engines.torch_backend.ops.native.library import STRUCTS, Library, NativeKernel
from engines.torch_backend.ops.paged_attention.cpu import PagedAttention, bind_heads
from engines.torch_backend.ops.paged_attention.reference import Attend
from engines.torch_backend.ops.registry import Site


def build(site: Site) -> CreateChain:
    """A function that creates the chain, or returns None if the kernel does not support all layers."""
    library = native.load(site.level)

    def create(layers: Sequence[LayerProducts]) -> Chain | None:
        products = [product for layer in layers for product in layer.products]
        if not all(isinstance(p, NativeKernel) and p.fuses_prologue for p in products):
            return None
        if any(layer.heads.rope or layer.heads.has_odd_scores for layer in layers):
            return None  # the kernel supports only the first rotary table (index 0), and only unmodified scores
        return LayerChain(library, layers)

    return create


class LayerChain:
    def __init__(self, library: Library, layers: Sequence[LayerProducts]) -> None:
        self._library = library
        self._max_tokens = min(product.max_tokens for layer in layers for product in layer.products)
        heads = [bind_heads(layer.heads) for layer in layers]
        self._kept = (layers, heads)  # the kernel reads their memory
        rows = [[p for p in layer.products if isinstance(p, NativeKernel)] for layer in layers]
        qkv, out, gate_up, _ = rows[0]
        self._widths = qkv.num_outputs, out.num_inputs, gate_up.num_outputs
        self._has_spans = any(layer.heads.is_bidirectional for layer in layers)
        structs = (STRUCTS["Layer"](*(part.address for part in row)) for row in rows)
        self._structs = (STRUCTS["Layer"] * len(layers))(*structs)
        for struct, (form, _) in zip(self._structs, heads, strict=True):
            struct.heads = form

    def can_run(self, x: Tensor, attend: Attend) -> bool:
        if not isinstance(attend, PagedAttention) or attend.is_fused or len(x) > self._max_tokens:
            return False
        return not (self._has_spans and attend.inputs.bidirectional)

    def __call__(self, x: Tensor, attend: Attend, num_layers: int) -> None:
        """Shapes: x float32 (N, C), changed in place."""
        assert isinstance(attend, PagedAttention)
        buffers = [torch.empty(len(x), width) for width in self._widths]
        for layer, struct in enumerate(self._structs):
            struct.keys, struct.values = attend.addresses(layer)
        step = STRUCTS["Layers"](
            ctypes.addressof(self._structs),
            num_layers,
            attend.address,
            x.data_ptr(),
            *(buffer.data_ptr() for buffer in buffers),
            torch.get_num_threads(),
        )
        self._library.layers(ctypes.byref(step))
