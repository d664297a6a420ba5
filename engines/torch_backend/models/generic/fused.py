"""Runs modules of transformers by our operators. Modules are recognised by what they compute, not by name.

One call of the model is recorded: which linear layers read the same tensor, and where queries, keys, values and
gates come from. This suggests a replacement for a module. The replacement is used if its results equal those of
the module's own forward pass for random inputs.

Shape letters: N tokens, C width, H query heads, K key/value heads, D head width, E value width.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engines.torch_backend.layers.linear_group import LinearGroup, Stream
from engines.torch_backend.layers.norm import RMSNorm
from engines.torch_backend.models.generic.attention import (
    NO_NORMS,
    QKV,
    HeadNorms,
    LayerSpec,
    PagedLayer,
    Rotation,
    counts_by_cache,
)
from engines.torch_backend.ops.decoder_chain.reference import Chain, LayerProducts
from engines.torch_backend.ops.linear.reference import Prologue
from engines.torch_backend.ops.registry import Ops

#: Scales of random inputs of a norm: small ones reveal a wrong epsilon.
_SIZES = (1e-3, 1.0, 30.0)
#: Allowed difference to a module's own forward pass, relative to its result.
_TOLERANCE = 1e-5
_FAR = 10**6
_Tensors = list[Tensor]


# -- recorded calls of modules
@dataclass(frozen=True, slots=True)
class Call:
    """Input and output of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    #: The hidden states when it returned, which later modules may change in place.
    copied: Tensor | None

    @property
    def input(self) -> Any:
        """The hidden states, however they were passed."""
        return self.args[0] if self.args else self.kwargs.get("hidden_states")

    def again(self, module: nn.Module, x: Tensor, **others: Any) -> Tensor:
        """Run the module's own forward pass on `x`, at positions far from the start of a sequence."""
        kwargs = {name: _far(value) for name, value in self.kwargs.items()} | others
        args = (x, *self.args[1:]) if self.args else ()
        if not args:
            kwargs["hidden_states"] = x
        return first_of(module.forward(*args, **kwargs))


class Watched:
    """The calls of all modules in one forward pass, in the order of their returns."""

    def __init__(self) -> None:
        self._calls: dict[nn.Module, list[Call]] = {}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Record calls inside the block."""

        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = first_of(output)
            copied = given.clone() if isinstance(given, Tensor) else None
            self._calls.setdefault(module, []).append(Call(args, kwargs, output, copied))

        handles = [m.register_forward_hook(note, with_kwargs=True) for m in model.modules()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def calls(self, module: nn.Module) -> list[Call]:
        return self._calls.get(module, [])

    def call(self, module: nn.Module) -> Call | None:
        """The call of a module; None if there was none or several."""
        calls = self.calls(module)
        return calls[0] if len(calls) == 1 else None

    def within(self, module: nn.Module) -> list[tuple[str, nn.Module, Call]]:
        """Direct children of a module that were called once."""
        names = {child: name for name, child in module.named_children()}
        called = [(child, self.call(child)) for child in self._calls if child in names]
        return [(names[child], child, call) for child, call in called if call is not None]

    def siblings(self, module: nn.Module) -> list[list[str]]:
        """Groups of direct children, by name, that are linear layers and read the same tensor."""
        groups: dict[int, list[str]] = {}
        for name, child, call in self.within(module):
            if type(child) is nn.Linear:
                groups.setdefault(id(call.input), []).append(name)
        return [names for names in groups.values() if len(names) > 1]


# -- norms
def find_norm(module: nn.Module) -> RMSNorm | None:
    """The RMS norm that a module computes, with `weight` or `1 + weight` as its gain; None for other modules."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if [*state] != ["weight"] or state["weight"].dim() != 1:
        return None
    weight = state["weight"].detach()
    for eps in {v for v in vars(module).values() if isinstance(v, float) and 0 < v < 0.1}:
        for gain in (weight, (1 + weight.float()).to(weight.dtype)):
            norm = RMSNorm(len(weight), eps).requires_grad_(False)
            norm.weight.data = gain
            inputs = [size * _random(1, 2, len(weight)).to(weight.device) for size in _SIZES]
            if all(_gives(lambda x=x: [module(x)], [norm(x)]) for x in inputs):
                return norm
    return None


# -- feed-forwards
@dataclass(frozen=True, slots=True)
class GatedParts:
    """The parts of a gated feed-forward. `inputs` names the layers of gate and values, or one for both."""

    module: nn.Module
    inputs: tuple[str, ...]
    output: str
    gate: Callable[[Tensor], Tensor]


