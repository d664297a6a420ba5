"""The training loop that both stages share: AdamW, warm-up and cosine, an average of weights, resuming.

A stage gives it a module and a function from the step number to a loss. All that a step draws at random
must come from that number, so that a run which stops and resumes ends with the same weights.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Tensor, nn

from training.shapes import checkpoints

MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps of a parameter


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how fast to learn."""

    num_steps: int
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    weight_decay: float = 0.05
    max_gradient_norm: float = 1.0
    average_decay: float = 0.99  # of the weights, per step

    def learning_rate_at(self, step: int, time_ratio: float = 0.0) -> float:
        """Linear warm-up, then half a cosine down to a fiftieth at the last step, or when time is up."""
        progress = min(1.0, max(step / self.num_steps, time_ratio))
        cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps) * cosine


class Trainer:
    """Trains those parameters of a module that want it, and keeps a running average of them.

    `autocast`: matrices are multiplied in bfloat16; the weights stay as they are.
    """

    def __init__(
        self,
        module: nn.Module,
        loss_at: Callable[[int], Tensor],
        plan: Plan,
        autocast: bool = False,
    ) -> None:
        named = module.named_parameters()
        self.module = module
        self.parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        self.average = {name: each.detach().clone() for name, each in self.parameters.items()}
        self.loss_at = loss_at
        self.plan = plan
        self.autocast = autocast
        self.step = 0
        self.loss = math.nan  # running mean
        matrices = [each for each in self.parameters.values() if each.ndim > 1]
        vectors = [each for each in self.parameters.values() if each.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": plan.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=plan.learning_rate,
            betas=(0.9, 0.98),
            fused=True,
        )

    def train_step(self, time_ratio: float = 0.0) -> None:
        """One step of learning; `time_ratio` is how much of a limited time is over, 0 to 1."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.learning_rate_at(self.step, time_ratio)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss = self.loss_at(self.step)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters.values(), self.plan.max_gradient_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._update_average()
        self.loss = loss.item() if math.isnan(self.loss) else 0.98 * self.loss + 0.02 * loss.item()
        self.step += 1

    @torch.no_grad()
    def _update_average(self) -> None:
        decay = min(self.plan.average_decay, (1 + self.step) / (10 + self.step))
        for name, parameter in self.parameters.items():
            self.average[name].lerp_(parameter, 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it, the module has the averaged weights."""
        current = {name: each.detach().clone() for name, each in self.parameters.items()}
        self._put(self.average)
        try:
            yield
        finally:
            self._put(current)

    def keep_average(self) -> None:
        """Give the module the averaged weights for good."""
        self._put(self.average)

    @torch.no_grad()
    def _put(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(weights[name])

    def run(
        self,
        folder: Path,
        report: Callable[[], str],
        report_every: int,
        max_seconds: float = math.inf,
    ) -> None:
        """Train to the end of the plan, but for `max_seconds` at most.

        Every `report_every` steps and at the end the state is saved to `folder` and `report` is called with
        the averaged weights in place; the line it returns is printed.
        """
        started = time.monotonic()
        reported_at = self.step
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(TextColumn("{task.description}"), *columns) as progress:
            task = progress.add_task("", total=self.plan.num_steps, completed=self.step)
            while (
                self.step < self.plan.num_steps
                and (spent := time.monotonic() - started) < max_seconds
            ):
                self.train_step(spent / max_seconds)
                progress.update(task, completed=self.step, description=f"loss {self.loss:.4f}")
                if self.step % report_every == 0:
                    reported_at = self.step
                    progress.console.print(self._take_stock(folder, report, started))
            if self.step != reported_at:
                progress.console.print(self._take_stock(folder, report, started))

    def _take_stock(self, folder: Path, report: Callable[[], str], started: float) -> str:
        self.save(folder)
        with self.averaged():
            spent = time.monotonic() - started
            return f"step {self.step} {spent:.0f} s loss {self.loss:.4f} {report()}"

    def save(self, folder: Path) -> None:
        """Write everything that `load` needs to go on as if nothing had happened."""
        tensors = checkpoints.with_prefix("module", self.module.state_dict())
        tensors |= checkpoints.with_prefix("average", self.average)
        for name, parameter in self.parameters.items():
            state = self.optimizer.state.get(parameter, {})
            tensors |= checkpoints.with_prefix(f"optimizer.{name}", state)
        numbers = {"step": self.step, "loss": self.loss, "plan": asdict(self.plan)}
        checkpoints.save(folder, tensors, numbers)

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote."""
        tensors, numbers = checkpoints.load(folder)
        self.module.load_state_dict(checkpoints.of_prefix("module", tensors))
        self.average = {name: tensors[f"average.{name}"] for name in self.parameters}
        for name, parameter in self.parameters.items():
            keys = {moment: f"optimizer.{name}.{moment}" for moment in MOMENTS}
            if all(key in tensors for key in keys.values()):
                state = {moment: tensors[key] for moment, key in keys.items()}
                self.optimizer.state[parameter] = state
        self.step, self.loss = numbers["step"], numbers["loss"]
