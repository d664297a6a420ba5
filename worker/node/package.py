"""Runs packages as workers: in a process of a node, or by `vlm worker` with `VLM_DEPLOY__PACKAGE`."""

import atexit
import json
import logging
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engines.application.sandbox import check_isolation
from engines.base import EngineStartError
from engines.child_process import hide_process
from engines.registry import APPLICATION_KIND, EngineKind, find_kind, kind_of
from shared.packages.deployments import NAME, Resources, Spec, version_name
from shared.packages.environment import BadEnvironment, Environment, version_digest
from shared.packages.manifest import Manifest, is_digest
from shared.packages.store import StoreError, open_store
from shared.settings.load import load_settings
from shared.settings.tree import EngineValues, Settings, SettingsError
from worker.node.cache import Uses, open_cache
from worker.node.environment import HUB_SECRETS, WORKER_GROUPS, child_environment
from worker.node.install import InstallError, install, make_packages
from worker.node.resources import find_gpus
from worker.node.secrets import SecretMissing, Secrets, hand_over

logger = logging.getLogger(__name__)

VARIABLES_FD = "VLM_ENGINE__VARIABLES_FD"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedWorker:
    """How to run an installed package. `version`: the digest of the package in its environment."""

    name: str
    package: str
    version: str
    manifest: Manifest
    folder: Path
    packages: Path | None
    resources: Resources
    start_s: object

    @property
    def engine(self) -> str:
        """The kind of the engine."""
        config = self.manifest.config
        if config.kind != "model":
            return APPLICATION_KIND
        return kind_of({**config.engine, "model": str(self.folder)})

    @property
    def runs_code(self) -> bool:
        return self._kind.runs_code

    @property
    def _kind(self) -> EngineKind:
        if (kind := find_kind(self.engine)) is None:
            raise EngineStartError(f"there is no engine {self.engine!r}")
        return kind

    def environment(self, settings: Settings, **worker: Any) -> dict[str, str]:
        """The environment of the worker. `worker`: settings of its group. Raises: EngineStartError."""
        config = self.manifest.config
        values = dict(config.engine)
        if config.kind != "model":
            values = {
                "kind": APPLICATION_KIND,
                "entry": config.entry,
                "command": json.dumps(config.command),
                "network": str(config.network),
                "packages": str(self.packages or ""),
                "start_s": str(self.start_s),
                "uses_gpu": str(self.resources.gpu > 0),
                "isolation": settings.node.isolation,
            }
        short = version_name("", self.version)
        values |= {"model": str(self.folder), "served_name": self.name + short}
        taken = self._kind.load_settings().model_fields
        if "num_threads" in taken:
            values.setdefault("num_threads", str(max(1, round(self.resources.cpu))))
        if "memory_bytes" in taken:
            values["memory_bytes"] = str(self.resources.memory_bytes)
        package = f"{self.name}@{self.package}"
        if (
            self.version != self.package
        ):  # with an environment, the version differs from the package
            package += f"+{short[1:]}"
        settings = settings.model_copy(update={"engine": EngineValues.model_validate(values)})
        settings = settings.changed(worker={"package": package, "lora": (), **worker})
        hidden = HUB_SECRETS if self.runs_code else frozenset()
        return child_environment(settings, WORKER_GROUPS, hidden)


def run_package(settings: Settings) -> int:
    """Run a worker of the package of `settings.deploy` until a signal. Returns the exit code."""
    from worker.main import run_worker  # noqa: PLC0415 - not needed by nodes

    hide_process()
    try:
        settings = _become(settings)
    except (EngineStartError, SettingsError) as error:
        logger.critical("%s", error)
        return os.EX_CONFIG
    return run_worker(settings)


def _become(settings: Settings) -> Settings:
    """Install the package, and make this process its worker. Blocks.

    Returns the worker's settings, and replaces the environment of this process by them, because it contains the
    store's credentials. Raises: EngineStartError, SettingsError.
    """
    deploy = settings.deploy
    name, _, package = deploy.package.partition("@")
    if not re.match(NAME, name) or not is_digest(package):
        raise SettingsError(
            "VLM_DEPLOY__PACKAGE: write NAME@sha256:... with a digest of 64 hexadecimal digits"
        )
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # the kernel has no default actions for a container's process 1
        signal.signal(number, lambda *_: os._exit(0))
    try:
        environment = msgspec.json.decode(deploy.environment or "{}", type=Environment)
        variables = Secrets(settings.node).read(environment)
        check_isolation(settings.node.isolation)
        store, cache, uses = open_store(deploy.store), open_cache(deploy), Uses()
        atexit.register(uses.close)
        manifest, folder = install(store, package, cache, signers=deploy.signers, uses=uses)
        hidden = frozenset(settings.node.secrets)
        packages = make_packages(manifest, folder, uses, cache=cache, hidden=hidden)
    except msgspec.MsgspecError as error:
        raise SettingsError(f"VLM_DEPLOY__ENVIRONMENT: {error}") from None
    except StoreError as error:
        raise SettingsError(f"VLM_DEPLOY__STORE: {error}") from None
    except (BadEnvironment, InstallError, SecretMissing) as error:
        raise EngineStartError(f"{deploy.package}: {error}") from None
    cpu = deploy.cpu or float(os.cpu_count() or 1)
    worker = PackagedWorker(
        name=name, package=package, version=version_digest(package, environment),
        manifest=manifest, folder=folder, packages=packages,
        resources=Resources(cpu, deploy.memory_bytes, len(find_gpus(os.environ))),
        start_s=settings.engine.values().get("start_s", Spec().start_s),
    )  # fmt: skip
    own = worker.environment(settings)
    if worker.runs_code and variables.all:
        own[VARIABLES_FD] = str(hand_over(variables))
    os.environ.clear()
    os.environ.update(own)
    overrides: dict[str, Any] = {"_env_file": None}
    return load_settings(**overrides)
