"""Checkpoints in published quantized formats give the logits of the dequantized weights, or are refused by name."""

import json
import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import CompressedTensorsConfig, LlavaForConditionalGeneration, Qwen3ForCausalLM

from engines.packages.cache import CachedModel
from engines.torch_backend.layers import linear
from engines.torch_backend.layers.linear import METHODS, Linear, quantized_layers
from engines.torch_backend.loading import published
from engines.torch_backend.loading import weights as module
from engines.torch_backend.loading.formats import detect
from engines.torch_backend.loading.formats.reader import Integers
from engines.torch_backend.loading.load import quantization_of
from engines.torch_backend.loading.stored_tensors import list_tensors
from engines.torch_backend.loading.weights import ModelTooLarge, load_model
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.generic.family import GenericFamily
from engines.torch_backend.models.hf_config import read_fields
from engines.torch_backend.models.registry import FamilyModel, find_family
from engines.torch_backend.ops.registry import CpuKernels, cpu_ops
from tests import factories_formats as formats
from tests.factories_torch import logits_of, plain_logits
from tests.long import few

CPU = torch.device("cpu")
TOKEN_IDS = torch.arange(5, 305, 13)
PROJECTION = "language_model.model.layers.0.self_attn.q_proj."

INT4 = {
    "gptq": formats.gptq(),
    "gptq symmetric, groups of 128": formats.gptq(group_size=128, sym=True),
    "gptq one group": formats.gptq(group_size=-1),
    "gptq groups of 32": formats.gptq(group_size=32),
    "gptq v2": formats.gptq(version="gptq_v2"),
    "gptq desc_act": formats.gptq(group_size=128, desc_act=True),
    "awq": formats.awq(),
    "awq groups of 128": formats.awq(128),
    "packed groups of 128": formats.packed(4, 128),
    "packed channels": formats.packed(4),
    "packed asymmetric groups of 32": formats.packed(4, 32, symmetric=False),
    "packed asymmetric channels": formats.packed(4, symmetric=False),
    "packed ordered": formats.packed(4, 64, ordered=True),
}
INT8 = {
    "gptq of 8 bits": formats.gptq(8, -1, sym=True, dtype=torch.float32),
    "packed of 8 bits": formats.packed(8),
    "int8": formats.int8(),
    "int8, one scale": formats.int8("tensor"),
    "w8a8": formats.int8(activations=True),
}
FLOAT = {
    "gptq of 8 bits in groups": formats.gptq(8, 128, desc_act=True),
    "awq small groups": formats.awq(16),
    "int8 asymmetric": formats.int8(symmetric=False),
    "int8 asymmetric, one scale": formats.int8("tensor", symmetric=False),
    "fp8 channels": formats.float8(),
    "fp8, one scale": formats.float8("tensor"),
    "fp8 blocks of compressed-tensors": formats.float8("block", 96),
    "fp8 blocks": formats.deepseek(),
}
ALL = INT4 | INT8 | FLOAT
#: Formats that the library installed here can read.
LIBRARY = [name for name in ALL if name.startswith(("packed", "int8"))]


def load(
    directory: Path, mode: CpuKernels = "off", family: Any = None, **options: Any
) -> FamilyModel:
    ops = cpu_ops(mode)
    usual, config = find_family(directory)
    model = load_model(directory, family or usual, config, CPU, torch.float32, ops=ops, **options)
    model.bind(ops, torch.float32)
    return model


def linears(model: nn.Module) -> list[Linear]:
    layers = model.language_model.model.layers
    return [m for n, m in layers.named_modules() if n.endswith("_proj")]


