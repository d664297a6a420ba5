"""Transformers' attention layers over pages: what each asks for, found by calling it, and how it is computed.

A model whose text configuration names `NAME` as its attention hands queries, keys and values of a flat batch to `attend`,
which gives them to what stands in the module's `pages`: a `Probe` while the model is loaded, a `PagedLayer` afterwards.
No masks are made for that name: what a token sees is the engine's to know.

Shape letters: N new tokens, H query heads, K key/value heads, D key width, E value width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.attention import AttentionPlan, paged_attention
from engines.torch_backend.layers.visible_attention import Scores, Visible, visible_attention
from engines.torch_backend.models.config import TextConfig, UnsupportedCheckpoint
from engines.torch_backend.ops.registry import Ops

NAME = "vlm_fleet_pages"
#: What layers pass beside queries, keys and values, and the engine knows or may leave aside.
_KNOWN = frozenset({
    "scaling", "dropout", "is_causal", "sliding_window", "softcap", "s_aux", "position_ids", "use_cache",
    "output_attentions", "output_hidden_states", "return_dict", "position_embeddings", "cu_seq_lens_q",
    "attention_mask", "logits_to_keep", "past_key_values",
})  # fmt: skip
#: Those whose masks the engine makes itself; those of any other would be missing without a word.
_LAYER_TYPES = frozenset({
    None, "full_attention", "attention", "sliding_attention", "chunked_attention", "linear_attention", "mamba",
    "conv", "hybrid", "moe", "mlp",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention layer asks for. Widths in channels, window and chunk in tokens."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None = None  #: tokens that a token sees, itself included
    chunk: int | None = None  #: tokens see those of their own chunk of so many
    softcap: float | None = None
    has_sinks: bool = False
    shares: int | None = None  #: the layer whose keys and values it reads, by its number
    kind: str | None = None  #: its type in the configuration
    sees_images: bool = False  #: whether slots of an image see each other

    @property
    def pool_shape(self) -> tuple[int, int]:
        """Heads and width of what is kept; the narrower of keys and values is padded."""
        return self.num_kv_heads, max(self.key_dim, self.value_dim)

    @property
    def is_plain(self) -> bool:
        """Whether tokens see all before them, by plain scores: what kernels compute."""
        return (self.window, self.chunk, self.softcap, self.has_sinks) == (None, None, None, False)

    def within(self, max_model_len: int) -> "LayerSpec":
        """As it is for sequences that are never longer: what they cannot leave is no limit."""
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
    """Transformers' interface. Shapes: query (1, H, N, D), key (1, K, N, D), value (1, K, N, E); returns (1, N, H, E)."""
    pages: Any = module.pages
    return pages(module, query, key, value, attention_mask, options), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
assert NAME not in ALL_MASK_ATTENTION_FUNCTIONS


class Probe:
    """Notes what each layer asks for, in the order of their calls. Raises: UnsupportedCheckpoint for what is not known."""

    def __init__(self, tells_masks: bool) -> None:
        """`tells_masks`: the model has a hook that says who sees whom."""
        self.layers: dict[nn.Module, LayerSpec] = {}
        self._tells_masks = tells_masks
        self._keys: list[Tensor] = []  # kept, so that no other layer's come to lie at their places

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        """Shapes: as `attend`."""
        self._refuse(module, mask, options)
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
            raise UnsupportedCheckpoint(f"{name} brings a mask of its own to its attention")
        if not getattr(module, "is_causal", True) and not self._tells_masks:
            raise UnsupportedCheckpoint(f"{name} lets tokens see those after them")
        if layer_type(module) not in _LAYER_TYPES:
            raise UnsupportedCheckpoint(f"{name} is of the type {layer_type(module)!r}")
        if module in self.layers:
            raise UnsupportedCheckpoint(f"{name} is computed more than once for each token")


def layer_type(module: nn.Module) -> str | None:
    """What the configuration calls a layer; None where all are alike."""
    types = getattr(module.config, "layer_types", None)
    return types[module.layer_idx] if types else None  # pyright: ignore


