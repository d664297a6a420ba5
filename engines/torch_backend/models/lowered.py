"""Transformers' models whose decoder is one that our program says: `Llama` computes its weights, as fast as native ones.

Transformers' configuration, image processor, tower, merging of embeddings, rotary frequencies and position hooks stay
the front. What the decoder is, is read from its modules and from what its layers asked for when they were probed, not
from its name; that it is nothing else, is seen by computing: each layer of both is given what goes through
transformers' own, and has to make the same of it. Where it does not, the model stays as it is, with the reason.

Shape letters: T tokens of the trial, N tokens of a step, R rows of positions, C hidden width, D head width.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPast

from engines.core.request import ImageInput
from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.activation import ACTIVATIONS
from engines.torch_backend.layers.attention import Span, plan_attention
from engines.torch_backend.layers.linear import Stream
from engines.torch_backend.layers.quantization import Scheme
from engines.torch_backend.layers.rotary import RotaryTable
from engines.torch_backend.models.config import BeyondOurProgram, TextConfig
from engines.torch_backend.models.generic.attention import LayerSpec
from engines.torch_backend.models.generic.rope import freeze_rope
from engines.torch_backend.models.llama import Llama
from engines.torch_backend.models.registry import FamilyModel, ImageSlots
from engines.torch_backend.ops.step_attention.reference import create_attention

#: Of what a layer adds to the stream, as a share of its standard deviation, in float32.
_LARGEST_DIFFERENCE = 1e-3
_TRIAL_TOKENS = (1, 5, 2, 7, 3, 4, 9, 6)
_BLOCK_SIZE = 4
_LARGE = 2**29  # parameters, of which more are not all computed twice at the start
_TABLE_ROWS = 1 << 13  # positions whose angles are computed at once
#: What the front may hand to a decoder without saying anything but tokens and their positions.
_PLAIN_INPUTS = frozenset({
    "input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "use_cache", "cache_position",
    "output_attentions", "output_hidden_states", "return_dict",
})  # fmt: skip


def lower(front: Any, dtype: torch.dtype) -> "LoweredModel":
    """A `GenericModel` that has been probed, with its decoder in our program, to compute in that precision.

    Raises: BeyondOurProgram with the reason; the model is as it was then.
    """
    stack_name, stack = _find_stack(front.inner)
    for module in front.inner.modules():
        module.pages = (
            None  # of the probe, which knows all layers: one of them is to be copied alone
        )
    decoder = _read_decoder(front, stack, dtype)
    width = decoder.text.head_dim
    rotary = Rotary(stack.rotary_emb, front.num_position_rows, width)
    with front.as_transformers_does():
        seen = _observe(front, stack)
        _check_levels(seen, stack)
        refusals: list[BeyondOurProgram] = []
        for are_neighbours in (False, True):
            order = _order_of_pairs(rotary.num_turned, width, are_neighbours)
            decoder = _read_decoder(front, stack, dtype, order)
            try:
                _compare(seen, decoder, rotary, stack)
            except BeyondOurProgram as refusal:
                refusals.append(refusal)
            else:
                return LoweredModel(front, stack_name, decoder, rotary, dtype)
    raise refusals[0]


class LoweredModel(FamilyModel):
    """Our decoder behind transformers' front."""

    converts_weights = True
    speed_path = "lowered"

    def __init__(
        self, front: Any, stack_name: str, decoder: Llama, rotary: "Rotary", dtype: torch.dtype
    ) -> None:
        """Takes transformers' decoder out of its model, which is of no use without this one then."""
        super().__init__()
        self.config = front.config
        self.language_model = decoder
        self._rotary = rotary
        self._inputs = _DecoderInputs(decoder)
        self.front: Any = None
        if front.config.takes_images:
            front.inner.set_submodule(stack_name, self._inputs)
            front.inner.set_output_embeddings(nn.Identity())
            _convert(front.inner, dtype)
            front.forget_decoder()
            self.front = front

    def rotary(self, max_positions: int, dtype: torch.dtype, device: torch.device) -> RotaryTable:
        """By transformers' own frequencies."""
        self._rotary.freeze(max_positions)
        return self._rotary.table(max_positions, dtype, device)

    def quantize(self, scheme: Scheme, dtype: torch.dtype) -> None:
        """The linear maps of the decoder's layers."""
        scheme.convert_linears(self.language_model)

    def embed(self, token_ids: Tensor, images: Sequence[ImageSlots]) -> Tensor:
        """As transformers merges them. Shapes: (N,); returns (N, C)."""
        if not images:
            return self.language_model.embed(token_ids)
        ids = token_ids[None]
        positions = ids.new_zeros(self.front.num_position_rows, *ids.shape)
        self.front.inner(
            input_ids=ids,
            position_ids=positions[0] if len(positions) == 1 else positions,
            use_cache=False,
            **self.front.inputs(ids, images),
        )
        return self._inputs.taken()

    def num_features(self, image: ImageInput) -> int | None:
        """Those that the prompt has slots for."""
        return None if self.front is None else self.front.num_features(image)

    def encode(
        self, images: Sequence[ImageInput], device: torch.device, dtype: torch.dtype
    ) -> list[Tensor]:
        """Shapes: returns (slots, C) each."""
        return self.front.encode(images, device, dtype)


