"""Images that a family's processor cannot take are a 400 that names the part and says what to send."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.registry import create_engine
from tests.engines.torch_backend.models.family_table import named, write_checkpoint
from tests.factories_gateway import (
    RunningGateway,
    make_body,
    make_settings,
    run_gateway_on_socket,
)
from tests.factories_images import data_url, image_part
from tests.factories_queue import MODEL, Ends
from tests.factories_worker import run_worker

OPTIONS = {"kind": "torch", "device": "cpu", "dtype": "float32", "kv_cache_bytes": 2**20}


@pytest.fixture(scope="module")
def pixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("family") / "pixtral"
    family = named("Pixtral")
    write_checkpoint(family, directory)
    return directory


def ask(*sizes: tuple[int, int]) -> dict[str, Any]:
    images = [image_part(data_url(size=size)) for size in sizes]
    return make_body([*images, {"type": "text", "text": "?"}], max_tokens=2)


@asynccontextmanager
async def serving(
    model: Path, ends: Ends, redis_server: str, **changes: Any
) -> AsyncIterator[RunningGateway]:
    values = {**OPTIONS, "model": str(model), "served_name": MODEL, **changes}
    async with (
        run_worker(ends, load=lambda: create_engine(values)),
        run_gateway_on_socket(make_settings(redis_server, ends.prefix)) as gateway,
    ):
        yield gateway


async def test_what_a_familys_processor_refuses_is_told_by_its_part_and_size(
    pixtral: Path, ends: Ends, redis_server
):
    async with serving(pixtral, ends, redis_server) as gateway:
        fits = await gateway.chat(ask((3, 50), (1, 1)))
        narrow = await gateway.chat(ask((64, 48), (1, 199)))
    assert fits.status_code == 200, fits.text
    error = narrow.json()["error"]
    assert (narrow.status_code, error["code"]) == (400, "invalid_image")
    assert error["param"] == "messages.[0].content.[1].image_url"
    assert "1 x 199 pixels" in error["message"]


async def test_images_that_fill_the_context_are_told_by_their_tokens(
    pixtral: Path, ends: Ends, redis_server
):
    async with serving(pixtral, ends, redis_server, max_model_len=40) as gateway:
        response = await gateway.chat(ask((2000, 1500)))
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "of its images" in error["message"]
