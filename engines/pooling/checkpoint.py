"""Reads the configuration of a sentence-transformers directory: pooling, prompts, lengths.

Source: sentence-transformers, `modules.json` and the `config.json` of its modules.
"""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from engines.base import UnsupportedCheckpoint
from engines.packages.checkpoint_json import load_json, read_json, shown

Pooling = Literal["cls", "mean", "max", "last"]
_TOKENS = re.compile("_?tokens?$")  #: suffix of some names of pooling modes, such as `cls_token`
_KINDS = ("Transformer", "Pooling", "Dense", "Normalize")
_MAX_SIZE = 1 << 16  # limit of a vector's dimensions
_MAX_TOKENS = 2**31 - 1
#: Files that determine the output.
_DIGESTED = ("*.safetensors", "*.json", "*/*.json", "*.txt", "*.model")


@dataclass(frozen=True, slots=True)
class Normalize:
    """Normalizes vectors to length 1."""


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A linear layer with activation, whose weights are in a folder of the checkpoint."""

    folder: str
    num_inputs: int
    num_outputs: int
    has_bias: bool
    activation: str  #: a path such as `torch.nn.modules.activation.Tanh`
    is_residual: bool  #: whether its input is added to its output


@dataclass(frozen=True, slots=True)
class SentenceConfig:
    """Pooling of a model's last layer, and the prompts that precede its texts."""

    pooling: Pooling = "mean"
    modules: tuple[DenseConfig | Normalize, ...] = ()  #: modules after the pooling, in order
    prompts: dict[str, str] = field(default_factory=dict)
    #: Name of the prompt for requests that do not choose one.
    default_prompt: str = ""
    max_tokens: int | None = None


def read_sentence_config(directory: Path) -> SentenceConfig:
    """Without `modules.json`, vectors are mean-pooled and not normalized. Raises: UnsupportedCheckpoint."""
    modules = load_json(directory / "modules.json", [])
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise UnsupportedCheckpoint("modules.json is not a list of objects")
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if unknown := [kind for kind in kinds if kind not in _KINDS]:
        raise UnsupportedCheckpoint(
            f"modules.json: the module {unknown[0]!r} is not supported; supported are {', '.join(_KINDS)}"
        )
    pooling: Pooling = "mean"
    max_tokens = None
    behind: list[DenseConfig | Normalize] = []
    for kind, module in zip(kinds, modules, strict=True):
        path = str(module.get("path", ""))
        folder = directory / path
        if not folder.resolve().is_relative_to(directory.resolve()):
            raise UnsupportedCheckpoint("modules.json: a path leads out of the directory")
        match kind:
            case "Pooling":
                pooling = _read_pooling(folder)
            case "Dense":
                behind.append(_read_dense(folder, path))
            case "Normalize":
                behind.append(Normalize())
            case _:
                file = folder / "sentence_bert_config.json"
                max_tokens = read_json(file).whole("max_seq_length", at_most=_MAX_TOKENS)
    own = read_json(directory / "config_sentence_transformers.json")
    prompts = {name: str(text) for name, text in own.section("prompts").values.items() if text}
    default = str(own.get("default_prompt_name", ""))
    return SentenceConfig(
        pooling, tuple(behind), prompts, default if default in prompts else "", max_tokens
    )


def read_shorter_dimensions(directory: Path, whole: int) -> tuple[int, ...]:
    """The dimensions to which vectors of `whole` dimensions can be cut. Raises: UnsupportedCheckpoint."""
    name, fields = "matryoshka_dimensions", read_json(directory / "config.json")
    found = fields.get(name, [])
    if not isinstance(found, list) or not all(isinstance(each, int) and each > 0 for each in found):
        raise fields.refuse(name, f"is {shown(found)}, not a list of positive integers")
    return tuple(sorted(each for each in found if each < whole))


def _read_pooling(folder: Path) -> Pooling:
    values = read_json(folder / "config.json").values
    if values.get("include_prompt", True) is not True:
        raise UnsupportedCheckpoint("Pooling: include_prompt must be true (false is unsupported)")
    named = values.get("pooling_mode")
    flags = [
        name.removeprefix("pooling_mode_")
        for name, value in values.items()
        if name.startswith("pooling_mode_") and value is True
    ]
    modes: list[Any] = [_TOKENS.sub("", name) for name in ([str(named)] if named else flags)]
    if len(modes) != 1 or modes[0] not in get_args(Pooling):
        raise UnsupportedCheckpoint(
            f"the Pooling module combines {modes}: one of cls, mean, max and lasttoken is supported"
        )
    return modes[0]


def _read_dense(folder: Path, path: str) -> DenseConfig:
    fields = read_json(folder / "config.json")
    for name in ("module_input_name", "module_output_name"):
        fields.one_of(name, ("sentence_embedding",))
    return DenseConfig(
        path,
        num_inputs=fields.whole("in_features", 0, at_most=_MAX_SIZE),
        num_outputs=fields.whole("out_features", 0, at_most=_MAX_SIZE),
        has_bias=fields.flag("bias", True),
        activation=str(fields.get("activation_function", "torch.nn.modules.activation.Tanh")),
        is_residual=fields.flag("use_residual", False),
    )


def digest_of(directory: Path) -> str:
    """Digest of a checkpoint: SHA-256 over names and hashes of its files, in order of names."""
    whole = hashlib.sha256()
    paths = {path for pattern in _DIGESTED for path in directory.glob(pattern) if path.is_file()}
    for name, path in sorted((str(path.relative_to(directory)), path) for path in paths):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{name}\0{digest}\n".encode())
    return whole.hexdigest()