class _DecoderInputs(nn.Module):
    """Stands where transformers' decoder was, and keeps what it is given."""

    def __init__(self, decoder: Llama) -> None:
        super().__init__()
        self.embed_tokens = _Embeddings(decoder)
        self._given: tuple[Tensor, Tensor | None, Sequence[Tensor]] | None = None

    def get_input_embeddings(self) -> nn.Module:
        """As transformers' models ask for them."""
        return self.embed_tokens

    def taken(self) -> Tensor:
        """What the last call gave: embeddings, and beside them what is added behind the first layers.

        Shapes: returns (N, C), or (N, C + levels * C).
        """
        assert self._given is not None
        (embeddings, slots, levels), self._given = self._given, None
        columns = [embeddings]
        for level in levels if slots is not None else ():
            columns.append(torch.zeros_like(embeddings))
            columns[-1][slots] = level.to(embeddings.dtype)
        return torch.cat(columns, dim=1) if len(columns) > 1 else embeddings

    def forward(
        self,
        inputs_embeds: Tensor,
        visual_pos_masks: Tensor | None = None,
        deepstack_visual_embeds: Sequence[Tensor] | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Shapes: (1, N, C), (1, N) and levels of (slots, C) each."""
        slots = None if visual_pos_masks is None else visual_pos_masks[0]
        self._given = inputs_embeds[0], slots, deepstack_visual_embeds or ()
        hidden: Any = inputs_embeds
        return BaseModelOutputWithPast(last_hidden_state=hidden)


class _Embeddings(nn.Module):
    """The decoder's own, for transformers' front."""

    def __init__(self, decoder: Llama) -> None:
        super().__init__()
        self._decoder = (decoder,)  # no part of this module: its weights are counted once

    def forward(self, token_ids: Tensor) -> Tensor:
        """Shapes: (1, N); returns (1, N, C)."""
        return self._decoder[0].embed(token_ids[0])[None]


class Rotary:
    """Transformers' rotary module as our table, which turns pairs from the two halves of a head; of some of them

    the angle is 0 where positions do not turn all channels. Raises: BeyondOurProgram.
    """

    def __init__(self, module: nn.Module, num_rows: int, head_dim: int) -> None:
        self._module = module
        self._num_rows = num_rows
        probes = torch.eye(num_rows, dtype=torch.long).T  # by token, one row away from 0
        cos, sin = self._turn(probes)
        width = self.num_turned = cos.shape[-1]  #: channels of a head that positions turn
        self._num_still = head_dim - width
        if self._num_still < 0 or self._num_still % 2:
            raise BeyondOurProgram(f"positions turn {width} of {head_dim} channels of a head")
        if not all(torch.equal(x[:, : width // 2], x[:, width // 2 :]) for x in (cos, sin)):
            raise BeyondOurProgram("positions turn other pairs of channels than halves of a head")
        is_turned = sin != 0
        if not bool((is_turned.sum(0) == 1).all()):
            raise BeyondOurProgram("channels of a head turn by several rows of positions, or none")
        self._channel_rows = self._with_still(is_turned.int().argmax(0)[None], 0)[0]  # (D,)

    def freeze(self, max_positions: int) -> None:
        """Turn as in sequences that are never longer from now on."""
        freeze_rope(self._module, max_positions)

    def table(self, max_positions: int, dtype: torch.dtype, device: torch.device) -> RotaryTable:
        """Of positions from 0."""
        chunks = [
            self._turn(places.expand(self._num_rows, -1))
            for places in torch.arange(max_positions).split(_TABLE_ROWS)
        ]
        cos, sin = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        cos, sin = self._with_still(cos, 1), self._with_still(sin, 0)
        half = sin.shape[1] // 2
        return RotaryTable.of(
            cos.to(device, dtype),
            torch.cat([-sin[:, :half], sin[:, half:]], dim=1).to(device, dtype),
            self._channel_rows.to(device) if self._num_rows > 1 else None,
            self._num_rows,
        )

    def _with_still(self, x: Tensor, value: int) -> Tensor:
        """Channels that are not turned at the end of each half. Shapes: (P, turned); returns (P, D)."""
        still = x.new_full((len(x), self._num_still // 2), value)
        left, right = x.chunk(2, dim=1)
        return torch.cat([left, still, right, still], dim=1)

    def _turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes: (R, N); returns two float32 (N, D)."""
        device = next((b.device for b in self._module.buffers()), positions.device)
        given = positions.to(device)
        given = given if len(given) == 1 else given[:, None]
        cos, sin = self._module(torch.zeros(1, 1, 1, device=device), given)
        if cos.dim() != 3:
            raise BeyondOurProgram("positions turn channels in a way of the layers' own")
        return cos[0], sin[0]


# -- reading
def _order_of_pairs(num_turned: int, head_dim: int, are_neighbours: bool) -> Tensor | None:
    """Channels of queries and keys in an order in which those turned together lie half a head apart; None: as they are.

    Their products stay the same. Shapes: returns (D,).
    """
    if num_turned == head_dim and not are_neighbours:
        return None
    turned = torch.arange(num_turned)
    pairs = turned.view(-1, 2) if are_neighbours else turned.view(2, -1).T
    still = torch.arange(num_turned, head_dim).view(2, -1).T
    return torch.cat([pairs, still]).T.flatten()


def _find_stack(model: nn.Module) -> tuple[str, Any]:
    """The decoder without its head, and its name."""
    parts = ("embed_tokens", "layers", "norm", "rotary_emb")
    for name, module in model.named_modules():
        if all(isinstance(getattr(module, part, None), nn.Module) for part in parts):
            return name, module
    raise BeyondOurProgram(f"no decoder of {', '.join(parts)}")


def _read_decoder(front: Any, stack: Any, dtype: torch.dtype, order: Tensor | None = None) -> Llama:
    """Our program with transformers' weights: matrices as they were loaded, all else in `dtype`.

    Channels of queries and keys are in `order`, if it is given.
    """
    layers = list(stack.layers)
    specs = _read_specs(front, layers)
    spec = specs[0]
    head = front.inner.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        raise BeyondOurProgram("its head is more than a matrix")
    if type(stack.embed_tokens) is not nn.Embedding:
        raise BeyondOurProgram(f"its embeddings are {type(stack.embed_tokens).__name__}")
    table = stack.embed_tokens.weight
    is_tied = head.weight is table
    weights: dict[str, Tensor] = {"model.embed_tokens.weight": table}
    gain, eps = _read_norm(stack.norm)
    weights["model.norm.weight"] = gain
    if not is_tied:
        weights["lm_head.weight"] = head.weight
    all_eps = {eps}
    activations: set[str] = set()
    for number, (layer, one) in enumerate(zip(layers, specs, strict=True)):
        parts = _read_layer(layer, one)
        if order is not None:
            for name in parts.weights.keys() & _TURNED:
                by_head = parts.weights[name].unflatten(0, (-1, spec.key_dim))
                parts.weights[name] = by_head[:, order.to(by_head.device)].flatten(0, 1)
        all_eps |= parts.eps
        activations.add(parts.activation)
        weights |= {f"model.layers.{number}.{name}": x for name, x in parts.weights.items()}
    if len(all_eps) > 1 or len(activations) > 1:
        raise BeyondOurProgram("its layers are not alike")

    def has(name: str) -> bool:
        return any(f"model.layers.{number}.{name}" in weights for number in range(len(layers)))

    text = TextConfig(
        vocab_size=table.shape[0],
        hidden_size=table.shape[1],
        intermediate_size=weights["model.layers.0.mlp.up_proj.weight"].shape[0],
        num_layers=len(layers),
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.key_dim,
        max_position_embeddings=front.config.text.max_position_embeddings,
        rms_norm_eps=eps,
        attention_bias=any(has(f"self_attn.{x}_proj.bias") for x in "qkv"),
        attention_output_bias=has("self_attn.o_proj.bias"),
        mlp_bias=any(has(f"mlp.{x}_proj.bias") for x in ("gate", "up", "down")),
        tie_word_embeddings=is_tied,
        hidden_act=activations.pop(),
        has_head_norms=any(name.endswith("self_attn.q_norm.weight") for name in weights),
        windows=tuple(one.window for one in specs) if any(one.window for one in specs) else (),
    )
    with torch.device("meta"):
        decoder = Llama(text)
    wanted = decoder.state_dict()
    for name, x in wanted.items():
        if name.endswith(".bias") and name not in weights:
            weights[name] = torch.zeros(x.shape, device=table.device)
    if odd := [n for n, x in weights.items() if n not in wanted or x.shape != wanted[n].shape]:
        raise BeyondOurProgram(f"weights do not fit: {', '.join(sorted(odd)[:3])}")
    decoder.load_state_dict(
        {n: x.detach() if x.dim() > 1 else x.detach().to(dtype) for n, x in weights.items()},
        assign=True,
    )
    return decoder.requires_grad_(False).eval()


def _read_specs(front: Any, layers: list[Any]) -> list[LayerSpec]:
    """What each layer's attention asks for, which has to be all that is there."""
    found: Mapping[Any, LayerSpec] = front.specs
    specs = [found.get(getattr(layer, "self_attn", None)) for layer in layers]
    if len(found) != len(specs) or not all(specs):
        raise BeyondOurProgram("not every layer is one of attention")
    read = [spec for spec in specs if spec is not None]
    limit = front.config.text.max_position_embeddings
    shapes = {(s.num_heads, s.num_kv_heads, s.key_dim, s.value_dim) for s in read}
    if len(shapes) > 1 or read[0].key_dim != read[0].value_dim:
        raise BeyondOurProgram("its layers have heads of several widths")
    for number, spec in enumerate(read):
        within = spec.within(limit)
        odd = {
            "chunks": within.chunk,
            "a soft cap": spec.softcap,
            "sinks": spec.has_sinks,
            "another's keys": spec.shares is not None,
            "images that see themselves": spec.sees_images,
            "a scale of its own": abs(spec.scale * spec.key_dim**0.5 - 1) > 1e-6,
        }
        if names := [name for name, is_there in odd.items() if is_there]:
            raise BeyondOurProgram(f"layer {number} has {', '.join(names)}")
    return [spec.within(limit) for spec in read]


@dataclass
class _LayerParts:
    """A layer's weights by our names."""

    weights: dict[str, Tensor]
    eps: set[float]
    activation: str


_LINEARS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
)  # fmt: skip
#: What belongs to channels of queries and keys.
_TURNED = frozenset({
    "self_attn.q_proj.weight", "self_attn.q_proj.bias", "self_attn.k_proj.weight", "self_attn.k_proj.bias",
    "self_attn.q_norm.weight", "self_attn.k_norm.weight",
})  # fmt: skip
_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


