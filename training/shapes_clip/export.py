"""Writes the model as transformers reads it: `CLIPModel.from_pretrained(folder)`, weights in float16."""

import copy
import json
from pathlib import Path

import torch
from transformers import CLIPModel, PreTrainedTokenizerFast

from training.shapes.architecture import IMAGE_MEAN, IMAGE_SIZE, IMAGE_STD
from training.shapes.llava import CLIPImageProcessor


def export(model: CLIPModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the checkpoint."""
    copy.deepcopy(model).to(dtype=torch.float16).save_pretrained(folder)  # pyright: ignore[reportCallIssue]
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    CLIPImageProcessor(
        size=size,
        crop_size=size,
        do_center_crop=False,
        image_mean=list(IMAGE_MEAN),
        image_std=list(IMAGE_STD),
        resample=3,
    ).save_pretrained(folder)
