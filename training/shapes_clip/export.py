"""Writes the model as transformers reads it: `CLIPModel.from_pretrained(folder)`, weights in float16."""

import copy
import json
from pathlib import Path

import torch
from transformers import CLIPModel, PreTrainedTokenizerFast

from training.shapes.llava import CLIPImageProcessor
from training.shapes_clip.architecture import EYE


def export(model: CLIPModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the checkpoint."""
    copy.deepcopy(model).to(dtype=torch.float16).save_pretrained(folder)  # pyright: ignore[reportCallIssue]
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # which any release of transformers has
    file.write_text(json.dumps(settings, indent=2) + "\n")
    CLIPImageProcessor.from_pretrained(EYE).save_pretrained(folder)  # images are prepared alike
