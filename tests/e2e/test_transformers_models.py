"""Models without code of ours, served from a directory by one command each.

`make test` starts one family, `make families` five.
"""

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from PIL import Image

import engines.torch_backend  # noqa: F401 - before transformers
from engines.torch_backend.loading.load import MAX_IMAGE_PIXELS_ON_CPU
from tests.contract.test_model_family import ask, make_image
from tests.engines.torch_backend.models.family_table import FAMILIES, Family, write_checkpoint
from tests.engines.torch_backend.models.test_families import (
    NUM_TOKENS,
    generate,
    load,
    load_reference,
    load_their_processor,
)
from tests.factories_images import png_url
from tests.integration.fleet_process import start_fleet
from tests.long import IS_LONG

QUESTION = "Say a word."
SHOWN = (60, 20, 2)
STARTED = {"Qwen2.5-VL", *(("LLaVA-NeXT", "Idefics3", "Gemma 3", "GLM-4.1V") if IS_LONG else ())}


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name in STARTED], ids=str)
def test_answers_over_http_have_the_tokens_of_transformers(family: Family, tmp_path: Path) -> None:
    directory = tmp_path / "tiny-vl"
    write_checkpoint(family, directory)
    _, processor = load(directory)
    theirs, to_inputs = (
        load_reference(directory, family.auto),
        load_their_processor(family, directory),
    )

    def expected(*question: Any) -> str:
        prompt = ask(processor, [*question])
        inputs = to_inputs([*question])
        assert inputs.pop("input_ids")[0].tolist() == prompt.token_ids
        token_ids = generate(theirs, prompt.token_ids, **inputs)
        return b"".join(map(processor.tokenizer.token_bytes, token_ids)).decode(errors="replace")

    text = {"type": "text", "text": QUESTION}
    url = png_url(Image.open(BytesIO(make_image(*SHOWN))))
    image = {"type": "image_url", "image_url": {"url": url}}
    options = {"engine": "torch", "VLM_ENGINE__DTYPE": "float32"}
    with (
        start_fleet(tmp_path / "serve", "--model", str(directory), **options) as served,
        OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        limits: Any = client.models.retrieve("tiny-vl").limits  # type: ignore[attr-defined]
        assert limits["scaled_image_pixels"] == MAX_IMAGE_PIXELS_ON_CPU
        for content, answer in (
            ([text], expected(QUESTION)),
            ([image, text], expected(SHOWN, QUESTION)),
        ):
            asked: dict[str, Any] = {
                "model": "tiny-vl", "messages": [{"role": "user", "content": content}],
                "temperature": 0, "max_tokens": NUM_TOKENS, "extra_body": {"ignore_eos": True},
            }  # fmt: skip
            whole = client.chat.completions.create(**asked)
            assert whole.choices[0].message.content == answer
            chunks = client.chat.completions.create(**asked, stream=True)
            streamed = (c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert "".join(streamed) == answer
