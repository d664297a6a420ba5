"""Train a checkpoint further, including its vision tower, in minutes on one GPU. CPU processes draw the `lessons`.

python -m training.shapes.finetune --device cuda --workers 15 --seconds 340 --out .cache/shapes/finetuned
python -m training.shapes.export .cache/shapes/finetuned .cache/shapes/checkpoint
"""

import os
import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from training import PACKAGES
from training.shapes.architecture import normalize
from training.shapes.code_book import CodeBook
from training.shapes.lessons import Batch, Lessons
from training.shapes.llava import LlavaForConditionalGeneration, PreTrainedTokenizerFast
from training.shapes.sequences import IMAGE_ID, Encoder
from training.shapes.trainer import Trainer, save

TOWER_WEIGHT = 0.1  # weight of the vision tower's loss against the code book
EYE_RATE = 0.5  # factor of the learning rate of vision tower and projector


class Learner(nn.Module):
    """A model with two losses: of its answers, and of its vision tower against the code book."""

    def __init__(self, model: LlavaForConditionalGeneration, device: torch.device) -> None:
        super().__init__()
        self.model = model.to(device)  # pyright: ignore[reportArgumentType]
        self.book = CodeBook(model.lm_head.in_features, device)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        inner: Any = self.model.model
        decoder = inner.language_model
        images = normalize(_disturb(batch.images) if self.training else batch.images)
        seen = inner.vision_tower(images).last_hidden_state[:, 1:]
        seen = inner.multi_modal_projector(seen)
        embeddings = decoder.embed_tokens(batch.token_ids)
        is_image = (batch.token_ids == IMAGE_ID).unsqueeze(-1).expand_as(embeddings)
        embeddings = embeddings.masked_scatter(is_image, seen.to(embeddings.dtype))
        hidden = decoder(
            inputs_embeds=embeddings,
            position_ids=batch.positions,
            attention_mask=who_sees_whom(batch.branches),
            use_cache=False,
        ).last_hidden_state
        counts = batch.weights[:, 1:] > 0
        logits = self.model.lm_head(hidden[:, :-1][counts])
        targets, weights = batch.token_ids[:, 1:][counts], batch.weights[:, 1:][counts]
        with torch.autocast(images.device.type, enabled=False):
            losses = F.cross_entropy(logits.float(), targets, reduction="none")
            answer_loss = (losses * weights).sum() / weights.sum()
            tower_loss = TOWER_WEIGHT * self.book.loss(seen[batch.known].float(), batch.codes)
        return answer_loss, tower_loss


def _disturb(images: Tensor) -> Tensor:
    """Change the brightness slightly and add noise. Shapes: uint8 (N, size, size, 3) in, float out."""
    gain = 1 + 0.06 * (torch.rand(len(images), 1, 1, 3, device=images.device) - 0.5)
    strength = 3 * torch.rand(len(images), 1, 1, 1, device=images.device).square()
    noise = torch.randn(images.shape, device=images.device)
    return (images * gain + strength * noise).clamp(0, 255)


def who_sees_whom(branches: Tensor) -> Tensor:
    """Attention mask: earlier tokens of the branch and the common prefix. Shapes: (B, T) in, bool (B, 1, T, T) out."""
    length = branches.shape[1]
    seen = (branches[:, None, :] == 0) | (branches[:, None, :] == branches[:, :, None])
    return (seen & torch.ones(length, length, dtype=torch.bool, device=branches.device).tril())[
        :, None
    ]


def rate_of(name: str) -> float:
    """The factor of a parameter's learning rate: the vision tower learns more slowly."""
    return EYE_RATE if "vision_tower" in name or "projector" in name else 1.0


def main(
    out: Annotated[Path, typer.Option(help="Folder of the new checkpoint.")],
    start: Path = PACKAGES / "shapes" / "checkpoint",
    device: str = "cpu",
    seconds: Annotated[float, typer.Option(help="Duration of the whole command.")] = 340.0,
    workers: Annotated[int, typer.Option(help="Processes that draw lessons.")] = 2,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 192,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> None:
    """Train until the time is up. The checkpoint is written at intervals and at the end."""
    deadline = time.monotonic() + seconds - 10
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    shutil.copytree(start, out, dirs_exist_ok=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(start)
    target = torch.device(device)
    is_cuda = target.type == "cuda"
    lessons = iter(
        DataLoader(
            Lessons(Encoder(tokenizer), batch, seed),
            batch_size=None,
            num_workers=workers,
            prefetch_factor=4,
            pin_memory=is_cuda,
            multiprocessing_context="fork",
        )
    )
    torch.manual_seed(seed)
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("high")
    model = LlavaForConditionalGeneration.from_pretrained(start, dtype=torch.float32)
    learner = Learner(model, target).train()
    autocast = is_cuda or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    trainer = Trainer(learner, learning_rate, autocast=autocast, rate_of=rate_of)

    def losses_of() -> tuple[Tensor, Tensor]:
        drawn = (each.to(target, non_blocking=True) for each in next(lessons))
        return learner(Batch(*drawn))

    def report(averaged: Learner) -> str:
        save(averaged.model, out, torch.bfloat16)
        return f"{deadline - time.monotonic():.0f} s left"

    trainer.run(losses_of, report, seconds=deadline - time.monotonic())


if __name__ == "__main__":
    typer.run(main)
