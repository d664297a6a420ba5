"""Tensors of GGUF files, llama.cpp's format: plain numbers, or blocks of integers with scales.

Q4_0, Q4_1 and Q4_K have groups of 32 integers of 4 bits with a scale and an offset, which our int4 kernels compute
exactly. All other types are dequantized to float16. Source: `ggml-common.h` of llama.cpp.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers.integrations.gguf.dequant import GGML_BLOCK, GGML_NAME, dequantize

from engines.packages.checkpoint_json import Fields
from engines.torch_backend.loading.formats.reader import Integers, Layout, Reader, StoredLinear
from engines.torch_backend.loading.stored_tensors import StoredTensor, finite

#: the types of plain numbers, by `ggml_type`
FLOATS = {0: ("F32", torch.float32), 1: ("F16", torch.float16), 30: ("BF16", torch.bfloat16)}
DTYPE = torch.float16  #: dtype of dequantized weights
_Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q4_K = 2, 3, 6, 7, 12
_GROUP = 32
#: Types that llama.cpp uses for rows whose length is not a multiple of 256. Transformers' tables lack them.
GGML_BLOCK.update({_Q5_0: (_GROUP, 22), _Q5_1: (_GROUP, 24)})
GGML_NAME.update({_Q5_0: "Q5_0", _Q5_1: "Q5_1"})
_CHUNK_WEIGHTS = 1 << 20  # weights dequantized at a time, to bound temporary memory


@dataclass(frozen=True, slots=True)
class GgufTensor(StoredTensor):
    """A tensor of a GGUF file, by its name in transformers."""

    ggml_type: int = 0
    offset: int = 0  #: position of its first byte in the file
    num_file_bytes: int = 0
    num_heads: int = 0  #: heads whose rotary channels are interleaved in the file; 0: none are

    @property
    def is_blocks(self) -> bool:
        return self.ggml_type not in FLOATS

    @property
    def num_stored_bytes(self) -> int:
        return self.num_file_bytes

    def map(self) -> Tensor:
        """Map the numbers or blocks from the file. Shapes: blocks are uint8 (N, bytes of a row)."""
        # copy-on-write ("c"), because torch warns of read-only memory
        octets = np.memmap(self.file, np.uint8, "c", self.offset, (self.num_file_bytes,))
        raw = torch.from_numpy(octets)
        if self.is_blocks:
            raw = raw.view(self.shape[0], -1)
        else:
            raw = finite(self.name, raw.view(FLOATS[self.ggml_type][1]).view(self.shape))
        if self.num_heads == 0:
            return raw
        # reorder the outputs of each head as transformers expects
        rows = raw.unflatten(0, (self.num_heads, -1, 2)).transpose(1, 2)
        return rows.reshape(raw.shape)


class GgufReader(Reader):
    marker = ("weight",)
    part_names = frozenset({"weight"})

    def __init__(self, config: Fields) -> None:
        self.name = "GGUF"

    def split(
        self, stored: Iterable[StoredTensor], device: torch.device
    ) -> tuple[list[StoredLinear], list[StoredTensor]]:
        """The quantized matrices, including embeddings, and all other tensors."""
        linears: list[StoredLinear] = []
        others: list[StoredTensor] = []
        for tensor in stored:
            if isinstance(tensor, GgufTensor) and tensor.is_blocks:
                name = tensor.name.removesuffix(".weight")
                linears.append(StoredLinear(name, {"weight": tensor}, device))
            else:
                others.append(tensor)
        kinds = sorted({GGML_NAME[_tensor(linear).ggml_type] for linear in linears})
        self.name = f"GGUF of {' and '.join(kinds)}"
        return linears, others

    def layout(self, linear: StoredLinear) -> Layout:
        num_outputs, num_inputs = linear.expect_matrix("weight", "blocks")
        kind = _tensor(linear).ggml_type
        bits, size = (4, _GROUP) if kind in (_Q4_0, _Q4_1, _Q4_K) else (0, 0)
        return Layout((num_outputs, num_inputs), bits, size, kind == _Q4_0)

    def read(self, linear: StoredLinear) -> Integers | Tensor:
        """The weights of a layer: integers, or float16 (N, K)."""
        kind, rows = _tensor(linear).ggml_type, linear.read("weight")
        if kind in (_Q4_0, _Q4_1):
            return _q4(rows, kind)
        if kind == _Q4_K:
            return _q4_k(rows)
        num_outputs, num_inputs = self.layout(linear).shape
        numbers = rows.new_empty(num_outputs, num_inputs, dtype=DTYPE)
        num_rows = max(1, _CHUNK_WEIGHTS // num_inputs)
        for part, target in zip(rows.split(num_rows), numbers.split(num_rows), strict=True):
            found = _q5(part, kind) if kind in (_Q5_0, _Q5_1) else dequantize(part.flatten(), kind)
            target.copy_(found.view(target.shape))
        return numbers


def _tensor(linear: StoredLinear) -> GgufTensor:
    tensor = linear.parts["weight"]
    assert isinstance(tensor, GgufTensor)
    return tensor


def _q4(rows: Tensor, kind: int) -> Integers:
    """Blocks of a scale, an offset (Q4_1) and 32 integers, i and i + 16 in a byte. Shapes: uint8 (N, row's bytes)."""
    num_halves = 1 if kind == _Q4_0 else 2
    blocks = rows.unflatten(1, (-1, GGML_BLOCK[kind][1]))
    scale, *base = (x.t().contiguous() for x in _halves(blocks, num_halves).unbind(-1))
    values = _nibbles(blocks[..., 2 * num_halves :])
    return Integers(values, 4, _GROUP, scale, None, base=base[0] if base else None)


def _q5(rows: Tensor, kind: int) -> Tensor:
    """As `_q4`, with the integers' fifth bits in a word. Shapes: uint8 (N, row's bytes); returns (N, K)."""
    blocks = rows.unflatten(1, (-1, GGML_BLOCK[kind][1]))
    num_halves = 1 if kind == _Q5_0 else 2
    scale, *rest = _halves(blocks, num_halves).split(1, -1)
    base = rest[0] if rest else -16 * scale
    high, low = blocks[..., 2 * num_halves :].split((4, 16), -1)
    bits = (high[..., None] >> torch.arange(8, dtype=torch.uint8, device=rows.device)) & 1
    values = torch.cat([low & 15, low >> 4], -1) | (bits.flatten(-2) << 4)
    return (values * scale + base).flatten(1)


def _q4_k(rows: Tensor) -> Integers:
    """Blocks of eight groups. Two factors multiply their 6-bit scales and offsets. Shapes: uint8 (N, row's bytes)."""
    blocks = rows.unflatten(1, (-1, 144))
    of_scales, of_bases = _halves(blocks, 2).unbind(-1)
    low, high, rest = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([low & 63, (rest & 15) | (low >> 6 << 4)], -1)
    bases = torch.cat([high & 63, (rest >> 4) | (high >> 6 << 4)], -1)
    scale = (of_scales[..., None] * scales).flatten(1)
    base = -(of_bases[..., None] * bases).flatten(1)
    # two groups in 32 bytes, the first in the low nibbles
    values = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32)))
    return Integers(values, 4, _GROUP, scale.t().contiguous(), None, base=base.t().contiguous())


def _halves(blocks: Tensor, count: int) -> Tensor:
    """The first `count` float16 numbers of every block. Shapes: returns float32 (N, blocks, count)."""
    return blocks[..., : 2 * count].contiguous().view(torch.float16).float()


def _nibbles(octets: Tensor) -> Tensor:
    """The low nibbles of the bytes, then the high ones. Shapes: (N, ..., n); returns (N, inputs)."""
    return torch.cat([octets & 15, octets >> 4], -1).flatten(1)
