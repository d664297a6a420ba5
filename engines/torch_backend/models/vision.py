"""The image encoder: CLIP's vision transformer.

Only the layers up to the last used layer are created. Parameter names are those of Hugging Face CLIP.

Shape letters: B images, P patches, T = P + 1 tokens (the class token first), C channels.
"""

import torch
from torch import Tensor, nn

from engines.torch_backend.layers.activation import ACTIVATIONS
from engines.torch_backend.layers.linear import FLOAT, Linear, method_of
from engines.torch_backend.layers.linear_group import LinearGroup
from engines.torch_backend.layers.norm import LayerNorm
from engines.torch_backend.models.config import UnsupportedCheckpoint, VisionConfig
from engines.torch_backend.ops.dense_attention.reference import DenseAttention, attend
from engines.torch_backend.ops.linear.joined import join
from engines.torch_backend.ops.linear.reference import Prologue
from engines.torch_backend.ops.registry import Ops


class PatchEmbeddings(nn.Module):
    """Embeddings of the class token and the patches, with position embeddings."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width, size = config.hidden_size, config.patch_size
        self.class_embedding = nn.Parameter(torch.empty(width))
        self.patch_embedding = nn.Conv2d(3, width, size, size, bias=False)
        self.position_embedding = nn.Embedding(config.num_patches + 1, width)

    def forward(self, pixels: Tensor) -> Tensor:
        """Shapes: (B, 3, size, size); returns (B, T, C)."""
        patches = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        first = self.class_embedding.to(patches.dtype).expand(len(patches), 1, -1)
        return torch.cat([first, patches], 1) + self.position_embedding.weight.to(patches.dtype)


class TowerBlock(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self._num_heads = config.num_heads
        width, inner = config.hidden_size, config.intermediate_size
        self.layer_norm1 = LayerNorm(width, config.layer_norm_eps)
        self.layer_norm2 = LayerNorm(width, config.layer_norm_eps)
        query, key, value, out = (Linear(width, width, quantizable="int8") for _ in range(4))
        widen, narrow = (Linear(*w, quantizable="int8") for w in ((width, inner), (inner, width)))
        self.self_attn = nn.ModuleDict(
            {"q_proj": query, "k_proj": key, "v_proj": value, "out_proj": out}
        )
        self.mlp = nn.ModuleDict({"fc1": widen, "fc2": narrow})
        self._in, self._out = LinearGroup(query, key, value), LinearGroup(out)
        self._widen = LinearGroup(widen)
        self._narrow = LinearGroup(
            narrow, before=Prologue(activation=ACTIVATIONS[config.hidden_act])
        )
        self._attend: DenseAttention = attend
        self._dtype: torch.dtype | None = None
        self._product_dtype: torch.dtype | None = None  #: of matrix products that torch computes

    def bind(self, ops: Ops, dtype: torch.dtype) -> None:
        inputs = self._in.layers
        if all(method_of(layer) is FLOAT for layer in inputs):
            self._in = LinearGroup(join(inputs))  # a single matrix product if torch computes it
        for linear in (self._in, self._out, self._widen, self._narrow):
            linear.bind(ops, dtype)
        self._attend, self._dtype = ops["dense_attention"], dtype
        self._product_dtype = ops.product_dtype(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (B, T, C); returns (B, T, C)."""
        is_native = self._widen.computes(x.shape[0] * x.shape[1])
        dtype = x.dtype if is_native else self._product_dtype or x.dtype
        x = x + self._out.forward(self._mix(self.layer_norm1(x).to(dtype)).to(dtype))
        return x + self._narrow.forward(self._widen.forward(self.layer_norm2(x).to(dtype)))

    def _mix(self, x: Tensor) -> Tensor:
        """Attention within each image. Shapes: (B, T, C); returns (B, T, C)."""
        qkv = self._in.forward(x).to(self._dtype or x.dtype)
        q, k, v = qkv.flatten(0, 1).unflatten(-1, (3, self._num_heads, -1)).unbind(1)
        lengths = [(x.shape[1], x.shape[1])] * len(x)
        return self._attend(q, k, v, lengths).unflatten(0, x.shape[:2])


def block_numbers(config: VisionConfig, feature_layers: tuple[int, ...]) -> list[int]:
    """Numbers of the blocks, from 1, that output these layers; layer -1 is the last. Raises: UnsupportedCheckpoint."""
    numbers = []
    for layer in feature_layers:
        number = layer if layer >= 0 else config.num_layers + 1 + layer
        if not 1 <= number <= config.num_layers:
            raise UnsupportedCheckpoint(
                f"vision_feature_layer {layer} is not one of the vision tower's {config.num_layers} layers"
            )
        numbers.append(number)
    return numbers


class VisionTower(nn.Module):
    """CLIP's vision transformer; returns the hidden states of the feature layers."""

    def __init__(
        self, config: VisionConfig, feature_layers: tuple[int, ...], with_class_token: bool
    ) -> None:
        super().__init__()
        self.block_numbers = block_numbers(config, feature_layers)
        self.with_class_token = with_class_token
        self.embeddings = PatchEmbeddings(config)
        self.pre_layrnorm = LayerNorm(config.hidden_size, config.layer_norm_eps)  # published name
        blocks = (TowerBlock(config) for _ in range(max(self.block_numbers)))
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(blocks)})
        self._has_float32_stream = False

    def bind(self, ops: Ops, dtype: torch.dtype) -> None:
        """Select the operators. `dtype`: precision of operations that torch computes."""
        for block in self.blocks:
            block.bind(ops, dtype)
        self._has_float32_stream = ops.is_native

    def forward(self, pixels: Tensor) -> Tensor:
        """Selected layers' states, concatenated. Shapes: pixels (B, 3, size, size); returns (B, P or T, layers * C)."""
        x = self.pre_layrnorm(self.embeddings(pixels))
        x = x.float() if self._has_float32_stream else x
        read: dict[int, Tensor] = {}
        for number, block in enumerate(self.blocks, start=1):
            x = block(x)
            if number in self.block_numbers:
                read[number] = x
        features = torch.cat([read[number] for number in self.block_numbers], dim=-1)
        return features if self.with_class_token else features[:, 1:]

    @property
    def blocks(self) -> list[TowerBlock]:
        return [b for b in self.encoder["layers"].children() if isinstance(b, TowerBlock)]
