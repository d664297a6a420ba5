"""Real shapes of models that transformers implements, for checkpoints of random weights: configurations and processors.

Sources: `config.json` and the processors' files of HuggingFaceTB/SmolVLM2-500M-Video-Instruct, its 2.2B sibling and
Qwen/Qwen2.5-VL-3B-Instruct. The tokenizer is made up, so ids of control tokens are others than in these.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken
from transformers import PreTrainedConfig, PreTrainedTokenizerFast
from transformers.core_model_loading import revert_weight_conversion

from engines.packages.checkpoint_files import make_tokenizer
from engines.text.chat_template import LLAVA_TEMPLATE

_NUM_BASE_TOKENS = 32000
IMAGE_ID = _NUM_BASE_TOKENS  #: of `<image>`; `<pad>` follows, then the special tokens of a family
_TEMPLATE = LLAVA_TEMPLATE.replace("<image>", "PLACEHOLDER")


@dataclass(frozen=True)
class Shape:
    """A model's class and configuration, and with images its processor and what a prompt has for one."""

    architecture: str
    create: Callable[[], PreTrainedConfig]
    special: tuple[str, ...] = ()
    create_processor: Callable[[Any], Any] | None = None
    placeholder: str = "<image>"

    def config(self, num_layers: int | None, dtype: torch.dtype) -> PreTrainedConfig:
        """With this many layers at the most, in the decoder and in the tower."""
        config = self.create()
        config.architectures = [self.architecture]
        config.dtype = dtype
        if num_layers is not None:
            _cut_layers(config, num_layers)
        return config

    def write_files(self, directory: Path, config: PreTrainedConfig) -> None:
        """Everything but the weights. Raises: OSError."""
        tokenizer = _create_tokenizer(self.special)
        config.save_pretrained(directory)
        ends = {"bos_token_id": 1, "eos_token_id": 2}
        (directory / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
        (directory / "chat_template.jinja").write_text(
            _TEMPLATE.replace("PLACEHOLDER", self.placeholder), encoding="utf-8"
        )
        if self.create_processor is not None:
            self.create_processor(tokenizer).save_pretrained(directory)
            return
        tokenizer.save_pretrained(directory)


def list_parameters(config: PreTrainedConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes as transformers saves them; what is tied is there once."""
    name = (config.architectures or [""])[0]
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    tied = set(model.all_tied_weights_keys or {})
    state = {name: x for name, x in model.state_dict().items() if name not in tied}
    return [(name, tuple(x.shape)) for name, x in revert_weight_conversion(model, state).items()]


def _cut_layers(config: PreTrainedConfig, num_layers: int) -> None:
    text, vision = config.get_text_config(decoder=True), getattr(config, "vision_config", None)
    for part, name in (
        (text, "num_hidden_layers"),
        (vision, "num_hidden_layers"),
        (vision, "depth"),
    ):
        if part is not None and getattr(part, name, 0):
            setattr(part, name, min(num_layers, getattr(part, name)))
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:num_layers]


def _create_tokenizer(special: tuple[str, ...]) -> Any:
    backend = make_tokenizer(_NUM_BASE_TOKENS)
    backend.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )  # fmt: skip


# -- SmolVLM2
_ROWS = ("<global-img>", *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)))


def _smolvlm(
    text: dict[str, Any], vision: dict[str, Any], scale_factor: int
) -> Callable[[], PreTrainedConfig]:
    shared = {
        "vocab_size": 49280,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": IMAGE_ID + 1,
    }
    return lambda: transformers.SmolVLMConfig(
        image_token_id=IMAGE_ID,
        scale_factor=scale_factor,
        pad_token_id=IMAGE_ID + 1,  # pyright: ignore
        tie_word_embeddings=False,
        text_config={
            "model_type": "llama", "head_dim": 64, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
            "rope_theta": 100000.0, **shared, **text,
        },
        vision_config={"model_type": "smolvlm_vision", **vision},
    )  # fmt: skip


def _smolvlm_processor(side: int, longest: int, seq_len: int) -> Callable[[Any], Any]:
    """That of Idefics3, which is the same for images; SmolVLM's own wants a package for videos."""
    return lambda tokenizer: transformers.Idefics3Processor(
        transformers.Idefics3ImageProcessor(
            size={"longest_edge": longest}, max_image_size={"longest_edge": side}
        ),
        tokenizer,
        image_seq_len=seq_len,
    )


# -- Qwen2.5-VL
_QWEN_SPECIAL = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


def _qwen2_5_vl() -> PreTrainedConfig:
    first = IMAGE_ID + 2
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return transformers.Qwen2_5_VLConfig(
        **{name: first + number for number, name in enumerate(ids)},  # pyright: ignore
        tie_word_embeddings=True,
        text_config={
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
            "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        vision_config={
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    )  # fmt: skip


def _qwen_processor(tokenizer: Any) -> Any:
    return transformers.Qwen2_5_VLProcessor(
        transformers.Qwen2VLImageProcessor(patch_size=14, min_pixels=3136, max_pixels=12845056),
        tokenizer,
        transformers.Qwen2VLVideoProcessor(),
    )


#: By name.
SHAPES: dict[str, Shape] = {
    "llama-125m": Shape(
        "LlamaForCausalLM",
        lambda: transformers.LlamaConfig(
            vocab_size=32064, hidden_size=768, intermediate_size=1792, num_hidden_layers=12, num_attention_heads=12,
            num_key_value_heads=12, max_position_embeddings=2048,
        )
    ),
    "smolvlm2-500m": Shape(
        "SmolVLMForConditionalGeneration",
        _smolvlm(
            {"hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 15,
             "num_key_value_heads": 5},
            {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
             "image_size": 512, "patch_size": 16},
            scale_factor=4,
        ),
        _ROWS, _smolvlm_processor(512, 2048, 64),
    ),
    "smolvlm2-2.2b": Shape(
        "SmolVLMForConditionalGeneration",
        _smolvlm(
            {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
             "num_key_value_heads": 32},
            {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
             "image_size": 384, "patch_size": 14},
            scale_factor=3,
        ),
        _ROWS, _smolvlm_processor(384, 1536, 81),
    ),
    "qwen2.5-vl-3b": Shape(
        "Qwen2_5_VLForConditionalGeneration", _qwen2_5_vl, _QWEN_SPECIAL, _qwen_processor, "<|vision_start|><|image_pad|><|vision_end|>"
    ),
}  # fmt: skip
