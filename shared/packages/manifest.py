"""Package manifests: the files of a package by SHA-256, and how to run them. The digest identifies the package.

The format is that of OCI image manifests written by `oras`: a layer is a file, and its title is the file's path.
The encoding is canonical: equal files have an equal manifest on every machine. Of a file's mode, only the
executable bit is stored.

Source: OCI image-spec 1.1, "Image Manifest"; ORAS, `org.opencontainers.image.title`.
"""

import base64
import hashlib
import json
import re
import unicodedata
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import msgspec
from msgspec import Meta

ARTIFACT_TYPE = "application/vnd.vlm-fleet.package.v1"
CONFIG_TYPE = "application/vnd.vlm-fleet.package.config.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
LAYER_TYPE = "application/octet-stream"
TITLE = "org.opencontainers.image.title"
MODE = "org.vlm-fleet.mode"

MAX_FILES = 20_000
MAX_PATH_CHARS = 512
MAX_PART_BYTES = 255  #: maximum of a path component, as in common file systems
MAX_MANIFEST_BYTES = 16 * 1024 * 1024
MAX_PACKAGE_BYTES = 2 * 1024**4

#: Names of files that usually are pickles, which can run arbitrary code when loaded.
_PICKLES = re.compile(r".*\.(pkl|pickle|pt|pth|ckpt|bin|joblib|dill)", re.IGNORECASE)
_PICKLE_HEAD = re.compile(rb"\x80[\x02-\x05]", re.DOTALL)
_DIRECTIONS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

_WEIGHTS = (".safetensors", ".gguf")
#: Minimum bytes of memory per stored byte, by quantization, as the torch engine estimates it.
_LEAST_RATIO = {"none": 1.0, "int8": 0.4, "int4": 0.2}

Digest = Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}$(?!\n)")]
Kind = Literal["model", "python", "executable"]
#: The names of engine settings, and the settings that only a node can set.
_ENGINE_SETTING = re.compile(r"[a-z][a-z0-9_]{0,63}")
_NOT_OF_PACKAGES = frozenset({"model", "served_name", "device"})


class BadPackage(ValueError):
    """An invalid package; the message begins with the path of the layer, if there is one."""


class PackageConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a package runs."""

    kind: Kind
    engine: dict[str, str] = {}  #: models: the engine's settings by name, such as `quantization`
    entry: str = ""  #: Python applications: `module:Class`
    #: Executables: the path in the package (or on the node, if the package has no files) and arguments.
    command: tuple[str, ...] = ()
    #: Applications: True if the sandbox has network access.
    network: bool = False
    protocol: int = 1


class Layer(msgspec.Struct, frozen=True, order=True):
    """A file. `path` is relative, with `/` between components."""

    path: str
    digest: str
    size: int
    is_executable: bool = False


class Manifest(msgspec.Struct, frozen=True):
    """A package; its layers are sorted by path."""

    config: PackageConfig
    layers: tuple[Layer, ...]

    @property
    def size(self) -> int:
        return sum(layer.size for layer in self.layers)

    @property
    def least_memory_bytes(self) -> int:
        """The minimum memory of a model's instance on a CPU: the size of its weights in memory."""
        ratio = _LEAST_RATIO.get(self.config.engine.get("quantization", "none"), 0.2)
        stored = sum(each.size for each in self.layers if each.path.endswith(_WEIGHTS))
        return int(stored * ratio) if self.config.kind == "model" else 0

    def encode(self) -> bytes:
        """The canonical bytes, whose SHA-256 is the digest."""
        config = config_bytes(self)
        return _canonical(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST_TYPE,
                "artifactType": ARTIFACT_TYPE,
                "config": {
                    "mediaType": CONFIG_TYPE,
                    "digest": digest_of(config),
                    "size": len(config),
                    "data": base64.b64encode(config).decode(),
                },
                "layers": [_describe(layer) for layer in self.layers],
            }
        )

    @property
    def digest(self) -> str:
        """The identity: `sha256:` and 64 hex digits."""
        return digest_of(self.encode())


def config_bytes(manifest: Manifest) -> bytes:
    """The canonical bytes of the config: a blob, and part of the manifest."""
    return _canonical(msgspec.to_builtins(manifest.config))


def make_manifest(config: PackageConfig, layers: list[Layer]) -> Manifest:
    """Make and check the manifest of files in any order. Raises: BadPackage."""
    manifest = Manifest(config, tuple(sorted(layers)))
    check_manifest(manifest)
    return manifest


