"""Weights that were quantized by examples give nearer answers than weights rounded to the nearest."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from engines.torch_backend.layers.quantized_linear import Int4Linear
from engines.torch_backend.loading import calibration
from engines.torch_backend.loading.calibration import quantize, read_examples
from engines.torch_backend.loading.make_checkpoint import make_checkpoint
from engines.torch_backend.loading.quantize_checkpoint import quantize_checkpoint, run
from engines.torch_backend.loading.rounding import round_int4
from engines.torch_backend.loading.weights import load_model
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.registry import find_family
from tests.factories_torch import plain_logits

TOKEN_IDS = torch.arange(5, 105)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("calibration") / "tiny"
    make_checkpoint("tiny", directory)
    return directory


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "NUM_OWN", 12)
    monkeypatch.setattr(calibration, "OWN_TOKENS", 24)


def logits(directory: Path) -> Tensor:
    found = find_family(directory)
    model = load_model(directory, *found, torch.device("cpu"), torch.float32)
    return plain_logits(model, TOKEN_IDS)


@pytest.mark.parametrize("group_size", [32, 64])
def test_what_inputs_give_is_kept_better_than_weights_are(group_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 256, generator=generator)
    inputs = torch.randn(2000, 32, generator=generator) @ torch.randn(32, 256, generator=generator)
    inputs += torch.randn(2000, 256, generator=generator) / 10

    found = quantize(weight, inputs.t() @ inputs, group_size, torch.float32)
    nearest = round_int4(weight, torch.float32, group_size)

    def error(integers: Any) -> float:
        return float((inputs @ (integers.numbers(torch.float32) - weight).t()).norm())

    assert error(found) < 0.4 * error(nearest)


@pytest.mark.parametrize("total", [torch.zeros(64, 64), torch.full((64, 64), 1e30)])
def test_inputs_that_tell_nothing_leave_weights_near(total: Tensor) -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))

    found = quantize(weight, total, 64, torch.float32).numbers(torch.float32)

    assert (found - weight).norm() < 0.3 * weight.norm()


@pytest.mark.parametrize("max_bytes", [calibration.MAX_SUM_BYTES, 1])
def test_own_texts_make_a_checkpoint_in_four_bits(
    tiny: Path, tmp_path: Path, max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "MAX_SUM_BYTES", max_bytes)
    shares: list[float] = []

    quantize_checkpoint(
        tiny, tmp_path / "q", "int4", head="int8", examples="own", progress=shares.append
    )

    assert (logits(tmp_path / "q") - logits(tiny)).norm() < 0.4 * logits(tiny).norm()
    assert shares == sorted(shares)
    assert shares[0] < 0.1
    assert shares[-1] == 1.0
    family, config = find_family(tmp_path / "q")
    model = load_model(tmp_path / "q", family, config, torch.device("cpu"), torch.float32)
    assert isinstance(model.language_model.model.layers[1].mlp.down_proj, Int4Linear)


def image_url() -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def test_examples_may_have_images(tiny: Path, tmp_path: Path) -> None:
    Image.new("RGB", (30, 40), "blue").save(tmp_path / "blue.png")
    lines = []
    for url in (image_url(), "blue.png"):
        parts = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "What is it?"},
        ]
        lines.append(json.dumps({"messages": [{"role": "user", "content": parts}]}))
    lines.append(json.dumps({"messages": [{"role": "user", "content": "Only words."}]}))
    (tmp_path / "examples.jsonl").write_text("\n".join(lines))

    quantize_checkpoint(tiny, tmp_path / "q", "int4", examples=str(tmp_path / "examples.jsonl"))

    assert (logits(tmp_path / "q") - logits(tiny)).norm() < 0.4 * logits(tiny).norm()


def test_a_text_file_has_a_question_a_line(tmp_path: Path) -> None:
    (tmp_path / "examples.txt").write_text("What?\n\nWhy?\n")

    found = read_examples(tmp_path / "examples.txt")

    assert [example.messages[0].parts[0] for example in found] == [
        calibration.TextPart("What?"),
        calibration.TextPart("Why?"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", "", "a.txt has no examples"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "a"}]}\n[]', "a.jsonl: line 2 has"),
        ("a.jsonl", "no", "line 1 has no OpenAI messages"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": [{"type": "video"}]}]}', "'video'"),
        ("a.txt", "word " * 5000, "example 1 has .* tokens; the model takes"),
    ],
)
def test_examples_that_cannot_be_read_are_named(
    name: str, content: str, reason: str, tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)

    with pytest.raises(UnsupportedCheckpoint, match=reason):
        quantize_checkpoint(tiny, tmp_path / "q", "int4", examples=str(tmp_path / name))
    assert not (tmp_path / "q").exists()


def test_eight_bits_are_not_calibrated(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="quantize: --calibrate own: is for --scheme int4"):
        run(str(tiny), tmp_path / "q", "int8", examples="own")


def test_nothing_is_there_before_all_is(tiny: Path, tmp_path: Path) -> None:
    def stop(share: float) -> None:
        if share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(tiny, tmp_path / "new" / "q", "int4", examples="own", progress=stop)

    assert not any((tmp_path / "new").iterdir())
