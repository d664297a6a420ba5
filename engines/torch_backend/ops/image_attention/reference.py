"""Shape letters: B images, T tokens of an image, t of them that ask, D head width."""

from torch import Tensor
from torch.nn import functional as F


def mix_values(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of some queries to everything. Shapes: (B, heads, t, D), (B, heads, T, D); returns (B, t, C)."""
    mixed = F.scaled_dot_product_attention(queries, keys, values)
    return mixed.transpose(1, 2).flatten(2)
