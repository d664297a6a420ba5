"""Random checkpoints of real shapes, for tests and benchmarks: in the form of `llava-hf`, and as transformers saves.

Called by the command line and by tests. Memory is bounded by one shard: weights are generated and written one by
one.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress, TimeElapsedColumn

from engines.packages.checkpoint_files import write_text_files
from engines.packages.checkpoint_json import Fields
from engines.torch_backend.loading.stored_tensors import MAX_SHARD_BYTES, TensorWriter
from engines.torch_backend.models.config import TextConfig, VisionConfig
from engines.torch_backend.models.llava import FAMILY, VLMConfig

#: Ids after those of the tokenizer, for `<image>` and `<pad>`, as in llava-hf.
_NUM_SPARE_TOKENS = 64

Parameter = tuple[str, tuple[int, ...]]


def _shape(
    vision: dict[str, Any], text: dict[str, Any], base_vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": base_vocab,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "clip_vision_model"} | vision,
        "text_config": {
            "model_type": "llama",
            "vocab_size": base_vocab + _NUM_SPARE_TOKENS,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        | text,
    } | more


_CLIP_L_336 = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 768,
}
_TINY_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
    "projection_dim": 32,
}

#: Shapes of `transformers_shapes`, which is imported on demand.
TRANSFORMERS_SHAPES = ("llama-125m", "smolvlm2-500m", "smolvlm2-2.2b", "qwen2.5-vl-3b")
#: Shapes by name, as `config.json` contents.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _shape(
        _TINY_TOWER,
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
        },
        base_vocab=320,
    ),
    "llava-1b": _shape(  # the decoder of TinyLlama
        _CLIP_L_336,
        {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        base_vocab=32000,
    ),
    "llava-1.5-7b": _shape(
        _CLIP_L_336,
        {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        base_vocab=32000,
    ),
}


def make_checkpoint(
    shape: str,
    directory: Path,
    seed: int = 0,
    *,
    changes: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[float], None] | None = None,
) -> VLMConfig:
    """Write a checkpoint of a shape of `SHAPES`; `changes` override its `config.json`.

    `progress` receives the completed ratio of bytes, 0..1. Returns the configuration. Raises: ValueError for an
    unknown shape, UnsupportedCheckpoint for invalid changes, FileExistsError.
    """
    if shape not in SHAPES:
        raise ValueError(f"shape {shape!r} is unknown; there are {', '.join(SHAPES)}")
    content = _lay_over(SHAPES[shape], changes or {})
    content["dtype"] = str(dtype).removeprefix("torch.")
    config = FAMILY.check(Fields("config.json", content))
    _prepare(directory)
    content["image_seq_length"] = config.tokens_per_image
    write_text_files(directory, content)
    parameters = list(list_weights(config))
    width = config.text.hidden_size
    _write_weights(directory, parameters, width, seed, dtype, max_shard_bytes, progress)
    return config


def make_transformers_checkpoint(
    shape: str,
    directory: Path,
    seed: int = 0,
    *,
    num_layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[float], None] | None = None,
) -> list[Parameter]:
    """Write a checkpoint of a shape of `transformers_shapes`, with at most `num_layers` layers.

    Returns names and shapes of its weights. Raises: FileExistsError, OSError.
    """
    from engines.torch_backend.loading.transformers_shapes import (  # noqa: PLC0415 - imports transformers
        SHAPES as THEIRS,
    )
    from engines.torch_backend.loading.transformers_shapes import list_parameters  # noqa: PLC0415

    config = THEIRS[shape].config(num_layers, dtype)
    parameters = list_parameters(config)
    _prepare(directory)
    THEIRS[shape].write_files(directory, config)
    width = config.get_text_config(decoder=True).hidden_size
    _write_weights(directory, parameters, width, seed, dtype, max_shard_bytes, progress)
    return parameters


def run(shape: str, directory: Path, seed: int, num_layers: int | None = None) -> None:
    """The command: write a checkpoint with a progress bar. Raises: SystemExit with the reason."""
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), transient=True) as bar:
        task = bar.add_task(f"writing {directory}", total=1.0)
        try:
            parameters = make_any_checkpoint(
                shape, directory, seed, num_layers, lambda share: bar.update(task, completed=share)
            )
        except (OSError, ValueError) as error:
            raise SystemExit(f"make-checkpoint: {error}") from None
    num_parameters = sum(math.prod(size) for _, size in parameters)
    print(f"{directory}: {shape}, {num_parameters / 1e6:,.1f} million random weights, seed {seed}")


def make_any_checkpoint(
    shape: str,
    directory: Path,
    seed: int = 0,
    num_layers: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Iterable[Parameter]:
    """Write a checkpoint of any shape; returns names and shapes of its weights. Raises: ValueError, OSError."""
    if shape in TRANSFORMERS_SHAPES:
        return make_transformers_checkpoint(
            shape, directory, seed, num_layers=num_layers, progress=progress
        )
    if shape not in SHAPES:
        known = ", ".join((*SHAPES, *TRANSFORMERS_SHAPES))
        raise ValueError(f"shape {shape!r} is unknown; there are {known}")
    changes = {"text_config": {"num_hidden_layers": num_layers}} if num_layers else None
    config = make_checkpoint(shape, directory, seed, changes=changes, progress=progress)
    return list(list_weights(config))


def _prepare(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty")


def _lay_over(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return base | {
        name: _lay_over(base.get(name) or {}, value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }


def _write_weights(
    directory: Path,
    parameters: list[Parameter],
    width: int,
    seed: int,
    dtype: torch.dtype,
    max_shard_bytes: int,
    progress: Callable[[float], None] | None,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # LLaMA's 0.02; narrow models need larger weights, or they repeat one token for ever.
    std = max(0.02, 6.4 / width)
    total = sum(math.prod(shape) for _, shape in parameters)
    done = 0
    writer = TensorWriter(directory, max_shard_bytes)
    for name, shape in parameters:
        writer.add(name, _random_weight(name, shape, std, dtype, generator))
        done += math.prod(shape)
        if progress is not None:
            progress(done / total)
    writer.close()


def _random_weight(
    name: str, shape: tuple[int, ...], std: float, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    is_gain = ("norm" in name or "layrnorm" in name or "ln_q" in name) and name.endswith("weight")
    weight = torch.empty(shape, dtype=dtype).normal_(0.0, std, generator=generator)
    return weight.add_(1.0) if is_gain else weight


def list_weights(config: VLMConfig) -> Iterator[Parameter]:
    """Names and shapes, as in the published files."""
    yield from _vision_parameters("vision_tower.vision_model.", config.vision)
    width = config.vision.hidden_size * len(config.vision_feature_layers)
    for name, inner in (("linear_1", width), ("linear_2", config.text.hidden_size)):
        yield f"multi_modal_projector.{name}.weight", (config.text.hidden_size, inner)
        if config.projector_bias:
            yield f"multi_modal_projector.{name}.bias", (config.text.hidden_size,)
    yield from _text_parameters("language_model.", config.text)


def _vision_parameters(prefix: str, config: VisionConfig) -> Iterator[Parameter]:
    width = config.hidden_size
    patch = (width, 3, config.patch_size, config.patch_size)
    yield f"{prefix}embeddings.class_embedding", (width,)
    yield f"{prefix}embeddings.patch_embedding.weight", patch
    yield f"{prefix}embeddings.position_embedding.weight", (config.num_patches + 1, width)
    yield from _affine(f"{prefix}pre_layrnorm", (width,))
    for number in range(config.num_layers):
        layer = f"{prefix}encoder.layers.{number}."
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _affine(f"{layer}self_attn.{projection}", (width, width))
        yield from _affine(f"{layer}layer_norm1", (width,))
        yield from _affine(f"{layer}mlp.fc1", (config.intermediate_size, width))
        yield from _affine(f"{layer}mlp.fc2", (width, config.intermediate_size))
        yield from _affine(f"{layer}layer_norm2", (width,))
    yield from _affine(f"{prefix}post_layernorm", (width,))


def _affine(name: str, shape: tuple[int, ...], bias: bool = True) -> Iterator[Parameter]:
    yield f"{name}.weight", shape
    if bias:
        yield f"{name}.bias", shape[:1]


def _text_parameters(prefix: str, config: TextConfig) -> Iterator[Parameter]:
    width, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield f"{prefix}model.embed_tokens.weight", (config.vocab_size, width)
    for number in range(config.num_layers):
        layer = f"{prefix}model.layers.{number}."
        yield f"{layer}input_layernorm.weight", (width,)
        for name, size in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            yield from _affine(f"{layer}self_attn.{name}", (size, width), config.attention_bias)
        output_bias = config.attention_output_bias
        yield from _affine(f"{layer}self_attn.o_proj", (width, heads), output_bias)
        yield f"{layer}post_attention_layernorm.weight", (width,)
        yield from _affine(f"{layer}mlp.gate_proj", (inner, width), config.mlp_bias)
        yield from _affine(f"{layer}mlp.up_proj", (inner, width), config.mlp_bias)
        yield from _affine(f"{layer}mlp.down_proj", (width, inner), config.mlp_bias)
    yield f"{prefix}model.norm.weight", (width,)
    if not config.tie_word_embeddings:
        yield f"{prefix}lm_head.weight", (config.vocab_size, width)
