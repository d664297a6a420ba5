"""Families of models: everything that the backend knows of one kind of checkpoint, found by its architecture.

A family is one file beside this one and a line in `_BUILT_IN`. The loader asks here and never for a class by name.
"""

import logging
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module  # noqa: TID251 - names the modules of its own table
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engines.core.request import ImageInput
from engines.core.runner import Prompt
from engines.packages.checkpoint_json import Fields, shown
from engines.text.processor import MultimodalProcessor
from engines.torch_backend.kv_cache import KVCachePool, KVShape
from engines.torch_backend.layers.linear import QuantizedMethod
from engines.torch_backend.layers.rotary import RotaryTable
from engines.torch_backend.models.config import BeyondOurProgram, TextLimits, UnsupportedCheckpoint
from engines.torch_backend.models.hf_config import read_fields
from engines.torch_backend.multimodal.parts import in_parts
from engines.torch_backend.ops.registry import Ops
from engines.torch_backend.parallel.mesh import DIMS, Mesh
from engines.torch_backend.step import ImageSlots, StepInputs

logger = logging.getLogger(__name__)

#: modules with a `FAMILY`
_BUILT_IN = (
    "engines.torch_backend.models.llava",
    "engines.torch_backend.models.causal_lm",
)
#: one that takes what none of these does, and what they refuse
_FALLBACK = "engines.torch_backend.models.generic.family"


class ModelConfig(Protocol):
    """What the engine reads of any family's configuration; the rest is the family's own."""

    @property
    def text(self) -> TextLimits:
        """The decoder: a `TextConfig`, where the runner drives it."""
        ...

    @property
    def quantization(self) -> str | None:
        """Quantization in which the decoder's weights are stored."""
        ...


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A stored weight that is some rows of one of the model's: part `index` of `count`, joined in order."""

    name: str
    index: int
    count: int


class NoTower(nn.Module):
    """Stands for tower and projector where a model takes no images."""

    blocks = ()

    def bind(self, *_: Any) -> None:
        """There is nothing to compute."""


