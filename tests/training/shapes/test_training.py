"""Training learns, and a run that stops and resumes ends with the same weights."""

import math
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from training.shapes.architecture import (
    IMAGE_SIZE,
    NUM_IMAGE_TOKENS,
    make_config,
    make_model,
)
from training.shapes.batches import BatchMaker
from training.shapes.export import make_tokenizer
from training.shapes.gallery import (
    NUM_HELD_OUT,
    Gallery,
    encode,
    render_group,
    to_input,
)
from training.shapes.scene_targets import SceneTargets
from training.shapes.sequences import Encoder
from training.shapes.train import Student, attention_mask, exactness
from training.shapes.trainer import Plan, Trainer
from training.shapes.vision_pretraining import VisionStudent, draw_images
from training.shapes.world import make_scene


@pytest.fixture(scope="module")
def gallery() -> Gallery:
    """Sixteen images, many times."""
    drawn = [pair for seed in range(4) for pair in render_group(Random(seed))]
    times = NUM_HELD_OUT // len(drawn) + 4
    return Gallery(
        np.tile(np.stack([to_input(image, IMAGE_SIZE) for _, image in drawn]), (times, 1, 1, 1)),
        np.tile(np.stack([encode(scene) for scene, _ in drawn]), (times, 1)),
    )


@pytest.fixture(scope="module")
def batches(gallery: Gallery) -> BatchMaker:
    encoder = Encoder(make_tokenizer(num_conversations=200), NUM_IMAGE_TOKENS)
    return BatchMaker(gallery, encoder, batch_size=2)


def micro_trainer(batches: BatchMaker, num_steps: int = 6) -> Trainer:
    """A trainer of a model with one narrow layer of each sort."""
    config = make_config()
    for part in (config.vision_config, config.text_config):
        part.hidden_size, part.intermediate_size, part.num_hidden_layers = 48, 48, 1
    student = Student(make_model(config=config))
    plan = Plan(num_steps, learning_rate=3e-3, warmup_steps=2)
    return Trainer(student, lambda step: student(batches.make(step)), plan)


def test_a_resumed_run_ends_with_the_same_weights(batches: BatchMaker, tmp_path: Path):
    straight, stopped, resumed = (micro_trainer(batches) for _ in range(3))
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


def test_training_lowers_the_loss(batches: BatchMaker):
    trainer = micro_trainer(batches, num_steps=60)
    with torch.no_grad():
        before = trainer.loss_at(-1).item()
        for _ in range(60):
            with torch.enable_grad():
                trainer.train_step()
        assert trainer.loss_at(-1).item() < 0.9 * before


@pytest.mark.parametrize(("num_steps", "reported"), [(3, [2, 3]), (4, [2, 4])])
def test_a_run_ends_with_a_report_of_its_last_step(batches, tmp_path, num_steps, reported):
    trainer = micro_trainer(batches, num_steps)
    steps = []
    trainer.run(tmp_path, lambda: str(steps.append(trainer.step)), report_every=2)
    assert steps == reported
    resumed = micro_trainer(batches, num_steps)
    resumed.load(tmp_path)
    assert resumed.step == num_steps


def test_two_steps_in_bfloat16_change_weights_that_stay_in_fp32(batches: BatchMaker):
    trainer = micro_trainer(batches)
    trainer.autocast = True
    outputs = []
    trainer.module.model.lm_head.register_forward_hook(lambda *call: outputs.append(call[-1]))
    before = {name: each.detach().clone() for name, each in trainer.parameters.items()}
    for _ in range(2):
        trainer.train_step()
    assert {each.dtype for each in outputs} == {torch.bfloat16}
    assert {each.dtype for each in trainer.parameters.values()} == {torch.float32}
    assert math.isfinite(trainer.loss)
    changed = [not torch.equal(each, before[name]) for name, each in trainer.parameters.items()]
    assert all(changed)


def test_the_eye_learns_in_bfloat16(gallery: Gallery):
    config = make_config()
    config.vision_config.hidden_size = config.vision_config.intermediate_size = 48
    config.vision_config.num_hidden_layers = config.text_config.num_hidden_layers = 1
    student = VisionStudent(make_model(config=config))

    def loss_at(step: int) -> Tensor:
        array, codes = draw_images([gallery], 8, np.random.default_rng(0))
        images = torch.from_numpy(array)
        return student.loss(student(images), student.targets(images, codes))

    plan = Plan(2, learning_rate=1e-3, warmup_steps=1)
    trainer = Trainer(student, loss_at, plan, autocast=True)
    trainer.train_step()
    first = trainer.loss
    trainer.train_step()
    assert trainer.loss < first


def test_held_out_answers_are_counted(batches: BatchMaker):
    trainer = micro_trainer(batches)
    with trainer.averaged():
        shares = exactness(trainer.module, batches, num_batches=2)
    assert shares["all"] == pytest.approx(0.0, abs=0.2)
    assert len(shares) > 3


def test_a_batch_shows_its_images_in_order(batches: BatchMaker, gallery: Gallery):
    for step in range(12):
        batch = batches.make(step)
        num_slots = int((batch.token_ids == 4).sum())
        assert num_slots % NUM_IMAGE_TOKENS == 0
        assert num_slots // NUM_IMAGE_TOKENS == len(batch.images)


def test_branches_see_what_is_shared_and_themselves_only():
    mask = attention_mask(torch.tensor([[0, 0, 1, 1, 2, 2, -1]]))[0, 0] == 0
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 1, 0],
        [1, 1, 0, 0, 0, 0, 1],
    ]


def test_a_branch_is_answered_as_if_it_were_alone(batches: BatchMaker):
    student = micro_trainer(batches).module
    batch = next(batch for step in range(50) if (batch := batches.make(step)).branches.max() > 2)
    row = int(batch.branches.max(1).values.argmax())
    with torch.no_grad():
        together = student.hidden(batch)[row]
        keep = (batch.branches[row] == 0) | (batch.branches[row] == 2)
        embeddings = student.see(batch.images)
        inputs = student.model.model.language_model.embed_tokens(batch.token_ids)
        is_image = (batch.token_ids == 4).unsqueeze(-1)
        inputs = inputs.masked_scatter(is_image, embeddings)[row : row + 1, keep]
        positions = batch.positions[row : row + 1, keep]
        alone = student.read(inputs, positions, attention_mask(torch.zeros_like(positions)))[0]
    torch.testing.assert_close(together[keep], alone, atol=1e-5, rtol=1e-4)


def test_targets_say_what_stands_in_each_patch():
    scene = make_scene(
        "black", ("red", "star", "top left"), ("blue", "ring", "bottom right", "small")
    )
    image = np.zeros((1, 96, 96, 3), dtype=np.uint8)
    image[0, 8:24, 8:24] = 255
    targets = SceneTargets.of(torch.from_numpy(image), torch.from_numpy(encode(scene)[None]), 6)
    kind = targets.kind.view(6, 6)
    assert kind[:2, :2].unique().tolist() == [4]
    assert kind[4:, 4:].unique().tolist() == [6]
    assert (kind > 0).sum() == 8
    assert targets.count.unique().tolist() == [2]
    assert targets.silhouette.sum().item() == pytest.approx(16)
