"""A checkpoint learns more, with its eye, in minutes on one GPU: `lessons` drawn by all processors meanwhile.

python -m training.shapes.finetune --device cuda --workers 15 --seconds 340 --out .cache/shapes/finetuned
python -m training.shapes.export .cache/shapes/finetuned .cache/shapes/checkpoint
"""

import argparse
import multiprocessing
import os
import queue
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from training import PACKAGES
from training.shapes.architecture import IMAGE_SIZE, NUM_IMAGE_TOKENS, normalize, project
from training.shapes.code_book import CodeBook
from training.shapes.export import load_tokenizer
from training.shapes.lessons import LENGTH, NUM_SLOTS, teach
from training.shapes.llava import LlavaForConditionalGeneration
from training.shapes.sequences import Encoder
from training.shapes.tokenizer import IMAGE_ID
from training.shapes.trainer import Plan, Trainer

EYE_WEIGHT = 0.1  # in the loss: what the eye says in the code book stays right
EYE_RATE = 0.5  # of the learning rate
WARMUP = 0.03  # of the time
AVERAGE_DECAY = 0.998


@dataclass(slots=True)
class Batch:
    """What a step learns from. `images` of slots `new` come into the album first; then `shown` are looked at.

    Shapes: `token_ids`, `positions`, `branches` (B, T); `where` (N,), places in (B, T - 1) that count, with
    `weights` (N,); `shown` (I,); `known` (K,), those of which `codes` (K, CODE_LENGTH) are known.
    """

    images: Tensor
    new: Tensor
    shown: Tensor
    known: Tensor
    codes: Tensor
    token_ids: Tensor
    positions: Tensor
    branches: Tensor
    where: Tensor
    weights: Tensor
    answers: list[Any]

    def to(self, device: torch.device) -> "Batch":
        names = [name for name in Batch.__slots__ if name != "answers"]
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return Batch(answers=self.answers, **moved)


class Reader(threading.Thread):
    """Makes batches of the messages of the processes that `teach`."""

    def __init__(self, messages: Any, is_hungry: Any, per_batch: int, pin: bool) -> None:
        super().__init__(daemon=True)
        self.messages, self.is_hungry = messages, is_hungry
        self.per_batch, self.pin = per_batch, pin
        self.ready: queue.Queue[Batch] = queue.Queue(8)

    def run(self) -> None:
        while True:
            self.is_hungry.value = self.ready.qsize() < 4
            self.ready.put(self.make())

    def make(self) -> Batch:
        messages = [self.messages.get() for _ in range(self.per_batch)]
        joined = {
            name: np.concatenate([message[name] for message in messages])
            for name in messages[0]
            if name != "answers"
        }
        weights = joined["weights"][:, 1:].astype(np.float32).ravel()
        joined["known"], joined["where"] = np.flatnonzero(joined["known"]), np.flatnonzero(weights)
        joined["weights"] = weights[joined["where"]]
        for name in ("token_ids", "positions", "branches"):
            joined[name] = joined[name].astype(np.int64)
        tensors = {name: torch.from_numpy(each) for name, each in joined.items()}
        if self.pin:
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        return Batch(
            answers=[each for message in messages for each in message["answers"]], **tensors
        )


