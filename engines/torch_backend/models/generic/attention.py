"""Transformers' attention layers over pages: what each asks for, found by calling it, and how it is computed.

A model whose text configuration names `NAME` as its attention hands queries, keys and values of a flat batch to `attend`,
which gives them to what stands in the module's `pages`: a `Probe` while the model is loaded, a `PagedLayer` afterwards.
No masks are made for that name: what a token sees is the engine's to know.

Shape letters: N new tokens, H query heads, K key/value heads, D key width, E value width.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.attention import PLAIN, AttentionPlan, Heads, paged_attention
from engines.torch_backend.layers.norm import RMSNorm
from engines.torch_backend.layers.rotary import rotate
from engines.torch_backend.layers.visible_attention import Scores, Visible, visible_attention
from engines.torch_backend.models.config import TextConfig, UnsupportedCheckpoint
from engines.torch_backend.ops.registry import Ops
from engines.torch_backend.ops.step_attention.reference import Attend

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
#: Of queries and of keys, head by head.
HeadNorms = tuple[RMSNorm | None, RMSNorm | None]
NO_NORMS: HeadNorms = (None, None)


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
        """Whether tokens see all before them, or a window, by plain scores: what kernels compute."""
        return (self.chunk, self.softcap, self.has_sinks) == (None, None, False)

    def form(self, norms: HeadNorms = NO_NORMS) -> Heads:
        """As kernels are told of it, and of what heads are normalised by."""
        if norms == NO_NORMS and self.window is None:
            return PLAIN
        return Heads(*norms, window=self.window)

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
    """New tokens of an image that see their run of slots to its end: tokens of the step, and a place in the sequence."""

    start: int
    stop: int
    last: int
    sees_all_before: bool = False  #: beyond windows


@dataclass(frozen=True, slots=True)
class Rotation:
    """How the first channels of queries and keys are turned, in halves. Shapes: cos, sin (1, N, width)."""

    cos: Tensor
    sin: Tensor
    width: int

    def tables(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As operators take them: the minus of a half is in the sines. Shapes: returns two (N, 1, width)."""
        left, right = self.sin[0].to(dtype).chunk(2, dim=-1)
        return self.cos[0].to(dtype)[:, None], torch.cat([-left, right], dim=-1)[:, None]

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: (N, heads, D), kept."""
        turned = rotate(x[..., : self.width], *self.tables(x.dtype))
        return (
            turned
            if self.width == x.shape[-1]
            else torch.cat([turned, x[..., self.width :]], dim=-1)
        )


def split_rotated(
    qkv: Tensor, heads: tuple[int, int], rotation: Rotation | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a joined product. Shapes: (N, (H + 2 K) D); returns (N, H, D), two (N, K, D)."""
    sizes = [heads[0], heads[1], heads[1]]
    query, key, value = qkv.view(len(qkv), sum(sizes), -1).split(sizes, dim=1)
    return (query, key, value) if rotation is None else (rotation(query), rotation(key), value)


