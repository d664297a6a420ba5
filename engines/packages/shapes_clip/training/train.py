"""Trains `shapes-clip` and writes its checkpoint.

What a query means is a vector made of its facts, without words (`meaning.py`). Images learn to be near to
the meanings that are true of them, and texts to be what they mean: this is far quicker than to learn both
from each other.

python -m engines.packages.shapes_clip.training.train --minutes 12 --autocast
"""

import engines.torch_backend  # noqa: F401  isort: skip - before torchvision

import math
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

from engines.packages.shapes.training.architecture import IMAGE_SIZE, PATCH_SIZE
from engines.packages.shapes.training.gallery import (
    NUM_HELD_OUT,
    Gallery,
    decode,
    load_gallery,
)
from engines.packages.shapes.training.llava import LlavaForConditionalGeneration
from engines.packages.shapes.training.scene_targets import place_of_patches
from engines.packages.shapes.training.trainer import Plan, Trainer
from engines.packages.shapes.training.world import PLACES, sample_scene
from engines.packages.shapes_clip.training.architecture import DIMENSIONS, look, make_model, see
from engines.packages.shapes_clip.training.evaluation import evaluate, make_queries
from engines.packages.shapes_clip.training.export import export
from engines.packages.shapes_clip.training.meaning import Meaning
from engines.packages.shapes_clip.training.queries import Query, sample_query
from engines.packages.shapes_clip.training.tokenizer import train_tokenizer

