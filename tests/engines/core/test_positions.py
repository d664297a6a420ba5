"""Rotary positions of a request: the family's for the prompt, then one more for each output token."""

from engines.core.request import EngineRequest
from engines.core.sequence import Sequence
from shared.protocol import SamplingParams


def make_sequence(positions: tuple[list[int], ...], num_prompt: int = 5) -> Sequence:
    request = EngineRequest("r", [7] * num_prompt, SamplingParams(), positions=positions)
    sequence = Sequence.from_request(request, 8)
    sequence.token_ids += [1, 2, 3]
    return sequence


def test_without_positions_of_its_own_a_prompt_counts_from_nought():
    assert make_sequence(()).positions(3, 7) == [[3, 4, 5, 6]]


def test_output_goes_on_behind_the_largest_position_of_any_row():
    sequence = make_sequence(([0, 1, 1, 1, 3], [0, 1, 2, 9, 3]))

    assert sequence.positions(0, 8) == [[0, 1, 1, 1, 3, 10, 11, 12], [0, 1, 2, 9, 3, 10, 11, 12]]
    assert sequence.positions(2, 4) == [[1, 1], [2, 9]]
    assert sequence.positions(4, 6) == [[3, 10], [3, 10]]
    assert sequence.positions(7, 8) == [[12], [12]]
