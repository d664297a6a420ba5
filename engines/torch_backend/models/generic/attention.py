"""Transformers' attention layers over the paged KV cache.

If the text configuration of a model sets its attention implementation to `NAME`, its layers call `attend` with the
queries, keys and values of a flat batch. `attend` calls the module's `pages`: a `Probe` while the model is loaded, a
`PagedLayer` afterwards. Transformers creates no masks for this attention implementation.

Shape letters: N new tokens, H query heads, K key/value heads, D key width, E value width.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_masks_for_generate
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.ops.paged_attention.reference import Attend, CreateAttention, Heads
from engines.torch_backend.ops.registry import Ops
from engines.torch_backend.step import StepInputs

NAME = "vlm_fleet_pages"
#: Arguments of attention layers that the engine handles or can ignore.
_KNOWN = frozenset({
    "scaling", "dropout", "is_causal", "sliding_window", "softcap", "s_aux", "position_ids", "use_cache",
    "output_attentions", "output_hidden_states", "return_dict", "position_embeddings", "cu_seq_lens_q",
    "attention_mask", "logits_to_keep", "past_key_values",
})  # fmt: skip
#: Layer types whose masks the engine creates. Layers of other types would silently run without their masks.
_LAYER_TYPES = frozenset({
    None, "full_attention", "attention", "sliding_attention", "chunked_attention", "linear_attention", "mamba",
    "conv", "hybrid", "moe", "mlp",
})  # fmt: skip
#: Configuration fields that limit attention; the masks of longer sequences are not purely causal.
_SIZES = ("sliding_window", "attention_chunk_size")
#: Queries, keys and values. Shapes: (1, H, N, D), (1, K, N, D), (1, K, N, E).
QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Properties of one attention layer. Widths in channels, window and chunk in tokens."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None = None  #: tokens that a token attends to, including itself
    chunk: int | None = None  #: tokens attend within chunks of this size
    softcap: float | None = None
    has_sinks: bool = False
    shares: int | None = None  #: index of the layer whose keys and values this layer reads
    kind: str | None = None  #: layer type in the configuration
    is_bidirectional: bool = False  #: whether the slots of an image attend to each other

    @property
    def pool_shape(self) -> tuple[int, int]:
        """Heads and head dimension of the pool; the narrower of keys and values is padded."""
        return self.num_kv_heads, max(self.key_dim, self.value_dim)

    def form(self, sinks: Tensor | None) -> Heads:
        """Description of the heads for operators. Queries and keys are already rotated by the model's modules."""
        is_usual = abs(self.scale * self.key_dim**0.5 - 1) < 1e-9 and self.key_dim >= self.value_dim
        return Heads(
            window=self.window,
            rotates=False,
            scale=None if is_usual else self.scale,
            chunk=self.chunk,
            softcap=self.softcap,
            sinks=sinks,
            is_bidirectional=self.is_bidirectional,
        )

    def within(self, max_model_len: int) -> "LayerSpec":
        """The spec for sequences up to this length: larger windows and chunks are dropped."""
        window = None if self.window and self.window >= max_model_len else self.window
        chunk = None if self.chunk and self.chunk >= max_model_len else self.chunk
        return replace(self, window=window, chunk=chunk)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers' layers call. Shapes: as `QKV`; returns (1, N, H, E)."""
    pages: Any = module.pages
    return pages((query, key, value), options, module, attention_mask), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
assert NAME not in ALL_MASK_ATTENTION_FUNCTIONS


class Probe:
    """Records the spec of each layer in the order of their calls. Raises: UnsupportedCheckpoint for unknown arguments."""

    def __init__(self, defines_masks: bool) -> None:
        """`defines_masks`: whether the model has a hook that creates attention masks."""
        self.layers: dict[nn.Module, LayerSpec] = {}
        self._defines_masks = defines_masks
        self._keys: list[Tensor] = []  # kept alive, so that addresses are not reused

    def __call__(
        self, qkv: QKV, options: dict[str, Any], module: nn.Module, mask: Tensor | None
    ) -> Tensor:
        """Shapes: as `attend`."""
        self._refuse(module, mask, options)
        query, key, value = qkv
        kind = layer_type(module)
        config: Any = module.config
        scale = options.get("scaling")
        places = [kept.data_ptr() for kept in self._keys]
        shares = places.index(key.data_ptr()) if key.data_ptr() in places else None
        self._keys.append(key)
        self.layers[module] = LayerSpec(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[-1],
            value_dim=value.shape[-1],
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            window=options.get("sliding_window") or None,
            chunk=config.attention_chunk_size if kind == "chunked_attention" else None,
            softcap=options.get("softcap") or None,
            has_sinks=options.get("s_aux") is not None,
            shares=shares,
            kind=kind,
        )
        group = query.shape[1] // key.shape[1]
        return value.repeat_interleave(group, dim=1).transpose(1, 2).contiguous()

    def _refuse(self, module: nn.Module, mask: Tensor | None, options: dict[str, Any]) -> None:
        name = type(module).__name__
        odd = sorted(
            option
            for option, given in options.items()
            if given is not None and given is not False and option not in _KNOWN
        )
        if odd:
            raise UnsupportedCheckpoint(f"{name} passes {', '.join(odd)} to its attention")
        if mask is not None:
            raise UnsupportedCheckpoint(f"{name} passes its own mask to its attention")
        if not getattr(module, "is_causal", True) and not self._defines_masks:
            raise UnsupportedCheckpoint(f"{name} lets tokens attend to later tokens")
        if layer_type(module) not in _LAYER_TYPES:
            raise UnsupportedCheckpoint(f"{name} has the unknown type {layer_type(module)!r}")
        if module in self.layers:
            raise UnsupportedCheckpoint(f"{name} is computed more than once for each token")


