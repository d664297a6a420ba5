"""What trains is what is shipped, and training learns."""

import engines.torch_backend  # noqa: F401  isort: skip - before torchvision

from random import Random

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

from training.shapes.gallery import encode, render_group, to_input
from training.shapes.llava import LlavaForConditionalGeneration
from training.shapes.trainer import Trainer
from training.shapes_clip.architecture import DIMENSIONS, look, make_model, see
from training.shapes_clip.export import export
from training.shapes_clip.meaning import learn_meaning
from training.shapes_clip.queries import sample_query
from training.shapes_clip.train import CHECKPOINT, EYE, Student


@pytest.fixture(scope="module")
def drawn():
    rng = Random(5)
    return [pair for _ in range(6) for pair in render_group(rng)]


@pytest.fixture(scope="module")
def images(drawn):
    return torch.from_numpy(np.stack([to_input(image) for _, image in drawn]))


@pytest.fixture(scope="module")
def student(images):
    eye = LlavaForConditionalGeneration.from_pretrained(EYE, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = make_model(eye.model.vision_tower, images)
    return Student(model, tokenizer, learn_meaning(DIMENSIONS, num_steps=2))


def test_a_few_steps_lower_the_loss_and_the_rest_stays_as_it_was(student, drawn, images):
    codes = np.stack([encode(scene) for scene, _ in drawn])
    rng = Random(0)
    queries = [sample_query(scene, rng) for scene, _ in drawn]
    with torch.no_grad():
        looked = look(student.model, images)

    def losses():
        return student.losses(looked, codes, queries)

    before = sum(losses()).item()
    Trainer(student, warmup=0.1).run(losses, lambda: "", num_steps=16)
    assert sum(losses()).item() < 0.8 * before
    assert torch.equal(look(student.model, images), looked)


@torch.no_grad()
def test_what_is_written_is_what_was_trained(student, images, drawn, tmp_path):
    export(student.model, student.tokenizer, tmp_path)
    read = CLIPModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    shown = [image for _, image in drawn[:4]]
    pixels = AutoImageProcessor.from_pretrained(tmp_path)(shown, return_tensors="pt")
    given = read.get_image_features(pixels["pixel_values"]).pooler_output
    made = see(student.model, look(student.model, images[:4]))
    assert torch.nn.functional.cosine_similarity(given, made).min() > 0.99
    rng = Random(1)
    queries = [sample_query(scene, rng) for scene, _ in drawn[:4]]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
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
