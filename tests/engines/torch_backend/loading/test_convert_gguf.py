"""A GGUF file becomes a checkpoint of safetensors that means the same numbers, or the command ends with the reason."""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoTokenizer

from engines.torch_backend.loading.convert_gguf import convert_gguf, run
from engines.torch_backend.loading.formats import detect
from engines.torch_backend.loading.stored_tensors import list_tensors
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.hf_config import read_fields
from tests import factories_gguf as factories
from tests.factories_gguf import Kind


def write(file: Path, kind: Kind, arch: str = "llama") -> dict[str, torch.Tensor]:
    return factories.write_text(file, factories.make_model("llama"), arch, lambda name: kind)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.Q4_0, Kind.Q4_K])
def test_weights_mean_what_they_meant(kind: Kind, tmp_path: Path) -> None:
    meant = write(tmp_path / "model.gguf", kind)
    shares: list[float] = []

    convert_gguf(tmp_path / "model.gguf", tmp_path / "out", shares.append)

    reader = detect(read_fields(tmp_path / "out"))
    stored, linears = list_tensors(tmp_path / "out"), []
    if reader is not None:
        linears, stored = reader.split(stored, torch.device("cpu"))
        for linear in linears:
            assert reader.layout(linear).form == "int4"
            numbers = reader.read(linear).numbers(torch.float32)
            assert torch.equal(numbers, meant.pop(f"{linear.name}.weight"))
    assert len(linears) == (14 if kind == Kind.Q4_0 else 0)
    found = {tensor.name: tensor.map().float() for tensor in stored}
    assert_close(found, meant, rtol=1e-3, atol=1e-6)  # float16
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", Kind.Q8_0)

    convert_gguf(tmp_path / "model.gguf", tmp_path / "out")

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer.encode("ab a"), skip_special_tokens=True).strip() == "ab a"


def test_nothing_is_left_of_what_fails(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", Kind.Q8_0, "qwen9")

    with pytest.raises(UnsupportedCheckpoint):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "new" / "out")

    assert not any((tmp_path / "new").iterdir())


def test_the_command_ends_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"no")

    said = r"convert-gguf: model\.gguf: is no GGUF file to read"
    with pytest.raises(SystemExit, match=said) as ended:
        run(tmp_path / "model.gguf", tmp_path / "out")
    assert "/" not in str(ended.value)  # a path of ours, of a link that is gone by then
    with pytest.raises(SystemExit, match=r"convert-gguf: .*other\.gguf is not a file"):
        run(tmp_path / "other.gguf", tmp_path / "out")
