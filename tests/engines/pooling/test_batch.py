"""Batches of pooling steps: the oldest input and inputs of similar length; none starves and none is lost."""

from hypothesis import given
from hypothesis import strategies as st

from engines.pooling.batch import Row, Waiting


def fill(lengths, kinds=("text",)):
    waiting = Waiting()
    rows = [Row(None, length, kinds[index % len(kinds)]) for index, length in enumerate(lengths)]
    for row in rows:
        waiting.add(row)
    return waiting, rows


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 100), st.integers(1, 8)
)
def test_every_step_has_the_oldest_input_one_kind_and_fits_the_budget(lengths, budget, max_rows):
    waiting, rows = fill(lengths, ("text", "image"))
    left = list(rows)
    while waiting:
        oldest = left[0]
        taken = waiting.take(budget, max_rows)
        assert oldest in taken
        assert len(taken) == 1 or sum(row.num_tokens for row in taken) <= budget
        assert len(taken) <= max_rows
        assert {row.kind for row in taken} == {oldest.kind}
        assert [row.num_tokens for row in taken] == sorted(row.num_tokens for row in taken)
        left = [row for row in left if row not in taken]
        assert waiting.num_tokens == sum(row.num_tokens for row in left)
    assert not left


@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(1, 60))
def test_a_step_has_the_lengths_nearest_to_the_oldest(lengths, budget):
    waiting, rows = fill(lengths)
    taken = waiting.take(budget, 100)
    shortest, longest = taken[0].num_tokens, taken[-1].num_tokens
    for row in rows:
        if row not in taken:
            assert row.num_tokens <= shortest or row.num_tokens >= longest
