"""The text decoder: a LLaMA-family transformer, configured by `TextConfig`.

It computes the new tokens of any number of sequences, concatenated. Only the `attend` argument depends on the sequences
and the KV cache. The same code runs on every device; `bind` selects the operators.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from engines.torch_backend.layers.activation import ACTIVATIONS
from engines.torch_backend.layers.linear import FLOAT, Linear, method_of
from engines.torch_backend.layers.linear_group import LinearGroup, Stream, VocabEmbedding
from engines.torch_backend.layers.norm import RMSNorm
from engines.torch_backend.models.config import TextConfig
from engines.torch_backend.ops.decoder_chain.reference import Chain, LayerProducts
from engines.torch_backend.ops.linear.reference import Prologue
from engines.torch_backend.ops.paged_attention.reference import PLAIN, Attend, Heads
from engines.torch_backend.ops.registry import Ops


class SelfAttention(nn.Module):
    """Projections around attention. `attend` computes the attention itself."""

    def __init__(self, config: TextConfig, number: int, norm: RMSNorm) -> None:
        super().__init__()
        self.number = number  #: index of the layer
        width, bias = config.hidden_size, config.attention_bias
        query_width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        self.q_proj = _linear(width, query_width, bias)
        self.k_proj = _linear(width, kv_width, bias)
        self.v_proj = _linear(width, kv_width, bias)
        self.o_proj = _linear(query_width, width, config.attention_output_bias)
        self.qkv = LinearGroup(self.q_proj, self.k_proj, self.v_proj, before=Prologue(norm=norm))
        self.out_norm = _output_norm(config)
        self.out = LinearGroup(self.o_proj, after=self.out_norm)
        window = config.windows[number] if config.windows else None
        self.heads = PLAIN if window is None else Heads(window=window)
        if config.has_head_norms:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.heads = Heads(self.q_norm, self.k_norm, window)
        if config.has_bidirectional_images:
            self.heads = replace(self.heads, is_bidirectional=True)

    def forward(self, stream: Stream, attend: Attend, rows: Tensor | None = None) -> None:
        """Adds the attention output to the stream, which keeps only `rows` if they are given. Shapes: (N, C)."""
        mixed = attend(self.number, self.qkv(stream), self.heads)
        if rows is not None:
            mixed = mixed[rows]
            stream.keep(rows)
        self.out(mixed, add_to=stream)


class GatedMLP(nn.Module):
    """SwiGLU feed-forward. Source: Shazeer 2020."""

    def __init__(self, config: TextConfig, norm: RMSNorm) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = _linear(width, inner, bias)
        self.up_proj = _linear(width, inner, bias)
        self.down_proj = _linear(inner, width, bias)
        gate = Prologue(gate=ACTIVATIONS[config.hidden_act])
        self.gate_up = LinearGroup(self.gate_proj, self.up_proj, before=Prologue(norm=norm))
        self.down_norm = _output_norm(config)
        self.down = LinearGroup(self.down_proj, before=gate, after=self.down_norm)

    def forward(self, stream: Stream) -> None:
        """Shapes: (N, C)."""
        self.down(self.gate_up(stream), add_to=stream)


def _output_norm(config: TextConfig) -> RMSNorm | None:
    return RMSNorm(config.hidden_size, config.rms_norm_eps) if config.has_output_norms else None


def _linear(num_inputs: int, num_outputs: int, bias: bool) -> Linear:
    return Linear(num_inputs, num_outputs, bias=bias, quantizable="scheme")


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward with residual connections."""

    def __init__(self, config: TextConfig, number: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, number, self.input_layernorm)
        self.mlp = GatedMLP(config, self.post_attention_layernorm)

    def forward(self, stream: Stream, attend: Attend, rows: Tensor | None = None) -> None:
        """Shapes: stream (N, C), afterwards only its `rows`."""
        self.self_attn(stream, attend, rows)
        self.mlp(stream)

    @property
    def linears(self) -> tuple[LinearGroup, LinearGroup, LinearGroup, LinearGroup]:
        """The layer's linears in the order of `LayerProducts`."""
        return self.self_attn.qkv, self.self_attn.out, self.mlp.gate_up, self.mlp.down


class DecoderStack(nn.Module):
    """Embeddings, layers and final norm: `model` in checkpoints."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, number) for number in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """The decoder in three steps: token ids to embeddings, to hidden states, to logits."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.text = config
        self.model = DecoderStack(config)
        self.lm_head = None
        norm = Prologue(norm=self.model.norm)
        if config.tie_word_embeddings:
            self._head = LinearGroup(self.model.embed_tokens, before=norm)
        else:
            width, vocabulary = config.hidden_size, config.vocab_size
            self.lm_head = Linear(width, vocabulary, bias=False, quantizable="int8")
            self._head = LinearGroup(self.lm_head, before=norm)
        self._has_float32_stream = False
        self._chain: Chain | None = None
        self.is_adapted = False  #: whether adapters are applied in the current step

    def bind(self, ops: Ops, dtype: torch.dtype) -> None:
        """Select the operators. `dtype`: precision of operations that torch computes."""
        layers = [layer for layer in self.model.layers if isinstance(layer, DecoderLayer)]
        linears = [linear for layer in layers for linear in layer.linears]
        for linear in linears:
            linear.bind(ops, dtype)
        is_float = method_of(self._head.layers[0]) is FLOAT
        self._head.bind(ops, dtype if is_float else torch.float32)  # logits are not rounded
        self._has_float32_stream = ops.is_native
        self._chain = None
        if ops.uses("decoder_chain") and all(linear.is_whole for linear in linears):
            products = [
                LayerProducts(*(p.kernel for p in layer.linears), heads=layer.self_attn.heads)
                for layer in layers
            ]
            self._chain = ops["decoder_chain"](products)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Shapes: (N,); returns (N, C) in the dtype of the norms, because matrices can have fewer bits."""
        x = self.model.embed_tokens(token_ids).to(self.model.norm.weight.dtype)
        return x if self.text.embedding_scale == 1 else x * self.text.embedding_scale

    def forward(self, x: Tensor, attend: Attend, rows: Sequence[int] | None = None) -> Tensor:
        """Hidden states of these rows, by default of all. Additional channels of x are added after the first layers, in
        order (DeepStack).

        The last layer computes its outputs for these rows only. Shapes: x (N, C), or (N, C + levels * C), modified;
        returns (rows, C).
        """
        x, *levels = x.split(self.text.hidden_size, dim=1)
        layers, num_done = self.model.layers, 0
        chosen = None
        if rows is not None and list(rows) != list(range(len(x))):
            chosen = torch.tensor(rows, dtype=torch.long, device=x.device)
        # adapters need the rows of whole sequences in every layer
        in_layer = chosen is not None and not self.is_adapted and len(levels) < len(layers)
        if not self._has_float32_stream:
            stream = Stream(x)
        else:
            stream = Stream(x.to(torch.float32, copy=True), is_own=True)
            chain = None if self.is_adapted or levels else self._chain
            if chain is not None and chain.can_run(x, attend):
                num_done = len(layers) - in_layer
                chain(stream.tensor(), attend, num_done)
        for number in range(num_done, len(layers)):
            is_last = number == len(layers) - 1
            layers[number](stream, attend, chosen if is_last and in_layer else None)
            if number < len(levels):
                stream.add(levels[number])
        if chosen is not None and not in_layer:
            stream.keep(chosen)
        return stream.tensor()

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the given rows. Shapes: (N, C); returns (N, vocabulary)."""
        return self._head(hidden)
