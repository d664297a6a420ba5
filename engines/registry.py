"""Engines by name.

An engine is two things: a class of settings (`engines.settings`), and a function that makes a loaded engine of
them. The project's own are listed here, those of other packages are found by the entry point group
`vlm_fleet.engines`, whose values are `EngineKind`s. Nothing of an engine is imported before it is asked for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any

from engines.base import EngineStartError, LoadedEngine, Progress
from engines.settings import BadEngineSettings, EngineSettings

ENTRY_POINTS = "vlm_fleet.engines"
AUTO = "auto"
DEFAULT_KIND = "torch"
#: Built-in models that another engine runs.
_KINDS_OF_MODELS = {"shapes-clip": "pooling"}


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine's settings and what makes it, each itself or as `module:name`, imported when needed.

    `create(settings, progress)` blocks until the engine can serve. Raises: EngineStartError.
    """

    settings: type[EngineSettings] | str
    create: Callable[[Any, Progress | None], LoadedEngine] | str
    install: str = ""  #: what to install where a package that `create` needs is missing
    #: Refuses the name of a model that cannot be found, before anything is loaded. Raises: EngineStartError.
    check_model: Callable[[str], None] | str | None = None
    #: Imports what `create` would; only where that takes seconds.
    preload: Callable[[], None] | str | None = None

    def load_settings(self) -> type[EngineSettings]:
        """The class of its settings."""
        return resolve_name(self.settings) if isinstance(self.settings, str) else self.settings

    def load_create(self) -> Callable[[Any, Progress | None], LoadedEngine]:
        """What makes it. Raises: ModuleNotFoundError."""
        return resolve_name(self.create) if isinstance(self.create, str) else self.create

    def load_all(self) -> None:
        """Import what takes long of it, before there is a model. Raises: ModuleNotFoundError."""
        self.load_create()
        if self.preload is not None:
            (resolve_name(self.preload) if isinstance(self.preload, str) else self.preload)()


_kinds: dict[str, EngineKind] = {
    "torch": EngineKind(
        "engines.torch_backend.settings:TorchSettings",
        "engines.torch_backend.loading.load:load_engine",
        install="vlm-fleet[torch]",
        check_model="engines.packages.resolve:check_reference",
        preload="engines.torch_backend.models.registry:import_families",
    ),
    "mock": EngineKind(
        "engines.mock.settings:MockEngineSettings", "engines.mock.engine:load_mock_engine"
    ),
    "pooling": EngineKind(
        "engines.pooling.settings:EncoderSettings",
        "engines.pooling.load:load_pooling_engine",
        install="vlm-fleet[torch]",
        check_model="engines.packages.resolve:check_reference",
    ),
    "mock_pooling": EngineKind(
        "engines.mock_pooling.settings:MockPoolingSettings",
        "engines.mock_pooling.engine:load_mock_pooling_engine",
    ),
    "application": EngineKind(
        "engines.application.settings:ApplicationSettings",
        "engines.application.engine:load_application_engine",
    ),
}


def register(name: str, kind: EngineKind) -> None:
    """Add an engine, or put another in place of one."""
    _kinds[name] = kind


def engine_kinds() -> dict[str, EngineKind]:
    """All engines by name; those of other packages come last, and replace none."""
    others = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    return _kinds | {name: point.load() for name, point in others.items() if name not in _kinds}


def settings_classes() -> list[type[EngineSettings]]:
    """The settings of every engine, for whoever lists them."""
    return [kind.load_settings() for kind in engine_kinds().values()]


def read_settings(values: Mapping[str, object]) -> EngineSettings:
    """What raw values say, `kind` among them, checked by the engine that they name. Raises: BadEngineSettings."""
    kind, found = _find(values)
    return found.load_settings().read(kind, {k: v for k, v in values.items() if k != "kind"})


def check_settings(values: Mapping[str, object]) -> EngineSettings:
    """`read_settings`, and what else can be refused before anything is loaded. Raises: EngineStartError."""
    settings = read_settings(values)
    check = _find(values)[1].check_model
    if check is not None:
        (resolve_name(check) if isinstance(check, str) else check)(settings.model)
    return settings


def create_engine(values: Mapping[str, object], progress: Progress | None = None) -> LoadedEngine:
    """Make the engine that raw settings describe; blocks until it can serve.

    Raises: EngineStartError, with a message that says what to do.
    """
    settings = read_settings(values)
    kind, found = _find(values)
    try:
        create = found.load_create()
    except ModuleNotFoundError as error:
        package = found.install or f"the package of the {kind} engine"
        raise EngineStartError(
            f"the {kind} engine needs the package {error.name!r}: pip install '{package}', or "
            "take another with VLM_ENGINE__KIND"
        ) from None
    return create(settings, progress)


def kind_of(values: Mapping[str, object]) -> str:
    """The name of the engine that raw values ask for; by their model where they leave it open."""
    kind = str(values.get("kind", AUTO))
    model = str(values.get("model", ""))
    return _KINDS_OF_MODELS.get(model, DEFAULT_KIND) if kind == AUTO else kind


def _find(values: Mapping[str, object]) -> tuple[str, EngineKind]:
    name = kind_of(values)
    if name in _kinds:  # without a look at every installed package
        return name, _kinds[name]
    kinds = engine_kinds()
    if name not in kinds:
        raise BadEngineSettings(
            f"VLM_ENGINE__KIND: there is no engine {name!r}; there are {', '.join(sorted(kinds))}"
        )
    return name, kinds[name]
