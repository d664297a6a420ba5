"""Fine-tuning reduces the loss, and saves checkpoints that `export` reads."""

import shutil
from pathlib import Path
from random import Random

import pytest
import torch

from training.shapes.export import main as export
from training.shapes.finetune import Learner, who_sees_whom
from training.shapes.lessons import Album, Batch, make_batch
from training.shapes.llava import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)
from training.shapes.sequences import Encoder
from training.shapes.trainer import Trainer, save

CHECKPOINT = Path("engines/packages/shapes/checkpoint")


def make_learner() -> Learner:
    """Returns a learner of a narrow model with one layer of each kind."""
    config = LlavaConfig.from_pretrained(CHECKPOINT)
    for part, width in ((config.vision_config, 48), (config.text_config, 80)):
        part.hidden_size = part.intermediate_size = width
        part.num_hidden_layers = 1
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration._from_config(config, dtype=torch.float32)
    return Learner(model, torch.device("cpu"))


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Returns the lessons of a small album."""
    album = Album(Random(0))
    album.draw(4, 4, 2)
    return make_batch(album, Encoder(PreTrainedTokenizerFast.from_pretrained(CHECKPOINT)), 5)


def test_learning_lowers_the_loss_and_the_average_follows(batch: Batch):
    learner = make_learner()
    trainer = Trainer(learner, learning_rate=3e-3)
    losses = [trainer.learn(lambda: learner(batch), step / 14)[0] for step in range(14)]
    assert losses[-1] < 0.8 * losses[0]
    with torch.no_grad():
        assert trainer.average.module.eval()(batch)[0] < 0.9 * losses[0]


def test_the_saved_model_is_averaged_and_loads(tmp_path: Path):
    finetuned, mixed = tmp_path / "finetuned", tmp_path / "mixed"
    shutil.copytree(CHECKPOINT, finetuned)
    model = LlavaForConditionalGeneration.from_pretrained(CHECKPOINT, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    save(model, finetuned, torch.bfloat16)
    export(finetuned, mixed, other=CHECKPOINT, share=0.5)
    assert {path.name for path in mixed.iterdir()} == {path.name for path in CHECKPOINT.iterdir()}
    loaded = LlavaForConditionalGeneration.from_pretrained(mixed, dtype=torch.float32)
    for name, weight in loaded.named_parameters():
        expected = 0.75 * model.get_parameter(name)
        torch.testing.assert_close(weight, expected, atol=1e-2, rtol=1e-2)


def test_branches_attend_to_the_shared_part_and_themselves_only():
    mask = who_sees_whom(torch.tensor([[0, 0, 1, 1, 2, 2, -1]]))[0, 0]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 1, 0],
        [1, 1, 0, 0, 0, 0, 1],
    ]
