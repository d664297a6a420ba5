"""Model names are resolved to directories; a local server speaks the hub's API."""

import errno
import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from benchmarks.make_checkpoint import make_checkpoint
from engines.base import UnsupportedCheckpoint
from engines.packages import resolve as module
from engines.packages.resolve import ModelUnavailable, default_name, resolve_model
from engines.torch_backend.models.registry import find_family
from tests.factories_hub import REPO, Hub, Repository, use_hub


def test_a_hub_id_is_downloaded_once_without_unneeded_files(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[float] = []
    small = resolve_model(REPO, needs_weights=False)
    assert not (small / "model.safetensors").exists()
    directory = resolve_model(REPO, shares.append)

    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert find_family(directory)[1].text.hidden_size == 64
    names = {path.name for path in directory.rglob("*")}
    assert {"model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert not names & {"README.md", "pytorch_model.bin", "onnx"}

    hub.downloads.clear()
    assert resolve_model(REPO) == directory == resolve_model(REPO, needs_weights=False)
    assert hub.downloads == []
    use_hub(monkeypatch, "http://127.0.0.1:9")
    assert resolve_model(REPO) == directory == resolve_model(REPO, needs_weights=False)
    with pytest.raises(ModelUnavailable, match=r"cannot be reached, and .* no complete copy"):
        resolve_model("acme/other")


def test_an_interrupted_download_is_resumed(
    hub: Hub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # the size of kept pieces
    hub.cut_after = 100_000  # reached only by the weights

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


def test_the_error_names_a_missing_repository_or_revision(hub: Hub) -> None:
    for model, reason in ((f"{REPO}@v9", "no revision 'v9'"), ("acme/nothing", "or is private")):
        with pytest.raises(ModelUnavailable, match=reason):
            resolve_model(model)


def test_the_error_of_a_gated_repository_explains_how_to_use_a_token(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories[REPO].token = "accepted"
    for token in ("", "of somebody else"):
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(ModelUnavailable, match=rf"gated: accept .*/{REPO}, then set HF_TOKEN"):
            resolve_model(REPO)
    monkeypatch.setenv("HF_TOKEN", "accepted")
    assert (resolve_model(REPO) / "model.safetensors").is_file()


def test_too_little_disk_is_an_error_with_the_numbers(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(directory: Path, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "RESERVE_BYTES", 10**18)
        with pytest.raises(ModelUnavailable, match=r"needs 0\.0 GB of disk .* GB are free"):
            resolve_model(REPO)
    assert hub.downloads == []
    with pytest.raises(ModelUnavailable, match=r"is full: .* GB are free; HF_HOME .* vlm rm"):
        resolve_model(REPO, check=fill)


SHARDS = [f"model-{i}-of-3.safetensors" for i in (1, 2, 3)]
INDEX = json.dumps({"weight_map": {f"weight {name}": name for name in SHARDS}})


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"pytorch_model.bin": "", "config.json": "{}"}, "no safetensors weights; pickled ones"),
        ({"model.safetensors": "weights"}, r"acme/other has no config\.json"),
        (
            {"config.json": "{}", SHARDS[0]: "weights", "model.safetensors.index.json": INDEX},
            r"lacks 2 of .* names, such as model-2-of-3\.safetensors",
        ),
    ],
)
def test_an_incomplete_repository_is_refused_before_its_weights_are_downloaded(
    files: dict[str, str], reason: str, hub: Hub, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / name).write_text(content)
    hub.repositories["acme/other"] = Repository({"main": tmp_path / "other"})

    with pytest.raises(ModelUnavailable, match=reason):
        resolve_model("acme/other")
    assert not [name for name in hub.downloads if not name.endswith(".json")]


def test_an_unsupported_model_is_refused_before_its_weights_are_downloaded(
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
    assert resolve_model(REPO, check=check) is not None  # all files are present


def test_local_models_have_names_and_need_no_hub(checkpoint: Path) -> None:
    assert resolve_model(str(checkpoint)) == checkpoint
    assert resolve_model("shapes").parts[-3:] == ("packages", "shapes", "checkpoint")
    names = {str(checkpoint): "tiny", "shapes": "shapes", f"{REPO}@v1": REPO}
    assert {model: default_name(model) for model in names} == names
    for model in ("no such thing", "./missing", "a/b/c", "@v1", ""):
        with pytest.raises(ModelUnavailable, match="built-in name"):
            resolve_model(model)
