"""Resolves a model's name to a directory: built in, local, or downloaded from the Hugging Face hub.

`HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` apply.
"""

import errno
import io
import re
import shutil
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm.auto import tqdm

from engines.base import EngineStartError
from engines.packages.checkpoint_json import read_json

GGUF = ".gguf"  #: suffix of GGUF files
BUILT_IN = {
    "shapes": Path(__file__).parent / "shapes" / "checkpoint",
    "shapes-clip": Path(__file__).parent / "shapes_clip" / "checkpoint",
}
#: Patterns of root files and of `1_Pooling` of sentence-transformers. Other folders have the model in other formats.
_WANTED = ["*.safetensors", "*.json", "*.jinja"]
_UNWANTED = ["[!1]*/*", "consolidated*.safetensors"]
_HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?")
RESERVE_BYTES = 256 * 1024 * 1024  # disk space that a download leaves free

_INDEX_FILE = "model.safetensors.index.json"
_WEIGHTS = ".safetensors"

Report = Callable[[float], None]
#: Checks a model by its small files and the bytes of its weights before the weights are downloaded.
#: Raises: EngineStartError.
Check = Callable[[Path, int], object]


class ModelUnavailable(EngineStartError):
    """The model's files are not available."""


def default_name(model: str) -> str:
    """The served name of a model, unless it is configured."""
    if model in BUILT_IN:
        return model
    if Path(model).is_dir():
        return Path(model).resolve().name
    if model.endswith(GGUF):
        return Path(model).stem
    return model.partition("@")[0]


def resolve_model(
    model: str,
    report: Report | None = None,
    check: Check | None = None,
    *,
    needs_weights: bool = True,
) -> Path:
    """The directory or GGUF file of `model`, which is a built-in name, a path, or a hub id `org/name[@revision]`.

    Downloads missing files; without `needs_weights`, all except weights. `report` is called with the progress; without
    it, a progress bar is shown. Raises: ModelUnavailable, and errors of `check`.
    """
    if path := _on_disk(model):
        return path
    if (found := parse_hub_id(model)) is None:
        raise _unknown(model)
    return _fetch(*found, report, check, needs_weights)


def check_reference(model: str) -> None:
    """Check a model's name without the network. Raises: ModelUnavailable."""
    if _on_disk(model) is None and parse_hub_id(model) is None:
        raise _unknown(model)


def _on_disk(model: str) -> Path | None:
    path = BUILT_IN.get(model) or Path(model).expanduser()
    is_there = path.is_dir() or (model.endswith(GGUF) and path.is_file())
    return path if model and is_there else None


def _unknown(model: str) -> ModelUnavailable:
    return ModelUnavailable(
        f"model {model!r} is unknown: give a built-in name ({', '.join(BUILT_IN)}), a directory, "
        "or a hub id as org/name[@revision], such as llava-hf/llava-1.5-7b-hf"
    )


def parse_hub_id(model: str) -> tuple[str, str | None] | None:
    """Repository and revision of a hub id, else None."""
    match = _HUB_ID.fullmatch(model)
    return match and (match["repo"], match["revision"])


def _fetch(
    repo: str, revision: str | None, report: Report | None, check: Check | None, needs_weights: bool
) -> Path:
    try:
        if not needs_weights:
            is_reachable = _plan(repo, revision) is not None
            return Path(_snapshot(repo, revision, small=True, local_files_only=not is_reachable))
        return _download(repo, revision, report, check)
    except GatedRepoError:
        raise ModelUnavailable(
            f"{repo} is gated: accept its licence at {constants.ENDPOINT}/{repo}, "
            "then set HF_TOKEN to a token of that account"
        ) from None
    except RepositoryNotFoundError:
        raise ModelUnavailable(
            f"{repo} is not on {constants.ENDPOINT}, or is private: check the name, "
            "or set HF_TOKEN to a token that may read it"
        ) from None
    except RevisionNotFoundError:
        raise ModelUnavailable(f"{repo} has no revision {revision!r}") from None
    except HFValidationError as error:
        raise ModelUnavailable(f"{repo} is not a hub id (org/name): {error}") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise ModelUnavailable(f"{constants.ENDPOINT} returned {status} for {repo}") from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        free = shutil.disk_usage(_cache_folder()).free
        raise ModelUnavailable(
            f"the disk of {constants.HF_HUB_CACHE} is full: {free / 1e9:.1f} GB are free; HF_HOME "
            "moves the cache, vlm rm empties it"
        ) from None


