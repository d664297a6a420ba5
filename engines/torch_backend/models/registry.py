"""Model families by architecture. Each family is a file in this folder and a line in `_BUILT_IN`."""

import logging
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from functools import cache
from importlib import import_module  # noqa: TID251 - names the modules of its own table
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engines.core.sequence import ImageInput, Prompt
from engines.packages.checkpoint_json import Fields, name_some, shown
from engines.text.processor import MultimodalProcessor
from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.linear import QuantizedMethod
from engines.torch_backend.layers.rotary import RotaryTable
from engines.torch_backend.models.config import BeyondOurProgram, KVShape, UnsupportedCheckpoint
from engines.torch_backend.models.hf_config import read_fields
from engines.torch_backend.multimodal.parts import in_parts
from engines.torch_backend.ops.registry import Ops
from engines.torch_backend.step import ImageSlots, StepInputs

logger = logging.getLogger(__name__)

#: Modules with a `FAMILY`.
_BUILT_IN = (
    "engines.torch_backend.models.llava",
    "engines.torch_backend.models.causal_lm",
)
#: Module of the family for other architectures, and for checkpoints that built-in families refuse.
_FALLBACK = "engines.torch_backend.models.generic.family"


class FamilyModel(nn.Module):
    """A model for the runner: a decoder, and image features that replace some of its embeddings."""

    config: Any  #: the family's configuration; `text` describes the decoder
    vision_tower: Any  #: for fixed-size images, which are encoded in batches; else None
    multi_modal_projector: Any
    #: The `Llama` that the runner runs over one KV cache pool; None in generic models.
    language_model: Any
    speed_path = "native"  #: implementation of the decoder: `native`, `lowered` or `generic`
    converts_weights = False  #: `take` converts the weights itself, so it must get them as stored
    shares_prefixes = True  #: whether KV blocks are the complete state of their tokens
    binds_prompts = False  #: whether attention within prompts is bidirectional
    state_bytes = 0  #: size of all sequences' states outside the KV cache
    state_bytes_per_sequence = 0  #: size of one copy of a sequence's state
    num_position_rows = 1  #: rows of position ids, for models without a `language_model`

    def __init__(self) -> None:
        super().__init__()
        self.vision_tower = self.multi_modal_projector = None

    @property
    def kv_shapes(self) -> Sequence[KVShape]:
        """Shapes of the model's KV cache pools."""
        return (self.language_model.text,)

    def limit(self, max_model_len: int) -> None:
        """Set the maximum length of sequences."""

    def logits(self, inputs: StepInputs, pools: Sequence[KVCachePool]) -> Tensor:
        """Logits of a step, for models without a `language_model`. Shapes: returns (sampled rows, vocabulary)."""
        raise NotImplementedError

    def release(self, request_id: str) -> None:
        """Free the state of a request outside the KV cache. Idempotent."""

    def rotary(self, max_positions: int, dtype: torch.dtype, device: torch.device) -> RotaryTable:
        return RotaryTable.create(self.language_model.text, max_positions, dtype, device)

    def decoder_layers(self) -> tuple[str, nn.Module]:
        """The decoder's layers and their path in transformers' model, for adapters."""
        return "language_model.model.layers", self.language_model.model.layers

    def stored_rows(self, name: str) -> Mapping[str, Tensor | None]:
        """Our layers that hold rows of one transformers layer, each with the numbers of these rows in that layer.

        None: all rows, in the same order. Names are relative to the decoder's layers, such as "0.self_attn.q_proj".
        """
        return {name: None}

    def take(
        self,
        weights: dict[str, Tensor],
        family: "ModelFamily",
        device: torch.device,
        dtype: torch.dtype,
        kept: frozenset[torch.dtype],
        check_room: Callable[[Collection[str]], None],
    ) -> "FamilyModel":
        """Load a checkpoint's weights; returns the model to run.

        Matrices whose dtype is in `kept` can keep it. `check_room` is called with their names before the other weights
        are converted. Raises: UnsupportedCheckpoint for wrong names and shapes, and the errors of `check_room`.
        """
        renamed = rename_weights(weights, family, self.config)
        weights.clear()
        _check_weights(renamed, dict(self.state_dict()))
        self.load_state_dict(renamed, assign=True)
        return self

    def quantize(self, scheme: QuantizedMethod, dtype: torch.dtype) -> None:
        """Quantize the linear layers that were not loaded in the scheme."""

    def allow_int8_head(self) -> None:
        """Allow an int8 head. Called if the decoder is quantized."""

    def allow_int8_beside(self) -> None:
        """Allow int8 in the linear layers of towers and projectors. Called if the decoder is quantized."""

    def verify(
        self, runner: Any, how: str, make_example: Callable[[], Prompt | None] | None = None
    ) -> None:
        """Compare the logits with transformers', also for a prompt with an image. Raises: UnsupportedCheckpoint."""

    def embed(self, token_ids: Tensor, images: Sequence[ImageSlots]) -> Tensor:
        """Token embeddings, with image features in their slots. Shapes: (N,); returns (N, C)."""
        embeddings = self.language_model.embed(token_ids)
        for image in images:
            image.place(embeddings)
        return embeddings

    def encode_images(self, pixels: Tensor) -> Tensor:
        """Features of fixed-size images. Shapes: (B, 3, size, size); returns (B, P, C)."""
        return self.multi_modal_projector(self.vision_tower(pixels)).to(pixels.dtype)

    def bind(self, ops: Ops, dtype: torch.dtype) -> None:
        for part in (self.vision_tower, self.multi_modal_projector, self.language_model):
            if part is not None:
                part.bind(ops, dtype)

    def num_features(self, image: ImageInput) -> int | None:
        """Number of feature rows of an image. None if the model cannot encode it."""
        return None

    def encode(
        self, images: Sequence[ImageInput], device: torch.device, dtype: torch.dtype
    ) -> list[Tensor]:
        """Features of images of any size. Shapes: returns (slots of the image, C) each.

        By default an image is one square, or several tiles of one size, and all are encoded together.
        """
        pixels = [torch.as_tensor(image.pixels) for image in images]
        tiles = [x.view(-1, *x.shape[-3:]).to(device, dtype) for x in pixels]
        features = self.encode_images(torch.cat(tiles))
        return [part.flatten(0, 1) for part in features.split([len(part) for part in tiles])]

    def encode_in_parts(
        self, image: ImageInput, device: torch.device, dtype: torch.dtype
    ) -> Generator[None, None, Tensor]:
        """`encode` of one image; yields before each part, so that steps of other requests run in between."""
        return in_parts(lambda: self.encode([image], device, dtype)[0])

    def example_image(self) -> ImageInput | None:
        """A dummy image for warm-up, at offset 0. None for text models."""
        return None


