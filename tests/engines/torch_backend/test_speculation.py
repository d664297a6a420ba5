"""Drafts on a real model in float32: the tokens of answers without them, in fewer steps."""

import json

import pytest

from engines.registry import create_engine
from tests.engines.core.test_speculation import RECORD, Eager, answers, call

WORDS = {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3}


@pytest.fixture(scope="module")
def engine():
    engine = create_engine(
        {"kind": "torch", "model": "shapes", "device": "cpu", "dtype": "float32"}
    ).engine
    yield engine
    engine.close()


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2,
      "frequency_penalty": 0.3, "num_logprobs": 2}],
    ids=["greedy", "hot", "penalised"],
)  # fmt: skip
def test_drafts_change_the_number_of_steps_alone(engine, monkeypatch, sampling):
    calls = [
        call(
            f"{sampling.get('seed')} {i}", ("json", json.dumps(schema)), max_tokens=120, **sampling
        )
        for i, schema in enumerate((RECORD, WORDS, RECORD))
    ]
    monkeypatch.setattr(engine.scheduler, "_speculator", None)
    expected, num_steps = answers(engine, calls)
    speculator = Eager(engine.tokenizer.eos_token_ids)
    monkeypatch.setattr(engine.scheduler, "_speculator", speculator)
    monkeypatch.setattr(engine, "_speculator", speculator)
    found, num_fewer = answers(engine, calls)
    assert found == expected
    assert num_steps > 1.3 * num_fewer
    assert 0 < speculator.num_accepted <= speculator.num_guessed