def _download(repo: str, revision: str | None, report: Report | None, check: Check | None) -> Path:
    planned = _plan(repo, revision)
    if planned is None:
        return _from_cache(repo, revision)
    names = {file.filename for file in planned}
    if not any(name.endswith(_WEIGHTS) for name in names):
        raise ModelUnavailable(
            f"{repo} has no safetensors weights; pickled ones (.bin) are not read, because unpickling "
            "can run any code: look for a revision or a conversion with safetensors"
        )
    if "config.json" not in names:
        raise ModelUnavailable(
            f"{repo} has no config.json, which names the architecture: look for a conversion to "
            "transformers' format"
        )
    num_bytes = sum(file.file_size or 0 for file in planned if file.will_download)
    free = shutil.disk_usage(_cache_folder()).free
    if num_bytes + RESERVE_BYTES > free:
        raise ModelUnavailable(
            f"{repo} needs {num_bytes / 1e9:.1f} GB of disk in {constants.HF_HUB_CACHE}, "
            f"but {free / 1e9:.1f} GB are free; HF_HOME moves the cache, vlm rm empties it"
        )
    weights = [file for file in planned if file.filename.endswith(_WEIGHTS)]
    num_left = sum(file.file_size or 0 for file in weights if file.will_download)
    if num_left:
        small = Path(_snapshot(repo, revision, small=True, tqdm_class=_silent_bar()))
        if missing := find_missing_weights(small, names):
            raise ModelUnavailable(
                f"{repo} is not complete: it lacks {len(missing)} of the files that its {_INDEX_FILE} "
                f"names, such as {missing[0]}; look for another revision"
            )
        if check is not None:
            check(small, sum(file.file_size or 0 for file in weights))
        num_bytes = num_left
    bar: dict[str, Any] = {} if report is None else {"tqdm_class": _silent_bar(report, num_bytes)}
    return Path(_snapshot(repo, revision, **bar))


def _plan(repo: str, revision: str | None) -> list[Any] | None:
    """The files with their sizes and whether they are cached; None if the hub is not reachable."""
    try:
        return _snapshot(repo, revision, dry_run=True, tqdm_class=_silent_bar())
    except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError):
        raise
    except OSError as error:  # DryRunError, or a failed request
        if isinstance(error.__cause__, RepositoryNotFoundError):  # includes gated repositories
            raise error.__cause__ from None
        return None


def _from_cache(repo: str, revision: str | None) -> Path:
    try:
        return Path(_snapshot(repo, revision, local_files_only=True))
    except FileNotFoundError:
        offline = constants.HF_HUB_OFFLINE
        way = "unset HF_HUB_OFFLINE" if offline else "check the network (HTTPS_PROXY, HF_ENDPOINT)"
        raise ModelUnavailable(
            f"{constants.ENDPOINT} cannot be reached{' (HF_HUB_OFFLINE)' if offline else ''}, and "
            f"{constants.HF_HUB_CACHE} holds no complete copy of "
            f"{repo}{f'@{revision}' if revision else ''}: {way}, or name a directory that holds the model"
        ) from None


def _snapshot(repo: str, revision: str | None, *, small: bool = False, **options: Any) -> Any:
    return snapshot_download(
        repo,
        revision=revision,
        allow_patterns=[name for name in _WANTED if not (small and name.endswith(_WEIGHTS))],
        ignore_patterns=_UNWANTED,
        **options,
    )


def find_missing_weights(directory: Path, names: Set[str]) -> list[str]:
    """Weight files in the directory's index that are not among `names`. Raises: UnsupportedCheckpoint."""
    shards = read_json(directory / _INDEX_FILE).section("weight_map").values.values()
    return sorted({shard for shard in shards if isinstance(shard, str)} - names)


def _cache_folder() -> Path:
    folder = Path(constants.HF_HUB_CACHE)
    while not folder.exists():
        folder = folder.parent
    return folder


def _silent_bar(report: Report | None = None, num_bytes: int = 0) -> type[tqdm]:
    """A progress bar that shows nothing, and may report the fraction of bytes written."""

    class SilentBar(tqdm):
        def __init__(self, *args: Any, **settings: Any) -> None:
            settings.pop("name", None)
            self._counts_written = str(settings.get("desc", "")).startswith("Reconstructing")
            super().__init__(*args, **settings | {"file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if report and num_bytes and self._counts_written:
                report(min(1.0, self.n / num_bytes))
            return shown

    return SilentBar
