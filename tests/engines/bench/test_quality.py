"""Quantized copies are measured beside the model, and calibrated ones are nearer to it."""

import json

import pytest

from engines.bench import quality
from engines.bench.quality import run
from engines.torch_backend.loading import calibration


@pytest.mark.timeout(300)
def test_each_copy_has_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibration, "NUM_OWN", 16)
    monkeypatch.setattr(calibration, "OWN_TOKENS", 48)
    names = ("int8, head int8", "int4 to the nearest", "int4 calibrated")
    copies = [copy for copy in quality.COPIES if copy.name in names]
    monkeypatch.setattr(quality, "COPIES", copies)

    run("shapes", num_texts=6, num_scenes=1, as_json=True)

    rows = {row.pop("name"): row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == ["float32", *(copy.name for copy in copies)]
    assert rows["float32"]["divergence"] == 0
    assert rows["float32"]["same_token_percent"] == 100
    assert rows["int8, head int8"]["divergence"] < 0.01
    calibrated, nearest = rows["int4 calibrated"], rows["int4 to the nearest"]
    assert calibrated["divergence"] < 0.5 * nearest["divergence"]
    assert calibrated["weights_mib"] == nearest["weights_mib"] < rows["float32"]["weights_mib"]
    assert all(row["right_percent"] > 50 for row in rows.values())


def test_a_model_that_nobody_knows_is_one_line() -> None:
    with pytest.raises(SystemExit, match="'nope' is unknown"):
        run("nope", num_texts=1, num_scenes=0, as_json=True)
