"""A worker with a real encoder of two towers: texts and images over HTTP."""

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, CLIPModel

from engines.registry import create_engine
from tests.factories_encoders import make_clip
from tests.factories_gateway import make_settings, run_gateway_on_socket
from tests.factories_images import data_url
from tests.factories_numbers import EMBEDDINGS, read_vectors
from tests.factories_worker import run_worker


@pytest.fixture
async def gateway(ends, redis_server, tmp_path):
    make_clip(tmp_path)
    settings = {
        "kind": "pooling",
        "model": str(tmp_path),
        "served_name": "clip",
        "device": "cpu",
        "dtype": "float32",
    }
    async with (
        run_worker(ends, load=lambda: create_engine(settings)),
        run_gateway_on_socket(make_settings(redis_server, ends.prefix)) as gateway,
    ):
        yield gateway


async def test_texts_and_images_are_in_one_space(gateway, tmp_path):
    body = {"model": "clip", "input": ["w1 w2", {"image": data_url()}]}
    response = await gateway.client.post(EMBEDDINGS, json=body)
    assert response.status_code == 200, response.text
    text, image = map(np.array, read_vectors(response.json()))
    model = CLIPModel.from_pretrained(tmp_path).eval()
    ids = AutoTokenizer.from_pretrained(tmp_path)("w1 w2", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        expected = torch.nn.functional.normalize(
            model.get_text_features(ids).pooler_output[0], dim=0
        )
    assert np.allclose(text, expected, atol=1e-4)
    assert np.linalg.norm(image) == pytest.approx(1, abs=1e-4)
    models = (await gateway.client.get("/v1/models/clip")).json()
    assert (models["supports_images"], models["dimensions"]) == (True, 16)
