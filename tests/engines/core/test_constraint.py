import time

import pytest

from engines.core.constraint import Constraint
from engines.core.runner import SequenceFailure, token_mask
from shared.protocol import ErrorCode, FinishReason
from tests.factories_engine import SumMatcher, make_engine, make_request, make_sequence, run_all

PROMPT = [5, 6]


def bits(mask: bytes) -> set[int]:
    return {t for t in range(8 * len(mask)) if mask[t >> 3] >> (t & 7) & 1}


def test_a_mask_is_a_function_of_the_tokens_however_they_came():
    step_by_step, at_once = Constraint(SumMatcher(12)), Constraint(SumMatcher(12))
    answer: list[int] = []
    for _ in range(5):
        mask = step_by_step.mask([*PROMPT, *answer], len(PROMPT))
        assert mask == step_by_step.mask([*PROMPT, *answer], len(PROMPT))  # a step computed again
        answer.append(max(bits(mask)))
    assert at_once.mask([*PROMPT, *answer], len(PROMPT)) == step_by_step.mask(
        [*PROMPT, *answer], len(PROMPT)
    )
    assert bits(Constraint(SumMatcher(12)).begin().mask(PROMPT, len(PROMPT))) == {0, 3, 6, 9}


def test_tokens_that_do_not_follow_end_the_one_request():
    sequence = make_sequence(token_ids=[*PROMPT, 1])
    sequence.num_prompt_tokens = len(PROMPT)
    sequence.constraint = Constraint(SumMatcher(12))
    with pytest.raises(SequenceFailure, match="grammar"):
        token_mask(sequence)


class Signs:
    """Drafts that find nothing, and note where they were asked; tokens from 100 on are signs."""

    def __init__(self):
        self.asked = []

    def draft(self, matcher, output):
        self.asked.append(len(output))
        return []

    def resumes(self, token_id):
        return token_id >= 100


def test_no_draft_is_looked_up_in_free_text_before_punctuation():
    text = [1] * 20 + [100] + [1] * 20
    drafts, anything = Signs(), SumMatcher(128)
    anything.consume_tokens = lambda sampled_tokens: True
    constraint = Constraint(anything, drafts)
    for end in range(1, len(text)):
        constraint.draft(text[:end], 0)
    assert len(drafts.asked) < 10
    # what begins behind a sign may be a name, or one of a few choices
    assert {21, 22} <= set(drafts.asked)


@pytest.mark.parametrize("overlap_steps", [False, True])
def test_the_mock_keeps_to_a_grammar_beside_answers_without_one(overlap_steps):
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


def test_an_answer_whose_grammar_takes_too_long_ends_alone_and_says_why(monkeypatch):
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
