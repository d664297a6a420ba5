"""Invariants of the queues, the blocks and the image cache between two steps."""

from collections import Counter
from collections.abc import Iterable

from engines.core.blocks import BlockManager
from engines.core.scheduler import Scheduler
from engines.core.sequence import Sequence


def check_scheduler(scheduler: Scheduler) -> None:
    """Checks queues, states and blocks."""
    assert len(scheduler.running) <= scheduler.max_num_seqs
    for queue in (scheduler.running, scheduler.waiting):
        ranks = [sequence.is_preemptible for sequence in queue.values()]
        assert ranks == sorted(ranks)
    for sequence in scheduler.running.values():
        assert sequence.is_running
    for sequence in scheduler.waiting.values():
        assert not sequence.is_running
        assert sequence.num_computed_tokens == 0
    sequences = [*scheduler.running.values(), *scheduler.waiting.values()]
    for sequence in sequences:
        assert sequence.finish_reason is None
        assert 0 <= sequence.num_computed_tokens < sequence.num_tokens
    check_blocks(scheduler.blocks, sequences)


def check_blocks(blocks: BlockManager, sequences: Iterable[Sequence]) -> None:
    """Compares the block manager with the block tables of all sequences."""
    holders = Counter(block_id for table in blocks._parked for block_id in table)
    for sequence in sequences:
        holders.update(sequence.block_ids)
        _check_table(blocks, sequence)
    free = [*blocks._empty, *blocks._evictable]
    assert len(set(free)) == len(free), "a block is free twice"
    for block_id, block in enumerate(blocks._blocks):
        assert block.ref_count == holders[block_id], "wrong reference count"
    assert set(free) == set(range(blocks.num_blocks)) - holders.keys()
    assert all(blocks._blocks[block_id].block_hash is None for block_id in blocks._empty)
    hashes = {block.block_hash: block_id for block_id, block in enumerate(blocks._blocks)}
    hashes.pop(None, None)
    assert hashes == blocks._published, "published blocks and their hashes disagree"


def _check_table(blocks: BlockManager, sequence: Sequence) -> None:
    """Checks that published blocks match the sequence, and that it writes only to unshared blocks."""
    size = blocks.block_size
    assert len(set(sequence.block_ids)) == len(sequence.block_ids), "a table has a block twice"
    assert sequence.is_running or not sequence.block_ids
    assert sequence.num_computed_tokens <= len(sequence.block_ids) * size
    for index, block_id in enumerate(sequence.block_ids):
        block = blocks._blocks[block_id]
        if block.block_hash is None:
            was_published = index < sequence.num_published_blocks
            assert was_published or block.ref_count == 1, "an unpublished block is shared"
            continue
        is_full = index < sequence.num_computed_tokens // size
        assert is_full, "a published block would be written to"
        assert block.block_hash == blocks._block_hash(sequence, index), "another prefix's block"
        tokens = sequence.token_ids[index * size : (index + 1) * size]
        assert block.token_ids == tokens, "a block has other tokens"
