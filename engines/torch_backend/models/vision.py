"""The image encoder: open_clip's vision transformer with Hugging Face CLIP weights.

Only the layers up to the last one that is used are created.

Shape letters: B images, P patches, T = P + 1 tokens (the class token first), C channels.
"""

import re
from collections.abc import Generator, Mapping
from functools import partial

import torch
from open_clip.transformer import VisionTransformer
from torch import Tensor, nn

from engines.torch_backend.layers.activation import ACTIVATIONS
from engines.torch_backend.layers.linear import Linear
from engines.torch_backend.layers.linear_group import LinearGroup
from engines.torch_backend.layers.norm import LayerNorm
from engines.torch_backend.models.config import UnsupportedCheckpoint, VisionConfig
from engines.torch_backend.ops.dense_attention.reference import DenseAttention, attend
from engines.torch_backend.ops.linear.reference import Prologue
from engines.torch_backend.ops.registry import Ops


class TowerAttention(nn.Module):
    """Weights of `attn` in open_clip's blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_proj = Linear(width, 3 * width, quantizable="int8")  # queries, keys and values
        self.out_proj = Linear(width, width, quantizable="int8")


class TowerMLP(nn.Module):
    """Weights of `mlp` in open_clip's blocks."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.c_fc = Linear(width, inner, quantizable="int8")
        self.c_proj = Linear(inner, width, quantizable="int8")


