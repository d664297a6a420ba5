"""Images that a family's processor refuses are a 400 that names the field and describes the problem."""

from pathlib import Path
from typing import Any

from engines.registry import create_engine
from tests.engines.torch_backend.models.family_table import named, write_checkpoint
from tests.factories_gateway import make_body, make_settings, run_gateway_on_socket
from tests.factories_images import data_url, image_part
from tests.factories_queue import MODEL, Ends
from tests.factories_worker import run_worker


def ask(*sizes: tuple[int, int]) -> dict[str, Any]:
    images = [image_part(data_url(size=size)) for size in sizes]
    return make_body([*images, {"type": "text", "text": "?"}], max_tokens=2)


async def test_the_error_of_a_refused_image_names_its_field_and_size(
    tmp_path: Path, ends: Ends, redis_server
):
    write_checkpoint(named("Pixtral"), tmp_path)
    values = {
        "kind": "torch", "device": "cpu", "dtype": "float32", "kv_cache_bytes": 2**20, "max_model_len": 40,
        "model": str(tmp_path), "served_name": MODEL,
    }  # fmt: skip
    async with (
        run_worker(ends, load=lambda: create_engine(values)),
        run_gateway_on_socket(make_settings(redis_server, ends.prefix)) as gateway,
    ):
        fits = await gateway.chat(ask((3, 50), (1, 1)))
        narrow = await gateway.chat(ask((1, 1), (1, 199)))
        large = await gateway.chat(ask((2000, 1500)))
    assert fits.status_code == 200, fits.text
    error = narrow.json()["error"]
    assert (narrow.status_code, error["code"]) == (400, "invalid_image")
    assert error["param"] == "messages.[0].content.[1].image_url"
    assert "1 x 199 pixels" in error["message"]
    error = large.json()["error"]
    assert (large.status_code, error["code"]) == (400, "context_length_exceeded")
