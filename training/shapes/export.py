"""Writes the model in the format of the `llava-hf` checkpoints: weights in bf16, tokenizer, processor.

python -m training.shapes.export .cache/shapes/finetuned .cache/shapes/checkpoint
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
import typer
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import nn

from training.shapes.architecture import (
    IMAGE_MEAN,
    IMAGE_SIZE,
    IMAGE_STD,
    PATCH_SIZE,
    make_config,
)
from training.shapes.llava import (
    CLIPImageProcessor,
    GenerationConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from training.shapes.tokenizer import (
    BOS_ID,
    CHAT_TEMPLATE,
    EOS_ID,
    IMAGE,
    PAD_ID,
    to_fast,
)


def make_image_processor() -> CLIPImageProcessor:
    """Of both models: images are squashed to a square, never cropped."""
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    return CLIPImageProcessor(
        size=size,
        crop_size=size,
        do_center_crop=False,
        image_mean=list(IMAGE_MEAN),
        image_std=list(IMAGE_STD),
        resample=3,
    )


def name_tokenizer(folder: Path) -> dict[str, Any]:
    """The tokenizer's settings, with the class that any release of `transformers` has."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    _write(folder / "tokenizer_config.json", settings)
    return settings


def load_finetuned(folder: Path) -> tuple[LlavaForConditionalGeneration, PreTrainedTokenizerFast]:
    tokenizer = to_fast(Tokenizer.from_file(str(folder / "tokenizer.json")))
    model = LlavaForConditionalGeneration._from_config(make_config(), dtype=torch.float32)
    model.load_state_dict(load_file(folder / "weights.safetensors"))
    return model, tokenizer


def export(
    model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Write the checkpoint; `LlavaForConditionalGeneration.from_pretrained(folder)` reads it."""
    model = copy.deepcopy(model).to(dtype=torch.bfloat16)  # pyright: ignore[reportCallIssue]
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        do_sample=False,
        max_new_tokens=128,
    )
    model.save_pretrained(folder)
    processor = LlavaProcessor(
        image_processor=make_image_processor(),
        tokenizer=tokenizer,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        chat_template=CHAT_TEMPLATE,
        image_token=IMAGE,
        num_additional_image_tokens=1,
    )
    processor.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    _write(folder / "chat_template.json", {"chat_template": CHAT_TEMPLATE})
    _add_what_older_releases_read(folder)


def _add_what_older_releases_read(folder: Path) -> None:
    """Names that `transformers` 4 has for what release 5 writes otherwise."""
    config = json.loads((folder / "config.json").read_text())
    text_config = config["text_config"]
    text_config["rope_theta"] = text_config["rope_parameters"]["rope_theta"]
    _write(folder / "config.json", config)
    tokenizer = name_tokenizer(folder)
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = {name: tokenizer[name] for name in names} | {"additional_special_tokens": [IMAGE]}
    _write(folder / "special_tokens_map.json", special)


def _write(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def blend(model: nn.Module, other: Path, share: float) -> None:
    """Replace the weights by an average with those of a checkpoint, which have this share."""
    weights = LlavaForConditionalGeneration.from_pretrained(other, dtype=torch.float32).state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.lerp_(weights[name], share)


def main(finetuned: Path, folder: Path, other: Path | None = None, share: float = 0.0) -> None:
    """Make a checkpoint of what `finetune` wrote, averaged with the checkpoint `--other` by `--share`."""
    model, tokenizer = load_finetuned(finetuned)
    if other is not None:
        blend(model, other, share)
    export(model, tokenizer, folder)


if __name__ == "__main__":
    typer.run(main)
