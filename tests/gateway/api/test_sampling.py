"""Sampling fields are the same in every API of text."""

import pytest

from tests.factories_gateway import MODEL, TEXT_BODIES

FIELDS = {
    "temperature": 0.5, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "seed": 3, "stop_token_ids": [5],
    "allowed_token_ids": [5, 6], "presence_penalty": 0.5, "frequency_penalty": 0.25,
    "logit_bias": {"5": 1.0}, "min_tokens": 2, "skip_special_tokens": False, "ignore_eos": True,
}  # fmt: skip


@pytest.mark.parametrize("path", TEXT_BODIES)
async def test_every_api_of_text_has_every_sampling_field(gateway, worker, path):
    fields = {"options": FIELDS} if path.startswith("/api/") else FIELDS
    body = {"model": MODEL, **TEXT_BODIES[path], **fields}
    response = await gateway.client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert "x-vlm-ignored" not in response.headers
    sampling = worker.requests[-1].task.sampling
    expected = {**FIELDS, "stop_token_ids": (5,), "allowed_token_ids": (5, 6), "logit_bias": {5: 1}}
    assert {name: getattr(sampling, name) for name in FIELDS} == expected
