from dataclasses import replace

import pytest

from engines.core.blocks import BlockManager, hash_block, hash_root
from engines.core.sequence import ImageInput, Sequence, SequenceStatus
from tests.factories_engine import make_image, make_sequence
from tests.integrity import check_blocks

BLOCK_SIZE = 4


def make_blocks(num_blocks: int = 16, **options: bool) -> BlockManager:
    return BlockManager(num_blocks, BLOCK_SIZE, **options)


def compute(blocks: BlockManager, sequence: Sequence) -> None:
    """Compute a whole prompt, as scheduler and runner do."""
    blocks.admit(sequence, blocks.find_prefix(sequence))
    sequence.status = SequenceStatus.RUNNING
    assert blocks.grow(sequence, sequence.num_tokens)
    sequence.num_computed_tokens = sequence.num_tokens
    blocks.publish(sequence)


def compute_and_free(blocks: BlockManager, sequence: Sequence) -> None:
    compute(blocks, sequence)
    blocks.free(sequence)
    sequence.status = SequenceStatus.FINISHED


def find_shared(first: Sequence, second: Sequence) -> int:
    """Number of blocks that the second sequence shares with the first."""
    blocks = make_blocks()
    compute(blocks, first)
    return len(blocks.find_prefix(second))


def test_nothing_is_lent_when_too_few_blocks_are_free():
    blocks = make_blocks(num_blocks=2)
    sequence = make_sequence(9)
    assert not blocks.grow(sequence, 9)
    assert sequence.block_ids == []
    assert blocks.num_free_blocks == 2


def test_full_computed_blocks_are_shared():
    blocks = make_blocks()
    first, second = make_sequence(10), make_sequence(10)
    compute(blocks, first)
    compute(blocks, second)
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    assert (blocks.num_query_tokens, blocks.num_hit_tokens) == (20, 8)
    assert second.num_cached_tokens == 8
    check_blocks(blocks, [first, second])


def test_blocks_not_computed_yet_are_not_found():
    blocks = make_blocks()
    first = make_sequence(10)
    blocks.grow(first, 10)
    first.num_computed_tokens = 7
    blocks.publish(first)
    assert len(blocks.find_prefix(make_sequence(10))) == 1


def test_freed_blocks_are_found_again_until_they_are_lent():
    blocks = make_blocks(num_blocks=3)
    compute_and_free(blocks, make_sequence(9))
    assert len(blocks.find_prefix(make_sequence(9))) == 2
    compute_and_free(blocks, make_sequence(token_ids=[50] * 12))
    assert blocks.find_prefix(make_sequence(9)) == []


def test_the_least_recently_used_prefix_is_evicted_first_and_its_end_before_its_beginning():
    blocks = make_blocks(num_blocks=4)
    old, new = make_sequence(token_ids=[1] * 9), make_sequence(token_ids=[2] * 5)
    compute_and_free(blocks, old)
    compute_and_free(blocks, new)
    borrower = make_sequence(8)
    assert blocks.grow(borrower, 8)
    assert len(blocks.find_prefix(make_sequence(token_ids=[1] * 9))) == 1
    assert len(blocks.find_prefix(make_sequence(token_ids=[2] * 5))) == 1


def test_withdrawn_blocks_and_blocks_computed_from_them_are_not_found():
    blocks = make_blocks()
    compute_and_free(blocks, make_sequence(17))  # goes on where the one that fails ends
    failed, holder, other = make_sequence(9), make_sequence(9), make_sequence(9, cache_salt="b")
    for sequence in (failed, holder, other):
        compute(blocks, sequence)

    blocks.withdraw(failed)

    assert blocks.find_prefix(make_sequence(17)) == []
    assert len(blocks.find_prefix(make_sequence(9, cache_salt="b"))) == 2
    check_blocks(blocks, [failed, holder, other])
    for sequence in (failed, holder):
        blocks.free(sequence)
        sequence.status = SequenceStatus.FINISHED
    compute_and_free(blocks, make_sequence(9))
    check_blocks(blocks, [other])
    assert len(blocks.find_prefix(make_sequence(17))) == 2


