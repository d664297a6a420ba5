"""All layers in one call give what a call for each part gives."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.attention import Span, plan_attention
from engines.torch_backend.layers.rotary import RotaryTable
from engines.torch_backend.ops.cpu.decoder import CpuDecoder
from engines.torch_backend.ops.cpu.kernels import CpuKernels
from engines.torch_backend.ops.cpu.library import Library
from engines.torch_backend.ops.cpu.probe import layers_are_right
from tests.engines.torch_backend.ops.cpu.test_attention import BLOCK_SIZE, CPU, make_spans
from tests.factories_torch import make_model_pair, make_vlm_config

CONFIG = make_vlm_config()
STEPS = [[(1, 0)], [(1, 3), (1, 17), (1, 30)], [(1, 9), (1, 2), (7, 0), (6, 5)], [(9, 0)]]


def make_decoder(kernels: CpuKernels) -> CpuDecoder:
    model = deepcopy(make_model_pair(CONFIG).ours)
    return CpuDecoder(model.language_model, CONFIG.text, kernels, torch.float32)


def pass_step(decoder: CpuDecoder, spans: list[Span], x: Tensor) -> Tensor:
    """Behind the same noise of earlier tokens each time."""
    plan = plan_attention(spans, BLOCK_SIZE, torch.float32, CPU)
    positions = torch.cat([torch.arange(s.num_computed, s.num_context) for s in spans])
    pool = KVCachePool(CONFIG.text, 128, BLOCK_SIZE, torch.float32, CPU)
    pool._data.normal_(generator=torch.Generator().manual_seed(1))
    rotation = RotaryTable(CONFIG.text, 64, torch.float32, CPU).at(positions)
    return decoder(x, rotation, pool, plan)


def make_stream(num_tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(num_tokens, CONFIG.text.hidden_size, generator=generator)


@pytest.mark.parametrize("shares", STEPS, ids=str)
@torch.inference_mode()
def test_one_call_gives_what_a_call_for_each_part_gives(
    kernels: CpuKernels, shares: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
):
    decoder, spans = make_decoder(kernels), make_spans(shares)
    x = make_stream(spans[-1].stop)
    with monkeypatch.context() as patch:
        patch.setattr(kernels.library, "attention", lambda *_: pytest.fail("in parts"))
        found = pass_step(decoder, spans, x)

    decoder._max_chained = 0
    assert torch.equal(found, pass_step(decoder, spans, x))


@pytest.mark.parametrize("num_threads", [2, 3, 5])
@torch.inference_mode()
def test_a_team_gives_what_one_thread_gives(kernels: CpuKernels, num_threads: int):
    """Bit by bit, also where some have nothing to do."""
    decoder, spans = make_decoder(kernels), make_spans(STEPS[2])
    x = make_stream(spans[-1].stop)
    alone = pass_step(decoder, spans, x)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for _ in range(20):
            assert torch.equal(pass_step(decoder, spans, x), alone)
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def test_without_a_right_kernel_parts_are_called(kernels: CpuKernels):
    spans = make_spans(STEPS[2])
    x = make_stream(spans[-1].stop)
    left = replace(kernels, has_layers=False)

    found = pass_step(make_decoder(left), spans, x)

    assert torch.equal(found, pass_step(make_decoder(kernels), spans, x))


def test_a_kernel_that_computes_something_else_is_found_out(kernels: CpuKernels):
    class Idle(Library):
        def __init__(self) -> None:
            self.linear, self.attention = kernels.library.linear, kernels.library.attention
            self.layers = lambda *_: None

    assert layers_are_right(kernels.library, kernels.bits)
    assert not layers_are_right(Idle(), kernels.bits)
