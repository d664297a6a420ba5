"""A checkpoint quantized and saved is, loaded again, the model that is quantized while it is loaded."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import CompressedTensorsConfig, LlavaForConditionalGeneration

from engines.torch_backend.layers.linear import INT8, METHODS, Linear
from engines.torch_backend.loading.make_checkpoint import make_checkpoint
from engines.torch_backend.loading.quantize_checkpoint import quantize_checkpoint, run
from engines.torch_backend.loading.weights import load_model
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.llava import Llava
from engines.torch_backend.models.registry import find_family
from engines.torch_backend.ops.registry import CpuKernels, Ops, cpu_ops
from tests import factories_formats as formats
from tests.engines.torch_backend.models.family_table import named, write_checkpoint
from tests.factories_torch import plain_logits


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("quantize") / "tiny"
    make_checkpoint("tiny", directory, changes={"text_config": {"attention_bias": True}})
    return directory


def load(
    directory: Path,
    scheme: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    ops: Ops | None = None,
) -> Llava:
    chosen, found = METHODS[scheme] if scheme else None, find_family(directory)
    return load_model(directory, *found, torch.device("cpu"), dtype, chosen, ops=ops)


@pytest.mark.parametrize("max_shard_bytes", [1 << 31, 50_000])
@pytest.mark.parametrize("mode", ["off", "fast"])
def test_in_8_bits_it_is_what_loading_makes_of_the_original(
    tiny: Path, tmp_path: Path, mode: CpuKernels, max_shard_bytes: int
) -> None:
    ops = cpu_ops(mode)
    before, after = quantize_checkpoint(
        tiny, tmp_path / "q", "int8", max_shard_bytes=max_shard_bytes
    )

    expected, found = (
        model.state_dict() for model in (load(tiny, "int8", ops=ops), load(tmp_path / "q", ops=ops))
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert after < before


@pytest.mark.parametrize("scheme", METHODS)
@pytest.mark.parametrize("head", ["none", "int8"])
def test_logits_are_near_those_of_the_original(
    tiny: Path, tmp_path: Path, scheme: str, head: str
) -> None:
    quantize_checkpoint(tiny, tmp_path / "q", scheme, head=head)
    token_ids = torch.arange(3, 103)

    expected, found = (
        plain_logits(load(directory, dtype=torch.float32), token_ids)
        for directory in (tiny, tmp_path / "q")
    )

    assert (found - expected).norm() < {"int8": 0.02, "int4": 0.3}[scheme] * expected.norm()
    model = load(tmp_path / "q").language_model
    assert (model.lm_head.method is INT8) is (head == "int8")


def test_what_earlier_releases_saved_is_refused_with_what_to_do(tiny: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(tiny, old)
    config = json.loads((old / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "vlm-fleet", "scheme": "int4"}
    (old / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedCheckpoint, match="take the full-precision checkpoint with --q"):
        load(old)


def test_a_checkpoint_in_fp8_can_be_rounded_to_integers(tmp_path: Path) -> None:
    formats.write_checkpoint(tmp_path / "fp8", *formats.deepseek())

    shares: list[float] = []
    quantize_checkpoint(tmp_path / "fp8", tmp_path / "q", "int4", progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0

    token_ids = torch.arange(3, 103)
    expected, found = (
        plain_logits(load(directory, dtype=torch.float32), token_ids)
        for directory in (tmp_path / "fp8", tmp_path / "q")
    )
    assert (found - expected).norm() < 0.3 * expected.norm()


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(("scheme", "head"), [("int8", "none"), ("int4", "none"), ("int8", "int8")])
def test_transformers_reads_it_with_the_library_of_the_format(
    tiny: Path, tmp_path: Path, scheme: str, head: str
) -> None:
    pytest.importorskip("compressed_tensors")
    quantize_checkpoint(tiny, tmp_path / "q", scheme, head=head)
    token_ids = torch.arange(3, 103)
    expected = plain_logits(load(tmp_path / "q", dtype=torch.float32), token_ids)

    how = CompressedTensorsConfig(dequantize=True)
    theirs = LlavaForConditionalGeneration.from_pretrained(
        tmp_path / "q", dtype=torch.float32, quantization_config=how
    )
    with torch.inference_mode():
        found = theirs(input_ids=token_ids[None]).logits[0]

    assert (found - expected).norm() < 0.01 * expected.norm()  # it multiplies in bfloat16


def test_a_head_that_is_not_there_cannot_be_quantized(tmp_path: Path) -> None:
    make_checkpoint("tiny", tmp_path / "t", changes={"text_config": {"tie_word_embeddings": True}})

    with pytest.raises(UnsupportedCheckpoint, match="head is its embeddings"):
        quantize_checkpoint(tmp_path / "t", tmp_path / "q", "int8", head="int8")
    assert not (tmp_path / "q").exists()


def test_what_is_stored_in_8_bits_stays_so_and_all_else_comes_along(
    tiny: Path, tmp_path: Path
) -> None:
    run(str(tiny), tmp_path / "q", "int8")
    assert {file.name for file in tiny.iterdir()} == {f.name for f in (tmp_path / "q").iterdir()}
    assert (tmp_path / "q" / "model.safetensors").stat().st_mode & 0o044
    mlp = load(tmp_path / "q", "int8", torch.float32).language_model.model.layers[0].mlp
    assert mlp.up_proj.scale.dtype is torch.float32
    assert mlp.up_proj.integers.dtype is torch.int8
    with pytest.raises(UnsupportedCheckpoint, match="compressed-tensors of int8; for int4"):
        load(tmp_path / "q", "int4")
    with pytest.raises(UnsupportedCheckpoint, match="already quantized"):
        quantize_checkpoint(tmp_path / "q", tmp_path / "again", "int4")


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("full", "full is not empty; name"),
        ("full/file/new", "full/file is not a directory"),
        ("new", "unknown: give a built-in name"),
    ],
)
def test_a_bad_target_and_an_unknown_model_end_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()

    with pytest.raises(SystemExit, match=f"quantize: .*{re.escape(reason)}"):
        run("./nowhere", Path(target), "int4")


@pytest.mark.parametrize("name", ["Gemma 2", "Mixtral", "Qwen2.5-VL"])
def test_models_of_transformers_are_quantized_as_while_they_are_loaded(
    name: str, tmp_path: Path
) -> None:
    family = named(name)
    write_checkpoint(family, tmp_path / "full")
    before, after = quantize_checkpoint(tmp_path / "full", tmp_path / "q", "int8")
    assert after < before
    dtype = torch.float32
    expected, found = (
        load(tmp_path / "full", "int8", dtype),
        load(tmp_path / "q", dtype=dtype),
    )
    quantized = [
        {n: m for n, m in model.named_modules() if isinstance(m, Linear) and m.method is INT8}
        for model in (expected, found)
    ]
    assert quantized[0].keys() == quantized[1].keys() != set()
    for linear, other in zip(*(each.values() for each in quantized), strict=True):
        assert torch.equal(linear.integers, other.integers)
        torch.testing.assert_close(linear.scale.float(), other.scale.float(), rtol=1e-2, atol=0)
