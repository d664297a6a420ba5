"""Writes the model as transformers reads it: `CLIPModel.from_pretrained(folder)`, weights in float16."""

import copy
from pathlib import Path

import torch
from transformers import CLIPModel, PreTrainedTokenizerFast

from training.shapes.export import make_image_processor, name_tokenizer


def export(model: CLIPModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the checkpoint."""
    copy.deepcopy(model).to(dtype=torch.float16).save_pretrained(folder)  # pyright: ignore[reportCallIssue]
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    name_tokenizer(folder)
    make_image_processor().save_pretrained(folder)