def _read_layer(layer: nn.Module, spec: LayerSpec) -> _LayerParts:
    modules: dict[str, Any] = {
        name: module
        for name, module in layer.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }
    tensors: dict[str, Tensor] = {}
    for name, module in list(modules.items()):
        if name in (*_NORMS, *_HEAD_NORMS):
            continue
        if type(module) is not nn.Linear:
            raise BeyondOurProgram(f"a layer has {name}, a {type(module).__name__}")
        for part, x in module.named_parameters(recurse=False):
            tensors |= _parted(f"{name}.{part}", x, spec)
    wanted = {*_NORMS, *(_HEAD_NORMS if modules.keys() & {*_HEAD_NORMS} else ())}
    names = {name.rpartition(".")[0] for name in tensors} | (
        modules.keys() & {*_NORMS, *_HEAD_NORMS}
    )
    if odd := names ^ {*_LINEARS, *wanted}:
        raise BeyondOurProgram(f"a layer has other parts: {', '.join(sorted(odd))}")
    norms = {name: _read_norm(modules[name]) for name in wanted}
    tensors |= {f"{name}.weight": gain for name, (gain, _) in norms.items()}
    mlp: Any = layer.get_submodule("mlp")
    return _LayerParts(tensors, {eps for _, eps in norms.values()}, _read_activation(mlp))


