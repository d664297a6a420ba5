from dataclasses import replace

import pytest

from engines.core.blocks import BlockManager, hash_block, hash_root
from engines.core.sequence import EngineRequest, ImageInput, Sequence
from shared.protocol import SamplingParams
from tests.factories_engine import make_image, make_sequence
from tests.integrity import check_blocks

BLOCK_SIZE = 4


def make_blocks(num_blocks: int = 16) -> BlockManager:
    return BlockManager(num_blocks, BLOCK_SIZE)


def compute(blocks: BlockManager, sequence: Sequence) -> None:
    """Computes a whole prompt, as the scheduler and the runner do."""
    blocks.admit(sequence, blocks.find_prefix(sequence))
    sequence.is_running = True
    assert blocks.grow(sequence, sequence.num_tokens)
    sequence.num_computed_tokens = sequence.num_tokens
    blocks.publish(sequence)


def compute_and_free(blocks: BlockManager, sequence: Sequence) -> None:
    compute(blocks, sequence)
    blocks.free(sequence)
    sequence.is_running = False


def find_shared(first: Sequence, second: Sequence) -> int:
    """Returns the number of blocks that the second sequence shares with the first."""
    blocks = make_blocks()
    compute(blocks, first)
    return len(blocks.find_prefix(second))


def of(token_id: int, num_tokens: int) -> Sequence:
    return make_sequence(token_ids=[token_id] * num_tokens)


@pytest.mark.parametrize(
    ("used", "num_lent", "found"),
    [
        pytest.param([of(1, 9)], 12, {1: 0}, id="no cached block"),
        pytest.param([of(1, 9), of(2, 5)], 8, {1: 1, 2: 1}, id="oldest sequence, last block first"),
        pytest.param([of(1, 5), of(2, 5), of(1, 5)], 12, {1: 1, 2: 0}, id="reused"),
    ],
)
def test_freed_blocks_are_found_until_they_are_reused(used: list[Sequence], num_lent: int, found):
    blocks = make_blocks(num_blocks=4 if len(used) > 1 else 3)
    for sequence in used:
        compute_and_free(blocks, sequence)
    assert len(blocks.find_prefix(used[-1])) == used[-1].num_tokens // BLOCK_SIZE
    assert blocks.grow(make_sequence(num_lent), num_lent)
    assert {each: len(blocks.find_prefix(of(each, 9))) for each in found} == found


def test_withdrawn_blocks_and_blocks_computed_from_them_are_not_found():
    blocks = make_blocks()
    compute_and_free(blocks, make_sequence(17))  # continues at the end of the failed sequence
    failed, holder, other = make_sequence(9), make_sequence(9), make_sequence(9, cache_salt="b")
    for sequence in (failed, holder, other):
        compute(blocks, sequence)

    blocks.withdraw(failed)

    assert blocks.find_prefix(make_sequence(17)) == []
    assert len(blocks.find_prefix(make_sequence(9, cache_salt="b"))) == 2
    check_blocks(blocks, [failed, holder, other])
    for sequence in (failed, holder):
        blocks.free(sequence)
        sequence.is_running = False
    compute_and_free(blocks, make_sequence(9))
    check_blocks(blocks, [other])
    assert len(blocks.find_prefix(make_sequence(17))) == 2


def seen(num_tokens: int, *images: ImageInput) -> Sequence:
    return make_sequence(num_tokens, images=images)


CAT, DOG = make_image(8, 8, "cat"), make_image(8, 8, "dog")


@pytest.mark.parametrize(
    ("first", "second", "num_shared"),
    [
        pytest.param(seen(8), seen(8), 1, id="the last token is always left to compute"),
        (seen(9), seen(9), 2),
        pytest.param(make_sequence(9, cache_salt="x"), make_sequence(9, cache_salt="y"), 0, id="other salts"),
        (make_sequence(9, cache_salt="x"), make_sequence(9, cache_salt="x"), 2),
        pytest.param(seen(25, CAT), seen(25, DOG), 2, id="the blocks before two images, none after"),
        (seen(25, CAT), seen(25, CAT), 6),
        pytest.param(seen(13, replace(CAT, offset=7)), seen(13, replace(DOG, offset=7)), 1, id="image within a block"),
        pytest.param(
            seen(17, make_image(4, 4, "cat"), make_image(8, 4, "dog")),
            seen(17, make_image(4, 4, "dog"), make_image(8, 4, "cat")), 1, id="images in another order",
        ),
        pytest.param(seen(9), make_sequence(token_ids=[3] * 9), 0, id="other tokens"),
    ],
)  # fmt: skip
def test_blocks_of_a_common_prefix_are_shared(first: Sequence, second: Sequence, num_shared: int):
    assert find_shared(first, second) == num_shared


def test_token_ids_are_compared_on_a_hit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engines.core.blocks.hash_block", lambda *_: b"always the same")
    assert find_shared(make_sequence(9), make_sequence(token_ids=[3] * 9)) == 0


def with_positions(*positions: list[int]) -> Sequence:
    request = EngineRequest("r", [7] * 5, SamplingParams(), positions=positions)
    sequence = Sequence.from_request(request, 8)
    sequence.token_ids += [1, 2, 3]
    return sequence


def test_output_positions_continue_after_the_largest_position_of_any_row():
    assert with_positions().positions(3, 7) == [[3, 4, 5, 6]]
    sequence = with_positions([0, 1, 1, 1, 3], [0, 1, 2, 9, 3])
    assert sequence.positions(0, 8) == [[0, 1, 1, 1, 3, 10, 11, 12], [0, 1, 2, 9, 3, 10, 11, 12]]
    assert sequence.positions(2, 4) == [[1, 1], [2, 9]]
    assert sequence.positions(4, 6) == [[3, 10], [3, 10]]
    assert sequence.positions(7, 8) == [[12], [12]]


def test_a_block_hash_depends_on_each_image_and_its_offset():
    tables = [
        (),
        (make_image(0, 2, "cat"),),
        (make_image(1, 2, "cat"),),
        (make_image(0, 3, "cat"),),
        (make_image(0, 2, "dog"),),
        (make_image(0, 1, "cat"), make_image(1, 1, "cat")),
    ]
    hashes = {hash_block(hash_root(""), [5] * 4, 0, images) for images in tables}
    assert len(hashes) == len(tables)
    assert {len(each) for each in hashes} == {32}
