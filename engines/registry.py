"""Engines by name, and the choice of an installed server for a model when the engine is `auto`.

An engine is a settings class and a function that creates the engine. Other packages add engines by the entry point
group `vlm_fleet.engines`, whose values are `EngineKind`s. Engines are imported lazily.
"""

import logging
import shutil
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions, entry_points
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name  # noqa: TID251 - for names in `kinds`
from typing import Any

from packaging.version import Version

from engines.base import EngineStartError, LoadedEngine, Progress
from engines.settings import BadEngineSettings, EngineSettings, Spell, as_variable

#: Tested versions of vLLM: the first one, and the first one that is too new.
VLLM_VERSIONS = ("0.32", "0.34")
#: Architectures of GGUF files that the torch engine reads.
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
GPU_DRIVER = Path("/proc/driver/nvidia/version")
_HEADER_BYTES = 64 * 1024
_ARCHITECTURE = b"general.architecture"

logger = logging.getLogger(__name__)
ENTRY_POINTS = "vlm_fleet.engines"
AUTO = "auto"
DEFAULT_KIND = "torch"
APPLICATION_KIND = "application"  #: runs Python applications and executables


@cache
def find_server(model: str) -> str | None:
    """`llama-server` or `vllm` if it suits model and machine better than the torch engine, else None."""
    if model.endswith(".gguf"):
        architecture = _read_architecture(Path(model).expanduser())
        if architecture is None or architecture in GGUF_ARCHITECTURES:
            return None
        if shutil.which("llama-server") is None:
            return None
        logger.info("engine llama-server: the torch engine does not read %s", architecture)
        return "llama-server"
    version = _vllm_version() if GPU_DRIVER.exists() else None
    if version is None:
        return None
    first, last = map(Version, VLLM_VERSIONS)
    if not first <= version < last:
        logger.info("engine torch: vLLM %s is untested (from %s to below %s)", version, first, last)
        return None
    logger.info("engine vllm: vLLM %s is installed and there is a GPU", version)
    return "vllm"


def _read_architecture(file: Path) -> str | None:
    """`general.architecture` of a GGUF file; writers store it as the first field."""
    try:
        with file.open("rb") as opened:
            header = opened.read(_HEADER_BYTES)
    except OSError:
        return None
    place = header.find(_ARCHITECTURE) + len(_ARCHITECTURE)
    if not header.startswith(b"GGUF") or place < len(_ARCHITECTURE):
        return None
    kind, length = struct.unpack_from("<IQ", header, place)
    name = header[place + 12 : place + 12 + length]
    return name.decode(errors="replace") if kind == 8 and length < 100 else None


def _vllm_version() -> Version | None:
    """The version of the `vllm` program, read from its environment's metadata because running it takes seconds."""
    program = shutil.which("vllm")
    if program is None:
        return None
    folders = Path(program).parent.parent.glob("lib/python*/site-packages")
    found = distributions(name="vllm", path=list(map(str, folders)))
    return next((Version(each.version) for each in found), None)


@dataclass(frozen=True, slots=True)
class EngineKind:
    """The definition of an engine. Classes and functions can be given as `module:name`, imported when needed.

    `create(settings, progress)` blocks until the engine can serve. Raises: EngineStartError.
    """

    settings: type[EngineSettings] | str
    create: Callable[[Any, Progress | None], LoadedEngine] | str
    needs: str = ""  #: module that the engine requires
    install: str = ""  #: requirement to install if a package of `create` is missing
    #: Refuses an unknown model before anything is loaded. Raises: EngineStartError.
    check_model: Callable[[str], None] | str | None = None
    #: Imports the modules of `create`, if that takes seconds.
    preload: Callable[[], None] | str | None = None
    #: Sets up the worker process before it starts threads.
    prepare_process: Callable[[], None] | str | None = None
    #: Models that select this engine.
    models: tuple[str, ...] = ()
    #: Whether its models are checkpoints with config.json and safetensors.
    needs_checkpoint: bool = False
    #: Whether it runs the code of a package, isolated and with limits that the node sets. A model package must not
    #: select it.
    runs_code: bool = False

    def load_settings(self) -> type[EngineSettings]:
        return _load(self.settings)

    def load_all(self) -> None:
        """Import its slow modules before the model is known. Raises: ModuleNotFoundError."""
        _load(self.create)
        if self.preload is not None:
            _load(self.preload)()


def _load(named: Any) -> Any:
    return resolve_name(named) if isinstance(named, str) else named


