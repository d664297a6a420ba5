"""bitsandbytes: indices of 4 bits into a table (nf4, fp4), or integers of 8 bits with a scale an output.

Layout of 4 bits: `weight` has two indices a byte, the first in the high half, row after row; `weight.quant_map` (16,) is
the table, `weight.absmax` the scale of each block of numbers, itself of 8 bits where `nested_` parts say so, and
`weight.quant_state.bitsandbytes__nf4` the rest as JSON. Of 8 bits: `weight` (N, K) of int8 and `SCB` (N,), 127 scales.
Source: bitsandbytes 0.50, `QuantState.as_dict` and `Linear8bitLt`.
"""

import json
import math
import re
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engines.packages.checkpoint_json import Fields, shown
from engines.torch_backend.loading.formats.reader import Integers, Layout, Reader, StoredLinear

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_MAX_STATE = 4096  # bytes of JSON
_MOST = 2**24  # of a side, and of a block


class BitsAndBytesReader(Reader):
    """A checkpoint by bitsandbytes."""

    marker = ("weight.absmax", "SCB")
    part_names = frozenset({
        "weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", "SCB",
        "weight_format", *_STATES,
    })  # fmt: skip

    def __init__(self, config: Fields) -> None:
        """Raises: UnsupportedCheckpoint."""
        is_int8 = config.flag("load_in_8bit", False)
        kind = config.get("bnb_4bit_quant_type", "fp4")
        if not is_int8 and kind not in ("nf4", "fp4"):
            raise config.refuse("bnb_4bit_quant_type", f"is {shown(kind)}, not 'nf4' or 'fp4'")
        self.name = "bitsandbytes in int8" if is_int8 else f"bitsandbytes in {kind}"

    def part_of(self, name: str) -> tuple[str, str]:
        """Parts of a weight of 4 bits have its name before theirs."""
        found = re.fullmatch(r"(.*)\.(weight\.(?:quant_state\.)?[a-z_0-9]+)", name)
        return (found[1], found[2]) if found else super().part_of(name)

    def layout(self, linear: StoredLinear) -> Layout:
        """What a map is, by its headers, and of 4 bits by its JSON."""
        if "SCB" in linear.parts:
            num_outputs, num_inputs = linear.expect_matrix("weight", "I8")
            linear.expect("SCB", (num_outputs,), "F32")
            if "weight_format" in linear.parts:
                linear.expect("weight_format", (), "U8")
                if linear.read("weight_format"):
                    raise linear.refuse("weight_format", "is of a GPU's own order, not rows")
            return Layout((num_outputs, num_inputs), 8, num_inputs, is_symmetric=True)
        state = self._state(linear)
        shape = (state["shape"][0], state["shape"][1])
        num_values, block = math.prod(shape), state["blocksize"]
        stored = linear.expect("weight", None, "U8", "BF16", "F16", "F32")
        if stored.num_stored_bytes != -(-num_values // 2):
            raise linear.refuse(
                "weight", f"has {stored.num_stored_bytes} bytes, but its state makes it {shape}"
            )
        linear.expect("weight.quant_map", (16,), "F32")
        num_blocks = -(-num_values // block)
        if "weight.nested_absmax" not in linear.parts:
            linear.expect("weight.absmax", (num_blocks,), "F32")
        else:
            linear.expect("weight.absmax", (num_blocks,), "U8")
            linear.expect("weight.nested_quant_map", (256,), "F32")
            num_nested = -(-num_blocks // state["nested_blocksize"])
            linear.expect("weight.nested_absmax", (num_nested,), "F32")
        return Layout(shape)

    def read(self, linear: StoredLinear) -> Integers | Tensor:
        """Its weights."""
        shape = self.layout(linear).shape
        if "SCB" in linear.parts:
            values = linear.read("weight").view(torch.uint8) ^ 128
            return Integers(values, 8, shape[1], linear.read("SCB").float()[None] / 127, None)
        state = self._state(linear)
        octets = linear.read("weight").flatten().view(torch.uint8)
        table = linear.read("weight.quant_map")
        every = torch.arange(256, device=table.device)
        pairs = torch.stack([table[every >> 4], table[every & 15]], -1)
        numbers = pairs[octets.int()].flatten()[: math.prod(shape)]
        scales, block = self._scales(linear, state), state["blocksize"]
        padded = F.pad(numbers, (0, len(scales) * block - len(numbers)))
        return padded.view(-1, block).mul_(scales[:, None]).flatten()[: len(numbers)].view(shape)

    def _scales(self, linear: StoredLinear, state: dict[str, Any]) -> Tensor:
        """Of all blocks."""
        scales = linear.read("weight.absmax")
        if "weight.nested_absmax" not in linear.parts:
            return scales
        block = state["nested_blocksize"]
        outer = linear.read("weight.nested_absmax").repeat_interleave(block)[: len(scales)]
        inner = linear.read("weight.nested_quant_map")[scales.int()]
        return inner * outer + state["nested_offset"]

    def _state(self, linear: StoredLinear) -> dict[str, Any]:
        """What its JSON says. Raises: UnsupportedCheckpoint."""
        name = next((name for name in _STATES if name in linear.parts), _STATES[0])
        if linear.expect(name, None, "U8").num_values > _MAX_STATE:
            raise linear.refuse(name, f"has more than {_MAX_STATE} bytes")
        try:
            state = json.loads(bytes(linear.read(name).tolist()))
            shape = [int(size) for size in state["shape"]]
            sizes = [int(state.get(n, 256)) for n in ("blocksize", "nested_blocksize")]
            offset = float(state.get("nested_offset", 0.0))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise linear.refuse(name, "does not say shape and block size") from error
        if len(shape) != 2 or not all(0 < size <= _MOST for size in (*shape, *sizes)):
            raise linear.refuse(name, f"says {shape} in blocks of {sizes[0]}")
        return {
            "shape": shape, "blocksize": sizes[0], "nested_blocksize": sizes[1], "nested_offset": offset,
        }  # fmt: skip
