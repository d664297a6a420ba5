"""Shape letters: N tokens, C channels."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

AddNorm = Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]


def add_norm(x: Tensor, delta: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The stream plus `delta`, and the RMS norm of this sum. Shapes: x, delta (N, C), gain (C,); returns two (N, C)."""
    total = x if delta is None else x + delta
    return total, F.rms_norm(total, gain.shape, gain.to(total.dtype), eps)
