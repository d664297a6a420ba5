"""A transformers model that runs the engine's steps over the paged KV cache.

Shape letters: N new tokens of a step, R rows of positions, V vocabulary.
"""

import inspect
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import greenlet
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engines.core.sequence import ImageInput, Prompt
from engines.packages.checkpoint_json import one_line
from engines.silent_transformers import silent_transformers
from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.linear import FLOAT, Linear, QuantizedMethod
from engines.torch_backend.layers.linear_group import adopt
from engines.torch_backend.models.config import BeyondOurProgram, KVShape, UnsupportedCheckpoint
from engines.torch_backend.models.generic.attention import (
    NAME,
    Counted,
    LayerSpec,
    PagedLayer,
    PagedStep,
    Probe,
    check_masks,
    counts_by_cache,
)
from engines.torch_backend.models.generic.config import GenericConfig
from engines.torch_backend.models.generic.image_form import ImageForm
from engines.torch_backend.models.generic.linears import (
    allow_int8,
    bind_layers,
    keep_stored,
    linears_within,
    stored_places,
)
from engines.torch_backend.models.generic.rope import batched, freeze_rope
from engines.torch_backend.models.generic.self_check import (
    difference_with_image,
    largest_difference,
    placed,
)
from engines.torch_backend.models.generic.stand_ins import cast
from engines.torch_backend.models.generic.states import Mixer, SequenceStates, is_mixer
from engines.torch_backend.models.generic.tested import TESTED
from engines.torch_backend.models.generic.token_types import control_ids, token_types, type_names
from engines.torch_backend.models.generic.watched import watching
from engines.torch_backend.models.lowered.model import lower
from engines.torch_backend.models.registry import FamilyModel, ModelFamily, check_names, check_shape
from engines.torch_backend.multimodal.image_masks import bidirectional_layers, binds_prompts
from engines.torch_backend.multimodal.processed import TYPES, ProcessedImage
from engines.torch_backend.multimodal.transformers_images import PositionHooks
from engines.torch_backend.ops.registry import Ops
from engines.torch_backend.step import ImageSlots, StepInputs

logger = logging.getLogger(__name__)
_PROBE_TOKENS = (1, 2)
#: Largest difference between the engine's and transformers' logits, relative to their standard deviation.
_LARGEST_DIFFERENCE = 1e-3
_LARGEST_ROUNDED = 0.1


