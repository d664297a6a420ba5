"""Quantized linear layers approximate the full ones, and other layers are unchanged."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.make_checkpoint import make_checkpoint
from engines.torch_backend.layers import linear as module
from engines.torch_backend.layers.linear import FLOAT, INT4, METHODS, Linear, quantizable_layers
from engines.torch_backend.loading.weights import load_model
from engines.torch_backend.models.registry import find_family

MAX_ERROR = {"int8": 0.01, "int4": 0.12}  # relative root mean square error of the weights


def make_weight(num_outputs: int, num_inputs: int, seed: int = 0) -> Tensor:
    return torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(seed))


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    linear = Linear(weight.shape[1], weight.shape[0], bias=bias is not None, quantizable="scheme")
    linear.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
    return linear.requires_grad_(False)


def quantize(
    scheme: str, weight: Tensor, dtype: torch.dtype = torch.float32, bias: Tensor | None = None
) -> Linear:
    """Returns the linear layer of one weight, as the loader creates it."""
    model = make_linear(weight, bias)
    METHODS[scheme].create(model, dtype)
    parts = METHODS[scheme].quantize(weight, dtype)
    if bias is not None:
        parts["bias"] = bias.to(dtype)
    model.load_state_dict(parts, assign=True)
    return model.requires_grad_(False)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("scheme", METHODS)
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, (96, 128)),
        (torch.bfloat16, (64, 96)),
        (torch.float16, (33, 64)),
        (torch.float32, (128, 256)),
    ],
)
def test_weights_keep_their_values_within_the_error_of_the_bits(
    scheme: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight, bias = make_weight(*shape), make_weight(1, shape[0], seed=2)[0]

    linear = quantize(scheme, weight, dtype, bias)

    assert linear.method is METHODS[scheme]
    assert relative_error(linear.weight, weight) < MAX_ERROR[scheme]
    for num_tokens in (1, 40):
        x = make_weight(num_tokens, shape[1], seed=1).to(dtype)
        expected = x.float() @ linear.weight.float().t() + bias.to(dtype).float()
        assert relative_error(linear(x), expected) <= 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("scheme", ["none", *METHODS])
def test_intermediate_sums_can_exceed_the_range_of_float16(scheme: str) -> None:
    """All implementations accumulate in float32."""
    weight = torch.cat([torch.full((64, 512), 64.0), torch.full((64, 512), -64.0)], dim=1)
    bias = torch.ones(64)
    if scheme == "none":
        linear = make_linear(weight, bias).half()
    else:
        linear = quantize(scheme, weight, torch.float16, bias)
    for num_tokens in (1, 4, 16, 17, 100):
        x = torch.full((num_tokens, 1024), 64.0, dtype=torch.float16)
        assert torch.allclose(linear(x).float(), torch.ones(num_tokens, 64))


def test_many_outputs_are_computed_in_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_WEIGHTS", 64 * 64)
    linear = quantize("int8", make_weight(200, 64))
    x = make_weight(5, 64, seed=1)

    assert relative_error(linear(x), x @ linear.weight.t()) < 1e-6


@pytest.mark.parametrize("scheme", METHODS)
def test_a_constant_weight_is_kept_exactly(scheme: str) -> None:
    """A range of zero and a scale of zero must not cause a division by zero."""
    for value in (0.0, 1.5, -2.0):
        weight = torch.full((32, 64), value)
        assert torch.allclose(quantize(scheme, weight).weight, weight, rtol=1e-6)


def test_quantizable_layers_are_selected_by_attribute_and_not_by_name() -> None:
    model = nn.ModuleDict(
        {
            "lm_head": Linear(64, 64, quantizable="scheme"),
            "q_proj": Linear(64, 64),
            "vision": Linear(64, 64, quantizable="int8"),
            "other": nn.Linear(64, 64),
        }
    )
    for scheme in METHODS.values():
        found = list(quantizable_layers(model, scheme))
        assert [n for n, m in model.items() if m in found] == ["lm_head"]


@pytest.mark.parametrize(
    ("scheme", "dtype"), [("int8", torch.bfloat16), ("int4", torch.float32)], ids=str
)
def test_quantization_errors_of_a_model(tmp_path: Path, scheme: str, dtype: torch.dtype) -> None:
    text = {"attention_bias": True, "intermediate_size": 100 if scheme == "int4" else 192}
    make_checkpoint("tiny", tmp_path / "t", changes={"text_config": text})
    found, cpu = find_family(tmp_path / "t"), torch.device("cpu")
    full = load_model(tmp_path / "t", *found, cpu, dtype)
    quantized = load_model(tmp_path / "t", *found, cpu, dtype, METHODS[scheme])

    for number, layer in enumerate(full.language_model.model.layers):
        other = quantized.language_model.model.layers[number]
        x = make_weight(4, 64).to(dtype)
        for path in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up"):
            found, expected = (m.get_submodule(f"{path}_proj")(x) for m in (other, layer))
            assert relative_error(found, expected) < 1.5 * MAX_ERROR[scheme]
        if scheme == "int4":  # a layer of odd width is not quantized
            assert other.mlp.up_proj.method is INT4
            assert other.mlp.down_proj.method is FLOAT
