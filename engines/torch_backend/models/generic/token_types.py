"""Token type arguments of models: whether a token belongs to an image or a video.

Shape letters: B prompts, N tokens.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

#: Tokens that models with image experts treat as part of an image.
_BESIDE_SLOTS = ("image_start_token_id", "image_end_token_id")


def type_names(arguments: Iterable[str]) -> list[str]:
    """Names of token type arguments of a forward pass."""
    return [name for name in arguments if name.endswith("token_type_ids")]


def token_types(
    names: Iterable[str], config: Any, token_ids: Tensor, kinds: Tensor, is_asked: Tensor
) -> dict[str, Tensor]:
    """Token types by argument name. `kinds`: 0 outside slots; `is_asked`: True in prompts. Shapes: all (B, N)."""
    types = {}
    for name in names:
        typed = kinds
        if name.startswith("moe_"):
            around = torch.tensor([getattr(config, each) for each in _BESIDE_SLOTS])
            typed = (kinds > 0) | (torch.isin(token_ids, around.to(token_ids.device)) & is_asked)
        types[name] = typed.long()
    return types


def control_ids(config: Any) -> frozenset[int]:
    """Ids of the model's special tokens, such as image slots."""
    ends = ("token_id", "token_ids", "token_index")
    given = [x for name, x in vars(config).items() if name.endswith(ends)]
    flat = [y for x in given for y in (x if isinstance(x, list | tuple) else [x])]
    return frozenset(x for x in flat if isinstance(x, int))
