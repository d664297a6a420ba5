"""The LoRA adapters of a worker, from its settings or loaded at run time.

Redis has the list of run-time adapters. With each heartbeat, a worker loads and unloads adapters to match the list,
and announces the results in its card. A call whose adapter is not loaded makes the worker read the list immediately.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace
from redis.exceptions import RedisError

from engines.base import AdapterLimits, AdapterUnavailable, BadAdapter, Engine, EngineStartError
from shared.protocol import AdapterCard, ModelCard
from shared.queue.registry import AdapterSource, Registry
from shared.settings.limits import LimitSettings
from shared.settings.tree import SettingsError, WorkerSettings

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class WorkerAdapters:
    _engine: Engine
    _model_card: ModelCard
    _registry: Registry
    _settings: WorkerSettings
    _limits: LimitSettings
    _held: dict[str, AdapterCard] = field(default_factory=dict)  #: by name
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def card(self) -> ModelCard:
        if not self._held:
            return self._model_card
        return replace(self._model_card, adapters=tuple(self._held.values()))

    async def load_own(self) -> None:
        """Load the adapters of the settings. Raises: SettingsError."""
        own, most = self._settings.adapters, self._limits.max_loras
        if len(own) > most:
            raise SettingsError(
                f"VLM_WORKER__LORA names {len(own)} adapters; name at most {most} (VLM_LIMITS__MAX_LORAS)"
            )
        for name, path in own.items():
            try:
                directory = await asyncio.to_thread(_resolve, path)
                self._held[name] = await self._load(name, directory)
            except (BadAdapter, EngineStartError) as error:
                raise SettingsError(f"VLM_WORKER__LORA: {name}: {error}") from None

    async def sync(self, *, tries_again: bool = False) -> None:
        """Load and unload adapters to match Redis's list. `tries_again`: retry failed adapters. Raises: RedisError."""
        async with self._lock:
            wanted = await self._registry.adapters(self._model_card.name)
            if not wanted and len(self._held) == len(self._settings.lora):
                return
            await self._registry.keep_adapters(self._model_card.name)
            for name, held in list(self._held.items()):
                if held.revision and name not in wanted:
                    del self._held[name]
                    self._unload(name, held.digest)
            for name, source in wanted.items():
                held = self._held.get(name)
                is_as_wanted = held is not None and held.revision in ("", source.revision)
                if not is_as_wanted or (tries_again and held is not None and held.error):
                    await self._replace(name, source)

    async def hold(self, digest: str) -> None:
        """Ensure that the adapter of a call is loaded. Raises: AdapterUnavailable."""
        if self._holds(digest):
            return
        try:
            await self.sync(tries_again=True)
        except RedisError as error:
            logger.warning("cannot read the list of adapters: %s", error)
        if not self._holds(digest):
            message = "The adapter was unloaded or replaced meanwhile; send the request again."
            raise AdapterUnavailable(message, "model")

    def _holds(self, digest: str) -> bool:
        return any(held.digest == digest for held in self._held.values())

    async def _replace(self, name: str, source: AdapterSource) -> None:
        """Load the new adapter of a name, or record the reason of the failure."""
        is_new = name not in self._held
        try:
            if is_new and len(self._held) >= self._limits.max_loras:
                raise BadAdapter(
                    f"{self._limits.max_loras} adapters are loaded, the maximum (VLM_LIMITS__MAX_LORAS); unload one"
                )
            card = await self._load(name, self._within(source.path), source.revision)
        except BadAdapter as error:
            logger.warning("cannot load the adapter %s: %s", name, error)
            card = AdapterCard(name, revision=source.revision, error=str(error))
        except Exception:  # the worker continues without the adapter
            logger.exception("cannot load the adapter %s", name)
            error = "the adapter cannot be loaded; see the worker's log"
            card = AdapterCard(name, revision=source.revision, error=error)
        before = self._held.get(name)
        self._held[name] = card
        if before is not None:
            self._unload(name, before.digest)

    async def _load(self, name: str, directory: Path, revision: str = "") -> AdapterCard:
        """Raises: BadAdapter."""
        started_at = time.monotonic()
        limits = AdapterLimits(self._limits.max_lora_rank, self._limits.max_lora_bytes)
        adapter = await asyncio.to_thread(self._engine.load_adapter, directory, limits)
        logger.info(
            "loaded the adapter %s: rank %d, %.1f MB, %.1f s",
            name, adapter.rank, adapter.num_bytes / 1e6, time.monotonic() - started_at,
        )  # fmt: skip
        return AdapterCard(name, adapter.digest, int(time.time()), revision)  # noqa: TID251

    def _within(self, path: str) -> Path:
        """Resolve a path relative to `lora_dir`. Raises: BadAdapter unless it is a directory below `lora_dir`."""
        if not self._settings.lora_dir:
            raise BadAdapter(
                "to load adapters at run time, set VLM_WORKER__LORA_DIR on the workers"
            )
        root = Path(self._settings.lora_dir).resolve()
        try:
            found = (root / path).resolve()
            is_directory = found.is_dir()
        except (ValueError, RuntimeError, OSError):  # a NUL, circular links, too long
            found, is_directory = root / "none", False
        if not found.is_relative_to(root) or found == root:
            raise BadAdapter("lora_path is outside the workers' directory (VLM_WORKER__LORA_DIR)")
        if not is_directory:
            raise BadAdapter(
                "lora_path is not a directory below the workers' directory (VLM_WORKER__LORA_DIR)"
            )
        return found

    def _unload(self, name: str, digest: str) -> None:
        """Unload the adapter of a name, unless another name uses it."""
        if digest and not self._holds(digest):
            self._engine.unload_adapter(digest)
            logger.info("unloaded the adapter %s", name)


def _resolve(path: str) -> Path:
    """The directory of a path or hub id. Raises: BadAdapter, EngineStartError."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    # The hub's client is slow to import.
    from engines.packages.resolve import parse_hub_id, resolve_model  # noqa: PLC0415

    if parse_hub_id(path) is None:
        raise BadAdapter(
            f"there is no directory {path}: name one, or a hub id as org/name[@revision]"
        )
    return resolve_model(path)