EYE = Path(__file__).parents[2] / "shapes" / "checkpoint"
CHECKPOINT = Path(__file__).parents[1] / "checkpoint"
PLACE_OF_PATCHES = place_of_patches(IMAGE_SIZE // PATCH_SIZE)
PATCHES_OF_A_PLACE = len(PLACE_OF_PATCHES) // len(PLACES)
NUM_TEXTS = 20_000  # that the tokenizer learns from
NUM_FOR_NEURONS = 256  # pictures that say which neurons matter
MARGIN_WEIGHT = 0.3  # of the sigmoid loss
TEXT_WEIGHT = 4.0  # of the distance between texts and what they mean
TEXTS_OF_A_CHUNK = 32
HARDEST = "with place"  # a fourth of the queries, beside its share


def make_tokenizer(num_texts: int = NUM_TEXTS) -> PreTrainedTokenizerFast:
    """The tokenizer; always the same."""
    rng = Random(0)
    return train_tokenizer(sample_query(sample_scene(rng), rng).text for _ in range(num_texts))


def encode_texts(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """Token ids, padded behind their end, where no token of a text looks. Shapes: int64 (Q, longest)."""
    return tokenizer(texts, padding=True, return_tensors="pt")["input_ids"]


class Student(nn.Module):
    """The model, what queries mean, and the bias of the sigmoid loss."""

    def __init__(self, model: CLIPModel, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.meaning = Meaning(DIMENSIONS)
        self.bias = nn.Parameter(torch.tensor(-5.0))

    def texts(self, queries: list[Query]) -> Tensor:
        """Vectors of length 1; those of like lengths are padded together. Shapes: (Q, V)."""
        order = sorted(range(len(queries)), key=lambda index: len(queries[index].text))
        made = []
        for first in range(0, len(order), TEXTS_OF_A_CHUNK):
            chunk = [queries[index].text for index in order[first : first + TEXTS_OF_A_CHUNK]]
            ids = encode_texts(self.tokenizer, chunk)
            features: Any = self.model.get_text_features(ids)
            made.append(features.pooler_output.float())
        return F.normalize(torch.cat(made)[torch.tensor(order).argsort()], dim=1)

    def images(self, looked: Tensor, stands_for: int = 1) -> Tensor:
        """Vectors of length 1. Shapes: (N, P, W) in, (N, V) out."""
        return F.normalize(see(self.model, looked, stands_for).float(), dim=1)

    def loss(
        self,
        looked: Tensor,
        queries: list[Query],
        is_true: Tensor,
        num_texts: int,
        stands_for: int = 1,
    ) -> Tensor:
        """How far images are from the meanings, and the first `num_texts` texts from theirs.

        Each true pair stands against all false ones of its query, and of its image; a sigmoid asks the same
        of every pair by itself. Shapes: (N, P, W), Q queries, bool (Q, N).
        """
        scale = self.model.logit_scale.exp().clamp(max=100)
        meanings = F.normalize(self.meaning(queries).float(), dim=1)
        logits = scale * meanings @ self.images(looked, stands_for).T
        ranked = 0.7 * _rank_loss(logits, is_true) + 0.3 * _rank_loss(logits.T, is_true.T)
        each = F.binary_cross_entropy_with_logits(
            logits + self.bias, is_true.float(), reduction="sum"
        )
        texts = self.texts(queries[:num_texts])
        apart = (texts - meanings[:num_texts].detach()).square().sum(1).mean()
        return ranked + MARGIN_WEIGHT * each / is_true.sum() + TEXT_WEIGHT * apart


def _rank_loss(logits: Tensor, is_true: Tensor) -> Tensor:
    """Shapes: (rows, columns) both."""
    false = logits.masked_fill(is_true, -1e4).logsumexp(1, keepdim=True)
    losses = F.softplus(false - logits) * is_true
    rows = is_true.any(1)
    return (losses.sum(1)[rows] / is_true.sum(1)[rows]).mean()


@torch.no_grad()
def look_at_all(model: CLIPModel, gallery: Gallery, file: Path) -> np.ndarray:
    """`look` at every picture, kept in a file. Shapes: float16 (N, P, W)."""
    if file.exists():
        return np.load(file, mmap_mode="r", allow_pickle=False)
    chunks = []
    for chunk in track(torch.from_numpy(gallery.pictures).split(128), "looking"):
        with torch.autocast("cpu", torch.bfloat16):
            chunks.append(look(model, chunk).half().numpy())
    with file.with_suffix(".part").open("wb") as part:
        np.save(part, np.concatenate(chunks), allow_pickle=False)
    file.with_suffix(".part").rename(file)
    return np.load(file, mmap_mode="r", allow_pickle=False)


def draw_groups(num_images: int, num_groups: int, rng: np.random.Generator) -> np.ndarray:
    """Images by whole groups, whose scenes differ in one word. Shapes: int64 (num_images,)."""
    groups = rng.choice(num_groups, num_images // 4, replace=False)
    return (4 * groups[:, None] + np.arange(4)).ravel()


def draw_patches(looked: np.ndarray, rng: np.random.Generator) -> Tensor:
    """The class token and one patch of each place, which stands for all of them; see PATCHES_OF_A_PLACE.

    Shapes: float16 (N, P, W) in, float (N, 1 + places, W) out.
    """
    members = PLACE_OF_PATCHES.argsort(stable=True).view(len(PLACES), PATCHES_OF_A_PLACE).numpy()
    chosen = rng.integers(0, PATCHES_OF_A_PLACE, (len(looked), len(PLACES)))
    patches = 1 + members[np.arange(len(PLACES)), chosen]
    kept = np.concatenate([np.zeros_like(patches[:, :1]), patches], axis=1)
    return torch.from_numpy(np.take_along_axis(looked, kept[..., None], axis=1)).float()


def main(
    cache: Annotated[Path, typer.Option(help="where pictures and checkpoints go")] = Path(
        ".cache/shapes_clip"
    ),
    output: Annotated[Path, typer.Option(help="where the model goes")] = CHECKPOINT,
    num_steps: int = 1000,
    minutes: Annotated[float, typer.Option(help="end after this time, if not before")] = math.inf,
    batch_size: int = 256,
    num_queries: int = 512,
    num_texts: Annotated[int, typer.Option(help="of the queries, whose words are read")] = 96,
    learning_rate: float = 1.5e-3,
    num_shards: Annotated[int, typer.Option(help="of 2048 pictures each")] = 14,
    resume: bool = False,
    report_every: Annotated[int, typer.Option(help="steps")] = 100,
    num_threads: int = 1,
    autocast: Annotated[bool, typer.Option(help="multiply in bfloat16")] = False,
) -> None:
    """Train, report precision on held-out pictures, and write the checkpoint."""
    torch.set_num_threads(num_threads)
    gallery = load_gallery(cache / "gallery", num_shards, IMAGE_SIZE)
    tokenizer = make_tokenizer()
    eye = LlavaForConditionalGeneration.from_pretrained(EYE, dtype=torch.float32).eval()
    sample = torch.from_numpy(gallery.pictures[:NUM_FOR_NEURONS])
    student = Student(make_model(tokenizer, eye.model.vision_tower, sample), tokenizer)
    looked = look_at_all(student.model, gallery, cache / f"looked-{num_shards}.npy")
    num_groups = (len(looked) - NUM_HELD_OUT) // 4

    def loss_at(step: int) -> Tensor:
        generator = np.random.default_rng(step)
        drawn = draw_groups(batch_size, num_groups, generator)
        codes = gallery.codes[drawn]
        rng = Random(step)
        chosen = [decode(codes[i]) for i in rng.choices(range(len(codes)), k=num_queries)]
        kinds = [HARDEST if index % 4 == 0 else None for index in range(num_queries)]
        queries = [
            sample_query(scene, rng, kind) for scene, kind in zip(chosen, kinds, strict=True)
        ]
        is_true = torch.from_numpy(np.stack([query.holds_of(codes) for query in queries]))
        patches = draw_patches(looked[drawn], generator)
        return student.loss(patches, queries, is_true, num_texts, PATCHES_OF_A_PLACE)

    held_out = gallery.codes[-NUM_HELD_OUT:]
    questions = make_queries([decode(code) for code in held_out], 60)

    @torch.no_grad()
    def report() -> str:
        tail = torch.from_numpy(looked[-NUM_HELD_OUT:]).float()
        images = torch.cat([student.images(chunk) for chunk in tail.split(128)])
        asked = [query for _, query in questions]
        texts, meanings = student.texts(asked), F.normalize(student.meaning(asked), dim=1)
        export(student.model, tokenizer, cache / "checkpoint")
        told = [f"cosine of texts {(texts * meanings).sum(1).mean():.3f}"]
        for name, vectors in (("texts", texts), ("meanings", meanings)):
            rows = evaluate(questions, (vectors @ images.T).numpy(), held_out)
            told.append(
                f"{name}: {', '.join(f'{k} {r.precision_at_1:.2f}' for k, r in rows.items())}"
            )
        return "; ".join(told)

    trainer = Trainer(student, loss_at, Plan(num_steps, learning_rate, warmup_steps=50), autocast)
    if resume:
        trainer.load(cache / "state")
    trainer.run(cache / "state", report, report_every=report_every, max_seconds=60 * minutes)
    with trainer.averaged():
        export(student.model, tokenizer, output)


if __name__ == "__main__":
    typer.run(main)
