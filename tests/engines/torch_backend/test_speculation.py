"""Speculation on a real model in float32: the same tokens in fewer steps."""

import json

import pytest

from engines.base import EngineCall
from engines.registry import create_engine
from shared.protocol import ChatMessage, Generate, SamplingParams, TextPart
from tests.engines.core.test_speculation import RECORD, Eager, answers, call

POOL = {"num_kv_blocks": 256}  #: few blocks, since each step checks all of them


@pytest.fixture(scope="module")
def engine():
    engine = create_engine(
        {"kind": "torch", "model": "shapes", "device": "cpu", "dtype": "float32", **POOL}
    ).engine
    yield engine
    engine.close()


#: Sampling of answers without a grammar; each choice of a request is a call with its own seed.
FREE = {
    "greedy": {"temperature": 0.0},
    "hot": {"seed": 3},
    "second": {"seed": 4},
    "top_p": {"seed": 5, "top_p": 0.8, "temperature": 1.4},
    "top_k": {"seed": 6, "top_k": 5, "min_p": 0.02},
    "penalised": {"seed": 7, "repetition_penalty": 1.1, "frequency_penalty": 0.2,
                  "presence_penalty": 0.1},
    "probable": {"temperature": 0.0, "num_logprobs": 3},
    "stopped": {"seed": 8, "stop": ("ar", "e 1")},
    "biased": {"temperature": 0.0, "logit_bias": {70: 4.0, 80: 4.0}},
    "long": {"seed": 9, "ignore_eos": False, "min_tokens": 30},
}  # fmt: skip


def free_call(name, known=(), **sampling):
    words = "red circle, blue square, red circle, blue square, red circle"
    sampling = {"temperature": 1.0, "max_tokens": 60, "ignore_eos": True, **sampling}
    message = ChatMessage("user", (TextPart(f"Repeat: {words}."),))
    return EngineCall(
        name, Generate((message,), SamplingParams(**sampling)), output_token_ids=tuple(known)
    )


def test_answers_take_fewer_steps_and_are_the_same(engine, monkeypatch):
    """With and without a grammar, and after a takeover."""
    calls = [free_call(name, **sampling) for name, sampling in FREE.items()]
    held = [
        call(
            f"held {i}",
            ("json", json.dumps(RECORD)),
            max_tokens=120,
            **{"temperature": 1.0, **FREE[name]},
        )
        for i, name in enumerate(("greedy", "hot", "penalised", "probable"))
    ]
    groups = (calls[:1], held[:1])
    monkeypatch.setattr(engine.scheduler, "speculator", None)
    expected, _ = answers(engine, calls + held)
    slow = [answers(engine, group) for group in groups]
    speculator = Eager(engine.tokenizer.eos_token_ids)
    monkeypatch.setattr(engine.scheduler, "speculator", speculator)
    found, _ = answers(engine, calls + held)
    assert found == expected
    assert 0 < speculator.num_accepted < speculator.num_drafted
    for group, (told, num_steps) in zip(groups, slow, strict=True):
        found, num_fewer = answers(engine, group)
        assert found == told
        assert num_steps >= 1.3 * num_fewer
    taken_over = [
        free_call(name, expected[name][0][:place], **sampling)
        for place, (name, sampling) in enumerate(FREE.items())
        if name != "stopped"
    ]
    found, _ = answers(engine, taken_over)
    assert all(found[each.request_id][0] == expected[each.request_id][0] for each in taken_over)
