"""The decoder's layers with few, fused operations between fewer, larger products: how a GPU computes them.

Used by the runner where the device is one, and by `cuda_graph`. It reads the weights of a loaded `Llama` and computes
the same; how a step's tokens attend is known by the function that it is given. Everything it calls can be captured
in a CUDA graph.

Shape letters: N tokens, C hidden width, F inner width, H query heads, K key/value heads, D head width.
"""

from collections.abc import Callable

from torch import Tensor, nn

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.activation import ACTIVATIONS
from engines.torch_backend.layers.joined_linear import JoinedLinear
from engines.torch_backend.layers.rotary import RotaryTable
from engines.torch_backend.models.config import TextConfig
from engines.torch_backend.models.llama import DecoderLayer, Llama
from engines.torch_backend.ops.decoder_ops import DecoderOps

#: Attention of new tokens, whose keys and values are in the pool: (layer, query, key, value) to (N, H * D).
AttendKept = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class CudaLayer:
    """The products and gains of one layer."""

    def __init__(self, layer: nn.Module, ops: DecoderOps) -> None:
        assert isinstance(layer, DecoderLayer)
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = JoinedLinear([attention.q_proj, attention.k_proj, attention.v_proj], ops)
        self.output = JoinedLinear([attention.o_proj], ops)
        self.gate_up = JoinedLinear([mlp.gate_proj, mlp.up_proj], ops)
        self.down = JoinedLinear([mlp.down_proj], ops)
        self.input_norm = layer.input_layernorm
        self.mlp_norm = layer.post_attention_layernorm


class CudaDecoder:
    """A `Llama`, computed by `DecoderOps`. The weights stay the model's own, in one memory with it."""

    def __init__(self, decoder: Llama, config: TextConfig, ops: DecoderOps) -> None:
        self.ops = ops
        self._decoder = decoder
        self._gate = ops.gate if config.hidden_act == "silu" else _gate_with(config.hidden_act)
        self._layers = [CudaLayer(layer, ops) for layer in decoder.model.layers]

    def embed(self, token_ids: Tensor) -> Tensor:
        """Shapes: (N,); returns (N, C)."""
        return self._decoder.embed(token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """Shapes: (N, C); returns (N, vocabulary)."""
        return self._decoder.logits(hidden)

    def __call__(
        self,
        x: Tensor,
        rotary: RotaryTable,
        positions: Tensor,
        slots: Tensor,
        pool: KVCachePool,
        attend: AttendKept,
    ) -> Tensor:
        """Hidden states of every token. Shapes: x (N, C), kept; positions and slots (N,)."""
        ops = self.ops
        delta = None
        for place, layer in enumerate(self._layers):
            x, normed = ops.add_norm(x, delta, layer.input_norm.weight, layer.input_norm.eps)
            qkv = layer.qkv(normed)
            query, key, value = ops.rotate_keep(qkv, rotary, positions, slots, pool, place)
            delta = layer.output(attend(place, query, key, value))
            x, normed = ops.add_norm(x, delta, layer.mlp_norm.weight, layer.mlp_norm.eps)
            delta = layer.down(self._gate(layer.gate_up(normed)))
        return x if delta is None else x + delta


def _gate_with(activation: str) -> Callable[[Tensor], Tensor]:
    function = ACTIVATIONS[activation]

    def gate(gate_up: Tensor) -> Tensor:
        left, right = gate_up.chunk(2, dim=1)
        return function(left) * right

    return gate
