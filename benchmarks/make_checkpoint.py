"""Checkpoints of real shapes with random weights, for tests and benchmarks: LLaVA as `llava-hf` publishes it, SmolVLM2 as
transformers saves it.

Weights are generated and written one by one, so memory holds one shard at most. The tokenizer is generated, so ids of
control tokens differ from those of the published models.
Sources: `config.json` and the processors' files of HuggingFaceTB/SmolVLM2-500M-Video-Instruct.
"""

import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from tokenizers import AddedToken
from transformers import LlavaConfig, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.core_model_loading import revert_weight_conversion

from benchmarks.checkpoint_files import make_tokenizer, write_text_files
from engines.packages.checkpoint_json import Fields
from engines.text.chat_template import LLAVA_TEMPLATE
from engines.torch_backend.loading.stored_tensors import INDEX_FILE
from engines.torch_backend.models.llava import FAMILY

MAX_SHARD_BYTES = 2 * 1024**3
#: Number of ids after the base tokens, as in llava-hf: `<image>`, `<pad>` and unused ids.
_NUM_SPARE_TOKENS = 64
_NUM_BASE_TOKENS = 32000
IMAGE_ID = _NUM_BASE_TOKENS  #: id of `<image>`; the next ids are `<pad>` and the special tokens of a family
SMOLVLM = "smolvlm2-500m"

Parameter = tuple[str, tuple[int, ...]]


def make_checkpoint(
    shape: str,
    directory: Path,
    seed: int = 0,
    *,
    num_layers: int | None = None,
    changes: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[Parameter]:
    """Write a checkpoint with at most `num_layers` layers; `changes` override the `config.json` of a LLaVA.

    Returns names and shapes of the weights. Raises: ValueError for an unknown shape, UnsupportedCheckpoint for invalid
    changes, FileExistsError, OSError.
    """
    if shape in LLAVA_SHAPES:
        cut = {"text_config": {"num_hidden_layers": num_layers}} if num_layers else {}
        content = _lay_over(_lay_over(LLAVA_SHAPES[shape], cut), changes or {})
        content["dtype"] = str(dtype).removeprefix("torch.")
        content["image_seq_length"] = FAMILY.check(Fields("config.json", content)).tokens_per_image
        config, write_files = LlavaConfig(**content), partial(write_text_files, config=content)
    elif shape == SMOLVLM:
        config = smolvlm_config(num_layers, dtype)
        write_files = partial(_write_smolvlm_files, config=config)
    else:
        known = ", ".join((*LLAVA_SHAPES, SMOLVLM))
        raise ValueError(f"shape {shape!r} is unknown: choose from {known}")
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty: name a new or empty directory")
    write_files(directory)
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    (directory / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(LLAVA_TEMPLATE, encoding="utf-8")
    parameters = list_parameters(config)
    generator = torch.Generator().manual_seed(seed)
    # At least 0.02, as in LLaMA. Narrow models need larger weights, or they repeat one token forever.
    std = max(0.02, 6.4 / config.get_text_config(decoder=True).hidden_size)
    planned = {name: torch.empty(size, dtype=dtype, device="meta") for name, size in parameters}
    split = split_torch_state_dict_into_shards(planned, max_shard_size=max_shard_bytes)
    for file, names in split.filename_to_tensors.items():
        tensors = {name: _random_weight(name, planned[name], std, generator) for name in names}
        _save(tensors, directory / file)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return parameters


def list_parameters(config: PreTrainedConfig) -> list[Parameter]:
    """Names and shapes as in the published files; tied weights are listed once."""
    name = (config.architectures or [""])[0]
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    tied = set(model.all_tied_weights_keys or {})
    state = {name: x for name, x in model.state_dict().items() if name not in tied}
    stored = {name: tuple(x.shape) for name, x in revert_weight_conversion(model, state).items()}
    if not isinstance(config, LlavaConfig):
        return list(stored.items())
    own, published = "vision_tower.", "vision_tower.vision_model."  # in transformers 5, and before
    return [(name.replace(own, published), size) for name, size in stored.items()]


def run(shape: str, directory: Path, seed: int, num_layers: int | None = None) -> None:
    """The command. Raises: the errors of `make_checkpoint`."""
    print(f"writing {directory}", file=sys.stderr)
    parameters = make_checkpoint(shape, directory, seed, num_layers=num_layers)
    num_parameters = sum(math.prod(size) for _, size in parameters)
    print(f"{directory}: {shape}, {num_parameters / 1e6:,.1f} million random weights, seed {seed}")


def _lay_over(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return base | {
        name: _lay_over(base.get(name) or {}, value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }


def _random_weight(
    name: str, planned: torch.Tensor, std: float, generator: torch.Generator
) -> torch.Tensor:
    is_gain = "norm" in name and name.endswith("weight")
    weight = torch.empty_like(planned, device="cpu").normal_(0.0, std, generator=generator)
    return weight.add_(1.0) if is_gain else weight


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)  # save_file sets a mode for the owner alone


# -- LLaVA
def _llava(vision: dict[str, Any], text: dict[str, Any], base_vocab: int = 32000) -> dict[str, Any]:
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
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        }
        | text,
    }


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

#: `config.json` by name.
LLAVA_SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _llava(
        _TINY_TOWER,
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
        },
        base_vocab=320,
    ),
    "llava-1b": _llava(  # the decoder of TinyLlama
        _CLIP_L_336,
        {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
        },
    ),
    "llava-1.5-7b": _llava(
        _CLIP_L_336,
        {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
        },
    ),
}


# -- SmolVLM2
_ROWS = ("<global-img>", *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)))


def smolvlm_config(num_layers: int | None, dtype: torch.dtype) -> PreTrainedConfig:
    """SmolVLM2's configuration, with at most `num_layers` layers in decoder and tower."""
    most, pad = num_layers or 32, IMAGE_ID + 1
    config = transformers.SmolVLMConfig(
        image_token_id=IMAGE_ID,
        scale_factor=4,
        pad_token_id=pad,  # pyright: ignore
        tie_word_embeddings=False,
        text_config={
            "model_type": "llama", "vocab_size": 49280, "hidden_size": 960, "intermediate_size": 2560,
            "num_hidden_layers": min(most, 32), "num_attention_heads": 15, "num_key_value_heads": 5, "head_dim": 64,
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "bos_token_id": 1,
            "eos_token_id": 2, "pad_token_id": pad,
        },
        vision_config={
            "model_type": "smolvlm_vision", "hidden_size": 768, "intermediate_size": 3072,
            "num_hidden_layers": min(most, 12), "num_attention_heads": 12, "image_size": 512, "patch_size": 16,
        },
    )  # fmt: skip
    config.architectures = ["SmolVLMForConditionalGeneration"]
    config.dtype = dtype
    return config


def _write_smolvlm_files(directory: Path, config: PreTrainedConfig) -> None:
    """Write all files except the weights. The processor is Idefics3's, which processes images in the same way;
    SmolVLM's needs a package for videos.
    """
    config.save_pretrained(directory)
    backend = make_tokenizer(_NUM_BASE_TOKENS)
    backend.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in _ROWS])
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )  # fmt: skip
    images = transformers.Idefics3ImageProcessor(
        size={"longest_edge": 2048}, max_image_size={"longest_edge": 512}
    )
    transformers.Idefics3Processor(images, tokenizer, image_seq_len=64).save_pretrained(directory)
