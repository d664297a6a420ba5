"""Images that a family's processor cannot take are a 400 that names the part and says what to send."""

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from engines.base import LoadedEngine
from engines.registry import create_engine
from tests.engines.torch_backend.models.family_table import named, write_checkpoint
from tests.factories_gateway import make_body, make_settings, run_gateway_on_socket
from tests.factories_queue import MODEL, Ends
from tests.factories_worker import run_worker

OPTIONS = {"kind": "torch", "device": "cpu", "dtype": "float32", "kv_cache_bytes": 2**20}


@pytest.fixture(scope="module")
def pixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("family") / "pixtral"
    family = named("Pixtral")
    write_checkpoint(family, directory)
    return directory


def data_url(size: tuple[int, int]) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", size, "red").save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def ask(*sizes: tuple[int, int]) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": data_url(size)}} for size in sizes]
    content = [*images, {"type": "text", "text": "?"}]
    return make_body(messages=[{"role": "user", "content": content}], max_tokens=2)


async def test_what_a_familys_processor_refuses_is_told_by_its_part_and_size(
    pixtral: Path, ends: Ends, redis_server, redis_prefix
):
    def load(**changes: Any) -> LoadedEngine:
        return create_engine({**OPTIONS, "model": str(pixtral), "served_name": MODEL, **changes})

    async with (
        run_worker(ends, load=load),
        run_gateway_on_socket(make_settings(redis_server, redis_prefix)) as gateway,
    ):
        fits = await gateway.chat(ask((3, 50), (1, 1)))
        narrow = await gateway.chat(ask((64, 48), (1, 199)))
    assert fits.status_code == 200, fits.text
    error = narrow.json()["error"]
    assert (narrow.status_code, error["code"]) == (400, "invalid_image")
    assert error["param"] == "messages.[0].content.[1].image_url"
    assert "1 x 199 pixels" in error["message"]


async def test_images_that_fill_the_context_are_told_by_their_tokens(
    pixtral: Path, ends: Ends, redis_server, redis_prefix
):
    def load() -> LoadedEngine:
        values = {**OPTIONS, "model": str(pixtral), "served_name": MODEL, "max_model_len": 40}
        return create_engine(values)

    async with (
        run_worker(ends, load=load),
        run_gateway_on_socket(make_settings(redis_server, redis_prefix)) as gateway,
    ):
        response = await gateway.chat(ask((2000, 1500)))
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "of them of its images" in error["message"]
