"""The training loop of both models: AdamW, warm-up and cosine decay, and an average of the weights."""

import copy
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

REPORT_EVERY_S = 55.0
WARMUP = 0.03  # share of the training during which the learning rate increases
WEIGHT_DECAY = 0.03  # applied to matrices
AVERAGE_DECAY = 0.998  # decay of the averaged weights per step; lower in the first steps
WEIGHTS = "model.safetensors"


class Trainer:
    """Trains the parameters of a module that require gradients, and keeps a running average of them.

    `autocast`: matrices are multiplied in bfloat16; the weights keep their type. `rate_of` returns the factor of a
    parameter's learning rate, given its name.
    """

    def __init__(
        self,
        module: nn.Module,
        learning_rate: float,
        *,
        autocast: bool = False,
        rate_of: Callable[[str], float] = lambda name: 1.0,
    ) -> None:
        self.module = module
        self.average = AveragedModel(module, avg_fn=_average)
        learning = {name: each for name, each in module.named_parameters() if each.requires_grad}
        groups = [
            {
                "params": [each],
                "weight_decay": WEIGHT_DECAY if each.ndim > 1 else 0.0,
                "peak": learning_rate * rate_of(name),
            }
            for name, each in learning.items()
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
        device = next(module.parameters()).device
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=autocast)

    def learn(self, losses_of: Callable[[], Sequence[Tensor]], progress: float) -> Tensor:
        """One optimization step on the sum of the losses. Returns the losses. `progress` of the training: 0 to 1."""
        cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * min(1.0, progress / WARMUP) * cosine
        with self.autocast:
            losses = torch.stack(list(losses_of()))
        losses.sum().backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.update_parameters(self.module)
        return losses.detach()

    def run(
        self,
        losses_of: Callable[[], Sequence[Tensor]],
        report: Callable[[Any], str],
        *,
        num_steps: float = math.inf,
        seconds: float = math.inf,
    ) -> None:
        """Train for a number of steps or seconds.

        At intervals and at the end, `report` is called with the averaged module, and its text is printed.
        """
        began_at = time.monotonic()
        due_at = began_at + REPORT_EVERY_S
        losses: list[Tensor] = []
        progress = 0.0
        while progress < 1:
            losses.append(self.learn(losses_of, progress))
            num_done = int(self.average.n_averaged)
            progress = max((time.monotonic() - began_at) / seconds, num_done / num_steps)
            if progress >= 1 or time.monotonic() > due_at:
                means = torch.stack(losses).mean(0).tolist()
                told = " + ".join(f"{mean:.4f}" for mean in means)
                print(f"step {num_done} loss {told} {report(self.average.module)}", flush=True)
                losses, due_at = [], time.monotonic() + REPORT_EVERY_S


def _average(average: Tensor, current: Tensor, num_averaged: Any) -> Tensor:
    decay = ((1 + num_averaged) / (10 + num_averaged)).clamp(max=AVERAGE_DECAY)
    return average.lerp(current, 1 - decay)


def save(model: Any, checkpoint: Path, dtype: torch.dtype) -> None:
    """Replace the weights of a checkpoint of transformers; an interrupted run leaves the previous weights complete."""
    with TemporaryDirectory(dir=checkpoint) as folder:
        copy.deepcopy(model).to(dtype).save_pretrained(folder)
        (Path(folder) / WEIGHTS).rename(checkpoint / WEIGHTS)
    (checkpoint / WEIGHTS).chmod(0o644)
