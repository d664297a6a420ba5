"""Positions for transformers' models, and rotary frequencies that do not depend on the longest sequence of a batch."""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engines.torch_backend.models.config import UnsupportedCheckpoint

_CHANGING = ("dynamic", "longrope")


def batched(positions: Tensor) -> Tensor:
    """Add the batch dimension that transformers expects. Shapes: (R, N); returns (1, N), or (R, 1, N)."""
    return positions if len(positions) == 1 else positions[:, None]


def freeze_rope(model: nn.Module, max_model_len: int) -> None:
    """Set the RoPE frequencies of every module as for sequences of this length.

    A batch has sequences of many lengths, and results must not depend on other sequences. Raises:
    UnsupportedCheckpoint for modules without an `inv_freq` buffer.
    """
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        for layer, kind in kinds.items() if isinstance(kinds, dict) else ((None, kinds),):
            if kind in _CHANGING:
                _freeze(module, kind, max_model_len, layer)


def _freeze(module: Any, kind: str, max_model_len: int, layer: str | None) -> None:
    prefix = "" if layer is None else f"{layer}_"
    old = getattr(module, f"{prefix}inv_freq", None)
    if not isinstance(old, Tensor):
        raise UnsupportedCheckpoint(
            f"{type(module).__name__} has no inv_freq buffer for its {kind} RoPE"
        )
    more = {} if layer is None else {"layer_type": layer}
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](
        module.config, old.device, seq_len=max_model_len, **more
    )
    setattr(module, f"{prefix}inv_freq", frequencies)
    setattr(module, f"{prefix}attention_scaling", scaling)
    module.rope_type = "default" if layer is None else {**module.rope_type, layer: "default"}
