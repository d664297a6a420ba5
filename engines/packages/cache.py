"""Lists and removes models in the Hugging Face cache."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CachedRepoInfo, constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from engines.base import EngineStartError
from engines.packages.checkpoint_json import quantization_section, read_json
from engines.packages.resolve import BUILT_IN, find_missing_weights, parse_hub_id

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx")

#: Returns the engine that runs a model on this machine, given its directory and the bytes of its weights.
#: Raises: EngineStartError.
FindEngine = Callable[[Path, int], str]


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One revision of a model. Units: bytes on disk."""

    name: str
    revision: str  #: names of the revision, else its commit; empty for built-in models
    num_bytes: int
    source: str  #: `hub` or `built in`
    directory: Path
    file_names: frozenset[str]

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of its safetensors files."""
        return sum(file.stat().st_size for file in self.directory.glob("*.safetensors"))

    @property
    def format(self) -> str:
        """The type of its weight files, and their quantization."""
        suffixes = {Path(name).suffix for name in self.file_names}
        stored = next((suffix[1:] for suffix in _WEIGHTS if suffix in suffixes), "no weights")
        try:
            quantization = quantization_section(read_json(self.directory / "config.json"))
        except EngineStartError:
            return stored
        method = quantization.get("quant_method")
        return f"{stored}, {method[:32]}" if isinstance(method, str) else stored

    def explain(self, find_engine: FindEngine) -> tuple[bool, str]:
        """Returns whether an engine on this machine can run the model, and the engine's name or the reason why not."""
        try:
            if missing := find_missing_weights(self.directory, self.file_names):
                return False, (
                    f"{len(missing)} weight files are missing, such as {missing[0]}: vlm pull {self.name}"
                )
            if not any(name.endswith(".safetensors") for name in self.file_names):
                return False, f"there are no safetensors weights: vlm pull {self.name}"
            return True, find_engine(self.directory, self.num_weight_bytes)
        except EngineStartError as problem:
            return False, str(problem)


def list_models() -> list[CachedModel]:
    """Built-in models, then cached models by name."""
    built_in = [
        CachedModel(
            name,
            "",
            sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()),
            "built in",
            directory,
            frozenset(file.name for file in directory.iterdir() if file.is_file()),
        )
        for name, directory in BUILT_IN.items()
    ]
    found = [
        CachedModel(
            repo.repo_id,
            ",".join(sorted(revision.refs)) or revision.commit_hash[:12],
            revision.size_on_disk,
            "hub",
            revision.snapshot_path,
            frozenset(file.file_name for file in revision.files),
        )
        for repo in _scan()
        for revision in sorted(repo.revisions, key=lambda revision: -revision.last_modified)
    ]
    return [*built_in, *sorted(found, key=lambda model: model.name)]


def remove(model: str, confirm: Callable[[str], bool]) -> int | None:
    """Remove a model or a revision. Returns: freed bytes; None if `confirm` declined. Raises: EngineStartError."""
    parsed = parse_hub_id(model)
    if model in BUILT_IN or parsed is None:
        raise EngineStartError(
            f"{model!r} is not in the hub's cache: write a model as org/name[@revision]"
        )
    name, revision = parsed
    repos = [repo for repo in _scan() if repo.repo_id == name]
    commits = [
        found.commit_hash
        for repo in repos
        for found in repo.revisions
        if revision is None
        or revision in found.refs
        or (len(revision) >= 7 and found.commit_hash.startswith(revision))
    ]
    if not commits:
        known = ", ".join(sorted({found.name for found in list_models() if found.source == "hub"}))
        raise EngineStartError(
            f"{constants.HF_HUB_CACHE} has no {model}; it has: {known or 'nothing'}"
        )
    strategy = scan_cache_dir(constants.HF_HUB_CACHE).delete_revisions(*commits)
    size = format_bytes(strategy.expected_freed_size)
    if not confirm(f"Remove {model} from {constants.HF_HUB_CACHE}, {size}?"):
        return None
    strategy.execute()
    return strategy.expected_freed_size


def format_bytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _scan() -> list[CachedRepoInfo]:
    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    return [repo for repo in repos if repo.repo_type == "model"]