def expected_logits(
    directory: Path, weights: dict[str, Tensor], model_class: Any = LlavaForConditionalGeneration
) -> Tensor:
    """Returns the logits of transformers with the dequantized weights."""
    plain = directory.with_name("plain")
    plain.mkdir()
    for file in directory.glob("*.json"):
        (plain / file.name).write_bytes(file.read_bytes())
    config = json.loads((plain / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    save_file(weights, plain / "model.safetensors")
    theirs = model_class.from_pretrained(plain, dtype=torch.float32)
    with torch.inference_mode():
        return theirs(input_ids=TOKEN_IDS[None]).logits[0]


#: One group size per format.
SHORT = [name for name in ALL if not name.endswith(("of 32", "one group", "compressed-tensors"))]


@pytest.mark.parametrize("name", few(ALL, SHORT))
def test_logits_equal_those_of_the_dequantized_weights(name: str, tmp_path: Path) -> None:
    """Tested with and without kernels; weights that kernels read stay quantized."""
    expected = expected_logits(tmp_path / "q", formats.write_checkpoint(tmp_path / "q", *ALL[name]))
    kinds = {linear.INT4: INT4, linear.INT8: INT8, linear.FLOAT: FLOAT}

    model = load(tmp_path / "q")
    assert_close(plain_logits(model, TOKEN_IDS), expected, rtol=1e-4, atol=1e-4)
    found = linears(model)
    assert len(found) == 14
    assert all(name in kinds[m.method] for m in found)

    native = plain_logits(load(tmp_path / "q", "fast"), TOKEN_IDS)
    assert (native - expected).norm() < 0.02 * expected.norm()


def test_the_quantization_in_text_config_is_detected(tmp_path: Path) -> None:
    config = {"text_config": {"quantization_config": {"quant_method": "fp8"}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    reader = detect(read_fields(tmp_path))
    assert reader is not None
    assert reader.name == "FP8"
    assert quantization_of(tmp_path, "none") == "fp8"
    cached = CachedModel("a/b", "main", 0, "hub", tmp_path, frozenset({"model.safetensors"}))
    assert cached.format == "safetensors, fp8"


def test_joined_layers_can_have_different_input_orders(tmp_path: Path) -> None:
    directory = tmp_path / "q"
    weights = formats.write_checkpoint(directory, *ALL["gptq desc_act"])
    tensors = load_file(directory / "model.safetensors")
    group = tensors[f"{PROJECTION}g_idx"]
    shift = torch.arange(len(group)).roll(1)
    tensors[f"{PROJECTION}g_idx"] = group[shift].contiguous()
    words = formats.unpack_rows(tensors[f"{PROJECTION}qweight"])
    tensors[f"{PROJECTION}qweight"] = formats.pack(words[shift].numpy(), 4, 0)
    save_file(tensors, directory / "model.safetensors")
    weights[f"{PROJECTION}weight"] = weights[f"{PROJECTION}weight"][:, shift].contiguous()
    expected = expected_logits(directory, weights)

    for mode in ("off", "fast"):
        found = plain_logits(load(directory, mode), TOKEN_IDS)
        assert (found - expected).norm() < 0.02 * expected.norm()


def test_biases_are_added_and_zero_biases_of_other_layers_ignored(tmp_path: Path) -> None:
    formats.write_checkpoint(tmp_path / "q", *formats.gptq())
    change(tmp_path / "q", {f"{PROJECTION}bias": torch.zeros(256)})
    load(tmp_path / "q")

    change(tmp_path / "q", {f"{PROJECTION}bias": torch.ones(256)})
    with pytest.raises(UnsupportedCheckpoint, match=rf"unknown weights: {PROJECTION}bias"):
        load(tmp_path / "q")

    how = formats.gptq(group_size=128, desc_act=True)
    weights = formats.write_checkpoint(tmp_path / "b", *how, attention_bias=True)
    found = plain_logits(load(tmp_path / "b"), TOKEN_IDS)
    assert_close(found, expected_logits(tmp_path / "b", weights), rtol=1e-4, atol=1e-4)


def test_fp8_can_be_quantized_at_load_time_and_int8_not_to_int4(tmp_path: Path) -> None:
    formats.write_checkpoint(tmp_path / "i", *ALL["packed of 8 bits"])
    load(tmp_path / "i", scheme=METHODS["int8"])
    with pytest.raises(UnsupportedCheckpoint, match="int8; for --quantization int4, use"):
        load(tmp_path / "i", scheme=METHODS["int4"])

    weights = formats.write_checkpoint(tmp_path / "q", *formats.deepseek())
    model = load(tmp_path / "q", scheme=METHODS["int8"])
    assert all(m.method is linear.INT8 for m in linears(model))
    expected = expected_logits(tmp_path / "q", weights)
    assert (plain_logits(model, TOKEN_IDS) - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize(
    ("name", "write", "slack"),
    [
        *((name, formats.write_checkpoint, 0.0) for name in ("gptq", "int8", "fp8 blocks")),
        ("awq", formats.write_text_checkpoint, 0.05),  # transformers creates the model
    ],
)
def test_the_checked_memory_is_that_of_the_weights(
    name: str, write: Any, slack: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "q", *ALL[name])
    taken = sum(value.nbytes for value in load(tmp_path / "q").state_dict().values())

    monkeypatch.setattr(module, "free_bytes", lambda device: (1 + slack) * taken)
    load(tmp_path / "q")
    monkeypatch.setattr(module, "free_bytes", lambda device: (1 - 2 * slack) * taken - 1)
    with pytest.raises(ModelTooLarge):
        load(tmp_path / "q")


def change(directory: Path, tensors: dict[str, Tensor | None]) -> None:
    """Replaces tensors of a checkpoint; None removes a tensor."""
    file = directory / "model.safetensors"
    found = load_file(file) | tensors
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, file)


HOSTILE: list[tuple[Any, dict[str, Tensor | None], str]] = [
    (formats.gptq(), {"qzeros": None}, "qzeros is missing"),
    (formats.gptq(), {"scales": torch.zeros(3, 256).half()}, r"scales has shape \(3, 256\); .* \(4, 256\)"),
    (formats.gptq(), {"scales": torch.zeros(4, 256).long()}, "scales has type I64"),
    (formats.gptq(), {"qweight": torch.zeros(4).int()}, r"qweight has shape \(4,\), which is not a matrix"),
    (formats.gptq(), {"qweight": torch.zeros(0, 4).int()}, r"qweight has shape \(0, 4\), which is not a matrix"),
    (formats.gptq(), {"g_idx": torch.zeros(7).int()}, r"g_idx has shape \(7,\)"),
    (formats.gptq(), {"g_idx": torch.zeros(256).int()}, "g_idx does not assign 64 inputs to each"),
    (formats.gptq(), {"g_idx": torch.full((256,), -5).int()}, "g_idx does not assign"),
    (formats.gptq(desc_act=True), {"g_idx": None}, "g_idx is missing"),
    (
        formats.gptq(group_size=128, sym=True),
        {"qzeros": torch.full((2, 32), 0x12345678).int()},
        "qzeros has asymmetric zero points, but sym is true",
    ),
    (formats.awq(), {"qzeros": torch.zeros(4, 31).int()}, r"qzeros has shape \(4, 31\)"),
    (formats.packed(), {"weight_shape": torch.tensor([2**40, 2**40])}, "weight_shape has"),
    (formats.packed(), {"weight_shape": torch.tensor([1, 256])}, "weight_shape is not"),
    (formats.packed(), {"weight_scale": None}, "weight_scale is missing"),
    (formats.packed(4, 64), {"weight_scale": torch.ones(256, 1)}, r"weight_scale has shape \(256, 1\)"),
    (formats.packed(symmetric=False), {"weight_zero_point": None}, "weight_zero_point is missing"),
    (formats.int8(), {"weight": torch.zeros(256, 256)}, "weight has type F32, not I8"),
    (formats.int8(), {"weight_scale": None}, "weight is int8"),
    (
        formats.int8(),
        {"weight_zero_point": torch.ones(256, 1).char()},
        "weight_zero_point is not 0, but the weights are symmetric",
    ),
    (formats.deepseek(), {"weight_scale_inv": torch.ones(1, 1)}, r"weight_scale_inv has shape \(1, 1\)"),
    (formats.deepseek(), {"weight_scale_inv": None}, "type F8_E4M3, but config.json has no"),
    (
        formats.gptq(),
        {"qweight": torch.zeros(16, 256).int(), "scales": torch.ones(2, 256).half(), "g_idx": None,
         "qzeros": torch.zeros(2, 32).int()},
        r"is \(256, 128\) but config.json requires \(256, 256\)",
    ),
]  # fmt: skip


SPARSE = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}


def compressed(**weights: Any) -> dict[str, Any]:
    config = deepcopy(formats.packed()[1])
    config["config_groups"]["group_0"]["weights"] |= weights
    return config


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "new"}, "'new' is not supported; .* --quantization int8"),
    ({"quant_method": ["gptq"]}, "quant_method .* is not supported"),
    ({}, "lacks weights|unknown"),
    (formats.gptq()[1] | {"bits": 3}, "bits is 3; GPTQ is supported with 4 or 8 bits"),
    (formats.gptq()[1] | {"group_size": 0}, "group_size is 0"),
    (formats.gptq()[1] | {"group_size": 10**9}, "group_size is 1000000000, not an integer"),
    (formats.gptq()[1] | {"group_size": "many"}, "group_size is 'many', not an integer"),
    (formats.gptq()[1] | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    (formats.gptq()[1] | {"group_size": 2**20}, r"scales has shape \(6, 256\)"),
    (formats.awq()[1] | {"version": "gemv"}, "version is 'gemv'"),
    (formats.awq()[1] | {"zero_point": False}, "zero_point is false"),
    (formats.awq()[1] | {"bits": 8}, "bits is 8"),
    (compressed(num_bits=2), "num_bits is 2 of type int"),
    (compressed(num_bits=4, type="float"), "num_bits is 4 of type float"),
    (compressed(strategy="tensor_group"), "strategy 'tensor_group'"),
    (compressed(strategy="group"), "group_size is None"),
    (formats.packed()[1] | {"format": "marlin-24"}, "format 'marlin-24'"),
    (formats.packed()[1] | {"sparsity_config": SPARSE}, "sparsity_config is '2:4'; only dense weights"),
    (formats.packed()[1] | {"transform_config": {"config_groups": {}}}, "transform_config"),
    (formats.packed()[1] | {"config_groups": None}, "config_groups is missing"),
    (formats.packed()[1] | {"config_groups": {"a": 3}}, "config_groups.a is 3, not an object"),
    (formats.deepseek()[1] | {"weight_block_size": [0, 128]}, "weight_block_size is"),
    (formats.deepseek()[1] | {"scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("how", "changes", "reason"),
    [*HOSTILE, *(((formats.gptq()[0], config), {}, reason) for config, reason in SETTINGS)],
)
def test_tensors_and_settings_that_do_not_fit_are_named(
    how: Any, changes: dict[str, Tensor | None], reason: str, tmp_path: Path
) -> None:
    formats.write_checkpoint(tmp_path / "q", *how)
    if changes:
        change(tmp_path / "q", {PROJECTION + part: value for part, value in changes.items()})

    with pytest.raises(UnsupportedCheckpoint, match=reason) as caught:
        load(tmp_path / "q")
    assert not changes or PROJECTION.removesuffix(".") in str(caught.value)


#: One entry per number encoding; the long form has every group size.
WAYS = (
    "gptq", "gptq desc_act", "awq", "packed groups of 128", "packed asymmetric channels", "gptq of 8 bits",
    "int8", "int8 asymmetric, one scale", "gptq of 8 bits in groups", "fp8 channels", "fp8 blocks",
)  # fmt: skip


@pytest.mark.parametrize("name", few(ALL, WAYS))
def test_numbers_that_are_not_finite_are_refused_by_name(name: str, tmp_path: Path) -> None:
    formats.write_checkpoint(tmp_path / "q", *ALL[name])
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    floats = {n: x for n, x in tensors.items() if PROJECTION in n and x.is_floating_point()}
    assert floats
    for part, value in floats.items():
        damaged = value.clone()
        damaged.view(-1)[-1] = torch.nan
        change(tmp_path / "q", {**floats, part: damaged})
        with pytest.raises(UnsupportedCheckpoint, match="not finite") as caught:
            load(tmp_path / "q", "fast")
        assert PROJECTION.removesuffix(".") in str(caught.value)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("name", few(LIBRARY, LIBRARY[::3]))
def test_the_library_of_the_format_reads_the_same_weights(name: str, tmp_path: Path) -> None:
    """Verifies that the writers of this file implement the format."""
    pytest.importorskip("compressed_tensors")
    if name == "packed ordered":
        pytest.skip("the library gave the order of inputs up")
    expected = expected_logits(tmp_path / "q", formats.write_checkpoint(tmp_path / "q", *ALL[name]))
    theirs = LlavaForConditionalGeneration.from_pretrained(
        tmp_path / "q",
        dtype=torch.float32,
        quantization_config=CompressedTensorsConfig(dequantize=True),
    )
    with torch.inference_mode():
        found = theirs(input_ids=TOKEN_IDS[None]).logits[0]
    # The library multiplies in the precision of the scales.
    assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize(
    ("name", "lowers"),
    [("gptq desc_act", True), ("awq", False), ("packed of 8 bits", True), ("fp8 blocks", False)],
)
def test_models_of_transformers_keep_the_integers(name: str, lowers: bool, tmp_path: Path) -> None:
    weights = formats.write_text_checkpoint(tmp_path / "q", *ALL[name])
    config = find_family(tmp_path / "q")[1]
    plain = config.model_class(config.full).eval()
    plain.load_state_dict({n: w.clone() for n, w in weights.items()}, strict=False)
    with torch.inference_mode():
        expected = plain(input_ids=TOKEN_IDS[None]).logits[0]

    model = load(tmp_path / "q", family=GenericFamily(lowers))

    kind = linear.INT4 if name in INT4 else linear.INT8 if name in INT8 else None
    found = quantized_layers(model)
    assert len(found) == (14 if kind else 0)
    assert all(method is kind for _, method in found)
    assert_close(logits_of(model, TOKEN_IDS), expected, rtol=1e-3, atol=1e-3)
    model = load(tmp_path / "q", "fast", family=GenericFamily(lowers))
    assert (logits_of(model, TOKEN_IDS) - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_precision_weights_are_never_allocated(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    formats.write_text_checkpoint(tmp_path / "q", *ALL["awq"])
    find, sizes = published.find_stand_ins, []

    def note(model: nn.Module, stand_ins: dict[str, Tensor]) -> dict[str, str]:
        places = find(model, stand_ins)
        weights: list[Any] = [model.get_submodule(path).weight for path in places.values()]
        sizes.extend(x.untyped_storage().nbytes() / x.nbytes for x in weights)
        return places

    monkeypatch.setattr(published, "find_stand_ins", note)
    family, config = find_family(tmp_path / "q")
    load_model(tmp_path / "q", family, config, CPU, dtype)

    assert len(sizes) == 14
    assert max(sizes) < 0.05


def test_layers_that_transformers_merges_are_dequantized(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = formats.write_text_checkpoint(tmp_path / "q", *ALL["awq"])
    find = published.find_stand_ins

    def find_but_one(*arguments: Any) -> dict[str, str]:
        found = find(*arguments)
        return {name: path for name, path in found.items() if "layers.1.mlp.up" not in name}

    monkeypatch.setattr(published, "find_stand_ins", find_but_one)
    with caplog.at_level(logging.INFO):
        model = load(tmp_path / "q", family=GenericFamily(lowers=False))

    assert len(quantized_layers(model)) == 13
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(model.inner.get_parameter(name), weights[name])
    assert "1 linear layers, such as model.layers.1.mlp.up_proj, are dequantized" in caplog.text


@pytest.mark.parametrize("name", ["gptq desc_act", "awq", "packed ordered", "w8a8", "fp8 blocks"])
def test_a_lowered_decoder_keeps_the_integers(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = formats.write_text_checkpoint(tmp_path / "q", *ALL[name], Qwen3ForCausalLM)
    expected = expected_logits(tmp_path / "q", weights, Qwen3ForCausalLM)
    form = "dequantized" if name in FLOAT else "as int8" if name in INT8 else "as int4"
    for mode, limit in (("off", 1e-4), ("fast", 0.02)):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            model = load(tmp_path / "q", mode)
        assert (plain_logits(model, TOKEN_IDS) - expected).norm() < limit * expected.norm()
        assert f"14 quantized linear layers (14 {form}" in caplog.text
        assert [m.method is linear.FLOAT for m in linears(model)] == [name in FLOAT] * 14


#: Words written by hand: AutoGPTQ packs eight inputs starting at the lowest bits and stores zero points minus one;
#: AutoAWQ packs eight outputs in the order 0, 2, 4, 6, 1, 3, 5, 7.
BY_HAND = [
    ("gptq", {"sym": True}, torch.full((1, 8), 0x76543210), 0x77777777, lambda n, k: k - 8),
    ("gptq", {"sym": False}, torch.full((1, 8), 0x76543210), 0x21076543, lambda n, k: k - ZEROS[n]),
    ("awq", {"version": "gemm"}, torch.full((8, 1), 0x75316420), 0x13572460, lambda n, k: n - AWQ_ZEROS[n]),
]  # fmt: skip
ZEROS = [4, 5, 6, 7, 8, 1, 2, 3]
AWQ_ZEROS = [0, 7, 6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize(("method", "config", "words", "zeros", "number"), BY_HAND)
def test_words_written_by_hand_have_the_values_of_the_published_layout(
    method: str, config: Any, words: Tensor, zeros: int, number: Any, tmp_path: Path
) -> None:
    config = {"quant_method": method, "bits": 4, "group_size": 8, **config}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    scales = torch.arange(1, 9).half()[None]
    parts = {"qweight": words.int(), "qzeros": torch.tensor([[zeros]]).int(), "scales": scales}
    save_file({f"x.{name}": x for name, x in parts.items()}, tmp_path / "model.safetensors")
    reader = detect(read_fields(tmp_path))
    assert reader is not None
    [linear], _ = reader.split(list_tensors(tmp_path), CPU)
    found = reader.read(linear)
    assert isinstance(found, Integers)
    expected = [[number(n, k) * (n + 1) for k in range(8)] for n in range(8)]
    assert found.numbers().tolist() == expected
