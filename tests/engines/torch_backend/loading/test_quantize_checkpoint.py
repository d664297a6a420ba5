"""A checkpoint quantized and saved is, loaded again, the model that is quantized while it is loaded."""

from pathlib import Path

import pytest
import torch

from engines.torch_backend.layers.quantization import SCHEMES
from engines.torch_backend.loading.make_checkpoint import make_checkpoint
from engines.torch_backend.loading.quantize_checkpoint import quantize_checkpoint, run
from engines.torch_backend.loading.weights import load_model
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.llava import Llava
from engines.torch_backend.models.registry import find_family
from engines.torch_backend.ops.registry import CpuKernels, Ops, cpu_ops


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
    chosen, found = SCHEMES[scheme] if scheme else None, find_family(directory)
    return load_model(directory, *found, torch.device("cpu"), dtype, chosen, ops=ops)


@pytest.mark.parametrize("max_shard_bytes", [1 << 31, 50_000])
@pytest.mark.parametrize("mode", ["off", "fast"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_saved_and_loaded_again_it_is_what_loading_makes_of_the_original(
    tiny: Path, tmp_path: Path, scheme: str, mode: CpuKernels, max_shard_bytes: int
) -> None:
    ops = cpu_ops(mode)
    before, after = quantize_checkpoint(
        tiny, tmp_path / "q", scheme, max_shard_bytes=max_shard_bytes
    )

    expected, found = (
        model.state_dict() for model in (load(tiny, scheme, ops=ops), load(tmp_path / "q", ops=ops))
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert after < before


def test_everything_but_the_weights_comes_along(tiny: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny, tmp_path / "q", "int8")

    assert {file.name for file in tiny.iterdir()} == {f.name for f in (tmp_path / "q").iterdir()}
    assert (tmp_path / "q" / "model.safetensors").stat().st_mode & 0o044


def test_it_can_be_loaded_in_another_precision(tiny: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny, tmp_path / "q", "int8")

    mlp = load(tmp_path / "q", dtype=torch.float32).language_model.model.layers[0].mlp

    assert mlp.up_proj.scale.dtype is torch.float32
    assert mlp.up_proj.integers.dtype is torch.int8


def test_another_scheme_than_the_stored_one_is_refused(tiny: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny, tmp_path / "q", "int8")

    load(tmp_path / "q", "int8")
    with pytest.raises(UnsupportedCheckpoint, match="holds int8 weights; for int4"):
        load(tmp_path / "q", "int4")


def test_what_is_quantized_is_not_quantized_again(tiny: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny, tmp_path / "q", "int8")

    with pytest.raises(UnsupportedCheckpoint, match="already quantized"):
        quantize_checkpoint(tmp_path / "q", tmp_path / "again", "int4")


def test_progress_comes_to_one(tiny: Path, tmp_path: Path) -> None:
    shares: list[float] = []

    quantize_checkpoint(tiny, tmp_path / "q", "int4", progress=shares.append)

    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_the_command_says_what_it_saved(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(str(tiny), tmp_path / "q", "int8")

    assert "MiB of weights became" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "target", "reason"),
    [("./nowhere", "new", "unknown: give a built-in name"), ("tiny", "full", "not empty")],
)
def test_the_command_ends_with_the_reason(
    tiny: Path, tmp_path: Path, model: str, target: str, reason: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()

    with pytest.raises(SystemExit, match=f"quantize: .*{reason}"):
        run(str(tiny) if model == "tiny" else model, tmp_path / target, "int8")
