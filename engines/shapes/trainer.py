"""The training loop that both stages share: AdamW, warm-up and cosine, an average of weights, resuming.

A stage gives it a module and a function from the step number to a loss. All that a step draws at random
must come from that number, so that a run which stops and resumes ends with the same weights.
"""

import copy
import math
import time
from collections.abc import Callable
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

from engines.shapes import checkpoints


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how fast to learn."""

    num_steps: int
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    weight_decay: float = 0.05
    max_gradient_norm: float = 1.0
    average_decay: float = 0.998  # of the weights, per step

    def learning_rate_at(self, step: int, share_of_time: float = 0.0) -> float:
        """Linear warm-up, then half a cosine down to a fiftieth at the last step, or when time is up."""
        progress = min(1.0, max(step / self.num_steps, share_of_time))
        cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps) * cosine


class Trainer:
    """Trains a module; `rates` scales the learning rate of parameters by the start of their names."""

    def __init__(
        self,
        module: nn.Module,
        loss_at: Callable[[int], Tensor],
        plan: Plan,
        rates: dict[str, float] | None = None,
    ) -> None:
        self.module = module
        self.loss_at = loss_at
        self.plan = plan
        self.step = 0
        self.loss = math.nan  # running mean
        self.reset_average()
        self.optimizer = torch.optim.AdamW(
            [
                {
                    "params": [parameter],
                    "rate": _rate_of(name, rates or {}),
                    "weight_decay": plan.weight_decay * (parameter.ndim > 1),
                }
                for name, parameter in module.named_parameters()
            ],
            lr=plan.learning_rate,
            betas=(0.9, 0.98),
            fused=True,
        )

    def train_step(self, share_of_time: float = 0.0) -> None:
        """One step of learning; `share_of_time` is how much of a limited time is over, 0 to 1."""
        learning_rate = self.plan.learning_rate_at(self.step, share_of_time)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group["rate"]
        loss = self.loss_at(self.step)
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), self.plan.max_gradient_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._update_average()
        self.loss = loss.item() if math.isnan(self.loss) else 0.98 * self.loss + 0.02 * loss.item()
        self.step += 1

    @torch.no_grad()
    def _update_average(self) -> None:
        decay = min(self.plan.average_decay, (1 + self.step) / (10 + self.step))
        averages = list(self.average.values())
        torch._foreach_lerp_(averages, [p.detach() for p in self.module.parameters()], 1 - decay)

    def reset_average(self) -> None:
        """Start the average of weights from the module as it is now."""
        self.average = {
            name: parameter.detach().clone() for name, parameter in self.module.named_parameters()
        }

    def averaged(self) -> nn.Module:
        """A copy of the module with the averaged weights."""
        averaged = copy.deepcopy(self.module)
        averaged.load_state_dict(self.average, strict=False)
        return averaged.eval()

    def run(
        self,
        folder: Path,
        report: Callable[["Trainer"], str],
        report_every: int,
        max_seconds: float = math.inf,
    ) -> None:
        """Train to the end of the plan, but for `max_seconds` at most; save to `folder` and report."""
        started = time.monotonic()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns) as progress:
            task = progress.add_task("training", total=self.plan.num_steps, completed=self.step)
            while self.step < self.plan.num_steps and (spent := time.monotonic() - started) < max_seconds:
                self.train_step(spent / max_seconds)
                progress.update(task, completed=self.step, description=f"loss {self.loss:.4f}")
                if self.step % report_every == 0:
                    self.save(folder)
                    progress.console.print(
                        f"{time.strftime('%H:%M')} step {self.step} {spent:.0f} s loss {self.loss:.4f} {report(self)}"
                    )
        self.save(folder)

    def save(self, folder: Path) -> None:
        """Write everything that `load` needs to go on as if nothing had happened."""
        tensors = checkpoints.with_prefix("module", self.module.state_dict())
        tensors |= checkpoints.with_prefix("average", self.average)
        for name, parameter in self.module.named_parameters():
            tensors |= checkpoints.with_prefix(
                f"optimizer.{name}", self.optimizer.state.get(parameter, {})
            )
        checkpoints.save(
            folder, tensors, {"step": self.step, "loss": self.loss, "plan": asdict(self.plan)}
        )

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote."""
        tensors, numbers = checkpoints.load(folder)
        self.module.load_state_dict(checkpoints.of_prefix("module", tensors))
        self.average = {name: tensors[f"average.{name}"] for name in self.average}
        for name, parameter in self.module.named_parameters():
            moments = ("step", "exp_avg", "exp_avg_sq")
            state = {
                moment: tensors[key]
                for moment in moments
                if (key := f"optimizer.{name}.{moment}") in tensors
            }
            if state:
                self.optimizer.state[parameter] = state
        self.step, self.loss = numbers["step"], numbers["loss"]


def _rate_of(name: str, rates: dict[str, float]) -> float:
    return next((rate for start, rate in rates.items() if name.startswith(start)), 1.0)