class Gated:
    """Replaces the forward pass of a gated feed-forward."""

    def __init__(self, parts: GatedParts, norm: RMSNorm | None = None) -> None:
        """`norm`: of the inputs; None if they are normalised."""
        self.gate_up = _group(parts.module, parts.inputs, Prologue(norm=norm))
        self.down = _group(parts.module, (parts.output,), Prologue(gate=parts.gate))
        self.linears = (self.gate_up, self.down)
        self.dtype: torch.dtype | None = None

    def __call__(self, x: Tensor, **_: Any) -> Tensor:
        """Shapes: (1, N, C), kept."""
        rows = x.reshape(-1, x.shape[-1])
        return self.down(self.gate_up(rows.to(self.dtype or x.dtype))).to(x.dtype).view(x.shape)


def find_gated(module: nn.Module, watched: Watched) -> GatedParts | None:
    """The parts of a module that computes down(act(gate(x)) * up(x))."""
    call = watched.call(module)
    children = watched.within(module)
    linears = [(name, each) for name, child, each in children if type(child) is nn.Linear]
    others = [child for _, child, _ in children if type(child) is not nn.Linear]
    if call is None or len(others) != 1 or len(linears) not in (2, 3) or not _is_flat(call):
        return None
    *inputs, (output, last) = linears
    if any(each.input is not call.input for _, each in inputs) or last.output is not call.output:
        return None
    names = [name for name, _ in inputs]
    x = _random(*call.input.shape).to(call.input)
    expected = [call.again(module, x)]
    gate = _known_activation(others[0])
    for order in (names, names[::-1]) if len(names) > 1 else (names,):
        parts = GatedParts(module, tuple(order), output, gate)
        if _gives(lambda parts=parts: [Gated(parts)(x)], expected):
            return parts
    return None


