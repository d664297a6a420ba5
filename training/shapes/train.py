"""Stage 2: trains the decoder to answer questions about what the eye of `vision_pretraining` sees.

python -m training.shapes.train --num-steps 6000 [--resume] [--minutes 60]
"""

import math
from collections import Counter
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from training.shapes import checkpoints
from training.shapes.architecture import (
    IMAGE_SIZE,
    NUM_IMAGE_TOKENS,
    make_model,
    normalize,
    project,
)
from training.shapes.batches import Batch, BatchMaker
from training.shapes.code_book import CodeBook
from training.shapes.export import export, load_tokenizer, make_tokenizer
from training.shapes.gallery import load_gallery
from training.shapes.head_start import give_head_start
from training.shapes.llava import LlavaForConditionalGeneration
from training.shapes.sequences import Encoder
from training.shapes.tokenizer import IMAGE_ID
from training.shapes.trainer import Plan, Trainer


class Student(nn.Module):
    """What stage 2 trains: the decoder. The eye, tower and projector, stays as stage 1 left it."""

    def __init__(self, model: LlavaForConditionalGeneration) -> None:
        super().__init__()
        self.model = model
        self.eye.requires_grad_(False)

    @property
    def eye(self) -> nn.ModuleDict:
        """The parts of the model that stage 1 trains, by their names there."""
        model = self.model.model
        return nn.ModuleDict(
            {"vision_tower": model.vision_tower, "projector": model.multi_modal_projector}
        )

    def load_eye(self, folder: Path) -> None:
        """Take over the averaged weights of stage 1."""
        tensors, _ = checkpoints.load(folder)
        average = checkpoints.of_prefix("average", tensors)
        known = {name: average[name] for name, _ in self.eye.named_parameters()}
        self.eye.load_state_dict(known, strict=False)  # buffers hold constants

    def compile_decoder(self) -> None:
        """Make the expensive part faster; a minute well spent."""
        self.read = torch.compile(self.read)

    @torch.no_grad()
    def see(self, images: Tensor) -> Tensor:
        """Projected features. Shapes: uint8 (N, size, size, 3) in, (N, P, width) out."""
        model = self.model.model
        return project(model.vision_tower, model.multi_modal_projector, normalize(images))

    def read(self, embeddings: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """The decoder's last hidden states.

        Shapes: (B, T, width), (B, T) and (B, 1, T, T) in, (B, T, width) out.
        """
        decoder = self.model.model.language_model
        return decoder(
            inputs_embeds=embeddings, position_ids=positions, attention_mask=mask, use_cache=False
        ).last_hidden_state

    def hidden(self, batch: Batch) -> Tensor:
        """What the decoder makes of a batch. Shapes: (B, T, width)."""
        embeddings = self.model.model.language_model.embed_tokens(batch.token_ids)
        is_image = (batch.token_ids == IMAGE_ID).unsqueeze(-1)
        seen = self.see(batch.images).to(embeddings.dtype)  # bfloat16 within autocast
        embeddings = embeddings.masked_scatter(is_image, seen)
        return self.read(embeddings, batch.positions, attention_mask(batch.branches))

    def forward(self, batch: Batch) -> Tensor:
        """The weighted mean cross-entropy of the answers' tokens."""
        weights = batch.weights[:, 1:]
        counted = weights > 0
        logits = self.model.lm_head(self.hidden(batch)[:, :-1][counted])
        losses = F.cross_entropy(logits, batch.token_ids[:, 1:][counted], reduction="none")
        return (losses * weights[counted]).sum() / weights.sum()

    @torch.no_grad()
    def count_right(self, batch: Batch) -> tuple[Counter[str], Counter[str]]:
        """How many answers of each topic there are, and how many greedy decoding would say exactly.

        It says an answer if every token of it is the likeliest after those before it.
        """
        asked, right = Counter[str](), Counter[str]()
        said = self.model.lm_head(self.hidden(batch)).argmax(-1)
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


def exactness(student: Student, batches: BatchMaker, num_batches: int = 12) -> dict[str, float]:
    """Share of held-out answers that greedy decoding would say exactly, by topic."""
    asked, right = Counter[str](), Counter[str]()
    for step in range(-num_batches, 0):
        counts = student.count_right(batches.make(step))
        for total, more in zip((asked, right), counts, strict=True):
            total.update(more)
    shares = {topic: right[topic] / asked[topic] for topic in sorted(asked)}
    return {"all": right.total() / asked.total()} | shares


def main(
    cache: Annotated[Path, typer.Option(help="where images and training state go")] = Path(
        ".cache/shapes"
    ),
    output: Annotated[Path, typer.Option(help="where the model goes, or is")] = Path(
        ".cache/shapes/checkpoint"
    ),
    num_steps: int = 6000,
    minutes: Annotated[float, typer.Option(help="end after this time, if not before")] = math.inf,
    learning_rate: float = 1e-3,
    batch_size: int = 6,
    num_shards: Annotated[int, typer.Option(help="of 2048 images each")] = 32,
    report_every: Annotated[int, typer.Option(help="steps")] = 250,
    resume: bool = False,
    num_threads: int = 2,
    compile: bool = False,
    autocast: Annotated[bool, typer.Option(help="multiply in bfloat16")] = False,
) -> None:
    """Train the decoder and write the model in the format of `llava-hf` checkpoints."""
    torch.set_num_threads(num_threads)
    gallery = load_gallery(cache / "gallery", num_shards, IMAGE_SIZE)
    tokenizer = load_tokenizer(output) if resume else make_tokenizer()
    batches = BatchMaker(gallery, Encoder(tokenizer, NUM_IMAGE_TOKENS), batch_size)
    student = Student(make_model())
    if not resume:
        give_head_start(
            student.model, tokenizer, CodeBook.of_width(student.model.lm_head.in_features)
        )
    if compile:
        student.compile_decoder()

    def report() -> str:
        export(student.model, tokenizer, output)
        shares = exactness(student, batches)
        return "right: " + ", ".join(f"{topic} {share:.3f}" for topic, share in shares.items())

    plan = Plan(num_steps, learning_rate)
    trainer = Trainer(student, lambda step: student(batches.make(step)), plan, autocast)
    if resume:
        trainer.load(cache / "training")
    student.load_eye(cache / "vision")  # which may have learned since
    trainer.run(cache / "training", report, report_every, max_seconds=60 * minutes)
    with trainer.averaged():
        export(student.model, tokenizer, output)


if __name__ == "__main__":
    typer.run(main)
