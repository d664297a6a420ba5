"""Streams of a real vLLM, which `record.py` has written, give the answers that it gives without streaming."""

import json
from typing import Any

import pytest

from engines.upstream.dialect import Chunk
from engines.upstream.settings import VllmSettings
from engines.upstream.vllm import FINISH, Vllm
from tests.engines.upstream.record import FILE

RECORDED = [json.loads(line) for line in FILE.read_text().splitlines()]
ANSWERED = [each for each in RECORDED if "choices" in each["whole"]]


def read(recorded: dict[str, Any]) -> list[Chunk]:
    dialect = Vllm(VllmSettings())
    events = (line.removeprefix("data: ").encode() for line in recorded["lines"])
    return [chunk for event in events if (chunk := dialect.parse(event)) is not None]


@pytest.mark.parametrize("recorded", ANSWERED, ids=lambda each: each["name"])
def test_events_of_vllm_give_its_answer(recorded: dict[str, Any]):
    chunks = read(recorded)
    (choice,), usage = recorded["whole"]["choices"], recorded["whole"]["usage"]
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert [token.token_id for token in tokens] == choice["token_ids"]
    assert [c.finish for c in chunks if c.finish] == [FINISH[choice["finish_reason"]]]
    assert {c.num_prompt_tokens for c in chunks} == {usage["prompt_tokens"]}
    assert chunks[-1].num_cached_tokens is not None
    scores = (choice["logprobs"] or {}).get("content")
    if scores:
        assert [token.token_id for token in tokens] == [score["token_id"] for score in scores]
        assert [len(token.top_logprobs) for token in tokens] == [2] * len(tokens)
        found = [
            value
            for token in tokens
            for value in (token.logprob, *dict(token.top_logprobs).values())
        ]
        expected = [each["logprob"] for score in scores for each in (score, *score["top_logprobs"])]
        assert found == pytest.approx(expected, abs=1e-4)