class TowerBlock(nn.Module):
    """A transformer block with open_clip's parameter names. All steps but `mix` work on single tokens.

    Shape letters: t of the T tokens of each image.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width, act = config.hidden_size, ACTIVATIONS[config.hidden_act]
        self.ln_1 = LayerNorm(width, config.layer_norm_eps)
        self.ln_2 = LayerNorm(width, config.layer_norm_eps)
        self.attn = TowerAttention(width)
        self.mlp = TowerMLP(width, config.intermediate_size)
        self._in, self._out = LinearGroup(self.attn.in_proj), LinearGroup(self.attn.out_proj)
        self._widen = LinearGroup(self.mlp.c_fc)
        self._narrow = LinearGroup(self.mlp.c_proj, before=Prologue(activation=act))
        self._attend: DenseAttention = attend
        self._dtype: torch.dtype | None = None

    def bind(self, ops: Ops, dtype: torch.dtype) -> None:
        """Select the operators; attention is computed in `dtype`."""
        for linear in (self._in, self._out, self._widen, self._narrow):
            linear.bind(ops, dtype)
        self._attend, self._dtype = ops["dense_attention"], dtype

    def project(self, x: Tensor) -> Tensor:
        """Norm, then queries, keys and values. Shapes: (B, t, C); returns (B, t, 3 C)."""
        return self._in(self.ln_1(x)).to(self._dtype or x.dtype)

    def mix(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of some queries to all tokens. Shapes: (B, t, heads, D), two (B, T, heads, D); returns (B, t, C)."""
        lengths = [(queries.shape[1], keys.shape[1])] * len(queries)
        query, key, value = (x.flatten(0, 1) for x in (queries, keys, values))
        return self._attend(query, key, value, lengths).unflatten(0, queries.shape[:2])

    def add_mixed(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Add the attention output to the residual stream. Shapes: (B, t, C), modified."""
        return x + self._out(mixed.to(x.dtype))

    def add_feed(self, x: Tensor) -> Tensor:
        """Add the feed-forward output to the residual stream. Shapes: (B, t, C), modified."""
        return x + self._narrow(self._widen(self.ln_2(x)))


def split_heads(projected: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys, values. Shapes: (B, T, 3 C); returns three (B, T, heads, C / heads)."""
    queries, keys, values = projected.unflatten(-1, (3, num_heads, -1)).unbind(2)
    return queries, keys, values


def num_blocks_needed(config: VisionConfig, feature_layers: tuple[int, ...]) -> int:
    """Number of blocks up to the last one whose output is used.

    Layer i >= 0 is the output of block i, counted from 1 (0 is the embeddings); -1 is the last block. Raises:
    UnsupportedCheckpoint.
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
    """CLIP's vision transformer; returns the hidden states of some layers."""

    def __init__(
        self, config: VisionConfig, feature_layers: tuple[int, ...], with_class_token: bool
    ) -> None:
        super().__init__()
        self.block_numbers = [_block_number(config, layer) for layer in feature_layers]
        self.with_class_token = with_class_token
        self.num_heads = config.num_heads
        self.num_tokens = config.num_patches + 1  #: per image, T
        self.clip = VisionTransformer(
            image_size=config.image_size,
            patch_size=config.patch_size,
            width=config.hidden_size,
            layers=0,
            heads=config.num_heads,
            mlp_ratio=1.0,
            norm_layer=partial(LayerNorm, eps=config.layer_norm_eps),
        )
        self.clip.transformer.resblocks.extend(
            TowerBlock(config) for _ in range(max(self.block_numbers))
        )
        self._has_float32_stream = False
        # The final norm is for CLIP's image-text score only.
        self.clip.ln_post = nn.Identity()
        self.clip.proj = None

    def bind(self, ops: Ops, dtype: torch.dtype) -> None:
        """Select the operators. `dtype` is for those that torch computes."""
        for block in self.blocks:
            block.bind(ops, dtype)
        self._has_float32_stream = ops.is_native

    def forward(self, pixels: Tensor) -> Tensor:
        """Hidden states of the selected layers, concatenated in the channels.

        Shapes: pixels (B, 3, size, size); returns (B, P or T, layers * C).
        """
        parts = self.in_parts(pixels, self.num_tokens)
        while True:
            try:
                next(parts)
            except StopIteration as stop:
                return stop.value

    def in_parts(self, pixels: Tensor, size: int) -> Generator[None, None, Tensor]:
        """`forward` in parts of `size` tokens; yields before each part."""
        yield
        x = self.embed(pixels)
        read: dict[int, Tensor] = {}
        for number, block in enumerate(self.blocks, start=1):
            x = yield from self._attend(block, x, size)
            x = yield from self._feed(block, x, size)
            if number in self.block_numbers:
                read[number] = x
        return self.select(read)

    def _attend(self, block: TowerBlock, x: Tensor, size: int) -> Generator[None, None, Tensor]:
        """A block's attention. Shapes: (B, T, C), modified."""
        pieces = x.split(size, dim=1)
        projected = []
        for piece in pieces:
            yield
            projected.append(block.project(piece))
        queries, keys, values = split_heads(joined(projected), self.num_heads)
        outputs = []
        for piece, part in zip(pieces, queries.split(size, dim=1), strict=True):
            yield
            outputs.append(block.add_mixed(piece, block.mix(part, keys, values)))
        return joined(outputs)

    def _feed(self, block: TowerBlock, x: Tensor, size: int) -> Generator[None, None, Tensor]:
        """A block's feed-forward part. Shapes: (B, T, C), modified."""
        outputs = []
        for piece in x.split(size, dim=1):
            yield
            outputs.append(block.add_feed(piece))
        return joined(outputs)

    def embed(self, pixels: Tensor) -> Tensor:
        """The input of the first block. Shapes: (B, 3, size, size); returns (B, T, C)."""
        x = self.clip._embeds(pixels)
        return x.float() if self._has_float32_stream else x

    @property
    def blocks(self) -> list[TowerBlock]:
        return [b for b in self.clip.transformer.resblocks if isinstance(b, TowerBlock)]

    def select(self, read: Mapping[int, Tensor]) -> Tensor:
        """The selected tokens of these hidden states. Shapes: (B, T, C) each; returns as `forward`."""
        features = torch.cat([read[number] for number in self.block_numbers], dim=-1)
        return features if self.with_class_token else features[:, 1:]


def joined(pieces: list[Tensor]) -> Tensor:
    """Concatenate along the tokens; a single piece is not copied."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


#: Names of Hugging Face CLIP (after an optional `vision_model.`) and of open_clip.
_NAMES = {
    "embeddings.class_embedding": "class_embedding",
    "embeddings.patch_embedding.weight": "conv1.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "pre_layrnorm.weight": "ln_pre.weight",  # misspelled in the checkpoint
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

    Query, key and value projections share the name `attn.in_proj.*`. None for unused parameters. Raises:
    UnsupportedCheckpoint for unknown names.
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
