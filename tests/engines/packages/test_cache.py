"""`vlm models`, `vlm pull` and `vlm rm` over a cache that a hub on this machine filled."""

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import vlm
from benchmarks.make_checkpoint import make_checkpoint
from engines.torch_backend.loading import check
from tests.factories_encoders import make_encoder
from tests.factories_hub import REPO, Hub, Repository


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hub") / "tiny"
    make_checkpoint("tiny", directory)
    return directory


def run(*arguments: str, answer: str | None = None) -> tuple[int, str]:
    done = CliRunner().invoke(vlm.app, arguments, input=answer)
    return done.exit_code, done.output


def listed() -> dict[str, dict]:
    code, output = run("models", "--check", "--json")
    assert code == 0, output
    return {entry["name"]: entry for entry in json.loads(output)}


def test_without_a_cache_the_built_in_models_are_listed(hub: Hub) -> None:
    found = listed()
    assert {entry["source"] for entry in found.values()} == {"built in"}
    engines = {name: (entry["runs"], entry["engine"]) for name, entry in found.items()}
    assert engines == {"shapes": (True, "torch"), "shapes-clip": (True, "pooling")}


def test_a_model_is_pulled_listed_and_removed(hub: Hub, checkpoint: Path) -> None:
    code, output = run("pull", REPO)
    assert code == 0, output
    assert f"vlm serve --model {REPO}" in output
    found = listed()[REPO]
    assert (found["revision"], found["format"], found["engine"]) == ("main", "safetensors", "torch")
    assert found["size_bytes"] > (checkpoint / "model.safetensors").stat().st_size
    assert (Path(found["directory"]) / "config.json").is_file()
    assert REPO in run("models")[1]
    [quick] = (each for each in json.loads(run("models", "--json")[1]) if each["name"] == REPO)
    assert quick.items() < found.items()
    assert "engine" not in quick

    assert run("rm", REPO, answer="n\n")[1].endswith("kept\n")
    assert REPO in listed()
    code, output = run("rm", REPO, "--yes")
    assert (code, "are free" in output) == (0, True)
    assert REPO not in listed()
    assert not Path(found["directory"]).exists()


def test_one_revision_is_removed_alone(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "old")
    hub.repositories[REPO].revisions["v1"] = tmp_path / "old"
    for name in (REPO, f"{REPO}@v1"):
        assert run("pull", name)[0] == 0
    assert run("rm", f"{REPO}@v1", "--yes")[0] == 0
    assert listed()[REPO]["revision"] == "main"


def test_what_cannot_be_run_is_not_pulled_unless_by_force(hub: Hub, tmp_path: Path) -> None:
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "config.json").write_text('{"architectures": ["Nothing"], "model_type": "no"}')
    (strange / "model.safetensors").write_bytes(b"weights")
    hub.repositories["acme/strange"] = Repository({"main": strange})

    code, output = run("pull", "acme/strange")
    assert code == 1
    assert "Nothing" in output
    assert len(output.splitlines()) == 1
    assert "model.safetensors" not in hub.downloads
    assert run("pull", "acme/strange", "--force")[0] == 0
    found = listed()["acme/strange"]
    assert found["runs"] is False
    assert "Nothing" in found["problem"]


def test_what_does_not_fit_the_memory_is_told_with_the_numbers_before_it_is_downloaded(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "free_bytes", lambda device: 1000)

    code, output = run("pull", REPO)
    assert code == 1
    assert "the weights have 0.0 GiB and need at least" in output
    assert "GiB available" in output
    assert "model.safetensors" not in hub.downloads


def test_an_encoder_is_one_for_the_pooling_engine(hub: Hub, tmp_path: Path) -> None:
    directory = make_encoder(tmp_path / "encoder", "bert")
    hub.repositories["acme/encoder"] = Repository({"main": directory})
    assert run("pull", "acme/encoder")[0] == 0
    assert listed()["acme/encoder"]["engine"] == "pooling"


def test_a_model_whose_weights_are_gone_is_listed_with_what_to_do(hub: Hub) -> None:
    run("pull", REPO)
    directory = Path(listed()[REPO]["directory"])
    os.unlink((directory / "model.safetensors").resolve())
    os.unlink(directory / "model.safetensors")
    found = listed()[REPO]
    assert found["runs"] is False
    assert f"vlm pull {REPO}" in found["problem"]


def test_what_is_not_in_the_cache_is_told_with_what_is(hub: Hub) -> None:
    run("pull", REPO)
    for name in ("shapes", "/tmp", "acme/nothing", "acme/tiny-llava@v9"):
        code, output = run("rm", name, "--yes")
        assert code == 1
        assert "org/name[@revision]" in output or f"it has: {REPO}" in output
    assert REPO in listed()


@pytest.mark.parametrize("name", ["acme/nothing", "no such thing"])
def test_what_is_no_model_of_the_hub_is_one_sentence(hub: Hub, name: str) -> None:
    code, output = run("pull", name)
    assert code == 1
    assert len(output.splitlines()) == 1
