"""Shape letters: N tokens, F inner width."""

from torch import Tensor
from torch.nn import functional as F


def gate(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of each row, times the second half. Shapes: (N, 2 F); returns (N, F)."""
    left, right = gate_up.chunk(2, dim=1)
    return F.silu(left).mul_(right)
