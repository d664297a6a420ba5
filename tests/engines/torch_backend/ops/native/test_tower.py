"""Vision tower and projector with kernels equal their modules, at once and in parts, in full precision and int8."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from engines.core.sequence import ImageInput
from engines.torch_backend.layers.linear import Linear
from engines.torch_backend.models.llava import Llava
from engines.torch_backend.models.vision import TowerBlock, VisionConfig
from engines.torch_backend.multimodal import parts
from engines.torch_backend.ops.linear.cpu import PACKED_INT8, pack_int8_beside
from engines.torch_backend.ops.registry import Ops, choose, cpu_ops
from tests.factories_torch import make_model_pair, make_vlm_config


def make_model(hidden_act: str = "quick_gelu") -> Llava:
    config = make_vlm_config(vision={"hidden_act": hidden_act})
    return deepcopy(make_model_pair(config).ours)


def make_pixels(model: Llava) -> Tensor:
    size = model.config.vision.image_size
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))


def linears_of_tower(model: Llava) -> dict[str, Linear]:
    names = ("vision_tower.", "multi_modal_projector.")
    modules = model.named_modules()
    return {n: m for n, m in modules if n.startswith(names) and isinstance(m, Linear)}


def encode(model: Llava, ops: Ops, pixels: Tensor) -> Tensor:
    model.bind(ops, torch.float32)
    return model.encode_images(pixels)


def plain(model: Llava, pixels: Tensor) -> Tensor:
    """Returns the features that the modules compute without kernels."""
    return encode(model, cpu_ops("off"), pixels)


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("mode", "hidden_act"), [("fast", "quick_gelu"), ("exact", "gelu")])
@torch.inference_mode()
def test_features_equal_those_of_the_modules_and_int8_is_close(ops: Ops, hidden_act: str):
    """Compared with the float weights, and with the dequantized ones."""
    model = make_model(hidden_act)
    pixels = make_pixels(model)
    full = plain(model, pixels)
    assert error(encode(model, ops, pixels), full) < 1e-5
    pack_int8_beside(model, ops)
    modules = plain(model, pixels)

    found = encode(model, ops, pixels)

    assert error(modules, full) < 0.03
    assert error(found, full) < 0.03
    assert error(found, modules) < {8: 0.03, 16: 2e-4}[ops.site.bits]


@torch.inference_mode()
def test_only_linear_layers_of_the_tower_and_the_head_are_packed(ops: Ops):
    model = make_model()
    decoder = {name: value.clone() for name, value in model.language_model.state_dict().items()}
    hidden = torch.randn(3, model.config.text.hidden_size)
    full = model.language_model.logits(hidden)
    pixels = make_pixels(model)
    features = plain(model, pixels)

    left = choose(ops.site, {"linear_float", "linear_int8", "linear_int4", "dense_attention"})
    pack_int8_beside(model, left)  # nothing is packed without a correct kernel
    assert not any(layer.method is PACKED_INT8 for layer in linears_of_tower(model).values())
    assert error(encode(model, left, pixels), features) < 1e-6

    pack_int8_beside(model, ops)
    packed = linears_of_tower(model)
    assert all(layer.method is PACKED_INT8 for layer in packed.values())
    assert len(packed) == 2 + 6 * len(model.vision_tower.blocks)
    kept = model.language_model.state_dict()
    assert decoder.keys() - kept.keys() == {"lm_head.weight"}
    for name in decoder.keys() - {"lm_head.weight"}:
        assert torch.equal(kept[name], decoder[name])
    for _ in range(2):
        assert error(model.language_model.logits(hidden), full) < 0.02
        model.bind(ops, torch.float32)


@pytest.mark.parametrize(("mode", "piece_flops"), [("fast", 1), ("exact", 50_000)])
@torch.inference_mode()
def test_features_are_equal_in_parts(ops: Ops, piece_flops: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parts, "PIECE_FLOPS_PER_THREAD", piece_flops)
    monkeypatch.setattr(parts, "PART_S", 0.0)
    model = make_model()
    pack_int8_beside(model, ops)
    pixels = make_pixels(model)
    model.bind(ops, torch.float32)
    image = ImageInput(0, len(pixels) * model.config.tokens_per_image, "image", pixels)
    encoding = model.encode_in_parts(image, torch.device("cpu"), torch.float32)
    try:
        while True:
            next(encoding)
    except StopIteration as stop:
        features = stop.value

    assert error(features, encode(model, ops, pixels).flatten(0, 1)) < 1e-2
    assert error(features, plain(model, pixels).flatten(0, 1)) < 0.03


@torch.inference_mode()
def test_a_float16_tower_has_the_range_of_float32(ops: Ops):
    block = TowerBlock(VisionConfig(64, 256, 1, 4, 28, 14)).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in block.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
        parameter.mul_(0.1 if parameter.ndim == 1 else 200.0)
    block.half().bind(ops, torch.float16)
    assert block(torch.randn(1, 100, 64, generator=generator)).isfinite().all()
