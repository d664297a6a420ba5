"""SiLU of the first half of each row, times the second half. Source: Shazeer 2020 (SwiGLU)."""

from collections.abc import Callable

from torch import Tensor

from engines.torch_backend.ops.gate.reference import gate
from engines.torch_backend.ops.registry import Op, Site
from engines.torch_backend.ops.triton_kernel import triton_candidate


def _example(gate: Callable[[Tensor], Tensor], site: Site) -> list[Tensor]:
    return [gate(3 * site.numbers(3, 2 * site.text.intermediate_size))]


OP = Op("gate", gate, (triton_candidate("gate", "gate"),), _example)
