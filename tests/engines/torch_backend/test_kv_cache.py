"""The KV pool has the configured size or the size that memory allows; errors contain the numbers."""

import pytest
import torch

from engines.base import EngineStartError
from engines.torch_backend.kv_cache import KVCachePool, bytes_per_block, plan_kv_cache
from engines.torch_backend.settings import TorchSettings
from tests.factories_torch import make_text_config

TEXT = make_text_config()
BLOCK_BYTES = bytes_per_block(TEXT, 16, torch.float32)


def plan(free: int = 1 << 40, **changes: int):
    return plan_kv_cache(TEXT, TorchSettings(**changes), torch.float32, free, "cpu", [TEXT])


@pytest.mark.parametrize(
    ("settings", "num_blocks", "max_model_len"),
    [
        ({"kv_cache_bytes": 100 * BLOCK_BYTES + 1}, 100, 256),
        ({"num_kv_blocks": 77}, 77, 256),
        ({"num_kv_blocks": 3}, 3, 48),  # the default context length is reduced to the pool
        ({"max_num_seqs": 3, "max_model_len": 32}, 3 * 2, 32),  # a batch of full contexts
        ({"free": 100 * BLOCK_BYTES}, 40, 256),  # a share of the free memory
    ],
)
def test_the_size_of_the_pool(settings, num_blocks, max_model_len):
    assert plan(**settings) == (num_blocks, max_model_len)
    pool = KVCachePool(TEXT, num_blocks, 16, torch.float32, torch.device("cpu"))
    assert pool.data.nbytes == num_blocks * BLOCK_BYTES


TOO_MUCH = rf"{9 * BLOCK_BYTES} bytes, but {8 * BLOCK_BYTES} bytes are free"


@pytest.mark.parametrize(
    ("asked", "numbers"),
    [
        (
            {"num_kv_blocks": 3, "max_model_len": 100},
            r"100 tokens needs 7 KV blocks .* 3 blocks \(48",
        ),
        ({"free": BLOCK_BYTES}, ""),
        ({"num_kv_blocks": 1, "block_size": 1}, r"1 blocks \(1 tokens"),
        ({"free": 8 * BLOCK_BYTES, "kv_cache_bytes": 9 * BLOCK_BYTES}, TOO_MUCH),
        ({"free": 8 * BLOCK_BYTES, "num_kv_blocks": 9}, TOO_MUCH),
    ],
)
def test_a_pool_that_does_not_fit_is_refused_with_the_numbers(asked, numbers):
    with pytest.raises(EngineStartError, match=numbers or None):
        plan(**asked)
    with pytest.raises(EngineStartError, match=r"257 .* 256"):  # the model's own limit
        plan(max_model_len=257)