def _parted(name: str, x: Tensor, spec: LayerSpec) -> dict[str, Tensor]:
    """The rows of joined maps by themselves."""
    head, _, part = name.rpartition(".")
    if head == "self_attn.qkv_proj":
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        rows = x.split([count * spec.key_dim for count in heads])
        return {f"self_attn.{k}_proj.{part}": y for k, y in zip("qkv", rows, strict=True)}
    if head == "mlp.gate_up_proj":
        return {f"mlp.{k}_proj.{part}": y for k, y in zip(("gate", "up"), x.chunk(2), strict=True)}
    return {name: x}


@torch.inference_mode()
def _read_norm(norm: Any) -> tuple[Tensor, float]:
    """Gain and epsilon of what is found to be a norm of root mean squares."""
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        raise BeyondOurProgram(f"{type(norm).__name__} is another norm")
    same = deepcopy(norm).float()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, len(weight), generator=generator) * torch.tensor(
        [[3.0], [1.0], [0.1], [0.01]]
    )
    x = x.to(weight.device)
    theirs = same(x)
    for gain in (weight, weight.float() + 1):
        ours = F.rms_norm(x, gain.shape, gain.float(), eps)
        if torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5):
            return gain, eps
    raise BeyondOurProgram(f"{type(norm).__name__} is another norm")


