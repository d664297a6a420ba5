"""The text decoder over C++ kernels: the same maps as `models/llama.py`, its reference implementation.

In one call for all layers where kernels compute all of a step, else in five calls a layer. Made by the runner from a loaded decoder, whose weights it shares. The stream between layers is float32 whatever
the weights are.

Shape letters: N tokens, C hidden width, H query heads, K key/value heads, D head width.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.attention import AttentionPlan, paged_attention
from engines.torch_backend.layers.rotary import rotate
from engines.torch_backend.models.config import TextConfig
from engines.torch_backend.models.llama import DecoderLayer, Llama
from engines.torch_backend.ops.cpu.attention import PagedAttention, can_attend
from engines.torch_backend.ops.cpu.fused_linear import FusedLinear
from engines.torch_backend.ops.cpu.kernels import CpuKernels
from engines.torch_backend.ops.cpu.layers import LayerChain, LayerProducts


class CpuLayer:
    """The four groups of linear maps of a layer."""

    def __init__(self, layer: nn.Module, kernels: CpuKernels, dtype: torch.dtype) -> None:
        assert isinstance(layer, DecoderLayer)
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.qkv = FusedLinear(kernels, projections, dtype, norm=layer.input_layernorm)
        self.out = FusedLinear(kernels, [attention.o_proj], dtype)
        self.gate_up = FusedLinear(
            kernels, [mlp.gate_proj, mlp.up_proj], dtype, norm=layer.post_attention_layernorm
        )
        self.down = FusedLinear(kernels, [mlp.down_proj], dtype, gate=mlp.activation)

    @property
    def maps(self) -> tuple[FusedLinear, ...]:
        """In the order of `LayerProducts`."""
        return self.qkv, self.out, self.gate_up, self.down


class CpuDecoder:
    """Embeddings to hidden states, hidden states to logits."""

    def __init__(
        self, decoder: Llama, text: TextConfig, kernels: CpuKernels, dtype: torch.dtype
    ) -> None:
        """`dtype` is the engine's: of torch's products, where they are used, and of the cache."""
        self._text = text
        self._kernels = kernels
        self._dtype = dtype
        self._layers = [CpuLayer(layer, kernels, dtype) for layer in decoder.model.layers]
        self._max_chained = 0  # tokens that the chain computes
        chained = [_whole_products(layer) for layer in self._layers]
        if kernels.has_layers and None not in chained:
            self._chain = LayerChain(kernels.library, [part for part in chained if part])
            self._max_chained = min(one.max_tokens for layer in self._layers for one in layer.maps)
        head: nn.Module | None = decoder.lm_head
        if head is None:
            embeddings = decoder.model.embed_tokens.weight
            head = nn.Linear(*reversed(embeddings.shape), bias=False, device="meta")
            head.weight = embeddings
        self._head = FusedLinear(kernels, [head], dtype, norm=decoder.model.norm)

    def __call__(
        self,
        embeddings: Tensor,
        rotation: tuple[Tensor, Tensor],
        pool: KVCachePool,
        plan: AttentionPlan,
    ) -> Tensor:
        """Hidden states of every token. Shapes: (N, C), kept; `rotation` as of `RotaryTable.at`."""
        x = embeddings.to(torch.float32, copy=True)
        attend = self._choose_attention(rotation, pool, plan)
        if isinstance(attend, PagedAttention) and len(x) <= self._max_chained:
            self._chain(x, attend)
            return x
        for number, layer in enumerate(self._layers):
            layer.out(attend(number, layer.qkv(x)), add_to=x)
            layer.down(layer.gate_up(x), add_to=x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token. Shapes: (N, C); returns (N, vocabulary)."""
        return self._head(hidden)

    def _choose_attention(
        self, rotation: tuple[Tensor, Tensor], pool: KVCachePool, plan: AttentionPlan
    ) -> Callable[[int, Tensor], Tensor]:
        """Shapes: of what is chosen, the number of a layer, then (N, (H + 2 K) * D); returns (N, H * D)."""
        if self._kernels.has_attention and can_attend(self._text, pool):
            return PagedAttention(self._kernels.library, self._text, pool, plan, rotation)
        return partial(self._attend_by_torch, rotation, pool, plan)

    def _attend_by_torch(
        self,
        rotation: tuple[Tensor, Tensor],
        pool: KVCachePool,
        plan: AttentionPlan,
        layer: int,
        qkv: Tensor,
    ) -> Tensor:
        text = self._text
        heads = (text.num_heads, text.num_kv_heads, text.num_kv_heads)
        by_head = qkv.to(self._dtype).view(qkv.shape[0], sum(heads), text.head_dim)
        query, key, value = by_head.split(heads, dim=1)
        query, key = rotate(query, *rotation), rotate(key, *rotation)
        return paged_attention(pool, plan, layer, query, key, value).float()


def _whole_products(layer: CpuLayer) -> LayerProducts | None:
    """What computes a layer without torch; None if torch has a part in it."""
    products = [linear.whole_product for linear in layer.maps]
    return None if None in products else LayerProducts(*(part for part in products if part))
