"""Allocation of KV blocks and the prefix cache.

Called by the scheduler. A block's hash covers everything that its keys and values depend on: the blocks before it, its
token ids, every image in it with its position, and the tenant's salt.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from engines.core.sequence import ImageInput, Sequence


@dataclass(slots=True)
class Block:
    """`block_size` KV slots. A published block has a hash, is fully computed and immutable."""

    ref_count: int = 0
    block_hash: bytes | None = None
    parent_hash: bytes | None = None  #: parent of a published block
    token_ids: list[int] | None = None  #: tokens of a published block, compared on a hit


def hash_root(cache_salt: str) -> bytes:
    """Parent hash of a prompt's first block. Tenants with different salts share no blocks."""
    return blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=32).digest()


def hash_block(
    parent: bytes, token_ids: list[int], start: int, images: Iterable[ImageInput]
) -> bytes:
    """Hash of a block whose first token has position `start`.

    All placeholder tokens of an image have the same id, so the image's hash and its offset in the block are added.
    """
    digest = blake2b(parent, digest_size=32)
    digest.update(array("q", token_ids))
    end = start + len(token_ids)
    for image in images:
        if image.offset < end and image.offset + image.num_tokens > start:
            name = image.image_hash
            digest.update(f"{len(name)}:{name}@{image.offset - start}+{image.num_tokens};".encode())
    return digest.digest()


