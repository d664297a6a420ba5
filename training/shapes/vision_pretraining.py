"""Stage 1: teaches the vision tower and the projector to read scenes, without the language model.

python -m training.shapes.vision_pretraining --num-steps 8000
"""

import math
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from training.shapes.architecture import IMAGE_SIZE, make_model, normalize
from training.shapes.code_book import CodeBook
from training.shapes.gallery import (
    NUM_HELD_OUT,
    Gallery,
    load_gallery,
    mirror_codes,
)
from training.shapes.llava import LlavaForConditionalGeneration
from training.shapes.scene_targets import SILHOUETTE_SIZE, SceneTargets
from training.shapes.trainer import Plan, Trainer

SILHOUETTE_WEIGHT = 3.0  # in the loss


class VisionStudent(nn.Module):
    """What stage 1 trains: the model's eye, and a read-out of shapes' outlines that helps to teach it."""

    def __init__(self, model: LlavaForConditionalGeneration) -> None:
        super().__init__()
        config: Any = model.config  # whose parts have no types
        self.vision_tower = model.model.vision_tower
        self.projector = model.model.multi_modal_projector
        self.silhouette_weight = SILHOUETTE_WEIGHT
        self.silhouette = nn.Linear(config.vision_config.hidden_size, SILHOUETTE_SIZE**2)
        self.code_book = CodeBook.of_width(config.text_config.hidden_size)
        self.patches_per_side = config.vision_config.image_size // config.vision_config.patch_size

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """What the decoder gets to see, and logits of what the patches' parts are covered by.

        Shapes: uint8 (N, size, size, 3) in, float (N, P, width) and (N, P, SILHOUETTE_SIZE ** 2) out.
        """
        seen = self.vision_tower(normalize(images)).last_hidden_state[:, 1:]
        return self.projector(seen), self.silhouette(seen)

    def targets(self, images: Tensor, codes: np.ndarray) -> SceneTargets:
        """What the patches of images with these codes should know."""
        return SceneTargets.of(images, torch.from_numpy(codes), self.patches_per_side)

    def loss(self, outputs: tuple[Tensor, Tensor], targets: SceneTargets) -> Tensor:
        """How far what `forward` gives is from what it should."""
        features, silhouette = outputs
        covered = F.binary_cross_entropy_with_logits(silhouette, targets.silhouette)
        return self.code_book.loss(features, targets) + self.silhouette_weight * covered

    @torch.no_grad()
    def accuracy(self, gallery: Gallery) -> dict[str, float]:
        """Share of right readings on the held-out end of a gallery."""
        images = torch.from_numpy(gallery.images[-NUM_HELD_OUT:])
        features = torch.cat([self(chunk)[0] for chunk in images.split(64)])
        targets = self.targets(images, gallery.codes[-NUM_HELD_OUT:])
        return self.code_book.accuracy(features, targets)


def draw_images(
    galleries: list[Gallery], num_images: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Random images and their codes, as many from each gallery, half of them mirrored."""
    drawn = []
    for gallery in galleries:
        indices = rng.integers(0, len(gallery.codes) - NUM_HELD_OUT, num_images // len(galleries))
        images, codes = gallery.images[indices], gallery.codes[indices]
        half = len(indices) // 2
        images[:half], codes[:half] = images[:half, :, ::-1].copy(), mirror_codes(codes[:half])
        drawn.append((images, codes))
    return np.concatenate([images for images, _ in drawn]), np.concatenate(
        [codes for _, codes in drawn]
    )


def main(
    cache: Annotated[Path, typer.Option(help="where images and checkpoints go")] = Path(
        ".cache/shapes"
    ),
    num_steps: int = 8000,
    minutes: Annotated[float, typer.Option(help="end after this time, if not before")] = math.inf,
    batch_size: int = 64,
    learning_rate: float = 1e-3,
    num_shards: Annotated[int, typer.Option(help="of 2048 images each")] = 32,
    crowds: Annotated[bool, typer.Option(help="half of the images of up to nine shapes")] = True,
    start: Annotated[
        Path | None, typer.Option(help="a checkpoint whose eye learns on; else a fresh one")
    ] = None,
    resume: bool = False,
    report_every: Annotated[int, typer.Option(help="steps")] = 250,
    num_threads: int = 2,
    compile: bool = False,
    autocast: Annotated[bool, typer.Option(help="multiply in bfloat16")] = False,
) -> None:
    """Train the eye."""
    torch.set_num_threads(num_threads)
    gallery = load_gallery(cache / "gallery", num_shards, IMAGE_SIZE)
    galleries = [gallery]
    if crowds:
        galleries.append(load_gallery(cache / "crowds", num_shards // 2, IMAGE_SIZE, crowded=True))
    if start is None:
        student = VisionStudent(make_model())
    else:
        student = VisionStudent(
            LlavaForConditionalGeneration.from_pretrained(start, dtype=torch.float32)
        )
        student.silhouette_weight = 0.0  # it helps only at the beginning
    forward = torch.compile(student) if compile else student

    def loss_at(step: int) -> Tensor:
        array, codes = draw_images(galleries, batch_size, np.random.default_rng(step))
        images = torch.from_numpy(array)
        return student.loss(forward(images), student.targets(images, codes))

    def report() -> str:
        return " ".join(f"{name} {share:.4f}" for name, share in student.accuracy(gallery).items())

    trainer = Trainer(
        student, loss_at, Plan(num_steps, learning_rate, average_decay=0.998), autocast
    )
    if resume:
        trainer.load(cache / "vision")
    trainer.run(cache / "vision", report, report_every, max_seconds=60 * minutes)


if __name__ == "__main__":
    typer.run(main)
