"""Drafts on a real model in float32: the tokens of answers without them, in fewer steps."""

import json

import pytest

from engines.base import EngineCall
from engines.registry import create_engine
from shared.protocol import ChatMessage, Generate, SamplingParams, TextPart
from tests.engines.core.test_speculation import RECORD, Eager, answers, call

WORDS = {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3}


POOL = {"num_kv_blocks": 256}  #: few, because each step checks all of them


@pytest.fixture(scope="module")
def engine():
    engine = create_engine(
        {"kind": "torch", "model": "shapes", "device": "cpu", "dtype": "float32", **POOL}
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
    monkeypatch.setattr(engine.scheduler, "speculator", None)
    expected, num_steps = answers(engine, calls)
    speculator = Eager(engine.tokenizer.eos_token_ids)
    monkeypatch.setattr(engine.scheduler, "speculator", speculator)
    found, num_fewer = answers(engine, calls)
    assert found == expected
    assert num_steps > 1.3 * num_fewer
    assert 0 < speculator.num_accepted <= speculator.num_drafted


#: How answers without a grammar are sampled; each `n` of a request is a call with a seed of its own.
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


def test_answers_without_a_grammar_take_fewer_steps_and_are_the_same(engine, monkeypatch):
    calls = [free_call(name, **sampling) for name, sampling in FREE.items()]
    monkeypatch.setattr(engine.scheduler, "speculator", None)
    expected, _ = answers(engine, calls)
    greedy, num_steps = answers(engine, calls[:1])
    speculator = Eager(engine.tokenizer.eos_token_ids)
    monkeypatch.setattr(engine.scheduler, "speculator", speculator)
    found, _ = answers(engine, calls)
    assert found == expected
    assert 0 < speculator.num_accepted < speculator.num_drafted
    found, num_fewer = answers(engine, calls[:1])
    assert found == greedy
    assert num_steps >= 1.3 * num_fewer
    taken_over = [
        free_call(name, expected[name][0][:place], **sampling)
        for place, (name, sampling) in enumerate(FREE.items())
        if name != "stopped"
    ]
    found, _ = answers(engine, taken_over)
    assert {name: answer[0] for name, answer in found.items()} == {
        name: answer[0] for name, answer in expected.items() if name != "stopped"
    }