@torch.inference_mode()
def _read_activation(mlp: nn.Module) -> str:
    x = torch.linspace(-6, 6, 97)
    for module in mlp.children():
        if not any(True for _ in module.parameters()):
            y = module(x)
            for name, function in ACTIVATIONS.items():
                if torch.allclose(y, function(x), atol=1e-6):
                    return name
    raise BeyondOurProgram("its activation is not known")


# -- seeing
@dataclass
class _Observed:
    """What went through transformers' model in one call, decoder and head."""

    positions: Tensor  #: (R, T)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


@torch.inference_mode()
def _observe(front: Any, stack: Any) -> _Observed:
    """Call the model, and see that there is nothing between embeddings, layers, norm and head."""
    model: Any = front.inner
    ids = torch.tensor([_TRIAL_TOKENS], device=stack.embed_tokens.weight.device)
    # one row counts on, as packed prompts would not; several may differ
    steps = torch.arange(1, front.num_position_rows + 1)[:, None]
    positions = (steps * torch.arange(ids.shape[1]) + 3).to(ids.device)
    seen = _Observed(positions)
    ends: dict[str, Tensor] = {}

    def see_layer(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.calls.append((args, kwargs))

    def see_output(module: nn.Module, args: Any, output: Any) -> None:
        seen.outputs.append(output if isinstance(output, Tensor) else output[0])

    def see_stack(module: nn.Module, args: Any, kwargs: Any) -> None:
        odd = {name for name, x in kwargs.items() if isinstance(x, Tensor)} - _PLAIN_INPUTS
        if odd:
            raise BeyondOurProgram(f"its decoder is given {', '.join(sorted(odd))}")

    def see_norm(module: nn.Module, args: Any, output: Tensor) -> None:
        ends["before norm"], ends["normed"] = args[0], output

    def see_embeddings(module: nn.Module, args: Any, output: Tensor) -> None:
        ends["embedded"] = output

    def see_head(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        ends["before head"] = args[0]
        scores = torch.linspace(-300, 300, output.numel(), device=output.device)
        ends["scores"] = scores.view_as(output).to(output.dtype)
        return ends["scores"]

    handles = [
        *[x.register_forward_pre_hook(see_layer, with_kwargs=True) for x in stack.layers],
        *[x.register_forward_hook(see_output) for x in stack.layers],
        stack.register_forward_pre_hook(see_stack, with_kwargs=True),
        stack.norm.register_forward_hook(see_norm),
        stack.embed_tokens.register_forward_hook(see_embeddings),
        model.get_output_embeddings().register_forward_hook(see_head),
    ]
    try:
        given = positions if len(positions) == 1 else positions[:, None]
        inputs = front.inputs(ids, [])
        logits = model(input_ids=ids, position_ids=given, use_cache=False, **inputs).logits
    finally:
        for handle in handles:
            handle.remove()
    if len(seen.calls) != len(stack.layers):
        raise BeyondOurProgram("layers are computed several times")
    streams = [_stream(call) for call in seen.calls]
    pairs = {
        "embeddings": (ends.get("embedded"), streams[0]),
        "the last layer": (seen.outputs[-1], ends.get("before norm")),
        "the last norm": (ends.get("normed"), ends.get("before head")),
        "the head": (ends.get("scores"), logits),
    }
    pairs |= {
        f"layer {number}": pair
        for number, pair in enumerate(zip(seen.outputs[:-1], streams[1:], strict=True))
    }
    for place, (left, right) in pairs.items():
        if left is None or right is None or not torch.equal(left, right):
            raise BeyondOurProgram(f"something is computed behind {place}")
    return seen


@torch.inference_mode()
def _check_levels(seen: _Observed, stack: Any) -> None:
    """See that features of images that a decoder takes beside embeddings are added behind the first layers."""
    if "deepstack_visual_embeds" not in inspect.signature(stack.forward).parameters:
        return
    x = _stream(seen.calls[0])
    slots = torch.arange(x.shape[1], device=x.device)[None] % 3 == 1
    levels = list(torch.stack([x[slots], 2 * x[slots]]))
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    handles = [
        *[
            x.register_forward_pre_hook(_noting_stream(inputs), with_kwargs=True)
            for x in stack.layers
        ],
        *[x.register_forward_hook(lambda _, __, y: outputs.append(y)) for x in stack.layers],
        stack.norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0])),
    ]
    positions = seen.positions if len(seen.positions) == 1 else seen.positions[:, None]
    try:
        stack(
            inputs_embeds=x, position_ids=positions, use_cache=False, visual_pos_masks=slots,
            deepstack_visual_embeds=levels,
        )  # fmt: skip
    finally:
        for handle in handles:
            handle.remove()
    for number, (output, following) in enumerate(zip(outputs, inputs[1:], strict=True)):
        expected = (output if isinstance(output, Tensor) else output[0]).clone()
        if number < len(levels):
            expected[slots] += levels[number]
        if not torch.equal(expected, following):
            raise BeyondOurProgram(f"features of images go elsewhere than behind layer {number}")


