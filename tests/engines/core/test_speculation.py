"""Speculation: any drafts change only the number of steps, not the answer."""

import json
from itertools import product, takewhile
from random import Random

import pytest

from engines.base import EngineCall
from engines.core.engine import BatchingEngine
from engines.core.runner import SequenceFailure, StepResult, TokenChoice
from engines.core.sequence import Batch, ScheduledSequence
from engines.core.speculation import History, Speculator
from engines.mock.engine import MockProcessor
from engines.registry import create_engine
from engines.text import tools
from shared.protocol import (
    ChatMessage,
    Function,
    Generate,
    Grammar,
    SamplingParams,
    TextPart,
    Tools,
)
from tests.factories_engine import make_image, make_sequence
from tests.integrity import check_scheduler

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
FORMATS = [each for each in vars(tools).values() if isinstance(each, tools.ToolFormat)]
CHOICE = ["a long answer of many words", "a long answer of some words"]


class Fixed:
    """A speculator whose drafts the test defines."""

    def __init__(self, find):
        self._find = find

    def draft(self, matcher, output):
        return self._find(matcher, output)

    def resumes(self, token_id):
        return True


def wrong(matcher, output):
    return [65, 66, 67]


def illegal(matcher, output):
    return [258, 300, 301, 302]


def ends(matcher, output):
    return [256, 256]


class Eager(Speculator):
    """A speculator that drafts as many tokens as allowed, at any cost."""

    def draft(self, sequence, num_running, most, most_beside):
        self._plain_s[num_running] = 1.0
        self._num_drafted = 0
        return super().draft(sequence, num_running, most, most)

    def _longest(self, right, most, num_running):
        return most, 0.0


def create(speculation="auto", **settings) -> BatchingEngine:
    instant = {"decode_s": 0, "prefill_s_per_token": 0}
    pool = {"num_kv_blocks": 256}  # few blocks, since each step checks all of them
    values = {"kind": "mock", "mock": instant, "speculation": speculation, **pool, **settings}
    engine = create_engine(values).engine
    assert isinstance(engine, BatchingEngine)
    if engine.scheduler.speculator is not None:
        engine.scheduler.speculator = Eager(engine.tokenizer.eos_token_ids)
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


def call(name, grammar=("json", json.dumps(RECORD)), known=(), tools=None, **sampling):
    sampling = {"temperature": 0.0, "max_tokens": 300, **sampling}
    task = Generate(
        (ChatMessage("user", (TextPart(f"question {name}"),)),),
        SamplingParams(**sampling),
        grammar=None if tools else Grammar(*grammar, "response_format"),
        tools=tools,
    )
    return EngineCall(name, task, output_token_ids=tuple(known))


def answers(engine, calls, draft=None):
    """Returns the tokens, text, finish reason and usage of each answer, and the number of steps."""
    found, num_before = {}, engine.stats().num_steps
    for each in calls:
        request = engine.prepare(each, [])
        if draft is not None:
            request.constraint.drafts = Fixed(draft)
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
        check_scheduler(engine.scheduler)
    return found, engine.stats().num_steps - num_before


