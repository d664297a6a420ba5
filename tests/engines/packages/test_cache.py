"""`vlm models`, `vlm pull` and `vlm rm` on a cache that a local hub filled."""

import json
import os
import shutil
from pathlib import Path

from typer.testing import CliRunner

import vlm
from tests.factories_hub import REPO, Hub, Repository


def run(*arguments: str, answer: str | None = None) -> tuple[int, str]:
    done = CliRunner().invoke(vlm.app, arguments, input=answer)
    return done.exit_code, done.output


def refusal(*arguments: str) -> str:
    """Returns the error of a command that must fail with one line."""
    code, output = run(*arguments)
    assert code == 1
    assert len(output.splitlines()) == 1
    return output


def listed() -> dict[str, dict]:
    code, output = run("models", "--check", "--json")
    assert code == 0, output
    return {entry["name"]: entry for entry in json.loads(output)}


def test_a_model_is_pulled_listed_with_the_built_in_ones_and_removed(
    hub: Hub, checkpoint: Path, tmp_path: Path
) -> None:
    found = listed()
    assert {entry["source"] for entry in found.values()} == {"built in"}
    engines = {name: (entry["runs"], entry["engine"]) for name, entry in found.items()}
    assert engines == {"shapes": (True, "torch"), "shapes-clip": (True, "pooling")}

    shutil.copytree(checkpoint, tmp_path / "old")
    hub.repositories[REPO].revisions["v1"] = tmp_path / "old"
    for name in (REPO, f"{REPO}@v1"):
        code, output = run("pull", name)
        assert code == 0, output
        assert f"vlm serve --model {name}" in output
    assert run("rm", f"{REPO}@v1", "--yes")[0] == 0
    found = listed()[REPO]
    assert (found["revision"], found["format"], found["engine"]) == ("main", "safetensors", "torch")
    assert found["size_bytes"] > (checkpoint / "model.safetensors").stat().st_size
    assert (Path(found["directory"]) / "config.json").is_file()
    assert REPO in run("models")[1]
    [quick] = (each for each in json.loads(run("models", "--json")[1]) if each["name"] == REPO)
    assert quick.items() < found.items()
    assert "engine" not in quick

    for name in ("shapes", "/tmp", "acme/nothing", "acme/tiny-llava@v9"):
        output = refusal("rm", name, "--yes")
        assert "org/name[@revision]" in output or f"it has: {REPO}" in output
    assert run("rm", REPO, answer="n\n")[1].endswith("kept\n")
    assert REPO in listed()
    code, output = run("rm", REPO, "--yes")
    assert (code, "are free" in output) == (0, True)
    assert REPO not in listed()
    assert not Path(found["directory"]).exists()


def test_an_unsupported_model_is_pulled_only_with_force(hub: Hub, tmp_path: Path) -> None:
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "config.json").write_text('{"architectures": ["Nothing"], "model_type": "no"}')
    (strange / "model.safetensors").write_bytes(b"weights")
    hub.repositories["acme/strange"] = Repository({"main": strange})

    assert "Nothing" in refusal("pull", "acme/strange")
    assert "model.safetensors" not in hub.downloads
    assert run("pull", "acme/strange", "--force")[0] == 0
    found = listed()["acme/strange"]
    assert found["runs"] is False
    assert "Nothing" in found["problem"]


def test_a_model_without_its_weights_is_listed_with_the_remedy(hub: Hub) -> None:
    run("pull", REPO)
    directory = Path(listed()[REPO]["directory"])
    os.unlink((directory / "model.safetensors").resolve())
    os.unlink(directory / "model.safetensors")
    found = listed()[REPO]
    assert found["runs"] is False
    assert f"vlm pull {REPO}" in found["problem"]
