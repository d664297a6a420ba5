"""FP8 weights with floating-point scales: one per tensor, per output, or per block of outputs and inputs.

Layout: `weight` (N, K) of float8_e4m3fn, and `weight_scale_inv` or `weight_scale`, which both multiply the weights.
Quantization settings of activations are ignored, because activations stay in the engine's precision.
Source: DeepSeek-V3, transformers' `FineGrainedFP8Config`, AutoFP8, FBGEMM.
"""

from torch import Tensor

from engines.packages.checkpoint_json import Fields, shown
from engines.torch_backend.loading.formats.reader import Layout, Reader, StoredLinear

FLOATS = ("F32", "BF16", "F16")


class Fp8Reader(Reader):
    marker = ("weight_scale_inv", "weight_scale")
    part_names = frozenset({"weight", "weight_scale_inv", "weight_scale"})
    ignored = frozenset({"input_scale", "activation_scale", "k_scale", "v_scale"})

    def __init__(self, config: Fields) -> None:
        config.one_of("scale_fmt", ("float",))
        config.one_of("fmt", ("e4m3",))
        config.one_of("expert_dtype", ("fp8",))
        self._block = check_block(config, "weight_block_size")
        self.name = "FP8" if self._block is None else "FP8 in blocks of {}x{}".format(*self._block)

    def layout(self, linear: StoredLinear) -> Layout:
        return scaled_layout(linear, self._scale_name(linear), self._block)

    def read(self, linear: StoredLinear) -> Tensor:
        return scaled(linear, self._scale_name(linear), self._block)

    def _scale_name(self, linear: StoredLinear) -> str:
        return next(name for name in self.marker if name in linear.parts)


def check_block(config: Fields, name: str) -> tuple[int, int] | None:
    """Outputs and inputs of a block; None if the field is missing. Raises: UnsupportedCheckpoint."""
    block = config.get(name)
    if block is None:
        return None
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(type(side) is int and 0 < side <= 2**20 for side in block):
        raise config.refuse(name, f"is {shown(block)}, not two positive integers")
    return block[0], block[1]


def scaled_layout(linear: StoredLinear, scale: str, block: tuple[int, int] | None) -> Layout:
    """The layout of a layer with scaled weights. Raises: UnsupportedCheckpoint."""
    num_outputs, num_inputs = linear.expect_matrix("weight", "F8_E4M3")
    shape = linear.expect(scale, None, *FLOATS).shape
    known = [(), (1,), (1, 1), (num_outputs,), (num_outputs, 1)]
    if block is not None:
        known = [(-(-num_outputs // block[0]), -(-num_inputs // block[1]))]
    if shape not in known:
        expected = " or ".join(map(str, known))
        raise linear.refuse(scale, f"has shape {shape}, but the weights require {expected}")
    return Layout((num_outputs, num_inputs))


def scaled(linear: StoredLinear, name: str, block: tuple[int, int] | None) -> Tensor:
    """Weights times their scales. Shapes: returns float32 (N, K)."""
    weight = linear.read("weight").float()
    scale = linear.read(name).float()
    if block is None:
        return weight.mul_(scale.view(-1, 1))
    num_inputs = weight.shape[1]
    wide = scale.repeat_interleave(block[1], 1)[:, :num_inputs]
    for row, rows in enumerate(weight.split(block[0])):
        rows.mul_(wide[row])
    return weight
