"""`vlm bench programs`: every program decodes the same model."""

import json
from pathlib import Path

import pytest

from benchmarks.engine.programs import ProgramOptions, run
from tests.engines.torch_backend.models.family_table import text, write_checkpoint


def test_every_program_is_measured_at_every_batch_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(text("Llama", "Llama"), tmp_path)
    options = ProgramOptions(tmp_path, ("float32", "int8"), (1, 3), num_context=20, rounds=1)
    capsys.readouterr()
    run(options, as_json=True)
    rows = json.loads(capsys.readouterr().out)
    ours = ["native", "lowered", "generic"]
    assert [(row["precision"], row["batch_size"], row["program"]) for row in rows] == [
        (precision, size, program)
        for precision, programs in (("float32", [*ours, "generate"]), ("int8", ours))
        for size in (1, 3)
        for program in programs
    ]
    assert all(row["step_ms"] > 0 for row in rows)


def test_a_folder_without_a_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"bench programs: .*config\.json"):
        run(ProgramOptions(tmp_path), as_json=True)
