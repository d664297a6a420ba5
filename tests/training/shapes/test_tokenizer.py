"""The tokenizer spells everything, and packs conversations as the chat template does."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from training.shapes.architecture import NUM_IMAGE_TOKENS
from training.shapes.export import load_tokenizer
from training.shapes.questions import Question
from training.shapes.sequences import Encoder
from training.shapes.tokenizer import (
    SPECIAL_TOKENS,
)

CHECKPOINT = Path("engines/packages/shapes/checkpoint")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(CHECKPOINT)


def spell(tokenizer, text: str) -> str:
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))


@settings(max_examples=200, deadline=None)
@given(text=st.text())
@example("na\u00efve \u4e16\u754c \U0001f389\U0001f469\u200d\U0001f467")
def test_any_text_at_all_comes_back(tokenizer, text):
    if not any(token in text for token in SPECIAL_TOKENS):
        assert spell(tokenizer, text) == text


def test_a_packed_conversation_reads_as_the_chat_template_writes_it(tokenizer):
    encoder = Encoder(tokenizer, num_image_tokens=NUM_IMAGE_TOKENS)
    packed = [
        *encoder.opening("Be brief."),
        *encoder.images(2),
        *encoder.question("Is there a star?"),
        *encoder.answer(Question("", "", "yes"))[0],
        *encoder.images(0),
        *encoder.question("Where is it?"),
    ]
    chat = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Is there a star?"},
                {"type": "image"},
                {"type": "image"},
            ],
        },
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "Where is it?"},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    expanded = text.replace("<image>", NUM_IMAGE_TOKENS * "<image>")
    assert packed == tokenizer.encode(expanded)
