"""Tower and projector over kernels give what their modules give, at once and in parts, in full and in few bits."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engines.core.sequence import ImageInput
from engines.torch_backend.layers.linear import Linear
from engines.torch_backend.models.llava import Llava
from engines.torch_backend.multimodal import parts
from engines.torch_backend.ops.linear.cpu import PACKED_INT8, pack_int8_beside
from engines.torch_backend.ops.registry import Ops, choose, cpu_ops
from tests.factories_torch import make_model_pair, make_vlm_config

ACTIVATIONS = ["quick_gelu", "gelu"]
in_both_modes = pytest.mark.parametrize("mode", ["fast", "exact"])


def make_model(hidden_act: str = "quick_gelu", **vision: Any) -> Llava:
    config = make_vlm_config(vision={"hidden_act": hidden_act, **vision})
    return deepcopy(make_model_pair(config).ours)


def make_pixels(model: Llava, num_images: int = 2) -> Tensor:
    size = model.config.vision.image_size
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_images, 3, size, size, generator=generator)


def linears_of_tower(model: Llava) -> dict[str, Linear]:
    names = ("vision_tower.", "multi_modal_projector.")
    modules = model.named_modules()
    return {n: m for n, m in modules if n.startswith(names) and isinstance(m, Linear)}


def encode(model: Llava, ops: Ops, pixels: Tensor) -> Tensor:
    model.bind(ops, torch.float32)
    return model.encode_images(pixels)


def plain(model: Llava, pixels: Tensor) -> Tensor:
    """As the modules compute it."""
    return encode(model, cpu_ops("off"), pixels)


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("hidden_act", ACTIVATIONS)
@torch.inference_mode()
def test_in_full_precision_features_are_those_of_the_modules(ops: Ops, hidden_act: str):
    model = make_model(hidden_act)
    pixels = make_pixels(model)

    found = encode(model, ops, pixels)

    assert error(found, plain(model, pixels)) < 1e-5


@torch.inference_mode()
def test_matrices_may_be_of_another_type_than_the_rest(ops: Ops):
    model, meant = make_model(), make_model()
    for linear, full in zip(
        linears_of_tower(model).values(), linears_of_tower(meant).values(), strict=True
    ):
        assert isinstance(linear, nn.Linear)
        assert isinstance(full, nn.Linear)
        linear.weight = nn.Parameter(linear.weight.bfloat16(), requires_grad=False)
        full.weight.copy_(linear.weight)
    pixels = make_pixels(model)

    found = encode(model, ops, pixels)

    assert error(found, plain(meant, pixels)) < 1e-5


@in_both_modes
@pytest.mark.parametrize("hidden_act", ACTIVATIONS)
@torch.inference_mode()
def test_eight_bits_cost_little(ops: Ops, hidden_act: str):
    """Against the float weights, and against what the integers stand for."""
    model = make_model(hidden_act)
    pixels = make_pixels(model)
    full = plain(model, pixels)
    pack_int8_beside(model, ops)
    modules = plain(model, pixels)

    found = encode(model, ops, pixels)

    assert error(modules, full) < 0.03
    assert error(found, full) < 0.03
    assert error(found, modules) < {8: 0.03, 16: 2e-4}[ops.site.bits]


@torch.inference_mode()
def test_only_linear_maps_are_packed_and_of_the_decoder_the_head(ops: Ops):
    model = make_model()
    before = {name for name, _ in model.named_modules()}
    decoder = {name: value.clone() for name, value in model.language_model.state_dict().items()}
    hidden = torch.randn(3, model.config.text.hidden_size)
    full = model.language_model.logits(hidden)

    pack_int8_beside(model, ops)

    packed = linears_of_tower(model)
    assert all(layer.method is PACKED_INT8 for layer in packed.values())
    assert len(packed) == 2 + 6 * len(model.vision_tower.blocks)
    assert {name for name, _ in model.named_modules()} == before
    left = model.language_model.state_dict()
    assert {name for name, value in decoder.items() if name not in left} == {"lm_head.weight"}
    for name in decoder.keys() - {"lm_head.weight"}:
        assert torch.equal(left[name], decoder[name])
    assert error(model.language_model.logits(hidden), full) < 0.02
    model.bind(ops, torch.float32)
    assert error(model.language_model.logits(hidden), full) < 0.02


@torch.inference_mode()
def test_without_a_right_kernel_the_tower_stays_as_it_is(ops: Ops):
    model = make_model()
    left = choose(ops.site, {"linear_float", "linear_int8", "linear_int4", "dense_attention"})
    pixels = make_pixels(model)
    full = plain(model, pixels)

    pack_int8_beside(model, left)

    assert not any(layer.method is PACKED_INT8 for layer in linears_of_tower(model).values())
    assert error(encode(model, left, pixels), full) < 1e-6


@in_both_modes
@pytest.mark.parametrize("piece_flops", [1, 50_000, 10**9])
@torch.inference_mode()
def test_in_parts_it_is_the_same(ops: Ops, piece_flops: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parts, "PIECE_FLOPS_PER_THREAD", piece_flops)
    monkeypatch.setattr(parts, "PART_S", 0.0)
    model = make_model()
    pack_int8_beside(model, ops)
    pixels = make_pixels(model)
    model.bind(ops, torch.float32)
    image = ImageInput(0, len(pixels) * model.config.tokens_per_image, "image", pixels)
    cpu = torch.device("cpu")
    encoding = model.encode_in_parts(image, cpu, torch.float32)
    try:
        while True:
            next(encoding)
    except StopIteration as stop:
        features = stop.value

    assert error(features, encode(model, ops, pixels).flatten(0, 1)) < 1e-2
    assert error(features, plain(model, pixels).flatten(0, 1)) < 0.03