WAYS = {
    "plain": {},
    "hot": {"temperature": 1.0, "seed": 7},
    "cut": {"max_tokens": 37},
    "stopped": {"stop": ("uni",)},
    "probable": {"num_logprobs": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_is_the_same_with_any_drafts(off, on, way):
    calls = [call(str(i), **WAYS[way]) for i in range(2)]
    expected, num_steps = answers(off, calls)
    for draft in {"plain": (None, wrong, illegal, ends), "hot": (None, wrong)}.get(way, (None,)):
        asked = calls if draft is None or (draft, way) == (wrong, "plain") else calls[:1]
        found, num_fewer = answers(on, asked, draft)
        assert found == {each.request_id: expected[each.request_id] for each in asked}, draft
        if draft is None:
            assert num_steps >= 1.5 * num_fewer or way == "stopped"
            assert on.stats().num_accepted_tokens > 0


def test_choices_and_patterns_are_drafted(off, on):
    for grammar in (("choice", json.dumps(CHOICE)), ("regex", "(the same words){3}[0-9]{2} more")):
        expected, num_steps = answers(off, [call("x", grammar)])
        found, num_fewer = answers(on, [call("x", grammar)])
        assert found == expected
        assert num_steps >= 2 * num_fewer


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_function_calls_are_drafted_in_each_format(off, on, form, monkeypatch):
    monkeypatch.setattr(MockProcessor, "tool_format", form)
    asked = [call("x", tools=Tools((Function("look_up", json.dumps(RECORD)),), True, False))]
    (expected, num_steps), (found, num_fewer) = answers(off, asked), answers(on, asked)
    assert found == expected
    assert num_steps >= 1.5 * num_fewer


def test_an_answer_continues_from_any_of_its_tokens(off, on):
    """After the loss of a worker, on an engine with or without drafts."""
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


def test_a_repeated_step_restores_the_state_of_the_grammar(off, on, monkeypatch):
    """Another sequence fails after a draft was accepted, so all other sequences are computed again."""
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


DRAFTS = [
    ([1, 2, 3, 4, 5, 6, 1, 2, 3], 16, [4, 5, 6, 1, 2, 3]),
    ([1, 2, 3, 4, 5, 6, 1, 2, 3], 2, [4, 5]),
    ([1, 2, 3, 4, 5, 6, 1, 2, 3, 9], 16, []),
    ([1, 2, 3], 16, []),
    ([1], 16, []),
    # from the longest match
    ([9, 1, 2, 3, 4, 8, 1, 2, 3, 5, 9, 1, 2, 3], 1, [4]),
    ([9, 1, 2, 3, 4, 8, 1, 2, 3, 5, 7, 1, 2, 3], 1, [5]),
    # beyond the end of a repetition
    ([7, 7, 7, 7, 7, 7, 7, 7, 7], 16, [7] * 16),
    ([1, 2, 1, 2, 1, 2, 1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),
]


@pytest.mark.parametrize(("token_ids", "most", "draft"), DRAFTS)
def test_the_continuation_of_an_earlier_n_gram_is_drafted(token_ids, most, draft):
    assert History().find(make_sequence(token_ids=token_ids), most) == draft


def test_image_placeholder_tokens_are_not_drafted():
    token_ids = [1, 2, 3, 4, 0, 0, 0, 0, 5, 1, 2, 3]
    for ids, draft in ((token_ids, [4]), ([*token_ids[:9], 3, 4, 0], [])):
        sequence = make_sequence(token_ids=ids, images=(make_image(4, 4),))
        assert History().find(sequence, 16) == draft


def test_long_prompts_are_indexed_in_parts():
    text = list(range(5000))
    sequence, history = make_sequence(token_ids=[*text, 1, 2, 3]), History()
    found = [history.find(sequence, 2) for _ in range(4)]
    assert found[0] == []
    assert found[-1] == [4, 5]
    sequence.token_ids += [4996, 4997, 4998]
    assert history.find(sequence, 1) == [4999]


def write(text, token_cost, num_running):
    """Returns the drafted and accepted tokens, and the time relative to no drafts, if all sequences have this text."""
    speculator, seconds = Speculator(), 0.0
    sequences = [
        make_sequence(token_ids=text[:4], max_output_tokens=len(text) - 4)
        for _ in range(num_running)
    ]
    for sequence in sequences:
        speculator.begin(sequence)
    while any(len(each.token_ids) < len(text) for each in sequences):
        items, choices = [], []
        for sequence in sequences:
            end = len(sequence.token_ids)
            sequence.num_computed_tokens = end - 1
            rest = [TokenChoice(each) for each in text[end:]] or [TokenChoice(0)]
            rests = sequence.history.rests(sequence)
            draft = () if rests else speculator.draft(sequence, num_running, 100, 100)
            pairs = zip(draft, rest, strict=False)
            num_right = len(list(takewhile(lambda two: two[0] == two[1].token_id, pairs)))
            rest[0].following = tuple(rest[1 : num_right + 1])
            items.append(ScheduledSequence(sequence, 1 + len(draft), draft=draft))
            choices.append(rest[0])
        step_s = 0.01 * (1 + token_cost * sum(len(item.draft) for item in items))
        seconds += step_s
        speculator.note(Batch(items), StepResult(choices), step_s)
        for item, choice in zip(items, choices, strict=True):
            item.sequence.token_ids += [each.token_id for each in (choice, *choice.following)]
    slowdown = seconds / (0.01 * (len(text) - 4))
    return speculator.num_drafted, speculator.num_accepted, slowdown


RANDOM = Random(1).choices(range(6), k=1200)
PROSE = Random(1).choices(range(1000), k=100)


@pytest.mark.parametrize(
    ("num_running", "token_cost", "text", "most_drafted", "right", "most_time"),
    [
        pytest.param(1, 0.3, RANDOM, 1200, (0, 0.5), 1.02, id="rejected"),
        pytest.param(8, 0.1, RANDOM, 9600, (0, 0.5), 1.02, id="rejected of several"),
        pytest.param(1, 0.2, PROSE * 4, 400, (0.5, 1), 0.75, id="repeated"),
        pytest.param(8, 0.05, PROSE * 4, 3200, (0.5, 1), 0.75, id="repeated of several"),
        pytest.param(1, 0.2, [*RANDOM[:600], *[7, 8, 9] * 200], 1200, (0.3, 1), 0.85, id="later"),
        pytest.param(1, 1.5, [1, 2, 3] * 400, 59, (0, 1), 1.02, id="one more token costs a step"),
    ],
)
def test_accepted_drafts_save_time_and_rejected_ones_cost_little(
    num_running, token_cost, text, most_drafted, right, most_time
):
    num_drafted, num_right, slowdown = write(text, token_cost, num_running)
    assert 0 < num_drafted <= most_drafted
    assert right[0] <= num_right / num_drafted <= right[1]
    assert slowdown < most_time
