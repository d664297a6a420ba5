"""Models that nobody wrote a line for, from a directory through the whole product, by one command each.

`make test` starts two families, `make families` six.
"""

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from PIL import Image

import engines.torch_backend  # noqa: F401 - before transformers
from shared.protocol import ChatMessage, TextPart
from tests.contract.test_model_family import ask, make_image
from tests.e2e.asking import png_url
from tests.engines.torch_backend.models.family_table import (
    FAMILIES,
    Family,
    text,
    write_checkpoint,
)
from tests.engines.torch_backend.models.test_families import (
    NUM_TOKENS,
    generate,
    load,
    load_reference,
    load_their_processor,
)
from tests.integration.fleet_process import Served, start_fleet
from tests.long import IS_LONG

QUESTION = "Say a word."
STARTED = {"Qwen2.5-VL", *(("LLaVA-NeXT", "Idefics3", "Gemma 3", "GLM-4.1V") if IS_LONG else ())}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3") / "tiny-qwen3"
    write_checkpoint(text("Qwen3", "Qwen3", head_dim=16), directory)
    return directory


@pytest.fixture(scope="module")
def fleet(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    served = start_fleet(
        folder, "--model", str(checkpoint), engine="torch", VLM_ENGINE__DTYPE="float32"
    )
    yield served
    served.end()


@pytest.fixture
def client(fleet: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat_gives_the_tokens_of_transformers(client: OpenAI, checkpoint: Path) -> None:
    _, processor = load(checkpoint)
    prompt = processor.build_prompt([ChatMessage("user", (TextPart(QUESTION),))], [])
    token_ids = generate(load_reference(checkpoint), prompt.token_ids)
    expected = b"".join(map(processor.tokenizer.token_bytes, token_ids)).decode(errors="replace")
    asked: dict[str, Any] = {
        "model": "tiny-qwen3",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == expected
    chunks = client.chat.completions.create(**asked, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected


def test_an_image_is_refused_by_a_model_that_takes_none(client: OpenAI) -> None:

    part = {"type": "image_url", "image_url": {"url": png_url(Image.new("RGB", (8, 8)))}}
    message: Any = {"role": "user", "content": [{"type": "text", "text": QUESTION}, part]}
    with pytest.raises(BadRequestError, match="image"):
        client.chat.completions.create(model="tiny-qwen3", messages=[message])


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name in STARTED], ids=str)
def test_a_model_of_images_is_asked_about_one(family: Family, tmp_path: Path) -> None:
    directory = tmp_path / "tiny-vl"
    write_checkpoint(family, directory)
    _, processor = load(directory)
    shown = (60, 20, 2)
    prompt = ask(processor, [shown, QUESTION])
    theirs = load_reference(directory, family.auto)
    inputs = load_their_processor(family, directory)([shown, QUESTION])
    assert inputs.pop("input_ids")[0].tolist() == prompt.token_ids
    token_ids = generate(theirs, prompt.token_ids, **inputs)
    expected = b"".join(map(processor.tokenizer.token_bytes, token_ids)).decode(errors="replace")
    served = start_fleet(
        tmp_path / "serve", "--model", str(directory), engine="torch", VLM_ENGINE__DTYPE="float32"
    )
    image = png_url(Image.open(BytesIO(make_image(*shown))))
    content: Any = [
        {"type": "image_url", "image_url": {"url": image}},
        {"type": "text", "text": QUESTION},
    ]
    try:
        with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(
                model="tiny-vl",
                messages=[{"role": "user", "content": content}],
                temperature=0,
                max_tokens=NUM_TOKENS,
                extra_body={"ignore_eos": True},
            )
    finally:
        served.end()
    assert answer.choices[0].message.content == expected