def test_admission_counts_free_prefix_blocks_as_taken():
    blocks = make_blocks(num_blocks=3)
    compute_and_free(blocks, make_sequence(9))
    newcomer = make_sequence(12)
    prefix = blocks.find_prefix(newcomer)
    assert len(prefix) == 2
    assert blocks.can_admit(newcomer, prefix, num_spare_blocks=0)
    assert not blocks.can_admit(newcomer, prefix, num_spare_blocks=1)


def test_without_prefix_cache_nothing_is_found():
    blocks = make_blocks(enable_prefix_cache=False)
    compute(blocks, make_sequence(9))
    assert blocks.find_prefix(make_sequence(9)) == []


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
        pytest.param(seen(13, replace(CAT, offset=7)), seen(13, replace(DOG, offset=7)), 1, id="amid a block"),
        pytest.param(
            seen(17, make_image(4, 4, "cat"), make_image(8, 4, "dog")),
            seen(17, make_image(4, 4, "dog"), make_image(8, 4, "cat")), 1, id="images in another order",
        ),
        pytest.param(seen(9), make_sequence(token_ids=[3] * 9), 0, id="other tokens"),
    ],
)  # fmt: skip
def test_blocks_of_one_beginning_are_shared(first: Sequence, second: Sequence, num_shared: int):
    assert find_shared(first, second) == num_shared


@pytest.mark.parametrize(
    "images",
    [
        (),
        (make_image(1, 2, "cat"),),
        (make_image(0, 3, "cat"),),
        (make_image(0, 2, "dog"),),
        (make_image(0, 1, "cat"), make_image(1, 1, "cat")),
    ],
)
def test_a_block_hash_depends_on_each_image_and_its_place(images: tuple[ImageInput, ...]):
    parent = hash_root("")
    reference = hash_block(parent, [5] * 4, 0, (make_image(0, 2, "cat"),))
    assert hash_block(parent, [5] * 4, 0, images) != reference
    assert len(reference) == 32


def test_token_ids_are_compared_on_a_hit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engines.core.blocks.hash_block", lambda *_: b"always the same")
    assert find_shared(make_sequence(9), make_sequence(token_ids=[3] * 9)) == 0


def test_check_blocks_sees_what_is_wrong():
    blocks, first, second = make_blocks(), make_sequence(10), make_sequence(10)
    for sequence in (first, second):
        compute(blocks, sequence)
    check_blocks(blocks, [first, second])
    with pytest.raises(AssertionError, match="reference count"):
        check_blocks(blocks, [first])
    second.num_computed_tokens = 7
    with pytest.raises(AssertionError, match="would be written to"):
        check_blocks(blocks, [first, second])
    second.num_computed_tokens = 10
    second.token_ids[2] = 77
    with pytest.raises(AssertionError, match="other tokens"):
        check_blocks(blocks, [first, second])


def test_a_decode_token_inside_a_block_hashes_nothing(monkeypatch: pytest.MonkeyPatch):
    blocks = make_blocks()
    sequence = make_sequence(9)
    compute(blocks, sequence)
    monkeypatch.setattr("engines.core.blocks.hash_block", lambda *_: pytest.fail("hashed"))
    sequence.token_ids.append(5)
    sequence.num_computed_tokens += 1
    blocks.publish(sequence)


def test_a_prefix_that_is_used_again_outlives_a_younger_one():
    blocks = make_blocks(num_blocks=4)
    old, young = make_sequence(token_ids=[1] * 5), make_sequence(token_ids=[2] * 5)
    compute_and_free(blocks, old)
    compute_and_free(blocks, young)
    compute_and_free(blocks, make_sequence(token_ids=[1] * 5))
    assert blocks.grow(make_sequence(12), 12)
    assert len(blocks.find_prefix(make_sequence(token_ids=[1] * 5))) == 1
    assert blocks.find_prefix(make_sequence(token_ids=[2] * 5)) == []
