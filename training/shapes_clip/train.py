"""Trains `shapes-clip` and writes its checkpoint.

What scenes and queries mean are vectors, without images or words (`meaning.py`). Images learn to be the
vector of their scene, and texts to be what they mean: this is far quicker than to learn both from each other.

python -m training.shapes_clip.train --minutes 12 --autocast
"""

import engines.torch_backend  # noqa: F401  isort: skip - before torchvision

import math
from collections.abc import Callable
from multiprocessing import Pool
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPModel, PreTrainedTokenizerFast

from training.shapes.architecture import IMAGE_SIZE, PATCH_SIZE
from training.shapes.code_book import place_of_patches
from training.shapes.gallery import decode, encode, render_group, to_input
from training.shapes.llava import LlavaForConditionalGeneration
from training.shapes.trainer import Trainer
from training.shapes.world import PLACES, sample_scene
from training.shapes_clip.architecture import (
    CHECKPOINT,
    DIMENSIONS,
    EYE,
    freeze,
    look,
    make_model,
    see,
)
from training.shapes_clip.evaluation import evaluate, make_queries
from training.shapes_clip.export import export
from training.shapes_clip.meaning import Meaning, learn_meaning
from training.shapes_clip.queries import Query, sample_query

PLACE_OF_PATCHES = place_of_patches(IMAGE_SIZE // PATCH_SIZE)
PATCHES_OF_A_PLACE = len(PLACE_OF_PATCHES) // len(PLACES)
GROUPS_OF_A_SHARD = 512
NUM_HELD_OUT = 1024  # images at the end of the gallery, which training never sees
NUM_FOR_NEURONS = 256  # images that say which neurons matter
TEXTS_OF_A_CHUNK = 32
IMAGES_OF_A_STEP, TEXTS_OF_A_STEP = 256, 128
TEXTS_TO_POLISH = 320  # of a step in which only texts learn


class Student(nn.Module):
    """The model, and what it is to say."""

    def __init__(
        self, model: CLIPModel, tokenizer: PreTrainedTokenizerFast, meaning: Meaning
    ) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.meaning = meaning

    def texts(self, queries: list[Query]) -> Tensor:
        """Vectors of length 1; those of like lengths are padded together, behind their end. Shapes: (Q, V)."""
        order = sorted(range(len(queries)), key=lambda index: len(queries[index].text))
        made = []
        for first in range(0, len(order), TEXTS_OF_A_CHUNK):
            chunk = [queries[index].text for index in order[first : first + TEXTS_OF_A_CHUNK]]
            ids = self.tokenizer(chunk, padding=True, return_tensors="pt")["input_ids"]
            features: Any = self.model.get_text_features(ids)
            made.append(features.pooler_output.float())
        return F.normalize(torch.cat(made)[torch.tensor(order).argsort()], dim=1)

    def images(self, looked: Tensor, stands_for: int = 1) -> Tensor:
        """Vectors of length 1. Shapes: (N, P, W) in, (N, V) out."""
        return F.normalize(see(self.model, looked, stands_for).float(), dim=1)

    def losses(
        self, looked: Tensor, codes: np.ndarray, queries: list[Query], stands_for: int = 1
    ) -> tuple[Tensor, Tensor]:
        """How far images and texts are from what they mean.

        Shapes: (N, P, W), uint8 (N, CODE_LENGTH), Q queries.
        """
        apart = self.images(looked, stands_for) - self.meaning.of_scenes(codes)
        return apart.square().sum(1).mean(), self.loss_of_texts(queries)

    def loss_of_texts(self, queries: list[Query]) -> Tensor:
        """How far texts are from what they mean."""
        apart = self.texts(queries) - self.meaning.of_queries(queries)
        return apart.square().sum(1).mean()


def render_shard(index: int) -> tuple[np.ndarray, np.ndarray]:
    """Images and codes of some groups; the same index always gives the same."""
    rng = Random(index)
    drawn = [pair for _ in range(GROUPS_OF_A_SHARD) for pair in render_group(rng)]
    images = np.stack([to_input(image) for _, image in drawn])
    return images, np.stack([encode(scene) for scene, _ in drawn])


def render_gallery(num_shards: int, num_processes: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Shapes: images uint8 (N, size, size, 3) and codes uint8 (N, CODE_LENGTH)."""
    with Pool(num_processes) as pool:
        jobs = pool.imap(render_shard, range(num_shards))
        shards = list(track(jobs, "rendering", total=num_shards))
    images, codes = map(np.concatenate, zip(*shards, strict=True))
    return images, codes


@torch.no_grad()
def look_at_all(model: CLIPModel, images: np.ndarray) -> np.ndarray:
    """`look` at every image. Shapes: float16 (N, P, W)."""
    chunks = []
    for chunk in track(torch.from_numpy(images).split(128), "looking"):
        with torch.autocast("cpu", torch.bfloat16):
            chunks.append(look(model, chunk).half().numpy())
    return np.concatenate(chunks)


def draw_patches(looked: np.ndarray, rng: np.random.Generator) -> Tensor:
    """The class token and one patch of each place, which stands for all of them; see PATCHES_OF_A_PLACE.

    Shapes: float16 (N, P, W) in, float (N, 1 + places, W) out.
    """
    members = PLACE_OF_PATCHES.argsort(stable=True).view(len(PLACES), PATCHES_OF_A_PLACE).numpy()
    chosen = rng.integers(0, PATCHES_OF_A_PLACE, (len(looked), len(PLACES)))
    patches = 1 + members[np.arange(len(PLACES)), chosen]
    kept = np.concatenate([np.zeros_like(patches[:, :1]), patches], axis=1)
    return torch.from_numpy(np.take_along_axis(looked, kept[..., None], axis=1)).float()


def polish_texts(student: Student, num_steps: int, report: Callable[[], str]) -> None:
    """Let only the text tower learn: its steps are cheap, and searches want it exact."""
    student.requires_grad_(False)
    student.model.text_model.requires_grad_(True)
    student.model.text_projection.requires_grad_(True)
    rng = Random("texts")

    def losses_of() -> tuple[Tensor]:
        queries = [sample_query(sample_scene(rng), rng) for _ in range(TEXTS_TO_POLISH)]
        return (student.loss_of_texts(queries),)

    Trainer(student).run(losses_of, report, num_steps=num_steps)


def main(
    output: Annotated[Path, typer.Option(help="where the model goes")] = CHECKPOINT,
    num_steps: int = 1000,
    minutes: Annotated[float, typer.Option(help="end after this time, if not before")] = math.inf,
    num_text_steps: Annotated[
        int, typer.Option(help="in which only texts learn, at the end")
    ] = 300,
    num_shards: Annotated[int, typer.Option(help="of 2048 images each")] = 14,
    start: Annotated[
        Path | None,
        typer.Option(help="a checkpoint that learns on; else only the eye is taken over"),
    ] = None,
    autocast: Annotated[bool, typer.Option(help="multiply in bfloat16")] = False,
) -> None:
    """Train, report precision on held-out images, and write the checkpoint, now and then too."""
    torch.set_num_threads(1)
    images, codes = render_gallery(num_shards)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(CHECKPOINT)
    if start:
        model = freeze(CLIPModel.from_pretrained(start, dtype=torch.float32))
    else:
        eye = LlavaForConditionalGeneration.from_pretrained(EYE, dtype=torch.float32).eval()
        model = make_model(eye.model.vision_tower, torch.from_numpy(images[:NUM_FOR_NEURONS]))
    student = Student(model, tokenizer, learn_meaning(DIMENSIONS))
    looked = look_at_all(student.model, images)
    generator, rng = np.random.default_rng(0), Random(0)

    def losses_of() -> tuple[Tensor, Tensor]:
        drawn = generator.integers(0, len(looked) - NUM_HELD_OUT, IMAGES_OF_A_STEP)
        queries = [sample_query(sample_scene(rng), rng) for _ in range(TEXTS_OF_A_STEP)]
        patches = draw_patches(looked[drawn], generator)
        return student.losses(patches, codes[drawn], queries, PATCHES_OF_A_PLACE)

    held_out = codes[-NUM_HELD_OUT:]
    questions = make_queries([decode(code) for code in held_out], 60)

    @torch.no_grad()
    def report() -> str:
        export(student.model, tokenizer, output)
        tail = torch.tensor(looked[-NUM_HELD_OUT:]).float()
        images = torch.cat([student.images(chunk) for chunk in tail.split(128)])
        scores = student.texts([query for _, query in questions]) @ images.T
        rows = evaluate(questions, scores.numpy(), held_out)
        return ", ".join(f"{kind} {row.precision_at_1:.2f}" for kind, row in rows.items())

    trainer = Trainer(student, 1.5e-3, autocast=autocast)
    trainer.run(losses_of, report, num_steps=num_steps, seconds=60 * minutes)
    with trainer.averaged():
        polish_texts(student, num_text_steps, report)


if __name__ == "__main__":
    typer.run(main)