class Learner(nn.Module):
    """The model with the album of pictures that it is shown."""

    def __init__(
        self, model: LlavaForConditionalGeneration, num_slots: int, device: torch.device
    ) -> None:
        super().__init__()
        self.model = model.to(device)  # pyright: ignore[reportArgumentType]
        self.album = torch.zeros(
            (num_slots, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=torch.uint8, device=device
        )
        self.book = CodeBook(model.lm_head.in_features, device)

    def forward(self, batch: Batch, is_learning: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of the answers, that of the eye, and logits of the places that count."""
        self.album[batch.new] = batch.images
        slots, is_mirrored = batch.shown // 2, (batch.shown % 2 == 1)[:, None, None, None]
        images = self.album[slots]
        images = torch.where(is_mirrored, images.flip(2), images)
        inner: Any = self.model.model
        decoder = inner.language_model
        seen = project(inner.vision_tower, inner.multi_modal_projector, normalize(_disturb(images) if is_learning else images))  # fmt: skip
        embeddings = decoder.embed_tokens(batch.token_ids)
        is_image = (batch.token_ids == IMAGE_ID).unsqueeze(-1).expand_as(embeddings)
        embeddings = embeddings.masked_scatter(is_image, seen.to(embeddings.dtype))
        hidden = decoder(
            inputs_embeds=embeddings,
            position_ids=batch.positions,
            attention_mask=who_sees_whom(batch.branches),
            use_cache=False,
        ).last_hidden_state
        logits = self.model.lm_head(hidden[:, :-1].flatten(0, 1)[batch.where])
        targets = batch.token_ids[:, 1:].flatten()[batch.where]
        with torch.autocast(images.device.type, enabled=False):
            losses = F.cross_entropy(logits.float(), targets, reduction="none")
            answer_loss = (losses * batch.weights).sum() / batch.weights.sum()
            eye_loss = EYE_WEIGHT * self.book.loss(seen[batch.known].float(), batch.codes)
        return answer_loss, eye_loss, logits

    @torch.no_grad()
    def exactness(self, batch: Batch) -> tuple[Counter[str], Counter[str]]:
        """How many answers of each topic there are, and how many greedy decoding would say exactly."""
        logits = self(batch, is_learning=False)[2]
        size = len(batch.token_ids), LENGTH - 1
        where = batch.where.cpu().numpy()
        targets = batch.token_ids[:, 1:].flatten()[batch.where]
        misses, weights = np.zeros(size, dtype=bool), np.zeros(size, dtype=np.float32)
        misses.flat[where] = (logits.argmax(-1) != targets).cpu().numpy()
        weights.flat[where] = batch.weights.cpu().numpy()
        asked, right = Counter[str](), Counter[str]()
        for row, counted, answers in zip(misses, weights, batch.answers, strict=True):
            for topic, start, end in answers:
                part = counted[start - 1 : end - 1]
                asked[topic] += 1
                right[topic] += not row[start - 1 : end - 1][part > 0.5 * part.max()].any()
        return asked, right


def _disturb(images: Tensor) -> Tensor:
    """A little brighter or darker, with a little noise. Shapes: uint8 (N, size, size, 3) in, float out."""
    gain = 1 + 0.06 * (torch.rand(len(images), 1, 1, 3, device=images.device) - 0.5)
    strength = 3 * torch.rand(len(images), 1, 1, 1, device=images.device).square()
    noise = torch.randn(images.shape, device=images.device)
    return (images * gain + strength * noise).clamp(0, 255)


def who_sees_whom(branches: Tensor) -> Tensor:
    """What came before in one's own branch or in the shared beginning. Shapes: (B, T) in, bool (B, 1, T, T) out."""
    length = branches.shape[1]
    seen = (branches[:, None, :] == 0) | (branches[:, None, :] == branches[:, :, None])
    return (seen & torch.ones(length, length, dtype=torch.bool, device=branches.device).tril())[
        :, None
    ]


def make_trainer(model: nn.Module, learning_rate: float, autocast: bool) -> Trainer:
    """Of the whole model; the eye learns more slowly than the rest."""

    def rate_of(name: str) -> float:
        return EYE_RATE if "vision_tower" in name or "projector" in name else 1.0

    return Trainer(model, Plan(learning_rate, WARMUP, 0.03, AVERAGE_DECAY), autocast, rate_of)


def save(weights: dict[str, Tensor], folder: Path) -> None:
    """Write weights in bfloat16; a run that is cut leaves the last ones whole."""
    state = {name: each.to("cpu", torch.bfloat16).contiguous() for name, each in weights.items()}
    save_file(state, folder / "weights.new")
    (folder / "weights.new").rename(folder / "weights.safetensors")


def main() -> None:
    """Learn until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", type=Path, default=PACKAGES / "shapes" / "checkpoint")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=340.0, help="of the whole command")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=192, help="sequences")
    parser.add_argument(
        "--message", type=int, default=32, help="sequences of one message, a part of the batch"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    deadline = began + options.seconds - 10
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    options.out.mkdir(parents=True, exist_ok=True)
    log = (options.out / "log.txt").open("a", buffering=1)

    def say(text: str) -> None:
        line = f"{time.monotonic() - began:6.1f} s {text}"
        print(line, flush=True)
        log.write(line + "\n")

    tokenizer = load_tokenizer(options.start)
    tokenizer.backend_tokenizer.save(str(options.out / "tokenizer.json"))
    say(f"{len(tokenizer)} tokens")
    fork = multiprocessing.get_context("fork")
    messages, is_hungry = fork.Queue(4 * options.workers), fork.Value("b", 1, lock=False)
    encoder = Encoder(tokenizer, NUM_IMAGE_TOKENS)
    teachers = [
        fork.Process(
            target=teach,
            args=(messages, encoder, options.message, index, options.seed, is_hungry),
            daemon=True,
        )
        for index in range(options.workers)
    ]
    for teacher in teachers:
        teacher.start()
    device = torch.device(options.device)
    is_cuda = device.type == "cuda"
    autocast = is_cuda or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    torch.manual_seed(options.seed)
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("high")
    model = LlavaForConditionalGeneration.from_pretrained(options.start, dtype=torch.float32)
    model.train()
    learner = Learner(model, options.workers * NUM_SLOTS, device)
    trainer = make_trainer(model, options.learning_rate, autocast)
    per_batch = max(1, options.batch // options.message)
    reader = Reader(messages, is_hungry, per_batch, is_cuda)
    reader.start()
    say(f"{sum(each.numel() for each in model.parameters()) / 1e6:.2f} M parameters on {device}")
    waited_s = 0.0

    def next_batch() -> Batch:
        nonlocal waited_s
        asked_at = time.monotonic()
        batch = reader.ready.get(timeout=90).to(device)
        waited_s += time.monotonic() - asked_at
        return batch

    def report() -> str:
        save(trainer.average, options.out)
        asked, right = Counter[str](), Counter[str]()
        with trainer.autocast:
            for _ in range(2):
                counts = learner.exactness(next_batch())
                for total, more in zip((asked, right), counts, strict=True):
                    total.update(more)
        shares = ", ".join(f"{topic} {right[topic] / asked[topic]:.3f}" for topic in sorted(asked))
        exact = right.total() / max(1, asked.total())
        return f"waited {waited_s:.1f} s, exact: all {exact:.4f}, {shares}"

    say(report())
    seconds = deadline - time.monotonic()
    trainer.run(lambda: learner(next_batch())[:2], report, say, seconds=seconds)
    say("done")
    for teacher in teachers:
        teacher.kill()
    log.close()
    os._exit(0)  # without waiting for the reader


if __name__ == "__main__":
    main()