class ModelFamily(Protocol):
    """One kind of checkpoint. `check` is called first; the other methods use its result."""

    architectures: tuple[str, ...]  #: in `config.json`
    model_type: str  #: for a `config.json` without architectures

    def check(self, config: Fields) -> Any:
        """The model's configuration. Its `text` is a `TextConfig` if the runner runs the decoder, else `TextLimits`.

        Raises: UnsupportedCheckpoint, with the field and the reason.
        """
        ...

    def build(self, config: Any) -> FamilyModel:
        """Create the model on the meta device. Raises: UnsupportedCheckpoint."""
        ...

    def rename(self, name: str, config: Any) -> str | None:
        """The parameter of a stored weight. None for unused weights. Raises: UnsupportedCheckpoint."""
        ...

    def processor(self, directory: Path, config: Any) -> MultimodalProcessor:
        """The image processor of a checkpoint. Raises: UnsupportedCheckpoint."""
        ...


def find_family(directory: Path) -> tuple[ModelFamily, Any]:
    """The family of a checkpoint, and its checked configuration. Raises: UnsupportedCheckpoint."""
    return resolve_config(read_fields(directory))


def resolve_config(config: Fields) -> tuple[ModelFamily, Any]:
    """`find_family` for the fields of a `config.json`."""
    given, kind = config.get("architectures"), config.get("model_type")
    for family in built_in():
        is_named = isinstance(given, list) and any(name in given for name in family.architectures)
        if is_named or (given is None and kind == family.model_type):
            try:
                return family, family.check(config)
            except BeyondOurProgram as refusal:
                if not _fallback().claims(config):
                    raise
                logger.info("transformers runs this %s: %s", family.architectures[0], refusal)
                break
    generic = _fallback()
    if generic.claims(config):
        return generic, generic.check(config)
    known = ", ".join(name for family in built_in() for name in family.architectures)
    raise config.refuse(
        "architectures",
        f"is {shown(given)}, model_type {shown(kind)}; supported are {known}, and "
        "causal language models that the installed transformers implements",
    )


@cache
def built_in() -> tuple[ModelFamily, ...]:
    return tuple(import_module(name).FAMILY for name in _BUILT_IN)


@cache
def _fallback() -> Any:
    """The family of all other models, imported on first use because the import takes a second."""
    return import_module(_FALLBACK).FAMILY


def import_families() -> None:
    """Import every family before the first model is known."""
    built_in()
    _fallback()


def rename_weights(
    weights: dict[str, Tensor], family: ModelFamily, config: Any
) -> dict[str, Tensor]:
    """A checkpoint's weights by parameter name, without unused ones."""
    renamed = {family.rename(stored, config): tensor for stored, tensor in weights.items()}
    return {name: tensor for name, tensor in renamed.items() if name is not None}


def _check_weights(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    check_names(sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys()))
    for name, value in weights.items():
        check_shape(name, value.shape, expected[name].shape)
        if value.is_floating_point() is not expected[name].is_floating_point():
            raise UnsupportedCheckpoint(
                f"the weight {name} is {str(value.dtype).removeprefix('torch.')}, but config.json has no "
                "quantization_config for it"
            )


def check_shape(name: str, found: Sequence[int], expected: Sequence[int]) -> None:
    """Raises: UnsupportedCheckpoint for a weight of another shape."""
    if tuple(found) != tuple(expected):
        raise UnsupportedCheckpoint(
            f"the weight {name} is {tuple(found)} but config.json requires {tuple(expected)}"
        )


def check_names(missing: list[str], unexpected: list[str]) -> None:
    """Raises: UnsupportedCheckpoint for missing and unexpected weights."""
    for problem, names in (("lacks", missing), ("has unknown", unexpected)):
        if names:
            raise UnsupportedCheckpoint(f"the checkpoint {problem} weights: {name_some(names, 5)}")
