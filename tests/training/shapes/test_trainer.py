"""Training lowers a loss, averages the weights, and reports its end."""

import pytest
import torch
from torch import Tensor, nn

from training.shapes.trainer import Plan, Trainer


def make_trainer(autocast: bool = False):
    """A trainer, and the losses of a module that learns to add up."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    generator = torch.Generator().manual_seed(0)

    def losses_of() -> tuple[Tensor]:
        inputs = torch.randn(32, 8, generator=generator)
        return ((module(inputs).float() - inputs.sum(1, keepdim=True)).square().mean(),)

    return Trainer(module, Plan(learning_rate=1e-2), autocast), losses_of


@pytest.mark.parametrize("autocast", [False, True])
def test_training_lowers_the_loss_of_weights_that_stay_in_float32(autocast: bool):
    trainer, losses_of = make_trainer(autocast)
    before = losses_of()[0].item()
    trainer.run(losses_of, lambda: "", num_steps=60)
    assert losses_of()[0].item() < 0.9 * before
    assert {each.dtype for each in trainer.parameters.values()} == {torch.float32}


@pytest.mark.parametrize("limit", [{"num_steps": 3}, {"seconds": 0.01}])
def test_a_run_ends_with_a_report_of_its_last_step(limit: dict[str, float]):
    trainer, losses_of = make_trainer()
    said: list[str] = []
    trainer.run(losses_of, lambda: "all is well", said.append, **limit)
    [last] = said
    assert last.startswith(f"step {trainer.step} loss ")
    assert last.endswith(" all is well")
    assert trainer.step == limit.get("num_steps", trainer.step)
