"""Training updates the layers that the shipped checkpoint contains, and reduces the loss."""

import engines.torch_backend  # noqa: F401  isort: skip - before torchvision

from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

from training.shapes.gallery import render_group
from training.shapes.lessons import Album
from training.shapes.trainer import Trainer
from training.shapes_clip.queries import sample_query
from training.shapes_clip.train import Student, sample_pictures

CHECKPOINT = Path("engines/packages/shapes_clip/checkpoint")


@pytest.fixture
def student() -> Student:
    return Student(CHECKPOINT)


def test_a_few_steps_lower_the_loss_and_the_frozen_layers_stay(student):
    album = Album(Random(5))
    album.draw(6, 0, 0)
    scenes, images, codes = sample_pictures(album, 6)
    queries = [sample_query(scene, album.rng) for scene in scenes]
    torch.manual_seed(0)
    torch.nn.init.normal_(student.model.text_projection.weight, std=0.1)
    frozen = [each.clone() for each in student.model.parameters() if not each.requires_grad]

    def losses():
        return (student.loss(images, codes, queries),)

    before = losses()[0].item()
    Trainer(student, 1e-3).run(losses, lambda averaged: "", num_steps=16)
    assert losses()[0].item() < 0.8 * before
    kept = [each for each in student.model.parameters() if not each.requires_grad]
    assert all(map(torch.equal, kept, frozen))


@torch.no_grad()
def test_vectors_equal_those_of_transformers(student):
    shown = render_group(Random(5))
    album = Album(Random(5))
    album.draw(1, 0, 0)
    scenes, images, _ = sample_pictures(album, 1)
    assert scenes == [scene for scene, _ in shown]
    read = CLIPModel.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    processor = AutoImageProcessor.from_pretrained(CHECKPOINT)
    pixels = processor([image for _, image in shown], return_tensors="pt")["pixel_values"]
    given = read.get_image_features(pixels).pooler_output
    assert torch.nn.functional.cosine_similarity(given, student.images(images)).min() > 0.99
    rng = Random(1)
    queries = [sample_query(scene, rng) for scene in scenes]
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    for query, expected in zip(queries, student.texts(queries), strict=True):
        ids = tokenizer(query.text, return_tensors="pt")["input_ids"]
        given = read.get_text_features(ids).pooler_output[0]
        assert torch.nn.functional.cosine_similarity(given, expected, dim=0) > 0.999


def test_the_checkpoint_is_small_and_a_clip_of_transformers():
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= 5_000_000
    model, told = CLIPModel.from_pretrained(CHECKPOINT, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert model.dtype == torch.float16
