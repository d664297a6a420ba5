"""Creates this project's decoder from the attention specs and the weights of transformers' modules.

Shape letters: D head width.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engines.torch_backend.layers.activation import ACTIVATIONS
from engines.torch_backend.models.config import BeyondOurProgram, TextConfig
from engines.torch_backend.models.generic.attention import LayerSpec
from engines.torch_backend.models.llama import Llama


def order_of_pairs(num_rotated: int, head_dim: int, are_neighbours: bool) -> Tensor | None:
    """Channel order with rotary pairs half a head apart; dot products stay equal. None: unchanged. Shapes: (D,)."""
    if num_rotated == head_dim and not are_neighbours:
        return None
    rotated = torch.arange(num_rotated)
    pairs = rotated.view(-1, 2) if are_neighbours else rotated.view(2, -1).T
    unrotated = torch.arange(num_rotated, head_dim).view(2, -1).T
    return torch.cat([pairs, unrotated]).T.flatten()


def find_stack(model: nn.Module) -> tuple[str, Any]:
    """The decoder without its head, and its name."""
    parts = ("embed_tokens", "layers", "norm", "rotary_emb")
    for name, module in model.named_modules():
        if all(isinstance(getattr(module, part, None), nn.Module) for part in parts):
            return name, module
    raise BeyondOurProgram(f"no module has {', '.join(parts)}")


def read_decoder(front: Any, stack: Any, dtype: torch.dtype, order: Tensor | None = None) -> Llama:
    """A `Llama` with transformers' weights: matrices as loaded, other parameters in `dtype` or higher precision.

    Channels of queries and keys are in `order`, if it is given. Raises: BeyondOurProgram.
    """
    specs = _read_specs(front, list(stack.layers))
    head: Any = front.inner.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        raise BeyondOurProgram("its head is not a linear layer without bias")
    table = stack.embed_tokens.weight
    weights = {"model.embed_tokens.weight": table}
    is_tied = head.weight is table
    if not is_tied:
        weights["lm_head.weight"] = head.weight
    scale = _read_scale(stack.embed_tokens)
    gain, eps = _read_norm(stack.norm)
    weights["model.norm.weight"] = gain.to(dtype)  # the hidden states have this dtype too
    all_eps, activations = {eps}, set()
    for number, (layer, spec) in enumerate(zip(stack.layers, specs, strict=True)):
        tensors, layer_eps, activation = _read_layer(layer, spec)
        all_eps |= layer_eps
        activations.add(activation)
        weights |= {
            f"model.layers.{number}.{name}": _in_order(name, x, order, spec.key_dim)
            for name, x in tensors.items()
        }
    if len(all_eps) > 1 or len(activations) > 1:
        raise BeyondOurProgram("its layers use several epsilons or activations")
    spec = specs[0]
    names = {name.split(".", 3)[-1] for name in weights}  # names within a layer
    vocab_size, width = weights["model.embed_tokens.weight"].shape
    text = TextConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=weights["model.layers.0.mlp.up_proj.weight"].shape[0],
        num_layers=len(specs),
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.key_dim,
        max_position_embeddings=front.config.text.max_position_embeddings,
        rms_norm_eps=eps,
        attention_bias=any(f"self_attn.{x}_proj.bias" in names for x in "qkv"),
        attention_output_bias="self_attn.o_proj.bias" in names,
        mlp_bias=any(f"mlp.{x}_proj.bias" in names for x in ("gate", "up", "down")),
        tie_word_embeddings=is_tied,
        hidden_act=activations.pop(),
        has_head_norms="self_attn.q_norm.weight" in names,
        has_output_norms="self_attn.out_norm.weight" in names,
        embedding_scale=scale,
        windows=tuple(one.window for one in specs) if any(one.window for one in specs) else (),
        has_bidirectional_images=spec.is_bidirectional,
    )
    return _fill(text, weights, dtype)


@torch.inference_mode()
def _read_scale(embeddings: Any) -> float:
    """The factor of scaled embeddings. Raises: BeyondOurProgram for other changes of the table's rows."""
    if type(embeddings) is nn.Embedding:
        return 1.0
    table = getattr(embeddings, "weight", None)
    scale = getattr(embeddings, "embed_scale", None)
    if isinstance(embeddings, nn.Embedding) and isinstance(table, Tensor) and scale is not None:
        ids = torch.arange(min(len(table), 64), device=table.device)
        factor = float(torch.as_tensor(scale).to(table.dtype))
        if torch.equal(embeddings(ids), table[ids] * factor):
            return factor
    raise BeyondOurProgram(f"its embeddings are computed by {type(embeddings).__name__}")