class PagedStep:
    """What all layers of a step share."""

    def __init__(
        self,
        plan: AttentionPlan,
        pools: Sequence[KVCachePool],
        ops: Ops,
        wholes: Sequence["Whole"] = (),
        has_images: bool = False,
    ) -> None:
        """`wholes` are of images whose slots see each other."""
        self.plan = plan
        self.pools = pools
        self.wholes = wholes
        self.has_images = has_images
        self._ops = ops
        device = plan.slots.device
        places = [torch.arange(s.num_computed, s.num_context) for s in plan.spans]
        self.places = torch.cat(places).to(device)  #: of each new token in its sequence
        self._visible: dict[tuple[int | None, int | None, bool], Visible] = {}
        #: with the rotation, so that no other comes to have its id
        self._kernels: dict[Any, tuple[Attend, Rotation | None]] = {}

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
                first, last = first.clone(), last.clone()
                for whole in self.wholes:
                    last[whole.start : whole.stop] = whole.last
                    if whole.sees_all_before:
                        first[whole.start : whole.stop] = 0
            self._visible[key] = Visible(self.plan, self.pools[0].block_size, first, last)
        return self._visible[key]

    @property
    def has_kernel(self) -> bool:
        """Whether there is one of our operator."""
        return self._ops.uses("step_attention")

    def attend_plainly(
        self,
        pool: KVCachePool,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        form: Heads = PLAIN,
    ) -> Tensor:
        """By our operator, where there is a kernel. Shapes: (N, H, D), two (N, K, D); returns (N, H, D)."""
        if not self.has_kernel:
            return paged_attention(pool, self.plan, layer, query, key, value).view_as(query)
        joined = torch.cat([query, key, value], dim=1).flatten(1).float()
        heads = (query.shape[1], key.shape[1])
        out = self.attend_joined(pool, layer, joined, heads, None, query.dtype, form)
        return out.to(query.dtype).view_as(query)

    def attend_joined(
        self,
        pool: KVCachePool,
        layer: int,
        qkv: Tensor,
        heads: tuple[int, int],
        rotation: "Rotation | None",
        dtype: torch.dtype,
        form: Heads = PLAIN,
    ) -> Tensor:
        """By our operator, in an engine of that type. Shapes: (N, (H + 2 K) D); returns (N, H D)."""
        width = qkv.shape[1] // (heads[0] + 2 * heads[1])
        return self.kernel(pool, heads, width, rotation, dtype)(layer, qkv, form)

    def kernel(
        self,
        pool: KVCachePool,
        heads: tuple[int, int],
        width: int,
        rotation: "Rotation | None",
        dtype: torch.dtype,
    ) -> Attend:
        """Our operator for layers of such heads that are turned so."""
        key = (*heads, width, rotation and id(rotation.cos))
        if key not in self._kernels:
            text = TextConfig(
                vocab_size=1, hidden_size=heads[0] * width, intermediate_size=1, num_layers=1,
                num_heads=heads[0], num_kv_heads=heads[1], head_dim=width, max_position_embeddings=1,
            )  # fmt: skip
            if rotation is None:
                count, device = len(self.places), self.places.device
                still = torch.ones(count, 1, width, dtype=dtype, device=device)
                tables = still, torch.zeros_like(still)
            else:
                tables = rotation.tables(dtype)
            create = self._ops["step_attention"]
            self._kernels[key] = create(text, pool, self.plan, tables), rotation
        return self._kernels[key][0]


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
        if self._is_plain:
            width = pool.head_dim
            scale = spec.scale * width**0.5  # kernels scale by the width that they see
            query = query if abs(scale - 1) < 1e-9 else query * scale
            query, key, value = (_widened(x, width) for x in (query, key, value))
            out = step.attend_plainly(pool, self._place, query, key, value, spec.form())
            return out[None, ..., : spec.value_dim]
        scores = Scores(spec.scale, spec.softcap, options.get("s_aux"))
        seen = step.visible(spec)
        return visible_attention(pool, self._place, seen, query, key, value, scores)[None]

    @property
    def _is_plain(self) -> bool:
        assert self.step is not None
        is_seen = self.spec.window is None or self.step.has_kernel
        is_whole = self.spec.sees_images and self.step.wholes
        return self.spec.is_plain and is_seen and not is_whole

    def attend(
        self,
        module: nn.Module,
        qkv: Tensor,
        heads: tuple[int, int],
        rotation: Rotation | None,
        dtype: torch.dtype,
        norms: HeadNorms = NO_NORMS,
    ) -> Tensor:
        """For queries and keys that are not rotated yet, in a model of that type; `qkv` is changed.

        They are not normalised yet either by `norms`, which are given only if it `takes_norms`.

        Shapes: (N, (H + 2 K) D); returns (N, H D).
        """
        spec, step = self.spec, self.step
        assert step is not None
        pool = step.pools[self._pool]
        if not self._is_direct(rotation):
            parts = split_rotated(qkv.to(dtype), heads, rotation)
            query, key, value = (x.transpose(0, 1)[None] for x in parts)
            return self(module, query, key, value, None, {})[0].flatten(1).to(qkv.dtype)
        if self._is_scaled:
            qkv[:, : heads[0] * spec.key_dim] *= spec.scale * spec.key_dim**0.5
        form = spec.form(norms)
        return step.attend_joined(pool, self._place, qkv, heads, rotation, dtype, form)

    def takes_norms(self, rotation: Rotation | None) -> bool:
        """Whether the operator normalises heads itself."""
        assert self.step is not None
        return self.step.has_kernel and not self._is_scaled and self._is_direct(rotation)

    @property
    def _is_scaled(self) -> bool:
        """Whether scores are scaled by something else than kernels do."""
        return abs(self.spec.scale * self.spec.key_dim**0.5 - 1) >= 1e-9

    def _is_direct(self, rotation: Rotation | None) -> bool:
        """Whether the operator takes the joined product as it is, scaled."""
        assert self.step is not None
        spec, width = self.spec, self.step.pools[self._pool].head_dim
        is_whole = rotation is None or rotation.width == spec.key_dim
        return self._is_plain and is_whole and width == spec.key_dim == spec.value_dim

    def kernel(self, place: int, rotation: Rotation | None, dtype: torch.dtype) -> Attend | None:
        """The operator, if it computes all of this layer's attention in this step and knows it by that place."""
        spec, step = self.spec, self.step
        assert step is not None
        if self._place != place or self._is_scaled or not self._is_direct(rotation):
            return None
        heads, pool = (spec.num_heads, spec.num_kv_heads), step.pools[self._pool]
        return step.kernel(pool, heads, spec.key_dim, rotation, dtype)


def counts_by_cache(module: nn.Module) -> bool:
    """Whether an attention layer asks its cache where its tokens are."""
    if not hasattr(module, "layer_idx"):
        return False
    return "past_key_values.get_seq_length(" in inspect.getsource(type(module).forward)


class Counted:
    """Stands for the forward pass of a layer that counts by its cache: each token has as many before it as its place says."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._forward = module.forward
        self._shift = torch.empty(0)

    def __call__(self, *args: Any, **options: Any) -> Any:
        step = getattr(self._module.pages, "step", None)
        if step is not None and self._module.config._attn_implementation == NAME:
            places = step.places
            self._shift = places - torch.arange(len(places), device=places.device)
            options["past_key_values"] = self
        return self._forward(*args, **options)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """As a cache's: what is to be added to the tokens' places in the step. Shapes: returns (N,)."""
        return self._shift

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """As a cache's: new tokens are the engine's to keep."""
        return key, value


def _widened(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