@dataclass(frozen=True, slots=True)
class Whole:
    """New tokens of an image that see all of their run of slots: tokens of the step, and places in the sequence."""

    start: int
    stop: int
    first: int
    last: int


class PagedStep:
    """What all layers of a step share."""

    def __init__(
        self,
        plan: AttentionPlan,
        pools: Sequence[KVCachePool],
        ops: Ops,
        wholes: Sequence["Whole"] = (),
    ) -> None:
        """`wholes` are of images whose slots see each other."""
        self.plan = plan
        self.pools = pools
        self.wholes = wholes
        self._ops = ops
        device = plan.slots.device
        places = [torch.arange(s.num_computed, s.num_context) for s in plan.spans]
        self.places = torch.cat(places).to(device)  #: of each new token in its sequence
        self._visible: dict[tuple[int | None, int | None, bool], Visible] = {}
        self._kernels: dict[tuple[int, int, int], Callable[[int, Tensor], Tensor]] = {}

    def visible(self, spec: LayerSpec) -> Visible:
        """What tokens see in such a layer."""
        key = (spec.window, spec.chunk, spec.sees_images)
        if key not in self._visible:
            first = torch.zeros_like(self.places)
            if spec.window is not None:
                first = (self.places - spec.window + 1).clamp(min=0)
            if spec.chunk is not None:
                first = torch.maximum(first, self.places - self.places % spec.chunk)
            last = self.places
            if spec.sees_images and self.wholes:
                last = last.clone()
                for whole in self.wholes:
                    tokens = slice(whole.start, whole.stop)
                    first[tokens] = first[tokens].clamp(max=whole.first)
                    last[tokens] = whole.last
            self._visible[key] = Visible(self.plan, self.pools[0].block_size, first, last)
        return self._visible[key]

    def attend_plainly(
        self, pool: KVCachePool, layer: int, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """By our operator, where there is a kernel. Shapes: (N, H, D), two (N, K, D); returns (N, H, D)."""
        num_heads, num_kv_heads, width = query.shape[1], key.shape[1], query.shape[2]
        if not self._ops.uses("step_attention"):
            return paged_attention(pool, self.plan, layer, query, key, value).view_as(query)
        shape = (num_heads, num_kv_heads, width)
        if shape not in self._kernels:
            self._kernels[shape] = self._kernel(pool, shape, query)
        joined = torch.cat([query, key, value], dim=1).flatten(1)
        return self._kernels[shape](layer, joined.float()).to(query.dtype).view_as(query)

    def _kernel(
        self, pool: KVCachePool, shape: tuple[int, int, int], like: Tensor
    ) -> Callable[[int, Tensor], Tensor]:
        """Queries and keys come rotated: no angle is left to turn."""
        text = TextConfig(
            vocab_size=1, hidden_size=shape[0] * shape[2], intermediate_size=1, num_layers=1,
            num_heads=shape[0], num_kv_heads=shape[1], head_dim=shape[2], max_position_embeddings=1,
        )  # fmt: skip
        still = like.new_ones(len(self.places), 1, shape[2])
        return self._ops["step_attention"](text, pool, self.plan, (still, torch.zeros_like(still)))


class PagedLayer:
    """One layer over its part of a pool."""

    def __init__(self, spec: LayerSpec, pool: int, place: int) -> None:
        self.spec = spec
        self.step: PagedStep | None = None  #: the present one
        self._pool = pool
        self._place = place

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        """Shapes: as `attend`. A layer that shares another's keys and values keeps the same ones once more."""
        spec, step = self.spec, self.step
        assert step is not None
        pool = step.pools[self._pool]
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        if spec.is_plain and not (spec.sees_images and step.wholes):
            width = pool.head_dim
            scale = spec.scale * width**0.5  # kernels scale by the width that they see
            query = query if abs(scale - 1) < 1e-9 else query * scale
            query, key, value = (_widened(x, width) for x in (query, key, value))
            out = step.attend_plainly(pool, self._place, query, key, value)
            return out[None, ..., : spec.value_dim]
        scores = Scores(spec.scale, spec.softcap, options.get("s_aux"))
        seen = step.visible(spec)
        return visible_attention(pool, self._place, seen, query, key, value, scores)[None]


def _widened(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