def _fill(text: TextConfig, weights: dict[str, Tensor], dtype: torch.dtype) -> Llama:
    """A decoder with these weights. Missing biases are 0."""
    with torch.device("meta"):
        decoder = Llama(text)
    wanted = decoder.state_dict()
    device = weights["model.embed_tokens.weight"].device
    missing = {name for name in wanted.keys() - weights.keys() if name.endswith(".bias")}
    weights |= {name: torch.zeros(wanted[name].shape, device=device) for name in missing}
    if odd := [n for n, x in weights.items() if n not in wanted or x.shape != wanted[n].shape]:
        raise BeyondOurProgram(f"unknown weights or shapes: {', '.join(sorted(odd)[:3])}")

    def place(name: str, x: Tensor) -> Tensor:
        # in a lower precision, gains of 1 + w would lose the precision of w
        is_fine = name.endswith("norm.weight") and x.dtype.itemsize > dtype.itemsize
        return x.detach() if x.dim() > 1 or is_fine else x.detach().to(dtype)

    decoder.load_state_dict({name: place(name, x) for name, x in weights.items()}, assign=True)
    return decoder.requires_grad_(False).eval()


def _read_specs(front: Any, layers: list[Any]) -> list[LayerSpec]:
    """Specs of each layer's attention. Raises: BeyondOurProgram for attention that `Llama` does not support."""
    found: Mapping[Any, LayerSpec] = front.specs
    specs = [found.get(getattr(layer, "self_attn", None)) for layer in layers]
    if len(found) != len(specs) or not all(specs):
        raise BeyondOurProgram("not every layer has attention")
    read = [spec for spec in specs if spec is not None]
    limit = front.config.text.max_position_embeddings
    shapes = {(s.num_heads, s.num_kv_heads, s.key_dim, s.value_dim) for s in read}
    if len(shapes) > 1 or read[0].key_dim != read[0].value_dim:
        raise BeyondOurProgram("its layers have heads of different numbers or widths")
    for number, spec in enumerate(read):
        within = spec.within(limit)
        odd = {
            "chunks": within.chunk,
            "a soft cap": spec.softcap,
            "sinks": spec.has_sinks,
            "keys of another layer": spec.shares is not None,
            "bidirectional prompts": front.binds_prompts,
            "bidirectional images, unlike layer 0": spec.is_bidirectional
            != read[0].is_bidirectional,
        }
        if names := [name for name, is_there in odd.items() if is_there]:
            raise BeyondOurProgram(f"layer {number} has {', '.join(names)}")
    return [spec.within(limit) for spec in read]


def stored_rows(name: str, text: TextConfig, order: Tensor | None) -> dict[str, Tensor | None]:
    """`FamilyModel.stored_rows` of a decoder that `read_decoder` created in this `order`."""
    number, _, module = name.partition(".")
    qkv = _qkv_rows(text.num_heads, text.num_kv_heads, text.head_dim)
    num_rows = {
        "self_attn.q_proj": qkv[0],
        "self_attn.k_proj": qkv[1],
        "self_attn.qkv_proj": sum(qkv),
        "mlp.gate_up_proj": 2 * text.intermediate_size,
    }.get(module)
    if num_rows is None:
        return {name: None}
    parts = _parted(f"{module}.weight", torch.arange(num_rows), qkv)
    return {
        f"{number}.{part.removesuffix('.weight')}": _in_order(part, rows, order, text.head_dim)
        for part, rows in parts.items()
    }


def _in_order(name: str, x: Tensor, order: Tensor | None, head_dim: int) -> Tensor:
    """A weight with the channels of queries and keys in `order`."""
    if order is None or not name.startswith(("self_attn.q_", "self_attn.k_")):
        return x
    return x.unflatten(0, (-1, head_dim))[:, order.to(x.device)].flatten(0, 1)


#: Scales of random inputs of a norm: small ones reveal a wrong epsilon.
_NORM_SIZES = (1e-3, 1.0, 30.0)
#: Allowed difference from a norm's own forward pass, relative to its result.
_NORM_TOLERANCE = 1e-5
_LINEARS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
)  # fmt: skip
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
#: Norms of the residual stream: transformers' names to ours. Layers with four norms also normalize their outputs.
_STREAM_NORMS = (
    {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "self_attn.out_norm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "mlp.down_norm",
    },
    {
        "input_layernorm": "input_layernorm",
        "post_self_attn_layernorm": "self_attn.out_norm",
        "post_attention_layernorm": "post_attention_layernorm",
        "post_mlp_layernorm": "mlp.down_norm",
    },
    {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
    },
)


