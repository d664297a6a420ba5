"""Sampling defaults in generation_config.json are read, validated, and can be disabled."""

import json
from pathlib import Path
from typing import Any

import pytest

from engines.base import EngineStartError
from engines.packages.generation_config import read_sampling_defaults
from shared.protocol import SamplingDefaults

NOTHING = SamplingDefaults()


def write(directory: Path, **fields: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "generation_config.json").write_text(json.dumps(fields))
    return directory


def test_sampling_defaults_are_read(tmp_path):
    assert read_sampling_defaults(tmp_path, "auto") == NOTHING  # there is no file
    directory = write(
        tmp_path, temperature=0.6, top_p=0.95, top_k=20, min_p=0.01, repetition_penalty=1.05,
        max_new_tokens=2048, do_sample=True, eos_token_id=[1, 2], transformers_version="5.0.0",
    )  # fmt: skip
    found = read_sampling_defaults(directory, "auto")
    assert found == SamplingDefaults(0.6, 0.95, 20, 0.01, 1.05, 2048)
    greedy = write(tmp_path, temperature=0, top_k=0, top_p=None, do_sample=False)
    assert read_sampling_defaults(greedy, "auto") == SamplingDefaults(temperature=0.0, top_k=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 9), ("temperature", "hot"), ("top_p", 1.5), ("top_k", -3), ("top_k", 1.5),
     ("min_p", -1), ("repetition_penalty", 0), ("max_new_tokens", 0), ("max_new_tokens", True)],
)  # fmt: skip
def test_a_value_outside_the_limits_is_ignored_with_a_warning(tmp_path, caplog, name, value):
    usual = {"repetition_penalty": 1.25, "temperature": 0.5}
    found = read_sampling_defaults(write(tmp_path, **usual | {name: value}), "auto")
    assert found == SamplingDefaults(**{key: x for key, x in usual.items() if key != name})
    assert name in caplog.text


def test_the_file_can_be_ignored_or_replaced(tmp_path):
    directory = write(tmp_path / "model", temperature=0.5)
    other = write(tmp_path / "other", temperature=0.75)
    assert read_sampling_defaults(directory, "none") == NOTHING
    assert read_sampling_defaults(directory, str(other)).temperature == 0.75
    with pytest.raises(EngineStartError, match=r"has no generation_config\.json"):
        read_sampling_defaults(directory, str(tmp_path))
