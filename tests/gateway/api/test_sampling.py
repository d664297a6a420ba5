"""Sampling fields are the same in every API of text."""

import pytest

from tests.factories_gateway import MODEL

HELLO = [{"role": "user", "content": "hello"}]
FIELDS = {
    "temperature": 0.5, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "seed": 3, "stop_token_ids": [5],
    "allowed_token_ids": [5, 6], "presence_penalty": 0.5, "frequency_penalty": 0.25,
    "logit_bias": {"5": 1.0}, "min_tokens": 2, "skip_special_tokens": False, "ignore_eos": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO, **FIELDS}),
        ("/v1/completions", {"prompt": "hello", **FIELDS}),
        ("/v1/responses", {"input": "hello", **FIELDS}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 9, **FIELDS}),
        ("/api/chat", {"messages": HELLO, "stream": False, "options": FIELDS}),
        ("/api/generate", {"prompt": "hello", "stream": False, "options": FIELDS}),
    ],
)
async def test_every_api_of_text_has_every_sampling_field(gateway, worker, path, body):
    response = await gateway.client.post(path, json={"model": MODEL, **body})
    assert response.status_code == 200, response.text
    assert "x-vlm-ignored" not in response.headers
    sampling = worker.requests[-1].task.sampling
    expected = {**FIELDS, "stop_token_ids": (5,), "allowed_token_ids": (5, 6), "logit_bias": {5: 1}}
    assert {name: getattr(sampling, name) for name in FIELDS} == expected