def _noting_stream(inputs: list[Tensor]) -> Callable[..., None]:
    return lambda module, args, kwargs: inputs.append(_stream((args, kwargs)).clone())


@torch.inference_mode()
def _compare(seen: _Observed, decoder: Llama, rotary: Rotary, stack: Any) -> None:
    """Have both compute each layer, in float32; of a large model each kind of layer, and the last."""
    text, device = decoder.text, seen.positions.device
    num_tokens = seen.positions.shape[1]
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    plan = plan_attention(
        [Span(0, num_tokens, 0, list(range(num_blocks)))], _BLOCK_SIZE, torch.float32, device
    )
    pool = KVCachePool(text, num_blocks, _BLOCK_SIZE, torch.float32, device)
    loaded = stack.embed_tokens.weight.dtype  # theirs rounds angles to it
    positions = seen.positions[0] if len(seen.positions) == 1 else seen.positions
    table = rotary.table(int(positions.max()) + 1, loaded, device)
    rotation = tuple(x.float() for x in table.at(positions))
    attend = create_attention(text, pool, plan, (rotation[0], rotation[1]))
    pairs: list[tuple[Any, Any, Any]] = list(
        zip(stack.layers, decoder.model.layers, seen.calls, strict=True)
    )
    is_large = sum(x.numel() for x in stack.parameters()) > _LARGE
    turns: dict[str, bool] = {}  # by kind of layer
    for number, (theirs, ours, (args, kwargs)) in enumerate(pairs):
        kind = f"{_kind_of(theirs)} {ours.self_attn.heads.window}"
        if is_large and kind in turns and number < len(pairs) - 1:
            _set_turns(ours, turns[kind])
            continue
        same = theirs if loaded == torch.float32 else deepcopy(theirs).float()
        args, kwargs = _widened(args), _widened(kwargs)
        output = same(*args, **kwargs)
        output = (output if isinstance(output, Tensor) else output[0])[0]
        x = _stream((args, kwargs))[0]
        found = []
        for is_turned in (True, False):
            _set_turns(ours, is_turned)
            stream = Stream(x)
            ours(stream, attend)
            rounding = 8 * torch.finfo(torch.float32).eps * output.abs()
            excess = ((stream.tensor() - output).abs() - rounding).max()
            found.append(float(excess / (output - x).std()))
            if found[-1] <= _LARGEST_DIFFERENCE:
                turns[kind] = is_turned
                break
        else:
            raise BeyondOurProgram(
                f"layer {number} makes something else of the same, by {found[0]:.1e} of what it adds"
            )