class BlockManager:
    """Allocates blocks to sequences with reference counts, and finds cached prefixes.

    A free block keeps its content until it is reused. Blocks without a hash are reused first, then the oldest others.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_cache: bool = True
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self._enable_prefix_cache = enable_prefix_cache
        self._blocks = [Block() for _ in range(num_blocks)]
        self._empty = list(range(num_blocks - 1, -1, -1))  # free and not published; a stack
        self._evictable: OrderedDict[int, None] = OrderedDict()  # free but published, oldest first
        self._published: dict[bytes, int] = {}
        self._promised: set[bytes] = set()  # hashes of blocks that the current step computes
        self._is_parking = False
        # lists of blocks that were freed while a step in flight may write to them
        self._parked: list[list[int]] = []

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks without a reference, including published blocks."""
        return len(self._empty) + len(self._evictable)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """The longest cached prefix. The last token is excluded, because sampling needs its logits."""
        if not self._enable_prefix_cache:
            return []
        found: list[int] = []
        size = self.block_size
        for index in range(sequence.num_reusable_tokens // size):
            block_id = self._published.get(self._block_hash(sequence, index))
            if block_id is None:
                break
            token_ids = sequence.token_ids[index * size : (index + 1) * size]
            if self._blocks[block_id].token_ids != token_ids:
                break
            found.append(block_id)
        return found

    def begin_step(self) -> None:
        """Forget the blocks that the previous step promised."""
        self._promised.clear()

    def promise(self, sequence: Sequence, num_new_tokens: int) -> None:
        """Record the full blocks that this step computes for the sequence."""
        if self._enable_prefix_cache:
            start = sequence.num_computed_tokens
            first, last = start // self.block_size, (start + num_new_tokens) // self.block_size
            self._promised.update(self._block_hash(sequence, i) for i in range(first, last))

    def is_promised(self, sequence: Sequence, index: int) -> bool:
        """Whether this step computes block `index` of the sequence for another sequence."""
        is_sharable = index < sequence.num_reusable_tokens // self.block_size
        return is_sharable and self._block_hash(sequence, index) in self._promised

    def can_admit(self, sequence: Sequence, prefix: list[int], num_spare_blocks: int) -> bool:
        """Whether there are blocks for all tokens of the sequence and `num_spare_blocks` more."""
        num_taken = sum(self._blocks[block_id].ref_count == 0 for block_id in prefix)
        num_missing = self.num_blocks_for(sequence.num_tokens) - len(prefix)
        return num_missing + num_taken + num_spare_blocks <= self.num_free_blocks

    def admit(self, sequence: Sequence, prefix: list[int]) -> None:
        """Start the sequence's block table with its cached prefix."""
        for block_id in prefix:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                del self._evictable[block_id]
            block.ref_count += 1
        sequence.block_ids = prefix
        sequence.num_published_blocks = len(prefix)
        sequence.num_computed_tokens = num_hit = len(prefix) * self.block_size
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = min(num_hit, sequence.num_prompt_tokens)
            self.num_query_tokens += sequence.num_tokens
            self.num_hit_tokens += num_hit

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate blocks for `num_tokens` tokens. Returns False, and allocates nothing, if too few are free."""
        num_missing = self.num_blocks_for(num_tokens) - len(sequence.block_ids)
        if num_missing <= 0:
            return True
        if num_missing > self.num_free_blocks:
            return False
        for _ in range(num_missing):
            if not self._empty:
                self._unpublish(next(iter(self._evictable)))
            block_id = self._empty.pop()
            self._blocks[block_id].ref_count = 1
            sequence.block_ids.append(block_id)
        return True

    def publish(self, sequence: Sequence) -> None:
        """Add to the prefix cache the blocks that the sequence has filled since the last call."""
        if not self._enable_prefix_cache:
            return
        size = self.block_size
        for index in range(sequence.num_published_blocks, sequence.num_computed_tokens // size):
            block_hash = self._block_hash(sequence, index)
            if block_hash not in self._published:
                block_id = sequence.block_ids[index]
                self._published[block_hash] = block_id
                block = self._blocks[block_id]
                block.block_hash = block_hash
                block.parent_hash = sequence.block_hashes[index - 1] if index else None
                block.token_ids = sequence.token_ids[index * size : (index + 1) * size]
            sequence.num_published_blocks = index + 1

    def withdraw(self, sequence: Sequence) -> None:
        """Remove a failed sequence's blocks, and all blocks computed from them, from the prefix cache.

        They may contain the cause of the failure: a prompt chunk is published before its logits are checked.
        """
        children: dict[bytes, list[bytes]] = {}
        for block_hash, block_id in self._published.items():
            parent_hash = self._blocks[block_id].parent_hash
            if parent_hash is not None:
                children.setdefault(parent_hash, []).append(block_hash)
        doomed = [self._block_hash(sequence, i) for i in range(sequence.num_published_blocks)]
        while doomed:
            block_hash = doomed.pop()
            doomed += children.pop(block_hash, ())
            block_id = self._published.get(block_hash)
            if block_id is not None:
                self._unpublish(block_id)

    def free(self, sequence: Sequence) -> None:
        if self._is_parking:
            self._parked.append(sequence.block_ids)
        else:
            self._give_back(sequence.block_ids)
        sequence.block_ids = []

    def park_freed(self) -> None:
        """Do not reuse freed blocks until `unpark`: a step in flight may write to them."""
        self._is_parking = True

    def unpark(self) -> None:
        """Release the parked blocks; blocks that are freed from now on can be reused immediately."""
        self._is_parking = False
        while self._parked:
            self._give_back(self._parked.pop())

    def _give_back(self, block_ids: list[int]) -> None:
        """Release blocks in reverse order, so that a prefix is evicted from its end."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.block_hash is None:
                    self._empty.append(block_id)
                else:
                    self._evictable[block_id] = None

    def _unpublish(self, block_id: int) -> None:
        block = self._blocks[block_id]
        assert block.block_hash is not None
        del self._published[block.block_hash]
        block.block_hash = block.parent_hash = block.token_ids = None
        if block.ref_count == 0:
            del self._evictable[block_id]
            self._empty.append(block_id)

    def _block_hash(self, sequence: Sequence, index: int) -> bytes:
        """Hash of a full block, computed once per sequence."""
        hashes = sequence.block_hashes
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else hash_root(sequence.cache_salt)
            start = len(hashes) * self.block_size
            token_ids = sequence.token_ids[start : start + self.block_size]
            hashes.append(hash_block(parent, token_ids, start, sequence.images))
        return hashes[index]
