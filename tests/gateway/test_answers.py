"""Whole answers on the wire: fields, usage, choices, logprobs, headers, timings."""

import re

import pytest

from shared.metrics import STAGES
from shared.protocol import FinishReason, OutputLogprob, StageTimings, TokenLogprob
from tests.factories_gateway import Answer, make_body
from tests.factories_pictures import data_url


async def test_an_answer_has_every_field_of_the_contract(gateway, worker):
    response = await gateway.chat()
    answer = response.json()
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", answer.pop("id"))
    assert answer.pop("created") > 1_700_000_000
    assert answer.pop("system_fingerprint").startswith("vlm-fleet-")
    assert answer == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello you", "refusal": None},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 2, "image_tokens": 0, "text_tokens": 7},
        },
    }
