"""The training loop of both models: AdamW, warm-up and half a cosine, an average of the weights."""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

REPORT_EVERY_S = 55.0
WARMUP = 0.03  # share of the training in which the learning rate grows
WEIGHT_DECAY = 0.03  # of matrices
AVERAGE_DECAY = 0.998  # of the averaged weights, per step; less in the first steps
WEIGHTS = "model.safetensors"


class Trainer:
    """Trains those parameters of a module that want it, and keeps a running average of them.

    `autocast`: matrices are multiplied in bfloat16; the weights stay as they are. `rate_of`: a parameter's share
    of the learning rate, by its name.
    """

    def __init__(
        self,
        module: nn.Module,
        learning_rate: float,
        *,
        autocast: bool = False,
        rate_of: Callable[[str], float] = lambda name: 1.0,
    ) -> None:
        named = module.named_parameters()
        self.parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        self.average = {name: each.detach().clone() for name, each in self.parameters.items()}
        self.step = 0
        groups = [
            {
                "params": [each],
                "weight_decay": WEIGHT_DECAY if each.ndim > 1 else 0.0,
                "peak": learning_rate * rate_of(name),
            }
            for name, each in self.parameters.items()
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
        device = next(iter(self.parameters.values())).device
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=autocast)

    def learn(self, losses_of: Callable[[], Sequence[Tensor]], progress: float) -> Tensor:
        """One step down the sum of some losses, which it returns; `progress` of the training is 0 to 1."""
        cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * min(1.0, progress / WARMUP) * cosine
        with self.autocast:
            losses = torch.stack(list(losses_of()))
        losses.sum().backward()
        nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        decay = min(AVERAGE_DECAY, (1 + self.step) / (10 + self.step))
        foreach_lerp: Any = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage]
        learned = [each.detach() for each in self.parameters.values()]
        foreach_lerp(list(self.average.values()), learned, 1 - decay)
        self.step += 1
        return losses.detach()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it, the module has the averaged weights."""
        current = {name: each.detach().clone() for name, each in self.parameters.items()}
        self._put(self.average)
        try:
            yield
        finally:
            self._put(current)

    @torch.no_grad()
    def _put(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(weights[name])

    def run(
        self,
        losses_of: Callable[[], Sequence[Tensor]],
        report: Callable[[], str],
        *,
        num_steps: float = math.inf,
        seconds: float = math.inf,
    ) -> None:
        """Train until steps or seconds are over.

        Once in a while and at the end, `report` is called with the averaged weights in place, and its text
        is printed.
        """
        began_at = time.monotonic()
        due_at = began_at + REPORT_EVERY_S
        losses: list[Tensor] = []
        progress = 0.0
        while progress < 1:
            losses.append(self.learn(losses_of, progress))
            progress = max((time.monotonic() - began_at) / seconds, self.step / num_steps)
            if progress >= 1 or time.monotonic() > due_at:
                means = torch.stack(losses).mean(0).tolist()
                told = " + ".join(f"{mean:.4f}" for mean in means)
                with self.averaged():
                    print(f"step {self.step} loss {told} {report()}", flush=True)
                losses, due_at = [], time.monotonic() + REPORT_EVERY_S


def save(model: Any, checkpoint: Path, dtype: torch.dtype) -> None:
    """Replace the weights of a checkpoint of transformers; a run that is cut leaves the last ones whole."""
    with TemporaryDirectory(dir=checkpoint) as folder:
        copy.deepcopy(model).to(dtype).save_pretrained(folder)
        (Path(folder) / WEIGHTS).rename(checkpoint / WEIGHTS)
    (checkpoint / WEIGHTS).chmod(0o644)