class GenericModel(FamilyModel):
    """Transformers' modules with the engine's positions, KV cache and attention."""

    config: GenericConfig
    converts_weights = True
    speed_path = "generic"
    inner: PreTrainedModel

    def __init__(self, config: GenericConfig, lowers: bool = True) -> None:
        super().__init__()
        self._lowers = lowers
        self.config = config
        self.language_model = None
        self.specs: dict[nn.Module, LayerSpec] = {}  #: by attention layer, in order of calls
        self._step = PagedStep()
        self._ops: Ops | None = None
        self._arguments = inspect.signature(config.model_class.forward).parameters.keys()
        self._types = type_names(self._arguments)
        self._is_rounded = False  #: whether weights are integers
        self._forms: dict[str, ImageForm] = {}  # by kind of slot: "image" or "video"
        self._no_feature: dict[str, Tensor] = {}
        self._calls_head = False

    # -- loading
    def take(
        self,
        weights: dict[str, Tensor],
        family: ModelFamily,
        device: torch.device,
        dtype: torch.dtype,
        kept: frozenset[torch.dtype],
        check_room: Callable[[Collection[str]], None],
    ) -> FamilyModel:
        """Load a checkpoint with transformers, and lower its decoder if possible. Raises: UnsupportedCheckpoint."""
        first = _loading_dtype(weights, dtype, kept)
        self._make(weights, device, first)
        name = self.config.model_class.__name__
        if self._lowers:
            try:
                lowered = lower(self, dtype)
            except BeyondOurProgram as refusal:
                logger.info("%s: generic, transformers computes the decoder: %s", name, refusal)
            else:
                logger.info("%s: lowered, this project's Llama computes the decoder", name)
                return lowered
        if first != dtype:
            paths = stored_places(self.inner, self._linear_names, weights)
            check_room(paths.keys())
            self._make(weights, device, dtype, paths)
        return self

    def _make(
        self,
        weights: dict[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        stored: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        """Create the model in this dtype and probe its layers. `stored`: module paths of weights to keep as stored."""
        empty = {name: weights[name].new_zeros(1).expand_as(weights[name]) for name in stored}
        # Load on the CPU, because transformers requires accelerate for other devices, and a GPU can be too small.
        self.inner = self._load(weights | empty, dtype).requires_grad_(False).eval()
        for name, paths in stored.items():
            keep_stored(map(self.inner.get_submodule, paths), weights[name], dtype)
        self._dtype = dtype
        moved: Any = self.inner
        moved.to(device)
        text = self._text
        self._own_attention = text._attn_implementation
        text._attn_implementation_internal = NAME
        self._mixers: list[Mixer] = []
        self._states = SequenceStates()
        for module in self.inner.modules():
            if counts_by_cache(module):
                counted: Any = Counted(module)
                module.forward = counted
            if is_mixer(module):
                mixer: Any = Mixer(module, self._states)
                module.forward = mixer
                self._mixers.append(mixer)
        with watching(self.inner) as calls:
            self.specs = self._probe(device)
        self._decoder_name = self._layers_name.rpartition(".")[0]
        check_masks(self.inner, list(self.specs.values()))
        head = self.inner.get_output_embeddings()
        self._calls_head = type(head) is nn.Linear and bool(calls[head])
        if self.config.takes_images:
            self.binds_prompts = binds_prompts(self.inner)
            kinds = bidirectional_layers(self.inner)
            self.specs = {
                module: replace(spec, is_bidirectional=kinds is None or spec.kind in kinds)
                for module, spec in self.specs.items()
            }
        self.shares_prefixes = not (self._mixers or self.binds_prompts)
        self.state_bytes_per_sequence = sum(mixer.num_bytes for mixer in self._mixers)

    def _load(self, weights: dict[str, Tensor], dtype: torch.dtype) -> PreTrainedModel:
        name = self.config.model_class.__name__
        weights = {n: cast(x, dtype) for n, x in weights.items()}
        try:
            with silent_transformers():
                result: Any = self.config.model_class.from_pretrained(
                    None,
                    config=self.config.full,
                    state_dict=weights,
                    dtype=dtype,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,
                )
        except Exception as error:  # transformers raises any type
            raise UnsupportedCheckpoint(
                f"transformers cannot load {name}: {_explain(error)}"
            ) from error
        loaded, info = result
        check_names(sorted(info["missing_keys"]), sorted(info["unexpected_keys"]))
        for weight, found, expected in info["mismatched_keys"]:
            check_shape(weight, found, expected)
        return loaded

    @torch.inference_mode()
    def _probe(self, device: torch.device) -> dict[nn.Module, LayerSpec]:
        """Run the model once and record the specs of its layers. Raises: UnsupportedCheckpoint."""
        probe: Any = Probe(hasattr(self.inner, "create_masks_for_generate"))
        for module in self.inner.modules():
            module.pages = probe
        if "position_ids" not in self._arguments:
            raise self._refuse("its forward() does not accept position_ids")
        ids = torch.tensor([_PROBE_TOKENS], device=device)
        positions = PositionHooks(self.inner).positions(_PROBE_TOKENS, ()).to(device)
        self.num_position_rows = len(positions)
        try:
            self.inner(input_ids=ids, position_ids=batched(positions), use_cache=False)
            for mixer in self._mixers:
                mixer.measure()
        except Exception as error:  # any type: layers that expect a mask fail in different ways
            own = "" if probe.layers else "its layers bypass transformers' attention interface: "
            raise self._refuse(f"{own}{_explain(error)}") from error
        text = self._text
        types = getattr(text, "layer_types", None) or [None] * text.num_hidden_layers
        num_wanted = sum(kind not in ("mlp", "moe") for kind in types)
        num_missing = num_wanted - len(probe.layers) - len(self._mixers)
        if num_missing > 0 or not probe.layers:
            raise self._refuse(
                f"{num_missing} of its {num_wanted} layers bypass transformers' attention interface"
            )
        return probe.layers

    def _refuse(self, why: str) -> UnsupportedCheckpoint:
        name = self.config.model_class.__name__
        return UnsupportedCheckpoint(f"{name} cannot use paged attention: {why}")

    @property
    def _text(self) -> Any:
        return self.inner.config.get_text_config(decoder=True)

    # -- called by the runner
    @property
    def kv_shapes(self) -> Sequence[KVShape]:
        """One pool for all layers of a shape; layers that read another layer's keys and values need no pool."""
        own = [spec.pool_shape for spec in self.specs.values() if spec.shares is None]
        return [KVShape(own.count(shape), *shape) for shape in dict.fromkeys(own)]

    def limit(self, max_model_len: int) -> None:
        freeze_rope(self.inner, max_model_len)
        shapes = [(shape.num_kv_heads, shape.head_dim) for shape in self.kv_shapes]
        num_taken = [0] * len(shapes)
        places: list[tuple[int, int]] = []
        for module, spec in self.specs.items():
            if spec.shares is not None:
                places.append(places[spec.shares])
            else:
                pool = shapes.index(spec.pool_shape)
                places.append((pool, num_taken[pool]))
                num_taken[pool] += 1
            layer: Any = PagedLayer(spec.within(max_model_len), self._step, *places[-1])
            module.pages = layer

    def bind(self, ops: Ops, dtype: torch.dtype) -> None:
        self._ops = ops
        linears = [module for module in self.inner.modules() if isinstance(module, Linear)]
        self._is_rounded |= any(linear.method is not FLOAT for linear in linears)
        for name in self._linear_names:
            adopt(self.inner, name)
        bind_layers(self.inner, ops, dtype)

    def quantize(self, scheme: QuantizedMethod, dtype: torch.dtype) -> None:
        """Quantize the linear layers of the decoder; towers and joined experts are not quantized."""
        num_quantized = 0
        for name in linears_within(self.inner, self._layers_name):
            layer = adopt(self.inner, name)
            if scheme.fits((layer.out_features, layer.in_features)):
                layer.quantize(scheme, dtype)
                num_quantized += 1
        if not num_quantized:
            name = self.config.model_class.__name__
            raise UnsupportedCheckpoint(
                f"{name} has no linear layers that can be quantized to {scheme.name}"
            )
        self._is_rounded = True
        logger.info("%d linear layers are quantized to %s", num_quantized, scheme.name)

    def allow_int8_head(self) -> None:
        head: Any = self.inner.get_output_embeddings()
        table = self.inner.get_input_embeddings()
        if self._calls_head and head.weight is not getattr(table, "weight", None):
            adopt(self.inner, self._name_of(head)).quantizable = "int8"

    def allow_int8_beside(self) -> None:
        """Allow int8 outside the decoder, but not in text models, where such layers run for every token."""
        if self.config.takes_media:
            allow_int8(self.inner, self._decoder_name, self.inner.get_output_embeddings())

    def decoder_layers(self) -> tuple[str, nn.Module]:
        return self._layers_name, self.inner.get_submodule(self._layers_name)

    @property
    def _linear_names(self) -> list[str]:
        names = linears_within(self.inner, self._layers_name)
        if self._calls_head:
            head: Any = self.inner.get_output_embeddings()
            names.append(self._name_of(head))
        return names

    @property
    def _layers_name(self) -> str:
        """Name of the module list that contains the attention layers."""
        return re.split(r"\.\d+\.", self._name_of(next(iter(self.specs))))[0]

    def _name_of(self, wanted: nn.Module) -> str:
        return next(name for name, module in self.inner.named_modules() if module is wanted)

    def logits(self, inputs: StepInputs, pools: Sequence[KVCachePool]) -> Tensor:
        """Logits of the step's sampled rows. Shapes: returns (rows, V)."""
        assert self._ops is not None
        self._step.begin(inputs, pools, self._ops)
        ids = inputs.token_ids[None]
        arguments = self.inputs(ids, inputs.images, self._in_prompt(inputs))
        arguments |= {"input_ids": ids, "position_ids": inputs.positions.unsqueeze(-2)}
        rows = torch.tensor(inputs.sampled_rows, dtype=torch.long, device=ids.device)
        keeps = "logits_to_keep" in self._arguments  # else `**kwargs` would swallow it silently
        if keeps:
            arguments["logits_to_keep"] = rows
        with (
            self._states.step(inputs.sequences) if self._mixers else nullcontext(),
            self._placing_audio(inputs.images),
        ):
            logits = self.inner(**arguments, use_cache=False).logits[0]
        return logits if keeps else logits[rows]

    @contextmanager
    def _placing_audio(self, images: Sequence[ImageSlots]) -> Iterator[None]:
        """Put audio features into the decoder's embeddings; transformers does this for images and videos only."""
        audios = [image for image in images if image.kind == "audio"]
        if not audios:
            yield
            return

        def place(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            embeddings = kwargs["inputs_embeds"].clone()
            for audio in audios:
                audio.place(embeddings[0])
            return args, {**kwargs, "inputs_embeds": embeddings}

        decoder = self.inner.get_submodule(self._decoder_name)
        hook = decoder.register_forward_pre_hook(place, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def _in_prompt(self, inputs: StepInputs) -> Tensor | None:
        """Whether each token belongs to a prompt; None if the model has no token types. Shapes: returns (N,)."""
        if not self._types:
            return None
        counts = [torch.full((each.num_new,), each.num_prompt_tokens) for each in inputs.sequences]
        return inputs.indices < torch.cat(counts).to(inputs.indices.device)

    @property
    def state_bytes(self) -> int:
        return self._states.num_bytes

    def release(self, request_id: str) -> None:
        self._states.release(request_id)

    def encode(
        self, images: Sequence[ImageInput], device: torch.device, dtype: torch.dtype
    ) -> list[Tensor]:
        """Features of image slots; each encoder level adds C channels. Shapes: returns (slots, levels * C) each."""
        return [self._encode(image.pixels, device, dtype) for image in images]

    def _encode(self, pixels: ProcessedImage, device: torch.device, dtype: torch.dtype) -> Tensor:
        base: Any = self.inner.base_model
        if pixels.kind == "audio":  # by a forward pass, as few models have a method for audio
            inputs = {name: placed(x, device, dtype) for name, x in pixels.inputs.items()}
            ids = torch.tensor([[pixels.slot_id] * pixels.num_slots], device=device)
            decoder = self.inner.get_submodule(self._decoder_name)
            return embeddings_of(self.inner, decoder, input_ids=ids, **inputs)
        encode = base.get_image_features
        if pixels.kind == "video":
            encode = getattr(base, "get_video_features", encode)
        named = inspect.signature(encode).parameters.keys()
        inputs = {
            name: placed(given, device, dtype)
            for name, given in pixels.inputs.items()
            if pixels.kind == "image" or name in named
        }
        encoded = encode(**inputs, return_dict=True)
        form = self._forms[pixels.slots_of] = ImageForm.of(encoded)
        rows = form.rows(encoded)
        rows = rows[: pixels.num_slots] if pixels.kept is None else rows[pixels.kept.to(device)]
        if not pixels.indicators:
            return rows
        table: Tensor = encoded.visual_indicator_features
        order = torch.tensor(pixels.indicators, device=device)
        marked = rows.new_empty(len(order), rows.shape[1])
        marked[order < 0], marked[order >= 0] = rows, table[order[order >= 0]].to(rows.dtype)
        return marked

    def num_features(self, image: ImageInput) -> int | None:
        return image.pixels.num_slots if isinstance(image.pixels, ProcessedImage) else None

    def inputs(
        self,
        token_ids: Tensor,
        images: Sequence[ImageSlots],
        in_prompt: Tensor | None = None,
    ) -> dict[str, Any]:
        """Arguments of the model besides tokens and positions. Shapes: token_ids (1, N), in_prompt (N,)."""
        config: Any = self.inner.config
        if getattr(config, "image_token_id", None) is None or not (images or self._types):
            return {}
        ids = token_ids[0]
        kinds = torch.zeros_like(ids)
        groups: dict[str, list[ImageSlots]] = {}
        for image in images:
            kinds[image.start : image.start + len(image.features)] = TYPES[image.kind]
            if image.kind == "audio":
                continue  # see `_placing_audio`
            groups.setdefault(image.slots_of, []).append(image)
        asked = torch.ones_like(ids, dtype=torch.bool) if in_prompt is None else in_prompt
        inputs: dict[str, Any] = dict(
            token_types(self._types, config, token_ids, kinds[None], asked[None])
        )
        if groups:
            inputs["mm_encoder_outputs"] = {
                name: self._output(name, ids, kinds > 0, group) for name, group in groups.items()
            }
        return inputs

    def _output(self, name: str, ids: Tensor, filled: Tensor, images: list[ImageSlots]) -> Any:
        """The encoder's output for the images or videos of a step. Shapes: ids, filled (N,)."""
        rows = torch.cat([image.features for image in images])
        is_slot = ids == getattr(self.inner.config, f"{name}_token_id")
        indicators = self._indicators(ids, rows, filled)
        rows = rows[is_slot[filled]] if indicators else rows
        if bool((is_slot & ~filled).any()):  # the model sampled slot tokens
            rows = self._beside_sampled(name, rows, filled[is_slot])
        output: Any = self._forms[name].output(rows)
        if indicators:
            output.visual_indicator_features = indicators
        return output

    def _indicators(self, ids: Tensor, features: Tensor, filled: Tensor) -> list[Tensor]:
        """Rows for the model's visual indicator tokens, if any: features inside images, embeddings elsewhere.

        Shapes: ids, filled (N,), features (filled, C); returns (places, C) of each.
        """
        found = []
        for token_id in getattr(self.inner.config, "visual_indicator_token_ids", ()):
            is_it = ids == token_id
            embed: Any = self.inner.get_input_embeddings()
            rows = embed(ids[is_it][None])[0].to(features.dtype)
            rows[filled[is_it]] = features[is_it[filled]]
            found.append(rows)
        return found

    def _beside_sampled(self, name: str, features: Tensor, is_feature: Tensor) -> Tensor:
        """Rows of all slot tokens: features, or `_no_feature` for sampled tokens. Shapes: (slots, levels * C)."""
        if name not in self._no_feature:
            # a row that gives a slot token the same embedding as in a prompt without images
            slot_id: Any = getattr(self.inner.config, f"{name}_token_id")
            ids = torch.tensor([[slot_id]], device=features.device)
            zero = {name: self._forms[name].output(torch.zeros_like(features[:1]))}
            plain = embeddings_of(self.inner, input_ids=ids)
            filled = embeddings_of(self.inner, input_ids=ids, mm_encoder_outputs=zero)
            self._no_feature[name] = plain - filled
        nothing = self._no_feature[name]
        rows = features.new_zeros(len(is_feature), features.shape[1])
        rows[:, : nothing.shape[1]] = nothing
        rows[is_feature] = features
        return rows

    @torch.inference_mode()
    def verify(
        self, runner: Any, how: str, make_example: Callable[[], Prompt | None] | None = None
    ) -> None:
        """Compare logits of a few tokens with transformers'. Raises: UnsupportedCheckpoint if they differ."""
        if how == "off" or (how == "auto" and self.config.kind in TESTED):
            return
        if not self.binds_prompts:  # only the check with an image marks where the prompt ends
            plain = sorted({*range(self.config.text.vocab_size)} - control_ids(self.inner.config))
            self._check(largest_difference(runner, self, plain), "")
        example = make_example() if make_example else None
        if example is None:
            return
        difference = difference_with_image(runner, self, example)
        if difference is None:
            logger.warning("self-check: %d tokens do not fit the KV cache", len(example.token_ids))
        else:
            self._check(difference, "of a prompt with an image ")

    def _check(self, difference: float, of: str) -> None:
        name = self.config.model_class.__name__
        limit = max(_LARGEST_DIFFERENCE, 40 * torch.finfo(self._dtype).eps)
        if self._is_rounded:  # the engine and transformers can round differently
            limit = max(limit, _LARGEST_ROUNDED)
        logger.info(
            "self-check of %s: logits %sdiffer by %.1e standard deviations", name, of, difference
        )
        if not difference <= limit:
            raise self._refuse(
                f"its logits {of}differ from transformers' by {difference:.1e} standard deviations, "
                f"more than the allowed {limit:.1e}"
            )

    @contextmanager
    def as_transformers_does(self) -> Iterator[PreTrainedModel]:
        """The model with transformers' own attention, inside the block."""
        self._text._attn_implementation_internal = self._own_attention
        try:
            yield self.inner
        finally:
            self._text._attn_implementation_internal = NAME


def _loading_dtype(
    weights: dict[str, Tensor], dtype: torch.dtype, kept: frozenset[torch.dtype]
) -> torch.dtype:
    """The dtype of all weights if kernels read it and it is narrower than the engine's, else the engine's dtype."""
    stored = {x.dtype for x in weights.values() if x.is_floating_point()}
    [first, *others] = stored or {dtype}
    is_narrow = first in kept and first.itemsize < dtype.itemsize
    return first if is_narrow and not others else dtype


class _EmbeddingsFound(Exception):
    """Carries embeddings out of a forward pass."""


def embeddings_of(
    model: PreTrainedModel, decoder: nn.Module | None = None, **inputs: Any
) -> Tensor:
    """Input embeddings of `decoder`, without running it. Default: the first module with embeddings. Shapes: (N, C)."""
    own = greenlet.getcurrent()

    def catch(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if greenlet.getcurrent() is not own:
            return  # called by another request's step, between two parts of an encoder
        if kwargs.get("inputs_embeds") is not None:
            raise _EmbeddingsFound(kwargs["inputs_embeds"][0])

    modules = model.modules() if decoder is None else (decoder,)
    hooks = [m.register_forward_pre_hook(catch, with_kwargs=True) for m in modules]
    try:
        model(**inputs, use_cache=False)
    except _EmbeddingsFound as caught:
        return caught.args[0]
    finally:
        for hook in hooks:
            hook.remove()
    raise UnsupportedCheckpoint(f"no module of {type(model).__name__} accepts inputs_embeds")


def _explain(error: Exception) -> str:
    kind = "" if isinstance(error, UnsupportedCheckpoint) else f"{type(error).__name__}: "
    return f"{kind}{one_line(error)}"
