"""Convert the checkpoint of `finetune` to the published one, optionally averaged with another checkpoint.

python -m training.shapes.export .cache/shapes/finetuned .cache/shapes/checkpoint
"""

import shutil
from pathlib import Path

import torch
import typer
from safetensors.torch import load_file, save_file

from training.shapes.trainer import WEIGHTS


def main(finetuned: Path, folder: Path, other: Path | None = None, share: float = 0.0) -> None:
    """Convert the checkpoint of `finetune`, averaged with the checkpoint `--other`, whose weight is `--share`."""
    weights = load_file(finetuned / WEIGHTS)
    if other is not None:
        others = load_file(other / WEIGHTS)
        weights = {
            name: each.float().lerp(others[name].float(), share).to(torch.bfloat16)
            for name, each in weights.items()
        }
    shutil.copytree(finetuned, folder, dirs_exist_ok=True)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)


if __name__ == "__main__":
    typer.run(main)