def decode_manifest(data: bytes) -> Manifest:
    """Read and check a manifest. Raises: BadPackage."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise BadPackage(f"the manifest has more than {MAX_MANIFEST_BYTES} bytes; use fewer files")
    try:
        raw = json.loads(data)
        config = msgspec.json.decode(base64.b64decode(raw["config"]["data"]), type=PackageConfig)
        layers = tuple(_read_layer(layer) for layer in raw["layers"])
        manifest = Manifest(config, layers)
        is_canonical = manifest.encode() == data
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadPackage(f"the manifest cannot be read: {str(error)[:200]}") from None
    if not is_canonical:
        raise BadPackage(
            "the manifest is not canonical: sort keys and layers, leave out spaces and fields that "
            "this version does not know"
        )
    check_manifest(manifest)
    return manifest


def check_manifest(manifest: Manifest) -> None:
    """Refuse manifests that are unsafe to unpack or run. Raises: BadPackage."""
    if len(manifest.layers) > MAX_FILES:
        raise BadPackage(
            f"the package has {len(manifest.layers)} files; the maximum is {MAX_FILES}"
        )
    if manifest.size > MAX_PACKAGE_BYTES:
        raise BadPackage(
            f"the package has {manifest.size} bytes; the maximum is {MAX_PACKAGE_BYTES}"
        )
    paths: set[str] = set()
    for layer in manifest.layers:
        check_path(layer.path)
        if not _DIGEST.fullmatch(layer.digest) or layer.size < 0:
            raise BadPackage(f"{layer.path}: its digest is not sha256, or its size is below 0")
        if layer.path in paths:
            raise BadPackage(f"{layer.path}: two layers have this path; remove one")
        paths.add(layer.path)
    for path in paths:
        parts = path.split("/")
        for end in range(1, len(parts)):
            if "/".join(parts[:end]) in paths:
                raise BadPackage(f"{path}: {'/'.join(parts[:end])} is also a file; rename one")
    _check_config(manifest.config, paths)


def _check_config(config: PackageConfig, paths: set[str]) -> None:
    if config.protocol != 1:
        raise BadPackage(f"config.protocol is {config.protocol}; only 1 is supported")
    match config.kind:
        case "model":
            pass  # `engines.registry.check_package` checks packages of models
        case "python":
            module = config.entry.partition(":")[0].replace(".", "/")
            if f"{module}.py" not in paths and f"{module}/__init__.py" not in paths:
                raise BadPackage(f"config.entry: the package has no module for {config.entry!r}")
        case "executable":
            program = config.command[0] if config.command else ""
            is_installed = program.startswith("/") and not paths
            if program not in paths and not is_installed:
                raise BadPackage("config.command: the first item must be a file of the package")
    for name in config.engine:
        first = name.split("__")[0]
        if config.kind != "model" or first in _NOT_OF_PACKAGES:
            raise BadPackage(f"config.engine: this package cannot set {name}; leave it out")
        if not _ENGINE_SETTING.fullmatch(name):
            raise BadPackage(f"config.engine: {name!r} is not the name of a setting")


def check_path(path: str) -> None:
    """Refuse paths that are invalid or leave the directory, and names of pickles. Raises: BadPackage."""
    if not path or len(path) > MAX_PATH_CHARS:
        raise BadPackage(f"{path[:80]!r}: a path has 1 to {MAX_PATH_CHARS} characters")
    try:
        parts = path.encode().split(b"/")
    except UnicodeEncodeError:
        raise BadPackage(f"{path!r}: the path is not UTF-8; rename the file") from None
    if any(part in (b"", b".", b"..") for part in parts):
        raise BadPackage(
            f"{path}: send a relative path below the package's root, without `.`, `..` or `//`"
        )
    if any(len(part) > MAX_PART_BYTES for part in parts):
        raise BadPackage(
            f"{path[:80]!r}: each part of a path has at most {MAX_PART_BYTES} bytes of UTF-8; "
            "give the file or folder a shorter name"
        )
    if "\\" in path or any(map(_is_control, path)):
        raise BadPackage(f"{path!r}: a path cannot have backslashes or control characters")
    if _PICKLES.fullmatch(path):
        raise BadPackage(f"{path}: {_PICKLED}")


def _is_control(character: str) -> bool:
    """True if a character controls the terminal or the text direction, and so can disguise a path."""
    return (
        unicodedata.category(character) in ("Cc", "Zl", "Zp")
        or unicodedata.bidirectional(character) in _DIRECTIONS
    )


_PICKLED = (
    "pickle files are refused, because unpickling can run any code; use safetensors for arrays"
)


def check_content(path: str, file: IO[bytes]) -> None:
    """Refuse pickles by their content, independent of the file's name. Raises: BadPackage."""
    head = file.read(4)
    file.seek(0)
    if _PICKLE_HEAD.match(head):
        raise BadPackage(f"{path}: {_PICKLED}")
    if head == b"PK\x03\x04" and not path.endswith((".whl", ".jar", ".docx")):
        try:
            names = zipfile.ZipFile(file).namelist()
        except (zipfile.BadZipFile, OSError, ValueError):
            names = []
        file.seek(0)
        if any(name.endswith("data.pkl") for name in names):
            raise BadPackage(f"{path}: {_PICKLED}")


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def digest_of_file(path: Path) -> str:
    """The digest of a file; releases the GIL."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _describe(layer: Layer) -> dict[str, Any]:
    mode = "0755" if layer.is_executable else "0644"
    return {
        "mediaType": LAYER_TYPE,
        "digest": layer.digest,
        "size": layer.size,
        "annotations": {TITLE: layer.path, MODE: mode},
    }


def _read_layer(raw: Mapping[str, Any]) -> Layer:
    notes, fields = raw["annotations"], {"digest": raw["digest"], "size": raw["size"]}
    fields |= {"path": notes[TITLE], "is_executable": notes[MODE] == "0755"}
    return msgspec.convert(fields, Layer)


def _canonical(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode()