class FamilyModel(nn.Module):
    """A model as the runner drives it: a decoder, and images that become rows among its embeddings."""

    config: Any  #: keeps `ModelConfig`
    vision_tower: Any  #: of squares, which are encoded in batches or in parts
    multi_modal_projector: Any
    #: The decoder, where the runner drives a `Llama` over one pool of keys and values.
    language_model: Any
    speed_path = "native"  #: whose program computes the decoder: `native`, `lowered` or `generic`
    converts_weights = False  #: whether `take` wants weights as they are stored
    keeps_stored = True  #: whether matrices of types that kernels read may stay as they are stored
    shares_prefixes = True  #: whether blocks hold all that is known of their tokens
    binds_prompts = False  #: whether a prompt's tokens see all of it
    state_bytes = 0  #: of what is kept of sequences beside keys and values
    state_bytes_per_sequence = 0  #: of one copy of these
    num_position_rows = 1  #: R, where there is no such decoder

    def __init__(self) -> None:
        super().__init__()
        self.vision_tower = self.multi_modal_projector = NoTower()

    @property
    def kv_shapes(self) -> Sequence[KVShape]:
        """The pools of keys and values that it asks for."""
        return (self.language_model.text,)

    def limit(self, max_model_len: int) -> None:
        """Compute sequences that are never longer from now on."""

    def logits(self, inputs: StepInputs, pools: Sequence[KVCachePool]) -> Tensor:
        """Scores of a step, of models without a `language_model`. Shapes: returns (sampled rows, vocabulary)."""
        raise NotImplementedError

    def plain_logits(self, token_ids: Tensor) -> Tensor:
        """Scores behind all tokens of a text by transformers' own attention, where it has one.

        Shapes: (N,); returns (N, vocabulary).
        """
        raise NotImplementedError

    def image_form(self) -> bytes:
        """What a model has to know of features that another rank has encoded."""
        return b""

    def take_image_form(self, form: bytes) -> None:
        """Read features as rank 0's `image_form` says."""

    def release(self, request_id: str) -> None:
        """Let go of what is kept of a request beside keys and values. Idempotent."""

    def rotary(self, max_positions: int, dtype: torch.dtype, device: torch.device) -> RotaryTable:
        """By what angles the decoder that the runner drives turns heads."""
        return RotaryTable(self.language_model.text, max_positions, dtype, device)

    def decoder_layers(self) -> tuple[str, nn.Module]:
        """The decoder's layers and their path in transformers' model: what adapters may change."""
        return "language_model.model.layers", self.language_model.model.layers

    def stored_rows(self, name: str) -> Mapping[str, Tensor | None]:
        """Which rows of transformers' linear layer each linear layer here has; None for all, in order.

        `name` is relative to the decoder's layers, such as "0.self_attn.q_proj".
        """
        return {name: None}

    def take(
        self,
        weights: dict[str, Tensor],
        family: "ModelFamily",
        device: torch.device,
        dtype: torch.dtype,
        kept: frozenset[torch.dtype] = frozenset(),
        check_room: Callable[[Collection[str]], None] = lambda kept: None,
    ) -> "FamilyModel":
        """Have a checkpoint's weights, to compute on that device in that precision; returns what computes them.

        Matrices of types in `kept` may stay as they are stored; `check_room` is called before others than
        those of some names are widened. Raises: UnsupportedCheckpoint for names and shapes that do not fit, and what `check_room` raises.
        """
        renamed = rename_weights(weights, family, self.config)
        weights.clear()
        _check_weights(renamed, dict(self.state_dict()))
        self.load_state_dict(renamed, assign=True)
        return self

    def quantize(self, scheme: QuantizedMethod, dtype: torch.dtype) -> None:
        """Have the linear maps of a scheme, where they were not there to be loaded."""

    def allow_int8_head(self) -> None:
        """Let the head be in int8: the decoder is quantized."""

    def allow_int8_beside(self) -> None:
        """Let the linear layers of towers and projectors be in int8: the decoder is quantized."""

    def verify(
        self, runner: Any, how: str, make_example: Callable[[], Prompt | None] | None = None
    ) -> None:
        """See that the runner's answers are the model's, also to a prompt with an image, which is made if it is wanted.

        Raises: UnsupportedCheckpoint.
        """

    def embed(self, token_ids: Tensor, images: Sequence[ImageSlots]) -> Tensor:
        """Token embeddings, with image features in their slots. Shapes: (N,); returns (N, C)."""
        embeddings = self.language_model.embed(token_ids)
        for image in images:
            stop = image.start + image.features.shape[0]
            embeddings[image.start : stop] = image.features
        return embeddings

    def encode_images(self, pixels: Tensor) -> Tensor:
        """What the decoder sees of squares. Shapes: (B, 3, size, size); returns (B, P, C)."""
        return self.multi_modal_projector(self.vision_tower(pixels)).to(pixels.dtype)

    def bind(self, ops: Ops, dtype: torch.dtype) -> None:
        """Compute with these operators from now on, in an engine of this precision."""
        for part in (self.vision_tower, self.multi_modal_projector, self.language_model):
            part.bind(ops, dtype)

    def num_features(self, image: ImageInput) -> int | None:
        """Rows of features that an image becomes; None for what is none of this model's."""
        return None

    def encode(
        self, images: Sequence[ImageInput], device: torch.device, dtype: torch.dtype
    ) -> list[Tensor]:
        """Features of images, each of its own size. Shapes: returns (slots of the image, C) each.

        Here an image is one square, or several tiles of one size, and all go through the tower together.
        """
        tiles = [_tiles(image, device, dtype) for image in images]
        features = self.encode_images(torch.cat(tiles))
        return [part.flatten(0, 1) for part in features.split([len(part) for part in tiles])]

    def encode_in_parts(
        self, image: ImageInput, tokens_per_part: int, device: torch.device, dtype: torch.dtype
    ) -> Generator[None, None, Tensor]:
        """`encode` of one image, yielding before each part, so that streams may go on between two of them."""
        if isinstance(self.vision_tower, NoTower):
            return (yield from in_parts(lambda: self.encode([image], device, dtype)[0]))
        pixels = _tiles(image, device, dtype)
        features = yield from self.vision_tower.in_parts(pixels, tokens_per_part)
        projected = []
        for piece in features.split(tokens_per_part, dim=1):
            yield
            projected.append(self.multi_modal_projector(piece))
        return torch.cat(projected, dim=1).to(dtype).flatten(0, 1)

    def example_image(self) -> ImageInput | None:
        """An image to warm up with, at offset 0; None where a model takes none."""
        return None


