"""torchao's tensors as transformers keeps them in safetensors: integers of 8 bits or fewer, or FP8, one to a byte.

Layout: `_weight_qdata` (N, K) of int8 or float8_e4m3fn, `_weight_scale` of each block of outputs and inputs, and
`_weight_zero_point` of integers. The file's metadata has for each weight the class of its tensor, and the block.
What is said of activations is left out. Source: torchao 0.18, `safetensors_support`.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from engines.packages.checkpoint_json import Fields, shown
from engines.torch_backend.loading.formats.fp8 import FLOATS, scaled
from engines.torch_backend.loading.formats.reader import Integers, Layout, Reader, StoredLinear

_DATA, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_FLOAT, _INT8, _FEW = "Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor"


class TorchAoReader(Reader):
    """A checkpoint by torchao."""

    name = "torchao"
    marker = (_DATA,)
    part_names = frozenset({_DATA, _SCALE, _ZERO})
    ignored = frozenset({"_weight_act_quant_scale"})

    def __init__(self, config: Fields) -> None:
        self._metadata: dict[Path, dict[str, str]] = {}

    def layout(self, linear: StoredLinear) -> Layout:
        """What a map is, by its headers, its metadata, and whether zeros are 0."""
        kind, bits, block = self._describe(linear)
        shape = linear.expect_matrix(_DATA, "F8_E4M3" if kind == _FLOAT else "I8")
        counts = tuple(-(-size // side) for size, side in zip(shape, block, strict=True))
        linear.expect(_SCALE, counts, *FLOATS)
        if kind == _FLOAT:
            return Layout(shape)
        if block[0] not in (1, shape[0]) or shape[1] % block[1]:
            raise linear.refuse(_DATA, f"is {shape} in blocks of {block}, no groups of inputs")
        is_symmetric = _ZERO not in linear.parts
        if not is_symmetric:
            linear.expect(_ZERO, counts, "I8", "I32")
            is_symmetric = not linear.read(_ZERO).any()
        return Layout(shape, bits, block[1], is_symmetric)

    def read(self, linear: StoredLinear) -> Integers | Tensor:
        """Its weights."""
        kind, bits, block = self._describe(linear)
        if kind == _FLOAT:
            return scaled(linear, _SCALE, block, _DATA)
        layout = self.layout(linear)
        middle = 2 ** (bits - 1)
        values = linear.read(_DATA).to(torch.int16) + middle
        if bits < 8 and not 0 <= int(values.min()) <= int(values.max()) < 2 * middle:
            raise linear.refuse(_DATA, f"has integers of more than {bits} bits")
        scale = linear.read(_SCALE).float().expand(layout.shape[0], -1).t().contiguous()
        zero = None
        if not layout.is_symmetric:
            zero = linear.read(_ZERO).float().expand(layout.shape[0], -1).t() + middle
        return Integers(values.to(torch.uint8), bits, layout.group_size, scale, zero)

    def _describe(self, linear: StoredLinear) -> tuple[str, int, tuple[int, int]]:
        """Class, bits and block of a weight. Raises: UnsupportedCheckpoint."""
        file = linear.parts[_DATA].file
        if file not in self._metadata:
            with safe_open(file, "pt") as content:
                self._metadata[file] = content.metadata() or {}
        try:
            described: Any = json.loads(self._metadata[file][f"{linear.name}.weight"])
            kind, data = described["_type"], described["_data"]
            outputs, inputs = data["block_size"]
            target = data["target_dtype"]["_data"] if kind == _FEW else "int8"
        except (KeyError, ValueError, TypeError) as error:
            raise linear.refuse(_DATA, "has no block in its file's metadata") from error
        if kind not in (_FLOAT, _INT8, _FEW):
            raise linear.refuse(
                _DATA,
                f"is of torchao's class {shown(kind)}; {_INT8}, {_FEW} and {_FLOAT} can be read. Take the "
                "full-precision checkpoint with --quantization int8 or int4",
            )
        if target not in ("int4", "int8"):
            raise linear.refuse(
                _DATA, f"has integers of the type {shown(target)}, not int4 or int8"
            )
        if not all(type(side) is int and side > 0 for side in (outputs, inputs)):
            raise linear.refuse(_DATA, f"is in blocks of {shown([outputs, inputs])}")
        return kind, int(target[3:]), (outputs, inputs)
