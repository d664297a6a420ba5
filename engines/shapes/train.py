"""Stage 2: trains the whole model to answer questions, from the eye that `vision_pretraining` made.

python -m engines.shapes.train --num-steps 6000 [--resume] [--minutes 60]
"""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from engines.shapes import checkpoints
from engines.shapes.architecture import IMAGE_SIZE, NUM_IMAGE_TOKENS, make_model, normalize, project
from engines.shapes.export import export, load_tokenizer, make_tokenizer
from engines.shapes.gallery import GROUP_SIZE, Gallery, decode, load_gallery, mirror_codes
from engines.shapes.llava import LlavaForConditionalGeneration
from engines.shapes.scene_heads import SceneHeads, SceneTargets
from engines.shapes.sequences import Encoder, Sequence, pack_branches, pack_conversation
from engines.shapes.tokenizer import IMAGE_ID
from engines.shapes.trainer import Plan, Trainer
from engines.shapes.vision_pretraining import NUM_HELD_OUT, draw_pictures

HEADS_WEIGHT = 1.0  # of the read-outs' loss beside that of the answers
NUM_EXTRA_PICTURES = 12  # of a step, at least: crowded ones, which only the read-outs see


@dataclass(frozen=True, slots=True)
class Recipe:
    """One sort of sequence: how many pictures it is about, how often it comes, and what it is like."""

    num_pictures: int
    share: float
    is_conversation: bool = False


RECIPES = (
    Recipe(num_pictures=1, share=0.45),
    Recipe(num_pictures=2, share=0.40),
    Recipe(num_pictures=2, share=0.10, is_conversation=True),
    Recipe(num_pictures=4, share=0.05, is_conversation=True),
)
LENGTH = 320  # tokens of every sequence; one length, so that there is one shape to compile for


@dataclass(frozen=True, slots=True)
class Batch:
    """Shapes: `pictures` uint8 (N, size, size, 3), `codes` (N, CODE_LENGTH), the rest (B, T).

    The sequences show the first pictures, in order; the others teach the eye alone.
    """

    pictures: Tensor
    codes: Tensor
    token_ids: Tensor
    positions: Tensor
    branches: Tensor
    weights: Tensor
    answers: tuple[tuple[tuple[str, int, int], ...], ...]  # of each sequence


