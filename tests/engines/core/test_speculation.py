"""Drafts change nothing but the number of steps: whatever is guessed, the answer is the same."""

import json
from itertools import product

import pytest

from engines.base import EngineCall
from engines.core.engine import BatchingEngine
from engines.core.runner import SequenceFailure
from engines.core.speculation import Speculator, find_repetition
from engines.registry import create_engine
from shared.protocol import ChatMessage, Generate, Grammar, SamplingParams, TextPart
from tests.factories_engine import make_sequence

RECORD = {
    "type": "object",
    "properties": {
        "function_name": {"type": "string", "enum": ["get_weather", "get_location"]},
        "arguments": {
            "type": "object",
            "properties": {
                "location": {"type": "string", "maxLength": 12},
                "unit_of_measure": {"enum": ["celsius", "fahrenheit"]},
                "number_of_days": {"type": "integer", "maximum": 9999},
            },
            "required": ["location", "unit_of_measure", "number_of_days"],
            "additionalProperties": False,
        },
    },
    "required": ["function_name", "arguments"],
    "additionalProperties": False,
}
CHOICE = ["a long answer of many words", "a long answer of some words"]


class Fixed:
    """Drafts that a test gives."""

    def __init__(self, find):
        self._find = find

    def draft(self, matcher, output):
        return self._find(matcher, output)


def wrong(matcher, output):
    return [65, 66, 67]


def illegal(matcher, output):
    return [258, 300, 301, 302]


def ends(matcher, output):
    return [256, 256]


def nothing(matcher, output):
    return []


class Eager(Speculator):
    """Guesses as much as it may, whatever that costs."""

    def guess(self, sequence, num_running, most):
        self._plain_s[num_running] = 1.0
        self._num_drafted = 0
        self._token_s = 0.0
        return super().guess(sequence, num_running, most)


def create(speculation="auto", **settings) -> BatchingEngine:
    instant = {"decode_s": 0, "prefill_s_per_token": 0}
    values = {"kind": "mock", "mock": instant, "speculation": speculation, **settings}
    engine = create_engine(values).engine
    assert isinstance(engine, BatchingEngine)
    if engine._speculator is not None:
        eager = Eager(engine.tokenizer.eos_token_ids)
        engine._speculator = engine.scheduler._speculator = eager
    return engine


@pytest.fixture(scope="module")
def off():
    engine = create("off")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def on():
    engine = create()
    yield engine
    engine.close()


def call(name, grammar=("json", json.dumps(RECORD)), known=(), **sampling):
    sampling = {"temperature": 0.0, "max_tokens": 300, **sampling}
    task = Generate(
        (ChatMessage("user", (TextPart(f"question {name}"),)),),
        SamplingParams(**sampling),
        grammar=Grammar(*grammar, "response_format"),
    )
    return EngineCall(name, task, output_token_ids=tuple(known))


def answers(engine, calls, draft=None):
    """Tokens, texts, ends and counts of each, and how many steps it took."""
    found, num_before = {}, engine.stats().num_steps
    for each in calls:
        request = engine.prepare(each, [])
        if draft is not None:
            request.constraint._drafts = Fixed(draft)
        engine.add(request)
        found[each.request_id] = [list(each.output_token_ids), "", None, None]
    while engine.has_work():
        for output in engine.step():
            answer = found[output.request_id]
            if output.token_ids:
                assert output.index == len(answer[0])
            answer[0] += output.token_ids
            answer[1] += output.text
            if output.finish_reason is not None:
                answer[2], answer[3] = output.finish_reason, output.usage.num_output_tokens
                assert len(answer[0]) == answer[3]
        engine.scheduler.check_integrity()
    return found, engine.stats().num_steps - num_before


WAYS = {
    "plain": {},
    "hot": {"temperature": 1.0, "seed": 7},
    "cut": {"max_tokens": 37},
    "stopped": {"stop": ("uni",)},
    "probable": {"num_logprobs": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_is_the_same_whatever_is_guessed(off, on, way):
    calls = [call(str(i), **WAYS[way]) for i in range(2)]
    expected, num_steps = answers(off, calls)
    for draft in (None, wrong, illegal, ends, nothing):
        found, num_fewer = answers(on, calls, draft)
        assert found == expected, draft
        if draft is None:
            assert num_steps >= 1.5 * num_fewer or way == "stopped"
            assert on.stats().num_accepted_tokens > 0


def test_choices_and_patterns_are_guessed_too(off, on):
    for grammar in (("choice", json.dumps(CHOICE)), ("regex", "(the same words){3}[0-9]{2} more")):
        expected, num_steps = answers(off, [call("x", grammar)])
        found, num_fewer = answers(on, [call("x", grammar)])
        assert found == expected
        assert num_steps >= 2 * num_fewer


def test_an_answer_goes_on_from_any_of_its_tokens(off, on):
    """As after a death, on an engine with drafts or without."""
    whole, _ = answers(off, [call("x")])
    tokens = whole["x"][0]
    for num_known, engine in product(range(0, len(tokens), 34), (on, off)):
        found, _ = answers(engine, [call("x", known=tokens[:num_known])])
        assert found["x"][0] == tokens


def test_preempted_answers_are_the_same(off):
    calls = [call(str(i), max_tokens=150) for i in range(4)]
    expected, _ = answers(off, calls)
    engine = create(num_kv_blocks=16, block_size=16, max_model_len=240)
    found, _ = answers(engine, calls)
    assert engine.stats().num_preemptions > 0
    assert found == expected
    engine.close()


def test_a_step_that_is_taken_back_leaves_the_grammar_where_it_was(off, on, monkeypatch):
    """Another sequence fails behind a draft that was right: all others are computed again."""
    expected, _ = answers(off, [call("a")])
    for name in ("a", "b"):
        on.add(on.prepare(call(name), []))
    launch, has_failed = on.runner.launch, []

    def fail_once(batch):
        step = launch(batch)
        if any(choice and choice.following for choice in step.result.choices) and not has_failed:
            has_failed.append(True)
            raise SequenceFailure("b", "it fails")
        return step

    monkeypatch.setattr(on.runner, "launch", fail_once)
    tokens = []
    while on.has_work():
        for output in on.step():
            if output.request_id == "a":
                tokens += output.token_ids
    assert has_failed
    assert tokens == expected["a"][0]


def test_drafts_are_as_long_as_they_pay():
    speculator = Speculator()
    speculator._plain_s[1] = 0.01
    speculator._token_s = 0.02
    assert speculator._longest(True, 1) == 0
    speculator._token_s = 0.0001
    assert speculator._longest(True, 1) > speculator._longest(False, 1) > 0
    speculator._plain_s[64] = 0.01
    assert speculator._longest(True, 64) < speculator._longest(True, 1)


def test_what_stood_before_is_guessed():
    sequence = make_sequence(token_ids=[1, 2, 3, 4, 5, 6, 1, 2, 3])
    assert find_repetition(sequence)[:3] == [4, 5, 6]
    sequence.token_ids += [9]
    assert find_repetition(sequence) == []