def _tiles(image: ImageInput, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Shapes: returns (tiles, 3, size, size)."""
    pixels = torch.as_tensor(image.pixels)
    return pixels.view(-1, *pixels.shape[-3:]).to(device, dtype)


class ModelFamily(Protocol):
    """One kind of checkpoint. Its methods are called in this order."""

    architectures: tuple[str, ...]  #: of `config.json`
    model_type: str  #: of a `config.json` that names no architecture

    def check(self, config: Fields) -> ModelConfig:
        """The model's configuration. Raises: UnsupportedCheckpoint, with the field and the reason."""
        ...

    def build(self, config: Any, mesh: Mesh) -> FamilyModel:
        """The model, or a member's share of it, its weights still undefined. Raises: UnsupportedCheckpoint."""
        ...

    def rename(self, name: str, config: Any) -> str | WeightPart | None:
        """A stored weight's name in the model; None for what is not read. Raises: UnsupportedCheckpoint."""
        ...

    def processor(self, directory: Path, config: Any) -> MultimodalProcessor:
        """What makes images of a checkpoint ready. Raises: UnsupportedCheckpoint."""
        ...


_MAX_NAMES = 5  # in messages
_registered: list[ModelFamily] = []


@contextmanager
def registered(family: ModelFamily) -> Iterator[None]:
    """Know a family for a while, before those that are built in."""
    _registered.insert(0, family)
    try:
        yield
    finally:
        _registered.remove(family)


def find_family(directory: Path) -> tuple[ModelFamily, Any]:
    """The family of a checkpoint, and its checked configuration. Raises: UnsupportedCheckpoint."""
    return check_config(read_fields(directory))


def read_config(directory: Path) -> Any:
    """The checked configuration of a checkpoint. Raises: UnsupportedCheckpoint."""
    return find_family(directory)[1]


def check_config(config: Fields) -> tuple[ModelFamily, Any]:
    """As `find_family`, of the fields of a `config.json`."""
    families = [*_registered, *_built_in()]
    given, kind = config.get("architectures"), config.get("model_type")
    for family in families:
        is_named = isinstance(given, list) and any(name in given for name in family.architectures)
        if is_named or (given is None and kind == family.model_type):
            try:
                return family, family.check(config)
            except BeyondOurProgram as refusal:
                if not _fallback().claims(config):
                    raise
                logger.info("not the program of %s: %s", family.architectures[0], refusal)
                break
    generic = _fallback()
    if generic.claims(config):
        return generic, generic.check(config)
    known = ", ".join(name for family in families for name in family.architectures)
    raise config.refuse(
        "architectures",
        f"is {shown(given)}, model_type {shown(kind)}; these can be run: {known}, and "
        "causal language models that the installed transformers implements",
    )


@cache
def _built_in() -> tuple[ModelFamily, ...]:
    return tuple(import_module(name).FAMILY for name in _BUILT_IN)


@cache
def _fallback() -> Any:
    """The family of any other model. Its import takes a second, and no other family needs it."""
    return import_module(_FALLBACK).FAMILY


def import_families() -> None:
    """Import every family, as the first model would."""
    _built_in()
    _fallback()


def rename_weights(
    weights: dict[str, Tensor], family: ModelFamily, config: Any
) -> dict[str, Tensor]:
    """A checkpoint's weights by the model's names; what the model does not read is left out.

    Raises: UnsupportedCheckpoint for names that the family does not know, and parts that are missing.
    """
    renamed: dict[str, Tensor] = {}
    parts: dict[str, dict[int, str]] = {}  # by name and index, the stored names
    counts: dict[str, int] = {}
    for stored, tensor in weights.items():
        target = family.rename(stored, config)
        if isinstance(target, str):
            renamed[target] = tensor
        elif target is not None:
            parts.setdefault(target.name, {})[target.index] = stored
            counts[target.name] = target.count
    for name, found in parts.items():
        if len(found) < counts[name]:
            raise UnsupportedCheckpoint(
                f"the checkpoint lacks weights that are joined with {', '.join(found.values())}: "
                f"{len(found)} of {counts[name]} are there"
            )
        dim, _ = DIMS.get(name.rpartition(".")[2], (0, None))
        renamed[name] = torch.cat([weights[found[index]] for index in range(counts[name])], dim)
    return renamed


def _check_weights(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    check_names(sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys()))
    for name, value in weights.items():
        if value.shape != expected[name].shape:
            raise UnsupportedCheckpoint(
                f"the weight {name} is {tuple(value.shape)} but config.json makes it "
                f"{tuple(expected[name].shape)}"
            )
        if value.is_floating_point() is not expected[name].is_floating_point():
            raise UnsupportedCheckpoint(
                f"the weight {name} holds {str(value.dtype).removeprefix('torch.')}, and config.json "
                "says of no scales"
            )


def check_names(missing: list[str], unexpected: list[str]) -> None:
    """Raises: UnsupportedCheckpoint for weights that a checkpoint lacks, or has beyond what the model reads."""
    for problem, names in (("lacks", missing), ("has unknown", unexpected)):
        if names:
            shown = ", ".join(names[:_MAX_NAMES])
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            raise UnsupportedCheckpoint(f"the checkpoint {problem} weights: {shown}{more}")
