"""Train `shapes-clip` further: texts move closer to the images that they describe, and away from other images.

python -m training.shapes_clip.train --out .cache/shapes_clip --minutes 10 --autocast
"""

import engines.torch_backend  # noqa: F401  isort: skip - before torchvision

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPModel, PreTrainedTokenizerFast

from training import PACKAGES
from training.shapes.architecture import normalize
from training.shapes.gallery import encode
from training.shapes.lessons import Album
from training.shapes.trainer import Trainer, save
from training.shapes.world import Scene
from training.shapes_clip.evaluation import evaluate, make_queries
from training.shapes_clip.queries import Query, sample_query

FIRST_GROUPS, NEW_GROUPS = 400, 4  # groups of four images: at first, and drawn per step
GROUPS_OF_A_STEP = 64
TEXTS_OF_A_STEP = 128
HELD_OUT_GROUPS = 200  # groups for the report


class Student(nn.Module):
    """The model in float32, and its tokenizer. In the vision tower, all parts before the last two layers are frozen."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
        self.model = CLIPModel.from_pretrained(checkpoint, dtype=torch.float32)
        vision: Any = self.model.vision_model
        for part in (vision.embeddings, vision.pre_layrnorm, *vision.encoder.layers[:-2]):
            part.requires_grad_(False)

    def images(self, images: Tensor) -> Tensor:
        """Vectors of length 1. Shapes: uint8 (N, size, size, 3) in, (N, V) out."""
        features: Any = self.model.get_image_features(normalize(images))
        return F.normalize(features.pooler_output.float(), dim=1)

    def texts(self, queries: Sequence[Query]) -> Tensor:
        """Vectors of length 1. Shapes: (Q, V)."""
        texts = [query.text for query in queries]
        ids = self.tokenizer(texts, padding=True, return_tensors="pt")["input_ids"]
        features: Any = self.model.get_text_features(ids)
        return F.normalize(features.pooler_output.float(), dim=1)

    def loss(self, images: Tensor, codes: np.ndarray, queries: Sequence[Query]) -> Tensor:
        """The ranking loss of queries and the images that they describe.

        Shapes: uint8 (N, size, size, 3), uint8 (N, CODE_LENGTH), Q queries.
        """
        is_true = torch.from_numpy(np.stack([query.holds_of(codes) for query in queries]))
        scores = self.model.logit_scale.exp() * self.texts(queries) @ self.images(images).T
        return 0.8 * rank_loss(scores, is_true) + 0.2 * rank_loss(scores.T, is_true.T)


def rank_loss(scores: Tensor, is_true: Tensor) -> Tensor:
    """Compare each matching pair with all pairs of its row that do not match. Shapes: (rows, columns) both."""
    false = scores.masked_fill(is_true, -1e4).logsumexp(1, keepdim=True)
    losses = F.softplus(false - scores) * is_true
    rows = is_true.any(1)
    return (losses.sum(1)[rows] / is_true.sum(1)[rows]).mean()


def sample_pictures(album: Album, num_groups: int) -> tuple[list[Scene], Tensor, np.ndarray]:
    """The scenes of some groups, their images and their codes. Shapes: see `Student.loss`."""
    groups = album.rng.sample(album.groups, num_groups)
    pictures = [picture for group in groups for picture in group]
    scenes = [picture.scene for picture in pictures if picture.scene]
    images = torch.from_numpy(np.stack([picture.pixels for picture in pictures]))
    return scenes, images, np.stack([encode(scene) for scene in scenes])


def main(
    out: Annotated[Path, typer.Option(help="Folder of the new checkpoint.")],
    start: Path = PACKAGES / "shapes_clip" / "checkpoint",
    num_steps: int = 1000,
    minutes: Annotated[float, typer.Option(help="End after this time at the latest.")] = math.inf,
    learning_rate: float = 3e-4,
    seed: int = 0,
    autocast: Annotated[bool, typer.Option(help="Multiply matrices in bfloat16.")] = False,
) -> None:
    """Train. At intervals and at the end, report precision on held-out images and write the checkpoint."""
    shutil.copytree(start, out, dirs_exist_ok=True)
    student, rng = Student(start), Random(seed)
    album, held_out = Album(rng), Album(Random("held out"))
    album.draw(FIRST_GROUPS, 0, 0)
    held_out.draw(HELD_OUT_GROUPS, 0, 0)
    scenes, images, codes = sample_pictures(held_out, HELD_OUT_GROUPS)
    questions = make_queries(scenes, 60)

    def losses_of() -> tuple[Tensor]:
        album.draw(NEW_GROUPS, 0, 0)
        shown, images, codes = sample_pictures(album, GROUPS_OF_A_STEP)
        queries = [sample_query(scene, rng) for scene in rng.sample(shown, TEXTS_OF_A_STEP)]
        return (student.loss(images, codes, queries),)

    @torch.no_grad()
    def report(averaged: Student) -> str:
        save(averaged.model, out, torch.float16)
        vectors = torch.cat([averaged.images(chunk) for chunk in images.split(128)])
        scores = averaged.texts([query for _, query in questions]) @ vectors.T
        rows = evaluate(questions, scores.numpy(), codes)
        return ", ".join(f"{kind} {row.precision_at_1:.2f}" for kind, row in rows.items())

    trainer = Trainer(student, learning_rate, autocast=autocast)
    trainer.run(losses_of, report, num_steps=num_steps, seconds=60 * minutes)


if __name__ == "__main__":
    typer.run(main)
