"""The image encoder: open_clip's vision transformer with Hugging Face CLIP weights mapped onto it.

Used by `llava`. It knows images as normalised pixels and gives hidden states; it must not know prompts,
caches or batches of requests. Only the layers up to the last one that is read are built.

Shape letters: B images, P patches, T = P + 1 tokens (the class token first), C channels.
"""

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from open_clip.transformer import LayerNorm, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from engines.torch_backend.layers.activation import ACTIVATIONS
from engines.torch_backend.models.config import UnsupportedCheckpoint, VisionConfig


class Activation(nn.Module):
    """One activation function as the module class that open_clip asks for."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = ACTIVATIONS[name]

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: any, kept."""
        return self.function(x)


class TowerAttention(nn.Module):
    """What open_clip's blocks do in `attn`, with modules for linear maps, which others may stand in for."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.in_proj = nn.Linear(width, 3 * width)  # queries, keys, values
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (B, T, C), kept."""
        queries, keys, values = split_heads(self.in_proj(x), self.num_heads)
        return self.out_proj(mix_values(queries, keys, values))


def split_heads(projected: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys, values. Shapes: (B, T, 3 C); returns three (B, heads, T, C / heads)."""
    by_head = projected.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
    queries, keys, values = by_head.unbind(0)
    return queries, keys, values


def mix_values(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of some queries to everything. Shapes: (B, heads, t, D), (B, heads, T, D); returns (B, t, C)."""
    mixed = F.scaled_dot_product_attention(queries, keys, values)
    return mixed.transpose(1, 2).flatten(2)


def num_blocks_needed(config: VisionConfig, feature_layers: tuple[int, ...]) -> int:
    """Transformer blocks up to the last one whose output is read.

    Layer i >= 0 is the output of block i, counted from 1 (0 would be the embeddings); -1 is the last block's.
    Raises: UnsupportedCheckpoint.
    """
    return max(_block_number(config, layer) for layer in feature_layers)


def _block_number(config: VisionConfig, layer: int) -> int:
    number = layer if layer >= 0 else config.num_layers + 1 + layer
    if not 1 <= number <= config.num_layers:
        raise UnsupportedCheckpoint(
            f"vision_feature_layer {layer} is not a layer of a vision tower of {config.num_layers}"
        )
    return number


class VisionTower(nn.Module):
    """CLIP's vision transformer, read at some of its layers."""

    def __init__(
        self, config: VisionConfig, feature_layers: tuple[int, ...], with_class_token: bool
    ) -> None:
        super().__init__()
        self.block_numbers = [_block_number(config, layer) for layer in feature_layers]
        self.with_class_token = with_class_token
        self.num_heads = config.num_heads
        self.num_tokens = config.num_patches + 1  #: of a image, T
        self.clip = VisionTransformer(
            image_size=config.image_size,
            patch_size=config.patch_size,
            width=config.hidden_size,
            layers=max(self.block_numbers),
            heads=config.num_heads,
            # open_clip floors width * ratio; the half keeps a ratio that is no binary fraction from losing one
            mlp_ratio=(config.intermediate_size + 0.5) / config.hidden_size,
            act_layer=partial(Activation, config.hidden_act),
            norm_layer=partial(LayerNorm, eps=config.layer_norm_eps),
            block_type="custom",  # its blocks have their attention in `attn`
        )
        for _, block in self.blocks:
            block.attn = TowerAttention(config.hidden_size, config.num_heads)
        # what follows the last layer serves CLIP's own image-text score
        self.clip.ln_post = nn.Identity()
        self.clip.proj = None

    def forward(self, pixels: Tensor) -> Tensor:
        """Hidden states of the asked layers, side by side in the channels, in the order asked.

        Shapes: pixels (B, 3, size, size); returns (B, P or T, layers * C).
        """
        x = self.embed(pixels)
        read: dict[int, Tensor] = {}
        for number, block in self.blocks:
            x = x + block.attn(block.ln_1(x))
            x = x + block.mlp(block.ln_2(x))
            if number in self.block_numbers:
                read[number] = x
        return self.select(read)

    def embed(self, pixels: Tensor) -> Tensor:
        """What the first block gets. Shapes: (B, 3, size, size); returns (B, T, C)."""
        return self.clip._embeds(pixels)

    @property
    def blocks(self) -> Iterable[tuple[int, Any]]:
        """open_clip's transformer blocks, numbered from 1."""
        return enumerate(self.clip.transformer.resblocks, start=1)

    def select(self, read: Mapping[int, Tensor]) -> Tensor:
        """What is read, of the outputs of these blocks. Shapes: (B, T, C) each; returns as `forward`."""
        features = torch.cat([read[number] for number in self.block_numbers], dim=-1)
        return features if self.with_class_token else features[:, 1:]


#: Hugging Face CLIP names (after an optional `vision_model.`) and open_clip's
_NAMES = {
    "embeddings.class_embedding": "class_embedding",
    "embeddings.patch_embedding.weight": "conv1.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "pre_layrnorm.weight": "ln_pre.weight",  # the missing letter is theirs
    "pre_layrnorm.bias": "ln_pre.bias",
}
_BLOCK_NAMES = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "self_attn.out_proj": "attn.out_proj",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
_BLOCK = re.compile(r"encoder\.layers\.(\d+)\.(.+)\.(weight|bias)$")
_UNREAD = ("post_layernorm.", "embeddings.position_ids")


def open_clip_name(name: str) -> str | None:
    """open_clip's name of a Hugging Face CLIP vision parameter, without prefixes.

    Query, key and value projections have one name together, `attn.in_proj.*`. None: of no use here.
    Raises: UnsupportedCheckpoint on a name that CLIP does not have.
    """
    if name in _NAMES:
        return _NAMES[name]
    if name.startswith(_UNREAD):
        return None
    match = _BLOCK.match(name)
    if match is None:
        raise UnsupportedCheckpoint(f"the vision tower has a parameter unknown to CLIP: {name}")
    block, module, kind = match.groups()
    if module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        return f"transformer.resblocks.{block}.attn.in_proj.{kind}"
    if module not in _BLOCK_NAMES:
        raise UnsupportedCheckpoint(f"the vision tower has a parameter unknown to CLIP: {name}")
    return f"transformer.resblocks.{block}.{_BLOCK_NAMES[module]}.{kind}"
