"""Fine-tuning learns from lessons, and writes what `export` reads."""

from pathlib import Path
from random import Random

import pytest
import torch

from training.shapes.architecture import make_config
from training.shapes.export import load_finetuned
from training.shapes.finetune import Learner, make_trainer, save, who_sees_whom
from training.shapes.lessons import Album, Batch, make_batch
from training.shapes.llava import LlavaForConditionalGeneration, PreTrainedTokenizerFast
from training.shapes.sequences import Encoder

CHECKPOINT = Path("engines/packages/shapes/checkpoint")


def make_learner() -> Learner:
    """Of a model with one narrow layer of each sort, as wide as the code book is long."""
    config = make_config()
    for part, width in ((config.vision_config, 48), (config.text_config, 80)):
        part.hidden_size = part.intermediate_size = width
        part.num_hidden_layers = 1
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration._from_config(config, dtype=torch.float32)
    return Learner(model, torch.device("cpu"))


@pytest.fixture(scope="module")
def batch() -> Batch:
    """The lessons of a small album."""
    album = Album(Random(0))
    album.draw(4, 4, 2)
    return make_batch(album, Encoder(PreTrainedTokenizerFast.from_pretrained(CHECKPOINT)), 5)


def test_learning_lowers_the_loss_and_the_average_follows(batch: Batch):
    learner = make_learner()
    trainer = make_trainer(learner.model, learning_rate=3e-3, autocast=False)
    losses = [trainer.learn(lambda: learner(batch), step / 14)[0] for step in range(14)]
    assert losses[-1] < 0.8 * losses[0]
    with torch.no_grad(), trainer.averaged():
        assert learner.eval()(batch)[0] < 0.9 * losses[0]


def test_what_is_saved_can_be_exported(tmp_path: Path):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(CHECKPOINT)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = LlavaForConditionalGeneration._from_config(make_config(), dtype=torch.float32)
    weights = {name: each.detach() for name, each in model.named_parameters()}
    save(weights, tmp_path)
    loaded, same = load_finetuned(tmp_path)
    assert len(same) == len(tokenizer)
    for name, weight in loaded.named_parameters():
        torch.testing.assert_close(weight, weights[name], atol=1e-2, rtol=1e-2)


def test_branches_see_what_is_shared_and_themselves_only():
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