def _set_turns(layer: Any, turns: bool) -> None:
    attention = layer.self_attn
    if attention.heads.turns is not turns:
        attention.heads = replace(attention.heads, turns=turns)


def _kind_of(layer: nn.Module) -> str:
    """Types of a layer's modules, and all plain values that they hold but its number."""
    return repr([
        (name, type(module), {
            n: x for n, x in sorted(vars(module).items())
            if isinstance(x, bool | int | float | str) and n != "layer_idx"
        })
        for name, module in layer.named_modules()
    ])  # fmt: skip


def _stream(call: tuple[tuple[Any, ...], dict[str, Any]]) -> Tensor:
    """What goes through a layer. Shapes: returns (1, T, C)."""
    args, kwargs = call
    return args[0] if args else kwargs["hidden_states"]


def _widened(given: Any) -> Any:
    """Every tensor of rounded numbers in float32."""
    if isinstance(given, Tensor):
        return given.float() if given.is_floating_point() else given
    if isinstance(given, dict):
        return {name: _widened(x) for name, x in given.items()}
    if isinstance(given, tuple):
        return tuple(_widened(x) for x in given)
    return given


def _convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Have all that is rounded more in `dtype`; what transformers keeps in float32 stays."""
    for x in (*model.parameters(), *model.buffers()):
        if x.is_floating_point() and x.dtype.itemsize < dtype.itemsize:
            x.data = x.data.to(dtype)
