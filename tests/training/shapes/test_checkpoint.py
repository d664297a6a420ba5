"""The shipped checkpoint loads with transformers and answers correctly."""

import engines.torch_backend  # noqa: F401  isort: skip  before transformers imports torchvision

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import pipeline

from tests.long import few
from tests.training.shapes.strangers import draw_framed, draw_plainly, draw_smoothly
from training.shapes.evaluation import Message, Score, make_cases
from training.shapes.gallery import to_input
from training.shapes.world import Scene, Shape

CHECKPOINT = Path("engines/packages/shapes/checkpoint")
FLOOR = 0.85
FILES = (
    "chat_template.jinja", "chat_template.json", "config.json", "generation_config.json", "model.safetensors",
    "preprocessor_config.json", "processor_config.json", "special_tokens_map.json", "tokenizer.json",
    "tokenizer_config.json",
)  # fmt: skip


@pytest.fixture(scope="module")
def answerer() -> Any:
    torch.set_num_threads(1)  # for the process, also for later tests
    return pipeline("image-text-to-text", model=str(CHECKPOINT), dtype="float32", device="cpu")


def ask(answerer: Any, messages: Sequence[Message]) -> str:
    chat = []
    for message in messages:
        images = [{"type": "image", "image": image} for image in message.images]
        text = {"type": "text", "text": message.question}
        answer = {"type": "text", "text": message.answer}
        chat += [{"role": "user", "content": [*images, text]}]
        chat += [{"role": "assistant", "content": [answer]}]
    [reply] = answerer(text=chat[:-1], max_new_tokens=128, return_full_text=False)
    return reply["generated_text"]


def test_it_has_the_files_of_a_llava_checkpoint():
    assert {path.name for path in CHECKPOINT.iterdir()} == set(FILES)
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) < 16_000_000
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["architectures"] == ["LlavaForConditionalGeneration"]
    assert config["text_config"]["max_position_embeddings"] >= 2048


def test_images_are_prepared_as_in_training(answerer):
    image = draw_smoothly(Scene("white", (Shape("star", "red", "large", "center"),)), rng=Random(0))
    pixels = answerer.processor.image_processor(image, return_tensors="pt")["pixel_values"][0]
    mean, std = (
        torch.tensor(getattr(answerer.processor.image_processor, name))
        for name in ("image_mean", "image_std")
    )
    levels = (pixels.permute(1, 2, 0) * std + mean) * 255
    expected = torch.from_numpy(to_input(image).copy()).float()
    assert (levels - expected).abs().max() < 1.01  # transformers can resize with torchvision


@pytest.mark.parametrize("draw", few([draw_plainly, draw_smoothly, draw_framed], [draw_framed]))
def test_it_answers_about_images_of_other_programs(answerer, draw):
    """Drawn by other programs than those of training. `tests/e2e/test_accuracy.py` has the goals."""
    cases = make_cases(2, draw, seed=7)
    score = Score([(case, ask(answerer, case.messages)) for case in cases])
    assert score.accuracy() > FLOOR
