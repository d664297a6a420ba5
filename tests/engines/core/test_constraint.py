import time

import pytest

from engines.core.constraint import Constraint
from engines.core.runner import SequenceFailure, token_mask
from shared.protocol import ErrorCode, FinishReason
from tests.factories_engine import SumMatcher, make_engine, make_request, make_sequence, run_all

PROMPT = [5, 6]


def test_tokens_that_violate_the_grammar_fail_only_their_request():
    sequence = make_sequence(token_ids=[*PROMPT, 1])
    sequence.num_prompt_tokens = len(PROMPT)
    sequence.constraint = Constraint(SumMatcher(12))
    with pytest.raises(SequenceFailure, match="grammar"):
        token_mask(sequence)


@pytest.mark.parametrize("overlap_steps", [False, True])
def test_the_mock_follows_a_grammar_beside_answers_without_one(overlap_steps):
    engine = make_engine(overlap_steps=overlap_steps, num_kv_blocks=14)
    free = make_request("free", "the same beginning")
    held = make_request("held", "the same beginning", max_tokens=12, ignore_eos=True)
    object.__setattr__(held, "constraint", Constraint(SumMatcher(engine.runner.vocab_size)))
    answers = run_all(engine, free, held)
    total = 0
    for token_id in answers["held"].token_ids:
        assert token_id % 3 == total % 3
        total += token_id + 1
    alone = run_all(make_engine(), free)
    assert answers["free"].token_ids == alone["free"].token_ids


def test_one_slow_grammar_step_does_not_end_an_answer(monkeypatch):
    clock = iter([0.0, 0.5, *(0.5 + 0.001 * i for i in range(100))])
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    constraint = Constraint(SumMatcher(24))
    for count in range(10):
        assert any(constraint.mask(([0, 1] * 5)[:count], 0))


def test_a_slow_grammar_fails_only_its_request_with_the_reason(monkeypatch):
    clock = iter(range(100_000))
    monkeypatch.setattr(time, "thread_time", lambda: 0.03 * next(clock))
    engine = make_engine()
    held = make_request("held", "a beginning", max_tokens=50, ignore_eos=True)
    object.__setattr__(held, "constraint", Constraint(SumMatcher(engine.runner.vocab_size)))
    for request in (held, make_request("free", "a beginning", max_tokens=5, ignore_eos=True)):
        engine.add(request)
    last = {}
    while engine.has_work():
        last.update((output.request_id, output) for output in engine.step())
    assert last["held"].error_code is ErrorCode.GRAMMAR_TOO_COMPLEX
    assert last["free"].finish_reason is FinishReason.LENGTH