def _known_activation(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The equivalent activation that kernels support, else the module itself."""
    x = _random(1, 256) * 3
    return F.silu if _gives(lambda: [module(x)], [F.silu(x)]) else module


# -- attention
@dataclass(frozen=True, slots=True)
class AttentionParts:
    """An attention layer: names of its linear layers, its norms of queries and keys, and the rotated channels."""

    module: nn.Module
    spec: LayerSpec
    inputs: tuple[str, ...]
    output: str
    #: Which of (q, k, v), the module, whether per head.
    norms: tuple[tuple[int, nn.Module, bool], ...]
    rotated: int


class Attention:
    """Replaces the forward pass of an attention layer."""

    def __init__(self, parts: AttentionParts, norm: RMSNorm | None = None) -> None:
        """`norm`: of the inputs; None if they are normalised."""
        self._parts = parts
        self._module: Any = parts.module
        spec = parts.spec
        self.head_norms = _head_norms(parts)
        self._widths = [n * spec.key_dim for n in (spec.num_heads, *[spec.num_kv_heads] * 2)]
        self.qkv = _group(parts.module, parts.inputs, Prologue(norm=norm))
        self.out = _group(parts.module, (parts.output,))
        self.linears = (self.qkv, self.out)
        self.dtype: torch.dtype | None = None

    def __call__(self, hidden_states: Tensor, *_: Any, **options: Any) -> tuple[Tensor, None]:
        """Shapes: (1, N, C), kept."""
        x = hidden_states
        mixed = self.mix(self.qkv(x[0].to(self.dtype or x.dtype)), options, x.dtype)
        return self.out(mixed).to(x.dtype)[None], None

    def mix(self, qkv: Tensor, options: dict[str, Any], dtype: torch.dtype) -> Tensor:
        """Run the attention operator. Shapes: (N, (H + 2 K) D); returns (N, H D)."""
        rotation, norms = self.rotation(options), self.head_norms
        if self._parts.norms and (norms is None or not self.pages.takes_norms(rotation)):
            self._norm(qkv)
            norms = None
        return self.pages.attend(qkv, rotation, dtype, norms or NO_NORMS)

    def _norm(self, qkv: Tensor) -> None:
        for place, norm, is_by_head in self._parts.norms:
            part = qkv.split(self._widths, dim=1)[place]
            shape = (1, len(qkv), -1, self._parts.spec.key_dim) if is_by_head else (1, *part.shape)
            part.copy_(norm(part.reshape(shape)).view(part.shape))

    def rotation(self, options: dict[str, Any]) -> Rotation | None:
        if not self._parts.rotated:
            return None
        cos, sin = options["position_embeddings"]
        return Rotation(cos, sin, self._parts.rotated)

    @property
    def pages(self) -> Any:
        """The layer's KV cache and mask."""
        return self._module.pages


def _head_norms(parts: AttentionParts) -> HeadNorms | None:
    """The norms of queries and keys, if the attention operator supports them."""
    norms: list[RMSNorm | None] = [None, None]
    for place, norm, is_by_head in parts.norms:
        if place > 1 or not is_by_head or not isinstance(norm, RMSNorm):
            return None
        norms[place] = norm
    query, key = norms
    return None if query and key and query.eps != key.eps else (query, key)


def find_attention(module: nn.Module, spec: LayerSpec, watched: Watched) -> AttentionParts | None:
    """The parts of a layer of q, k and v, optional norms, rotation of halves, attention and a projection."""
    call = watched.call(module)
    plain = (spec.has_sinks, spec.shares, spec.key_dim != spec.value_dim) == (False, None, False)
    if call is None or not plain or not _is_flat(call) or counts_by_cache(module):
        return None
    children = watched.within(module)
    linears = [(name, each) for name, child, each in children if type(child) is nn.Linear]
    inputs = [(name, each) for name, each in linears if each.input is call.input]
    outputs = [name for name, each in linears if each.output is first_of(call.output)]
    if len(inputs) not in (1, 3) or len(outputs) != 1 or len(inputs) + 1 != len(linears):
        return None
    norms = []
    for _, child, each in children:
        if type(child) is nn.Linear:
            continue
        places = [n for n, (_, other) in enumerate(inputs) if _is_view(each.input, other.output)]
        if len(places) != 1 or len(inputs) != 3:
            return None
        norms.append((places[0], find_norm(child) or child, each.input.dim() == 4))
    angles: Any = call.kwargs.get("position_embeddings")
    widths = [angles[0].shape[-1], 0] if _are_angles(angles) else [0]
    names = tuple(name for name, _ in inputs)
    found = [AttentionParts(module, spec, names, outputs[0], tuple(norms), n) for n in widths]
    x = _random(*call.input.shape).to(call.input)
    return _first_equal(Attention, found, call, x, found[0])


class _Recorder(PagedLayer):
    """Records queries, keys and values, and returns random numbers."""

    def __init__(self, spec: LayerSpec) -> None:
        self.spec = spec
        self._kept: _Tensors = []

    def __call__(self, qkv: QKV, options: dict[str, Any], *_: Any) -> Tensor:
        """Shapes: as `PagedLayer`."""
        self._kept = [*qkv]
        shape = 1, qkv[0].shape[2], self.spec.num_heads, self.spec.value_dim
        return _random(*shape).to(qkv[0])

    def takes_norms(self, rotation: Rotation | None) -> bool:
        return False

    def take(self) -> _Tensors:
        kept, self._kept = self._kept, []
        return kept


def _first_equal(
    create: type, found: Sequence[Any], call: Call, x: Tensor, attention: AttentionParts
) -> Any:
    """The first parts that compute what their module does. `attention` is in the module, or is the module."""
    angles: Any = call.kwargs.get("position_embeddings")
    given = {"position_embeddings": _random_angles(angles)} if _are_angles(angles) else {}
    layer: Any = attention.module
    record = _Recorder(attention.spec)
    pages, layer.pages = layer.pages, record
    try:
        expected = [call.again(found[0].module, x, **given), *record.take()]
        for parts in found:
            if _gives(lambda p=parts: [first_of(create(p)(x, **given)), *record.take()], expected):
                return parts
    finally:
        layer.pages = pages
    return None


# -- whole layers
class Block(NamedTuple):
    """The norms before and behind a module that reads the residual stream and adds to it."""

    before: RMSNorm | None
    behind: RMSNorm | None


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A layer of attention and feed-forward."""

    module: nn.Module
    attention: AttentionParts
    gated: GatedParts
    blocks: tuple[Block, Block]


class Layer:
    """Replaces the forward pass of a layer. Norms and residual sums are fused into the linear layers."""

    def __init__(self, parts: LayerParts) -> None:
        self._blocks = parts.blocks
        self.attention = Attention(parts.attention, parts.blocks[0].before)
        self._gated = Gated(parts.gated, parts.blocks[1].before)
        self.linears = (*self.attention.linears, *self._gated.linears)
        self.dtype: torch.dtype | None = None
        self.run: Run | None = None

    def __call__(self, hidden_states: Tensor, *_: Any, **options: Any) -> Tensor:
        """Shapes: (1, N, C), kept."""
        x, attention, gated = hidden_states, self.attention, self._gated
        if self.run is not None and (found := self.run.compute(self, x, options)) is not None:
            return found
        rows = self.run.rows(self, x) if self.run else x[0].to(self.dtype or x.dtype, copy=True)
        stream = Stream(rows, is_own=True)
        mixed = attention.mix(attention.qkv(stream), options, x.dtype)
        _add(stream, attention.out, mixed, self._blocks[0].behind)
        _add(stream, gated.down, gated.gate_up(stream), self._blocks[1].behind)
        y = stream.tensor()
        if self.run is not None:
            self.run.keep(self, y)
        return y.to(x.dtype)[None]

    @property
    def products(self) -> LayerProducts | None:
        """The linear layers for a decoder chain; None if the layer computes more than a chain supports."""
        attention, norms = self.attention, self.attention.head_norms
        is_normed_behind = any(block.behind is not None for block in self._blocks)
        if is_normed_behind or norms is None or not all(each.is_whole for each in self.linears):
            return None
        qkv, out, gate_up, down = (each.kernel for each in self.linears)
        return LayerProducts(qkv, out, gate_up, down, attention.pages.spec.form(norms))


class Run:
    """Consecutive layers, each of which reads the previous layer's output. The first may compute all in one call.

    Layers run one by one if the model may add image features or an adapter between them. The residual stream is
    float32 in both cases, so that no result depends on the other requests of the step.
    """

    def __init__(self, layers: Sequence[Layer], ops: Ops) -> None:
        self._layers = layers
        self._ops = ops
        self._specs: list[LayerSpec] = []  #: of the layers of the chain
        self._chain: Chain | None = None
        self._computed: tuple[Tensor, int, Any] | None = None  #: the result for the other layers
        self._kept: Tensor | None = None  #: the output of a layer before rounding

    def compute(self, layer: Layer, x: Tensor, options: dict[str, Any]) -> Tensor | None:
        """The result of all layers; None if each must run by itself. Raises: RuntimeError. Shapes: (1, N, C), kept."""
        angles = options.get("position_embeddings")
        if layer is self._layers[0]:
            found = self._compute(x, options)
            self._computed = None if found is None else (found, found._version, angles)
        elif self._computed is None:
            return None
        elif (
            self._computed[0] is not x
            or self._computed[1] != x._version
            or self._computed[2] is not angles
        ):
            raise RuntimeError("the model changed the input of a layer that was already computed")
        return None if self._computed is None else self._computed[0]

    def rows(self, layer: Layer, x: Tensor) -> Tensor:
        """The input of a layer that runs alone: the unrounded output of the previous layer, if unchanged.

        Shapes: (1, N, C); returns float32 (N, C), a copy.
        """
        kept, self._kept = self._kept, None
        if kept is None or layer is self._layers[0] or x.dtype == torch.float32:
            return x[0].to(torch.float32, copy=True)
        return torch.where(x[0] == kept.to(x.dtype), kept, x[0])

    def keep(self, layer: Layer, rows: Tensor) -> None:
        """Record the output of a layer, for the next one. Shapes: float32 (N, C)."""
        self._kept = None if layer is self._layers[-1] else rows

    def _compute(self, x: Tensor, options: dict[str, Any]) -> Tensor | None:
        pages = [layer.attention.pages for layer in self._layers]
        inputs = pages[0].step.inputs
        is_adapted = any(each.is_adapted for layer in self._layers for each in layer.linears)
        if inputs.images or inputs.bidirectional or is_adapted:
            return None
        specs = [each.spec for each in pages]
        if specs != self._specs:
            self._specs, self._chain = specs, self._make(pages, x.dtype, options)
        if self._chain is None:
            return None
        attend = pages[0].kernel(0, self._layers[0].attention.rotation(options), x.dtype)
        if attend is None or not self._chain.can_run(x[0], attend):
            return None
        rows = x[0].to(torch.float32, copy=True)
        self._chain(rows, attend)
        with torch.inference_mode(False):  # so that the tensor has a version counter
            found = torch.empty(x.shape, dtype=x.dtype)
        return found.copy_(rows[None])

    def _make(
        self, pages: Sequence[Any], dtype: torch.dtype, options: dict[str, Any]
    ) -> Chain | None:
        """The chain of layers that one attention operator can compute."""
        products = [layer.products for layer in self._layers]
        rotations = [layer.attention.rotation(options) for layer in self._layers]
        kernels = [
            each.kernel(place, rotation, dtype)
            for place, (each, rotation) in enumerate(zip(pages, rotations, strict=True))
        ]
        if None in kernels or any(each is not kernels[0] for each in kernels):
            return None
        whole = [each for each in products if each is not None]
        return self._ops["decoder_chain"](whole) if len(whole) == len(products) else None


def find_runs(layers: Iterable[nn.Module], watched: Watched) -> list[list[nn.Module]]:
    """Runs of layers that read the previous layer's output and use the same rotary angles."""
    runs: list[list[nn.Module]] = []
    last: Call | None = None
    for module in layers:
        call = watched.call(module)
        angles = [each and each.kwargs.get("position_embeddings") for each in (call, last)]
        if call and last and angles[0] is angles[1] and _hands_on(last, call):
            runs[-1].append(module)
        else:
            runs.append([module])
        last = call
    return [run for run in runs if len(run) > 1]


def _hands_on(last: Call, call: Call) -> bool:
    """Whether the input of a layer is the unchanged output of the previous layer."""
    copied = last.copied
    return call.input is last.output and copied is not None and torch.equal(call.input, copied)


def _add(stream: Stream, linear: LinearGroup, x: Tensor, norm: RMSNorm | None) -> None:
    if norm is None:
        linear(x, add_to=stream)
    else:
        stream.add(norm(linear(x)))


def find_layer(
    module: nn.Module,
    watched: Watched,
    attentions: dict[nn.Module, AttentionParts],
    gated: dict[nn.Module, GatedParts],
) -> LayerParts | None:
    """The parts of a layer that computes y = x + attention(x), then y + feed_forward(y), with optional norms."""
    call = watched.call(module)
    children = watched.within(module)
    if call is None or not isinstance(call.output, Tensor) or not _is_flat(call):
        return None
    attention = next((each for _, each, _ in children if each in attentions), None)
    mlp = next((each for _, each, _ in children if each in gated), None)
    if attention is None or mlp is None:
        return None
    blocks = [_find_block(each, children, watched) for each in (attention, mlp)]
    norms = [norm for block in blocks for norm in block if norm is not None]
    mixing = watched.call(attention)
    if len(norms) + len(blocks) != len(children) or mixing is None:
        return None
    angles: list[Any] = [each.kwargs.get("position_embeddings") for each in (call, mixing)]
    if angles[0] is not angles[1]:
        return None
    parts = LayerParts(module, attentions[attention], gated[mlp], (blocks[0], blocks[1]))
    x = 0.05 * _random(*call.input.shape).to(call.input)  # small relative to what is added
    return _first_equal(Layer, [parts], call, x, parts.attention)


def _find_block(
    module: nn.Module, children: list[tuple[str, nn.Module, Call]], watched: Watched
) -> Block:
    """The norms before and behind a child of a layer, if any."""
    call = watched.calls(module)[0]
    before = [norm for _, norm, each in children if each.output is call.input]
    behind = [norm for _, norm, each in children if each.input is first_of(call.output)]
    norms = [find_norm(found[0]) if found else None for found in (before, behind)]
    return Block(*norms)


# -- whole models
@dataclass(frozen=True)
class Recognised:
    """The recognised modules of a model. A recognised layer's attention and feed-forward are listed too."""

    norms: dict[nn.Module, RMSNorm]
    gated: dict[nn.Module, GatedParts]
    attentions: dict[nn.Module, AttentionParts]
    layers: dict[nn.Module, LayerParts]
    runs: list[list[nn.Module]]
    #: Linear layers that read the same tensor, in modules that are not replaced.
    siblings: list[list[str]]

    @classmethod
    def of(
        cls, model: nn.Module, layers: str, specs: dict[nn.Module, LayerSpec], watched: Watched
    ) -> "Recognised":
        """Recognise modules within `layers`, and norms anywhere."""
        names = {m: name for name, m in model.named_modules() if name.startswith(f"{layers}.")}
        modules = list(names)
        norms = {m: norm for m in model.modules() if (norm := _norm_of(m, watched)) is not None}
        gated = {m: parts for m in modules if (parts := find_gated(m, watched)) is not None}
        attentions = {
            module: parts
            for module, spec in specs.items()
            if (parts := find_attention(module, spec, watched)) is not None
        }
        parts = ((m, find_layer(m, watched, attentions, gated)) for m in modules)
        found = {module: each for module, each in parts if each is not None}
        siblings = [
            [f"{names[m]}.{child}" for child in group]
            for m in modules
            if m not in gated and m not in attentions
            for group in watched.siblings(m)
        ]
        return cls(norms, gated, attentions, found, find_runs(found, watched), siblings)

    def forwards(self) -> dict[nn.Module, Any]:
        """Our forward passes of the largest recognised modules: a layer instead of its attention and feed-forward."""
        parts = {p.module for x in self.layers.values() for p in (x.attention, x.gated)}
        kinds: Any = ((Gated, self.gated), (Attention, self.attentions), (Layer, self.layers))
        return {m: create(p) for create, found in kinds for m, p in found.items() if m not in parts}

    def counts(self) -> str:
        return ", ".join(
            f"{len(found)} {name}"
            for name in ("layers", "attentions", "gated", "norms")
            if (found := getattr(self, name))
        )


def _norm_of(module: nn.Module, watched: Watched) -> RMSNorm | None:
    call = watched.call(module)
    if call is None or call.kwargs or len(call.args) != 1 or not isinstance(call.output, Tensor):
        return None
    return find_norm(module)


class Fused:
    """Installs our forward passes in the recognised modules, and removes them to run transformers' own."""

    def __init__(self, found: Recognised) -> None:
        self.found = found
        self._forwards: dict[nn.Module, Any] = {}

    def bind(self, ops: Ops, dtype: torch.dtype) -> None:
        self.remove()
        self._forwards.clear()
        if not ops.is_native:
            return
        self._forwards |= {module: norm.forward for module, norm in self.found.norms.items()}
        for module, forward in self.found.forwards().items():
            self._forwards[module] = forward
            forward.dtype = torch.float32  # of the kernels' inputs
            for linear in forward.linears:
                linear.bind(ops, dtype)
        for modules in self.found.runs if ops.uses("decoder_chain") else ():
            layers = [self._forwards[module] for module in modules]
            run = Run(layers, ops)
            for layer in layers:
                layer.run = run
        self.put()

    def put(self) -> None:
        """Replace the modules' own forward passes."""
        for module, forward in self._forwards.items():
            module.forward = forward  # pyright: ignore

    def remove(self) -> None:
        for module in self._forwards:
            module.__dict__.pop("forward", None)


# -- small things
def _group(module: nn.Module, names: tuple[str, ...], before: Prologue = Prologue()) -> LinearGroup:
    return LinearGroup(*map(module.get_submodule, names), before=before)


def _far(value: Any) -> Any:
    """Shift token positions far from 0: masks and windows may depend on them."""
    is_count = isinstance(value, Tensor) and value.dtype == torch.long
    return value + _FAR if is_count else value


def first_of(output: Any) -> Any:
    """The hidden states of a module's output."""
    return output[0] if isinstance(output, tuple) else output


def _is_flat(call: Call) -> bool:
    """Whether the input is one sequence of tokens, and no argument is an object, such as a cache."""
    given, x = [*call.args, *call.kwargs.values()], call.input
    if not all(isinstance(each, Tensor | tuple | int | float | str | None) for each in given):
        return False
    return isinstance(x, Tensor) and x.dim() == 3 and len(x) == 1


def _is_view(x: Any, of: Tensor) -> bool:
    return isinstance(x, Tensor) and x.data_ptr() == of.data_ptr() and x.numel() == of.numel()


def _are_angles(given: Any) -> bool:
    """Whether these are cosines and sines of all tokens. Shapes: two (1, N, R)."""
    return (
        isinstance(given, tuple)
        and len(given) == 2
        and all(isinstance(x, Tensor) and x.dim() == 3 and len(x) == 1 for x in given)
    )


def _random_angles(like: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Angles that are equal in both halves."""
    half = 3 * _random(1, like[0].shape[1], like[0].shape[2] // 2)
    angles = torch.cat([half, half], dim=-1)
    return angles.cos().to(like[0]), angles.sin().to(like[0])


def _random(*shape: int) -> Tensor:
    """Random numbers that depend on the shape alone; the global random state does not change."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _gives(compute: Callable[[], Iterable[Tensor]], expected: _Tensors) -> bool:
    """Whether a computation gives this result, up to rounding; one that fails does not."""
    try:
        found = list(compute())
    except Exception:  # of any type: shapes that do not fit
        return False
    return len(found) == len(expected) and all(map(_are_equal, found, expected))


def _are_equal(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    tolerance = max(_TOLERANCE, 4 * torch.finfo(expected.dtype).eps)
    difference = (found.float() - expected.float()).norm()
    return bool(difference <= tolerance * expected.float().norm())