kinds: dict[str, EngineKind] = {
    "torch": EngineKind(
        "engines.torch_backend.settings:TorchSettings",
        "engines.torch_backend.loading.load:load_engine",
        needs="torch",
        install=".[torch]",
        check_model="engines.packages.resolve:check_reference",
        preload="engines.torch_backend.models.registry:import_families",
        prepare_process="engines.heap:use_one_heap",
        models=("shapes",),
        needs_checkpoint=True,
    ),
    "mock": EngineKind(
        "engines.mock.engine:MockEngineSettings", "engines.mock.engine:load_mock_engine"
    ),
    "pooling": EngineKind(
        "engines.pooling.settings:EncoderSettings",
        "engines.pooling.load:load_pooling_engine",
        needs="torch",
        install=".[torch]",
        check_model="engines.packages.resolve:check_reference",
        models=("shapes-clip",),
        needs_checkpoint=True,
    ),
    "mock_pooling": EngineKind(
        "engines.mock_pooling.engine:MockPoolingSettings",
        "engines.mock_pooling.engine:load_mock_pooling_engine",
    ),
    **{
        name: EngineKind(
            f"engines.upstream.settings:{settings}",
            "engines.upstream.load:load_upstream_engine",
            check_model="engines.packages.resolve:check_reference",
            needs_checkpoint=name != "llama-server",
        )
        for name, settings in {
            "vllm": "VllmSettings",
            "sglang": "SglangSettings",
            "llama-server": "LlamaServerSettings",
        }.items()
    },
    "openai": EngineKind(
        "engines.upstream.settings:OpenAiSettings", "engines.upstream.load:load_chat_engine"
    ),
    "openai-pooling": EngineKind(
        "engines.upstream.settings:VectorSettings",
        "engines.upstream.vectors:load_vector_engine",
        check_model="engines.packages.resolve:check_reference",
    ),
    APPLICATION_KIND: EngineKind(
        "engines.application.settings:ApplicationSettings",
        "engines.application.engine:load_application_engine",
        runs_code=True,
    ),
}


def register(name: str, kind: EngineKind) -> None:
    kinds[name] = kind


def engine_kinds() -> dict[str, EngineKind]:
    """All engines by name. Engines of other packages come last and cannot replace built-in engines."""
    others = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    return kinds | {name: point.load() for name, point in others.items() if name not in kinds}


def settings_classes() -> list[type[EngineSettings]]:
    return [kind.load_settings() for kind in engine_kinds().values()]


def read_settings(values: Mapping[str, object], spell: Spell = as_variable) -> EngineSettings:
    """Validate raw values with the settings class of their `kind`. Raises: BadEngineSettings."""
    kind, found = _find(values)
    own = {name: value for name, value in values.items() if name != "kind"}
    return found.load_settings().read(kind, own, spell)


def check_settings(values: Mapping[str, object]) -> EngineSettings:
    """`read_settings`, and check the model's name. Raises: EngineStartError."""
    settings = read_settings(values)
    check = _find(values)[1].check_model
    if check is not None:
        _load(check)(settings.model)
    return settings


def check_package(values: Mapping[str, object], paths: Collection[str]) -> None:
    """Check that the engine, if known, can run a model package. Raises: EngineStartError."""
    name = kind_of(values)
    kind = find_kind(name)
    if kind is not None and kind.runs_code:
        raise EngineStartError(
            f"config.engine: kind={name} does not run models; to deploy a Python application or an "
            "executable, leave out kind"
        )
    if "config.json" not in paths and (kind is None or kind.needs_checkpoint):
        raise EngineStartError("config.json is missing: it names the model's architecture")


def check_installed(values: Mapping[str, object]) -> None:
    """Raises: EngineStartError if the engine's packages are not installed."""
    name, kind = _find(values)
    if kind.needs and find_spec(kind.needs) is None:
        raise _not_installed(name, kind, kind.needs)


def _not_installed(name: str, kind: EngineKind, module: str | None) -> EngineStartError:
    package = kind.install or f"the package of the {name} engine"
    return EngineStartError(
        f"the {name} engine needs the package {module!r}: pip install '{package}', or choose "
        "another engine with --engine"
    )


def prepare_process(values: Mapping[str, object]) -> None:
    """Check the settings and set up a worker process that has no threads yet. Raises: EngineStartError."""
    check_installed(values)
    check_settings(values)
    prepare = _find(values)[1].prepare_process
    if prepare is not None:
        _load(prepare)()


def create_engine(values: Mapping[str, object], progress: Progress | None = None) -> LoadedEngine:
    """Create the engine of raw settings; blocks until it can serve. Raises: EngineStartError."""
    settings = check_settings(values)
    name, kind = _find(values)
    try:
        create = _load(kind.create)
    except ModuleNotFoundError as error:
        raise _not_installed(name, kind, error.name) from None
    return create(settings, progress)


def kind_of(values: Mapping[str, object]) -> str:
    """The engine that raw values name. If they name none, the engine that suits the model and the machine."""
    kind, model = str(values.get("kind", AUTO)), str(values.get("model", ""))
    if kind != AUTO or not model:
        return DEFAULT_KIND if kind == AUTO else kind
    named = _runs(model, kinds) or _runs(model, engine_kinds())
    return named or find_server(model) or DEFAULT_KIND


def _runs(model: str, kinds: Mapping[str, EngineKind]) -> str | None:
    return next((name for name, kind in kinds.items() if model in kind.models), None)


def find_kind(name: str) -> EngineKind | None:
    """The engine of this name; entry points are read only for unknown names."""
    return kinds.get(name) or engine_kinds().get(name)


def _find(values: Mapping[str, object]) -> tuple[str, EngineKind]:
    name = kind_of(values)
    kind = find_kind(name)
    if kind is None:
        raise BadEngineSettings(
            f"VLM_ENGINE__KIND: there is no engine {name!r}; choose one of "
            f"{', '.join(sorted(engine_kinds()))}"
        )
    return name, kind
