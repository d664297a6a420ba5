"""AWQ in the layout of its `gemm` kernel: 4-bit integers, packed along the outputs in a permuted order.

Layout: `qweight` (K, N / 8), `qzeros` (G, N / 8), `scales` (G, N). Source: AutoAWQ.
"""

import torch
from torch import Tensor

from engines.packages.checkpoint_json import Fields
from engines.torch_backend.loading.formats.reader import (
    Integers,
    Layout,
    Reader,
    StoredLinear,
    read_group_size,
    unpack_words,
)

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  #: index in a word of each of eight outputs


class AwqReader(Reader):
    name = "AWQ of 4 bits"
    marker = ("qweight",)
    part_names = frozenset({"qweight", "qzeros", "scales"})

    def __init__(self, config: Fields) -> None:
        bits = config.whole("bits", 4, at_most=8)
        if bits != 4:
            raise config.refuse("bits", f"is {bits}; AWQ is supported with 4 bits only")
        name = "format" if config.get("version") is None else "version"
        version = config.get(name, "gemm")
        if not isinstance(version, str) or version.lower() != "gemm":
            raise config.refuse(name, f"is {version!r:.40}; AWQ is supported as 'gemm' only")
        if not config.flag("zero_point", True):
            raise config.refuse("zero_point", "is false; AWQ is supported with zero points only")
        self._group_size = read_group_size(config)

    def layout(self, linear: StoredLinear) -> Layout:
        num_inputs, num_words = linear.expect_matrix("qweight", "I32")
        num_outputs = num_words * 8
        size = num_inputs if self._group_size == -1 else self._group_size
        if num_inputs % size:
            raise linear.refuse("qweight", f"has {num_inputs} inputs, not a multiple of {size}")
        num_groups = num_inputs // size
        linear.expect("qzeros", (num_groups, num_words), "I32")
        linear.expect("scales", (num_groups, num_outputs), "F16", "BF16", "F32")
        return Layout((num_outputs, num_inputs), 4, size)

    def read(self, linear: StoredLinear) -> Integers:
        values = _in_order(linear.read("qweight")).t().contiguous()
        zero = _in_order(linear.read("qzeros")).float()
        scale = linear.read("scales").float()
        return Integers(values, 4, self.layout(linear).group_size, scale, zero)


def _in_order(words: Tensor) -> Tensor:
    """Unpack outputs in their original order. Shapes: int32 (n, N / 8); returns uint8 (n, N)."""
    eights = unpack_words(words, 4).unflatten(1, (-1, 8))
    return eights[:, :, torch.tensor(_PLACES, device=words.device)].flatten(1)
