"""The tokenizer encodes any text, and packs conversations like the chat template."""

from pathlib import Path

import pytest

from training.shapes.architecture import NUM_IMAGE_TOKENS
from training.shapes.llava import PreTrainedTokenizerFast
from training.shapes.questions import Question
from training.shapes.sequences import Encoder

CHECKPOINT = Path("engines/packages/shapes/checkpoint")


@pytest.fixture(scope="module")
def tokenizer():
    return PreTrainedTokenizerFast.from_pretrained(CHECKPOINT)


def test_a_packed_conversation_equals_the_chat_template(tokenizer):
    encoder = Encoder(tokenizer)
    packed = [
        *encoder.opening("Be brief."),
        *encoder.images(2),
        *encoder.question("Is there a star?"),
        *encoder.answer(Question("", "yes"))[0],
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