def layer_type(module: nn.Module) -> str | None:
    """The type of a layer in the configuration; None if the configuration has no types."""
    types = getattr(module.config, "layer_types", None)
    return types[module.layer_idx] if types else None  # pyright: ignore


def check_masks(model: PreTrainedModel, layers: list[LayerSpec]) -> None:
    """Compare transformers' masks with the specs, in sequences longer than windows. Raises: UnsupportedCheckpoint."""
    text: Any = model.config.get_text_config(decoder=True)
    sizes = {getattr(text, name, None) for name in _SIZES} - {None}
    for size in sorted(size for size in sizes if type(size) is int and size <= 2**13):
        masks = _their_masks(text, size + 3)
        for number, spec in enumerate(layers):
            theirs = masks.get(spec.kind) if isinstance(masks, dict) else masks
            if theirs is not None and not torch.equal(theirs[0, 0].bool(), _ours(spec, size + 3)):
                raise UnsupportedCheckpoint(
                    f"{type(model).__name__} cannot use paged attention: the mask of attention layer "
                    f"{number} does not match its window or chunk size"
                )


def _their_masks(text: Any, length: int) -> Any:
    """Masks of one sequence of this length, as transformers creates them for SDPA."""
    text._attn_implementation_internal = "sdpa"
    try:
        embeddings, positions = torch.zeros(1, length, 1), torch.arange(length)[None]
        return create_masks_for_generate(text, embeddings, None, None, positions)
    finally:
        text._attn_implementation_internal = NAME


def _ours(spec: LayerSpec, length: int) -> Tensor:
    key = torch.arange(length)
    query = key[:, None]
    seen = key <= query
    if spec.window is not None:
        seen = seen & (key > query - spec.window)
    if spec.chunk is not None:
        seen = seen & (key // spec.chunk == query // spec.chunk)
    return seen


class PagedStep:
    """The current step of a model: its inputs, and the attention of its layers."""

    inputs: StepInputs

    def begin(self, inputs: StepInputs, pools: Sequence[KVCachePool], ops: Ops) -> None:
        self.inputs, self.pools = inputs, pools
        self._create: CreateAttention = ops["paged_attention"]
        self._attends: dict[tuple[int, int], Attend] = {}

    def attend(self, pool: int, num_heads: int) -> Attend:
        """The attention of layers with this number of query heads over a pool."""
        key = (pool, num_heads)
        if key not in self._attends:
            self._attends[key] = self._create(num_heads, self.pools[pool], self.inputs, None)
        return self._attends[key]


class PagedLayer:
    """One layer and its part of a KV cache pool."""

    def __init__(self, spec: LayerSpec, step: PagedStep, pool: int, place: int) -> None:
        self.spec = spec
        self.step = step
        self._pool = pool
        self._place = place

    def __call__(self, qkv: QKV, options: dict[str, Any], *_: Any) -> Tensor:
        """Shapes: as `attend`. A layer that shares another layer's keys and values writes them again."""
        width, num_heads = self.step.pools[self._pool].head_dim, self.spec.num_heads
        joined = torch.cat([_widened(x[0].transpose(0, 1), width) for x in qkv], dim=1).flatten(1)
        attend = self.step.attend(self._pool, num_heads)
        out = attend(self._place, joined, self.spec.form(options.get("s_aux")))
        out = out.view(1, len(joined), num_heads, width)
        return out[..., : self.spec.value_dim]


def counts_by_cache(module: nn.Module) -> bool:
    """Whether an attention layer derives the positions of its tokens from the length of its cache."""
    if not hasattr(module, "layer_idx"):
        return False
    return "past_key_values.get_seq_length(" in inspect.getsource(type(module).forward)


class Counted:
    """Forward pass of a layer that derives positions from its cache's length, for tokens of several sequences."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._forward = module.forward
        self._shift = torch.empty(0)

    def __call__(self, *args: Any, **options: Any) -> Any:
        step = getattr(self._module.pages, "step", None)
        if step is not None and self._module.config._attn_implementation == NAME:
            indices = step.inputs.indices
            self._shift = indices - torch.arange(len(indices), device=indices.device)
            options["past_key_values"] = self
        return self._forward(*args, **options)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """For each token, its index in the sequence minus its row in the step. Shapes: returns (N,)."""
        return self._shift

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores nothing, because the engine stores keys and values."""
        return key, value


def _widened(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