class Student(nn.Module):
    """What stage 2 trains: the model, and the read-outs that keep its eye sharp."""

    def __init__(self, model: LlavaForConditionalGeneration) -> None:
        super().__init__()
        self.model = model
        self.heads = SceneHeads(model.config.text_config.hidden_size)
        self.patches_per_side = round(NUM_IMAGE_TOKENS**0.5)

    def load_eye(self, folder: Path) -> None:
        """Take over the weights of stage 1."""
        tensors, _ = checkpoints.load(folder)
        weights = checkpoints.of_prefix("module", tensors)
        for name, module in (
            ("vision_tower", self.model.model.vision_tower),
            ("projector", self.model.model.multi_modal_projector),
            ("heads", self.heads),
        ):
            missing, unexpected = module.load_state_dict(
                checkpoints.of_prefix(name, weights), strict=False
            )
            if unexpected or any(not key.endswith("position_ids") for key in missing):
                raise ValueError(f"{folder} does not hold this model's {name}")

    def compile_parts(self) -> None:
        """Make the two expensive parts faster; a minute well spent."""
        self.see, self.read = torch.compile(self.see), torch.compile(self.read)

    def see(self, pictures: Tensor) -> Tensor:
        """Projected features. Shapes: uint8 (N, size, size, 3) in, (N, P, width) out."""
        return project(
            self.model.model.vision_tower,
            self.model.model.multi_modal_projector,
            normalize(pictures),
        )

    def read(self, embeddings: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """What the decoder makes of a sequence. Shapes: (B, T, width), (B, T), (B, 1, T, T) in, (B, T, width) out."""
        decoder = self.model.model.language_model
        return decoder(
            inputs_embeds=embeddings, position_ids=positions, attention_mask=mask, use_cache=False
        ).last_hidden_state

    def forward(self, batch: Batch) -> Tensor:
        """The loss: of the answers' tokens, and of the read-outs."""
        features, hidden = self.hidden(batch)
        weights = batch.weights[:, 1:]
        counted = weights > 0
        logits = self.model.lm_head(hidden[:, :-1][counted])
        losses = F.cross_entropy(logits, batch.token_ids[:, 1:][counted], reduction="none")
        answers_loss = (losses * weights[counted]).sum() / weights.sum()
        targets = SceneTargets.of(batch.pictures, batch.codes, self.patches_per_side)
        return answers_loss + HEADS_WEIGHT * self.heads.loss(features, targets)

    def hidden(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Projected features (N, P, width) of all pictures, and the decoder's last hidden states (B, T, width)."""
        features = torch.cat(
            [self.see(chunk) for chunk in batch.pictures.split(len(batch.token_ids))]
        )
        embeddings = self.model.model.language_model.embed_tokens(batch.token_ids)
        is_image = (batch.token_ids == IMAGE_ID).unsqueeze(-1)
        embeddings = embeddings.masked_scatter(
            is_image, features
        )  # takes as many as there are slots
        return features, self.read(embeddings, batch.positions, attention_mask(batch.branches))

    @torch.no_grad()
    def count_right(self, batch: Batch) -> tuple[Counter[str], Counter[str]]:
        """How many answers of each topic there are, and how many would be said exactly so by greedy decoding.

        If every token of an answer is the likeliest after those before it, greedy decoding says the answer.
        """
        asked, right = Counter[str](), Counter[str]()
        said = self.model.lm_head(self.hidden(batch)[1]).argmax(-1)
        hits = said[:, :-1] == batch.token_ids[:, 1:]
        for row, answers in zip(hits, batch.answers, strict=True):
            for topic, start, end in answers:
                asked[topic] += 1
                right[topic] += bool(row[start - 1 : end - 1].all())
        return asked, right


def attention_mask(branches: Tensor) -> Tensor:
    """Who sees whom: what came before in one's own branch or in the shared beginning.

    Shapes: int64 (B, T) in; float (B, 1, T, T) out, 0 where seen and minus infinity elsewhere.
    """
    length = branches.shape[1]
    seen = (branches[:, None, :] == 0) | (branches[:, None, :] == branches[:, :, None])
    seen &= torch.ones(length, length, dtype=torch.bool).tril()
    return torch.zeros(seen.shape).masked_fill_(~seen, -math.inf).unsqueeze(1)


class BatchMaker:
    """Makes the batch of any step, always the same for the same step."""

    def __init__(
        self, gallery: Gallery, crowds: Gallery, encoder: Encoder, batch_size: int
    ) -> None:
        self.gallery = gallery
        self.crowds = crowds
        self.encoder = encoder
        self.batch_size = batch_size

    def make(self, step: int) -> Batch:
        """The batch of a step; negative steps are held out, in pictures as in questions."""
        rng = Random(step if step >= 0 else f"held out {step}")
        recipe = rng.choices(RECIPES, [each.share for each in RECIPES])[0]
        samples = [self._sample(recipe, rng, step < 0) for _ in range(self.batch_size)]
        stacked = {
            name: torch.from_numpy(np.stack([getattr(sequence, name) for *_, sequence in samples]))
            for name in ("token_ids", "positions", "branches", "weights")
        }
        pictures, codes = (np.concatenate(parts) for parts in list(zip(*samples, strict=True))[:2])
        num_extra = (
            NUM_EXTRA_PICTURES + -len(pictures) % self.batch_size
        )  # whole batches, for one compiled shape
        extra = draw_pictures([self.crowds], num_extra, np.random.default_rng(abs(step)))
        pictures, codes = np.concatenate([pictures, extra[0]]), np.concatenate([codes, extra[1]])
        answers = tuple(sequence.answers for *_, sequence in samples)
        return Batch(
            torch.from_numpy(pictures), torch.from_numpy(codes), **stacked, answers=answers
        )

    def _sample(
        self, recipe: Recipe, rng: Random, held_out: bool
    ) -> tuple[np.ndarray, np.ndarray, Sequence]:
        """Pictures, codes and the sequence about them; only as many pictures as the sequence shows."""
        indices = self._pick(recipe.num_pictures, rng, held_out)
        pictures, codes = self.gallery.pictures[indices], self.gallery.codes[indices]
        if rng.random() < 0.5:
            pictures, codes = pictures[:, :, ::-1].copy(), mirror_codes(codes)
        scenes = tuple(decode(code) for code in codes)
        pack = pack_conversation if recipe.is_conversation else pack_branches
        sequence = pack(scenes, self.encoder, LENGTH, rng)
        num_shown = int((sequence.token_ids == IMAGE_ID).sum()) // NUM_IMAGE_TOKENS
        return pictures[:num_shown], codes[:num_shown], sequence

    def _pick(self, num_pictures: int, rng: Random, held_out: bool) -> list[int]:
        """Pictures of one group (alike, or the same twice) half of the time, else any."""
        first_held_out = self.gallery.num_groups - NUM_HELD_OUT // GROUP_SIZE
        groups = (
            range(first_held_out, self.gallery.num_groups) if held_out else range(first_held_out)
        )
        if num_pictures == 2 and rng.random() < 0.5:
            pair = rng.choice(
                ((0, 1), (1, 0), (0, 0), (1, 1), (0, 2), (2, 0), (1, 2), (1, 3), (3, 1), (2, 3))
            )
            start = GROUP_SIZE * rng.choice(groups)
            return [start + offset for offset in pair]
        return [
            GROUP_SIZE * rng.choice(groups) + rng.randrange(GROUP_SIZE) for _ in range(num_pictures)
        ]


def exactness(student: Student, batches: BatchMaker, num_batches: int = 6) -> dict[str, float]:
    """Share of held-out answers that greedy decoding would say exactly, by topic."""
    asked, right = Counter[str](), Counter[str]()
    for step in range(-num_batches, 0):
        for total, counts in zip(
            (asked, right), student.count_right(batches.make(step)), strict=True
        ):
            total.update(counts)
    return {"all": right.total() / asked.total()} | {
        topic: right[topic] / asked[topic] for topic in sorted(asked)
    }


def main(
    cache: Annotated[Path, typer.Option(help="where pictures and training checkpoints go")] = Path(
        ".cache/shapes"
    ),
    output: Annotated[Path, typer.Option(help="where the model goes")] = Path(
        ".cache/shapes/checkpoint"
    ),
    num_steps: int = 6000,
    minutes: Annotated[float, typer.Option(help="end after this time, if not before")] = math.inf,
    learning_rate: float = 1e-3,
    batch_size: int = 6,
    num_shards: Annotated[int, typer.Option(help="of 2048 pictures each")] = 32,
    report_every: Annotated[int, typer.Option(help="steps")] = 250,
    resume: bool = False,
    num_threads: int = 2,
    compile: bool = False,
) -> None:
    """Train the model, then write it in the format of `llava-hf` checkpoints and evaluate it."""
    torch.set_num_threads(num_threads)
    gallery = load_gallery(cache / "gallery", num_shards, IMAGE_SIZE)
    tokenizer = load_tokenizer(output) if resume else make_tokenizer()
    crowds = load_gallery(cache / "crowds", num_shards // 2, IMAGE_SIZE, crowded=True)
    batches = BatchMaker(gallery, crowds, Encoder(tokenizer, NUM_IMAGE_TOKENS), batch_size)
    student = Student(make_model())
    trainer = Trainer(
        student, lambda step: student(batches.make(step)), Plan(num_steps, learning_rate)
    )
    if compile:
        student.compile_parts()
    if resume:
        trainer.load(cache / "training")
    else:
        student.load_eye(cache / "vision")
        trainer.reset_average()

    def report(trainer: Trainer) -> str:
        averaged = trainer.averaged()
        export(averaged.model, tokenizer, output)
        return "right: " + ", ".join(
            f"{topic} {share:.3f}" for topic, share in exactness(averaged, batches).items()
        )

    trainer.run(cache / "training", report, report_every=report_every, max_seconds=60 * minutes)
    export(trainer.averaged().model, tokenizer, output)


if __name__ == "__main__":
    typer.run(main)
