"""Shapes of model parts, as plain data."""

from dataclasses import dataclass
from typing import Literal

from engines.base import UnsupportedCheckpoint as UnsupportedCheckpoint

#: largest side of a CLIP tower's image, in pixels
MAX_IMAGE_SIZE = 2048


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """A CLIP vision tower. Units: pixels for `image_size` and `patch_size`, channels for other sizes."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5

    @property
    def num_patches(self) -> int:
        """Patches of one image, without the class token."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Scaling of rotary frequencies. `linear` uses `factor`, `llama3` uses all four numbers."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


class BeyondOurProgram(UnsupportedCheckpoint):
    """A valid checkpoint that this project's decoder cannot compute. Transformers may be able to compute it."""


@dataclass(frozen=True)
class TextLimits:
    """Properties that the engine needs of every decoder."""

    vocab_size: int
    max_position_embeddings: int


@dataclass(frozen=True)
class KVShape:
    """Layers with keys and values of one shape, which share a pool."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class TextConfig(KVShape, TextLimits):
    """A LLaMA-family decoder: grouped-query heads, biases, tied embeddings, RoPE scaling."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    has_head_norms: bool = False  #: RMS norm of queries and keys, before rotary
    has_output_norms: bool = False  #: RMS norm of the outputs of attention and feed-forward
    embedding_scale: float = 1.0
    windows: tuple[int | None, ...] = ()  #: attention window of each layer; (): no windows
    has_bidirectional_images: bool = False  #: whether the tokens of an image attend to each other