def _read_layer(layer: nn.Module, spec: LayerSpec) -> tuple[dict[str, Tensor], set[float], str]:
    """A layer's weights by this project's names, the epsilons of its norms, and its activation."""
    modules: dict[str, Any] = {
        name: module
        for name, module in layer.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }
    tensors: dict[str, Tensor] = {}
    of_stream = next((x for x in _STREAM_NORMS if x.keys() <= modules.keys()), _STREAM_NORMS[-1])
    qkv = _qkv_rows(spec.num_heads, spec.num_kv_heads, spec.key_dim)
    for name, module in list(modules.items()):
        if name in (*of_stream, *_HEAD_NORMS):
            continue
        if type(module) is not nn.Linear:
            raise BeyondOurProgram(f"a layer has {name}, a {type(module).__name__}")
        for part, x in module.named_parameters(recurse=False):
            tensors |= _parted(f"{name}.{part}", x, qkv)
    wanted = {*of_stream, *(_HEAD_NORMS if modules.keys() & {*_HEAD_NORMS} else ())}
    names = {name.rpartition(".")[0] for name in tensors} | (
        modules.keys() & {*of_stream, *_HEAD_NORMS}
    )
    if odd := names ^ {*_LINEARS, *wanted}:
        raise BeyondOurProgram(f"a layer lacks or adds modules: {', '.join(sorted(odd))}")
    norms = {name: _read_norm(modules[name]) for name in wanted}
    scale = spec.scale * spec.key_dim**0.5
    if abs(scale - 1) > 1e-6:
        if "self_attn.q_norm" not in norms:
            raise BeyondOurProgram("a layer's attention scale is not head_dim ** -0.5")
        gain, eps = norms["self_attn.q_norm"]
        norms["self_attn.q_norm"] = gain.float() * scale, eps
    tensors |= {f"{of_stream.get(name, name)}.weight": gain for name, (gain, _) in norms.items()}
    mlp: Any = layer.get_submodule("mlp")
    return tensors, {eps for _, eps in norms.values()}, _read_activation(mlp)


def _qkv_rows(num_heads: int, num_kv_heads: int, head_dim: int) -> list[int]:
    """Rows of queries, keys and values in a joined layer."""
    return [count * head_dim for count in (num_heads, num_kv_heads, num_kv_heads)]


def _parted(name: str, x: Tensor, qkv: list[int]) -> dict[str, Tensor]:
    """Split the rows of joined linear layers."""
    head, _, part = name.rpartition(".")
    if head == "self_attn.qkv_proj":
        rows = x.split(qkv)
        return {f"self_attn.{k}_proj.{part}": y for k, y in zip("qkv", rows, strict=True)}
    if head == "mlp.gate_up_proj":
        return {f"mlp.{k}_proj.{part}": y for k, y in zip(("gate", "up"), x.chunk(2), strict=True)}
    return {name: x}


@torch.no_grad()
def _read_norm(norm: Any) -> tuple[Tensor, float]:
    """The gain (`weight` or `1 + weight`) and epsilon of an RMS norm. Raises: BeyondOurProgram for other norms."""
    wide = deepcopy(norm).float()
    state = {**dict(wide.named_parameters()), **dict(wide.named_buffers())}
    if [*state] == ["weight"] and state["weight"].dim() == 1:
        weight = state["weight"].detach()
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn(1, 2, len(weight), generator=generator).to(weight.device)
        for eps in {v for v in vars(norm).values() if isinstance(v, float) and 0 < v < 0.1}:
            for gain in (weight, 1 + weight):
                if all(_is_norm(wide, size * numbers, gain, eps) for size in _NORM_SIZES):
                    return norm.weight if gain is weight else gain, eps
    raise BeyondOurProgram(f"{type(norm).__name__} is not an RMS norm")


def _is_norm(norm: nn.Module, x: Tensor, gain: Tensor, eps: float) -> bool:
    try:
        found = norm(x)
    except Exception:  # any type: the module expects other arguments
        return False
    difference = found - F.rms_norm(x, gain.shape, gain, eps)
    return bool(difference.norm() <= _NORM_TOLERANCE * found.norm())


@torch.inference_mode()
def _read_activation(mlp: nn.Module) -> str:
    x = torch.linspace(-6, 6, 97)
    for module in mlp.children():
        if not any(True for _ in module.parameters()):
            y = module(x)
            for name, function in ACTIVATIONS.items():
                if torch.allclose(y, function(x), atol=1e-6):
                    return name
    raise BeyondOurProgram("its activation is not supported")
