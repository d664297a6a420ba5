"""A run that stops and resumes ends with the same weights, and its end is reported."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from training.shapes.trainer import Plan, Trainer


def make_trainer(num_steps: int = 6, autocast: bool = False) -> Trainer:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss_at(step: int) -> Tensor:
        inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        return (module(inputs).float() - inputs.sum(1, keepdim=True)).square().mean()

    return Trainer(module, loss_at, Plan(num_steps, learning_rate=1e-2, warmup_steps=2), autocast)


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path):
    straight, stopped, resumed = (make_trainer() for _ in range(3))
    for _ in range(6):
        straight.train_step()
    for _ in range(3):
        stopped.train_step()
    stopped.save(tmp_path)
    resumed.load(tmp_path)
    for _ in range(3):
        resumed.train_step()
    assert resumed.step == straight.step == 6
    for name, tensor in straight.module.state_dict().items():
        assert torch.equal(tensor, resumed.module.state_dict()[name]), name
    for name, tensor in straight.average.items():
        assert torch.equal(tensor, resumed.average[name]), name


@pytest.mark.parametrize("autocast", [False, True])
def test_training_lowers_the_loss_of_weights_that_stay_in_float32(autocast: bool):
    trainer = make_trainer(60, autocast)
    before = trainer.loss_at(-1).item()
    for _ in range(60):
        trainer.train_step()
    assert trainer.loss_at(-1).item() < 0.9 * before
    assert math.isfinite(trainer.loss)
    assert {each.dtype for each in trainer.parameters.values()} == {torch.float32}


@pytest.mark.parametrize(("num_steps", "reported"), [(3, [2, 3]), (4, [2, 4])])
def test_a_run_ends_with_a_report_of_its_last_step(tmp_path: Path, num_steps, reported):
    trainer = make_trainer(num_steps)
    steps = []
    trainer.run(tmp_path, lambda: str(steps.append(trainer.step)), report_every=2)
    assert steps == reported
    resumed = make_trainer(num_steps)
    resumed.load(tmp_path)
    assert resumed.step == num_steps
