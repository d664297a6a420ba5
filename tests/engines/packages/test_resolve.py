"""Model names become directories; the hub is a server on this machine that speaks its API."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from benchmarks.make_checkpoint import make_checkpoint
from engines.base import UnsupportedCheckpoint
from engines.packages import resolve as module
from engines.packages.resolve import ModelUnavailable, default_name, resolve_model
from engines.torch_backend.models.registry import find_family
from tests.factories_hub import REPO, Hub, Repository, use_hub


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hub") / "tiny"
    make_checkpoint("tiny", directory)
    (directory / "README.md").write_text("not needed")
    (directory / "pytorch_model.bin").write_text("never needed")
    (directory / "onnx").mkdir()
    (directory / "onnx" / "model.safetensors").write_text("not needed")
    return directory


def test_a_hub_id_is_downloaded_without_what_is_not_needed(hub: Hub) -> None:
    directory = resolve_model(REPO)

    assert find_family(directory)[1].text.hidden_size == 64
    names = {path.name for path in directory.rglob("*")}
    assert {"model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert not names & {"README.md", "pytorch_model.bin", "onnx"}


def test_progress_is_told_to_the_end(hub: Hub) -> None:
    shares: list[float] = []

    resolve_model(REPO, shares.append)

    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_second_start_downloads_nothing_and_needs_no_hub(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = resolve_model(REPO)
    hub.downloads.clear()
    assert resolve_model(REPO) == first
    assert hub.downloads == []
    use_hub(monkeypatch, "http://127.0.0.1:9")
    assert resolve_model(REPO) == first


def test_a_hub_that_is_down_is_told_when_the_cache_is_empty(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hub(monkeypatch, "http://127.0.0.1:9")

    with pytest.raises(
        ModelUnavailable, match=r"cannot be reached, and .* no complete copy.*--model"
    ):
        resolve_model(REPO)


def test_a_broken_download_is_taken_up_where_it_broke(
    hub: Hub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # what is kept of a broken one
    hub.cut_after = 100_000  # of the weights, the only file of that size

    directory = resolve_model(REPO)

    content = (directory / "model.safetensors").read_bytes()
    assert content == (checkpoint / "model.safetensors").read_bytes()
    assert hub.ranges == ["model.safetensors"]


def test_a_revision_is_pinned_by_name_and_by_commit(hub: Hub, tmp_path: Path) -> None:
    make_checkpoint("tiny", tmp_path / "old", changes={"vision_feature_layer": -1})
    hub.repositories[REPO].revisions["v1"] = tmp_path / "old"
    commit = hub.repositories[REPO].commit("v1")

    for revision in ("v1", commit):
        config = find_family(resolve_model(f"{REPO}@{revision}"))[1]
        assert config.vision_feature_layers == (-1,)
    assert find_family(resolve_model(REPO))[1].vision_feature_layers == (-2,)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (f"{REPO}@v9", "no revision 'v9'"),
        ("acme/nothing", r"acme/nothing is not on .* or is private"),
    ],
)
def test_what_the_hub_does_not_have_is_named(hub: Hub, model: str, reason: str) -> None:
    with pytest.raises(ModelUnavailable, match=reason):
        resolve_model(model)


@pytest.mark.parametrize("token", [None, "of somebody else"])
def test_a_gated_repository_says_what_to_do(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    hub.repositories[REPO].token = "accepted"
    if token:
        monkeypatch.setenv("HF_TOKEN", token)

    with pytest.raises(ModelUnavailable, match=rf"gated: accept .*/{REPO}, then set HF_TOKEN"):
        resolve_model(REPO)


def test_the_token_opens_a_gated_repository(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories[REPO].token = "accepted"
    monkeypatch.setenv("HF_TOKEN", "accepted")

    assert (resolve_model(REPO) / "model.safetensors").is_file()


def test_a_repository_of_pickles_is_refused_before_anything_is_downloaded(
    hub: Hub, tmp_path: Path
) -> None:
    pickles = tmp_path / "pickles"
    pickles.mkdir()
    for name in ("pytorch_model.bin", "config.json"):
        (pickles / name).write_text("{}")
    hub.repositories["acme/pickles"] = Repository({"main": pickles})

    with pytest.raises(ModelUnavailable, match="no safetensors weights; pickled ones"):
        resolve_model("acme/pickles")
    assert hub.downloads == []


def test_too_little_disk_is_told_with_the_numbers_before_anything_is_downloaded(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RESERVE_BYTES", 10**18)

    with pytest.raises(ModelUnavailable, match=r"needs 0\.0 GB of disk .* GB are free; HF_HOME"):
        resolve_model(REPO)
    assert hub.downloads == []


def add_repository(hub: Hub, source: Path, directory: Path, *left_out: str) -> Path:
    """A repository with the files of another, but some."""
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns(*left_out))
    hub.repositories["acme/other"] = Repository({"main": directory})
    return directory


def test_a_repository_without_a_configuration_is_refused_before_anything_is_downloaded(
    hub: Hub, checkpoint: Path, tmp_path: Path
) -> None:
    add_repository(hub, checkpoint, tmp_path / "other", "config.json")

    with pytest.raises(ModelUnavailable, match=r"acme/other has no config\.json"):
        resolve_model("acme/other")
    assert hub.downloads == []


def test_a_repository_that_lacks_weights_of_its_index_is_refused_before_weights_are_downloaded(
    hub: Hub, checkpoint: Path, tmp_path: Path
) -> None:
    directory = add_repository(hub, checkpoint, tmp_path / "other")
    files = [f"model-{i}-of-3.safetensors" for i in (1, 2, 3)]
    index = {"weight_map": {f"weight {name}": name for name in files}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "model.safetensors").rename(directory / files[0])

    with pytest.raises(ModelUnavailable, match=r"lacks 2 of .* names, model-2-of-3\.safetensors"):
        resolve_model("acme/other")
    assert files[0] not in hub.downloads


def test_a_model_that_cannot_be_run_is_refused_before_its_weights_are_downloaded(
    hub: Hub, checkpoint: Path, tmp_path: Path
) -> None:
    seen: list[int] = []

    def check(directory: Path, num_weight_bytes: int) -> None:
        assert find_family(directory)[1].text.hidden_size == 64
        seen.append(num_weight_bytes)
        raise UnsupportedCheckpoint("not here")

    with pytest.raises(UnsupportedCheckpoint, match="not here"):
        resolve_model(REPO, check=check)
    assert seen == [(checkpoint / "model.safetensors").stat().st_size]
    assert "model.safetensors" not in hub.downloads
    assert resolve_model(REPO) is not None
    assert resolve_model(REPO, check=check) is not None  # all is there


def test_a_disk_that_fills_up_is_told(hub: Hub) -> None:
    def fill(directory: Path, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ModelUnavailable, match=r"is full: .* GB are free; HF_HOME .* vlm rm"):
        resolve_model(REPO, check=fill)


def test_the_usual_environment_variables_are_obeyed(hub: Hub, tmp_path: Path) -> None:
    command = (
        "import sys; from engines.packages.resolve import resolve_model\n"
        "print(resolve_model(sys.argv[1]))"
    )
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        environment.pop(name, None)

    ended = subprocess.run(
        [sys.executable, "-c", command, REPO],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )

    assert Path(ended.stdout.strip()).is_relative_to(tmp_path / "home")
    assert (Path(ended.stdout.strip()) / "config.json").is_file()


def test_models_have_names_and_those_that_are_here_are_not_looked_for(checkpoint: Path) -> None:
    assert resolve_model(str(checkpoint)) == checkpoint
    assert resolve_model("shapes").parts[-3:] == ("packages", "shapes", "checkpoint")
    names = {str(checkpoint): "tiny", "shapes": "shapes", f"{REPO}@v1": REPO}
    assert {model: default_name(model) for model in names} == names


@pytest.mark.parametrize("model", ["no such thing", "./missing", "a/b/c", "@v1", ""])
def test_what_is_no_model_at_all_is_told(model: str) -> None:
    with pytest.raises(ModelUnavailable, match="built-in name"):
        resolve_model(model)


def test_the_small_files_come_without_the_weights(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = resolve_model(REPO, needs_weights=False)

    names = {path.name for path in directory.rglob("*")}
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert "model.safetensors" not in names
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    hub.downloads.clear()
    assert resolve_model(REPO, needs_weights=False) == directory
    assert hub.downloads == []
