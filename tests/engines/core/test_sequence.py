import pytest

from engines.core.sequence import EngineRequest, ScheduledSequence, Sequence
from shared.protocol import SamplingParams
from tests.factories_engine import make_image, make_sequence


@pytest.mark.parametrize(
    ("start", "num_new", "offsets"),
    [(0, 2, []), (0, 3, [2]), (5, 1, [2]), (6, 2, []), (5, 4, [2, 8]), (12, 1, [])],
)
def test_a_share_knows_the_images_that_it_reads(start: int, num_new: int, offsets: list[int]):
    images = (make_image(2, 4), make_image(8, 4))
    sequence = make_sequence(14, images=images, num_computed_tokens=start)
    assert [image.offset for image in ScheduledSequence(sequence, num_new).images] == offsets


def with_positions(positions: tuple[list[int], ...], num_prompt: int = 5) -> Sequence:
    request = EngineRequest("r", [7] * num_prompt, SamplingParams(), positions=positions)
    sequence = Sequence.from_request(request, 8)
    sequence.token_ids += [1, 2, 3]
    return sequence


def test_without_positions_of_its_own_a_prompt_counts_from_nought():
    assert with_positions(()).positions(3, 7) == [[3, 4, 5, 6]]


def test_output_goes_on_behind_the_largest_position_of_any_row():
    sequence = with_positions(([0, 1, 1, 1, 3], [0, 1, 2, 9, 3]))

    assert sequence.positions(0, 8) == [[0, 1, 1, 1, 3, 10, 11, 12], [0, 1, 2, 9, 3, 10, 11, 12]]
    assert sequence.positions(2, 4) == [[1, 1], [2, 9]]
    assert sequence.positions(4, 6) == [[3, 10], [3, 10]]
    assert sequence.positions(7, 8) == [[12], [12]]
