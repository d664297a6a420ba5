"""All layers of a decoder in one call of a C++ kernel, whose threads meet between its parts.

What each part computes is what calls for it alone compute, to the last bit: they are the reference implementation. A call for
each part costs Python's time between them, which is a tenth of a decode step.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.torch_backend.ops.cpu.attention import PagedAttention
from engines.torch_backend.ops.cpu.library import LayersStruct, LayerStruct, Library, Product


@dataclass(frozen=True, slots=True)
class LayerProducts:
    """Of a layer; norms are part of the first and the third, a gate of the last."""

    qkv: Product
    out: Product
    gate_up: Product
    down: Product


class LayerChain:
    """Layers one after another."""

    def __init__(self, library: Library, layers: Sequence[LayerProducts]) -> None:
        self._library = library
        self._layers = layers
        self._structs = (LayerStruct * len(layers))(
            *(
                LayerStruct(
                    part.qkv.address, part.out.address, part.gate_up.address, part.down.address
                )
                for part in layers
            )
        )

    def __call__(self, x: Tensor, attend: PagedAttention) -> None:
        """Shapes: x float32 (N, C), replaced by what it becomes."""
        widths = self._layers[0]
        rooms = [
            torch.empty(len(x), width)
            for width in (widths.qkv.num_outputs, widths.out.num_inputs, widths.gate_up.num_outputs)
        ]
        for layer, struct in enumerate(self._structs):
            struct.keys, struct.values = attend.places(layer)
        step = LayersStruct(
            ctypes.addressof(self._structs),
            len(self._layers),
            attend.address,
            x.data_ptr(),
            *(room.data_ptr() for room in rooms),
            torch.get_num_threads(),
        )
        self._library.layers(ctypes.byref(step))
