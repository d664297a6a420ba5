"""The text decoder: one LLaMA-family transformer, driven by its `TextConfig`.

Used by `llava`. It computes a flat run of tokens of any number of sequences: what belongs together, and where
keys and values are kept, is known by the `attend` function that it is given, not here.

Parameter names are those of transformers' `LlamaForCausalLM`: `model.embed_tokens.weight`,
`model.layers.{i}.self_attn.{q,k,v,o}_proj.weight`, `model.layers.{i}.mlp.{gate,up,down}_proj.weight`,
`model.layers.{i}.{input,post_attention}_layernorm.weight`, `model.norm.weight`, and `lm_head.weight` unless it
is tied to the embeddings.

Shape letters: N tokens, C hidden width, H query heads, K key/value heads, D head width.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engines.torch_backend.layers.activation import ACTIVATIONS
from engines.torch_backend.layers.rotary import rotate
from engines.torch_backend.models.config import TextConfig


class Attend(Protocol):
    """Attention of new tokens over their own sequences, keeping their keys and values."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Shapes: query (N, H, D), key and value (N, K, D); returns (N, H * D)."""
        ...


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a gain. Source: Zhang and Sennrich 2019."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (N, C), kept."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class SelfAttention(nn.Module):
    """Projections and rotation around `attend`."""

    def __init__(self, config: TextConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        query_width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, query_width, bias=bias)
        self.k_proj = nn.Linear(width, kv_width, bias=bias)
        self.v_proj = nn.Linear(width, kv_width, bias=bias)
        self.o_proj = nn.Linear(query_width, width, bias=config.attention_output_bias)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Shapes: x (N, C), kept."""
        heads = (x.shape[0], -1, self.head_dim)
        query = rotate(self.q_proj(x).view(heads), *rotation)
        key = rotate(self.k_proj(x).view(heads), *rotation)
        value = self.v_proj(x).view(heads)
        return self.o_proj(attend(self.layer, query, key, value))


class GatedMLP(nn.Module):
    """SwiGLU feed-forward. Source: Shazeer 2020."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (N, C), kept."""
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each on the normalised stream and added to it."""

    def __init__(self, config: TextConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, layer)
        self.mlp = GatedMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Shapes: x (N, C), kept."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class DecoderStack(nn.Module):
    """Embeddings, layers and the last norm: what checkpoints call `model`."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """Token ids to embeddings, embeddings to hidden states, hidden states to logits: three separate steps."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.model = DecoderStack(config)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Shapes: (N,); returns (N, C), in the precision of norms: matrices may be stored in less."""
        return self.model.embed_tokens(token_ids).to(self.model.norm.weight.dtype)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Hidden states of every token. Shapes: x (N, C), kept; `rotation` as of `RotaryTable.at`."""
        for layer in self.model.layers:
            x = layer(x, rotation, attend)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, for the tokens that need them. Shapes: (N, C); returns (N, vocabulary)."""
        hidden = self.model.norm(hidden)
        if self.lm_head is None:
            return F.linear(hidden, self.model.embed_tokens.weight)
        return self.lm_head(hidden)
