"""One instance of a deployment on this node: fetched, started, watched, drained."""

import asyncio
import json
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from engines.application.child import Variables
from engines.base import EngineStartError
from engines.registry import APPLICATION_KIND, find_kind, kind_of
from shared.packages.deployments import Resources, Spec, version_name
from shared.packages.environment import BadEnvironment
from shared.packages.manifest import Manifest
from shared.packages.rollout import ReportState, SlotReport
from shared.protocol import ModelCard
from shared.settings.tree import EngineValues, Settings
from worker.node.cache import Uses
from worker.node.environment import HUB_SECRETS, WORKER_GROUPS, child_environment
from worker.node.install import InstallError
from worker.node.resources import VARIABLE, too_much, used_bytes
from worker.node.secrets import SecretMissing, hand_over
from worker.node.standby import WarmProcess
from worker.node.supervisor import describe_end, start_process

GRACE_S = 5.0
POLL_S = 0.2
MEMORY_POLL_S = 0.5
_LAST_LINES = 5
VARIABLES_FD = "VLM_ENGINE__VARIABLES_FD"

logger = logging.getLogger(__name__)

Install = Callable[[str, Uses], tuple[Manifest, Path]]
#: The folder with what an application imports besides, if it names any.
MakePackages = Callable[[Manifest, Path, Uses], Path | None]
#: The card that a worker has announced under its id.
FindCard = Callable[[str], Awaitable[ModelCard | None]]
#: The tenants whose requests a worker ran when it ended, by its model and id.
FindTenants = Callable[[str, str], Awaitable[frozenset[str]]]


class Instance:
    """A worker process of one package. Its end is told by `report`, never raised."""

    def __init__(
        self,
        *,
        app: str,
        slot: int,
        since: float,
        digest: str,
        package: str,
        spec: Spec,
        needs: Resources,
        gpus: list[str],
        settings: Settings,
        install: Install,
        make_packages: MakePackages,
        variables: Callable[[], Variables],
        find_card: FindCard,
        find_tenants: FindTenants,
        health_socket: str,
        log: Callable[[str], None],
        warm: WarmProcess | None = None,
    ) -> None:
        self.app = app
        self.slot = slot
        self.since = since
        self.digest = digest
        self.package = package
        self.spec = spec
        self.needs = needs
        self.gpus = gpus
        self._settings = settings
        self._install = install
        self._make_packages = make_packages
        self._variables = variables
        self._find_card = find_card
        self._find_tenants = find_tenants
        self._log = log
        self._warm = warm
        self.health_socket = health_socket  #: where its worker serves health and metrics
        self.engine = ""  #: its kind, once that is known
        self._runs_code = False
        self.worker_id = f"{app}-{slot}-{os.getpid()}"
        self._state: ReportState = "starting"
        self._phase = "fetch"
        self._message = ""
        self._is_final = False
        self._tenants: tuple[str, ...] = ()
        self._card: ModelCard | None = None
        self._uses = Uses()
        self._process: asyncio.subprocess.Process | None = None
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._draining = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"instance {app} {slot}")

    @property
    def is_over(self) -> bool:
        """Whether it takes no room any more."""
        return self._task.done()

    @property
    def report(self) -> SlotReport:
        """What to say of it."""
        return SlotReport(
            self.app, self.slot, self.digest, self._state, self._phase, self._message,
            self._is_final, self._card, self.since, self._tenants,
        )  # fmt: skip

    def drain(self) -> None:
        """Finish what runs, then end."""
        self._draining.set()

    def kill(self) -> None:
        self.drain()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def close(self) -> None:
        """Drain, and wait until it has ended."""
        self.drain()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            await self._live()
        except Exception as error:
            logger.exception("instance %s of %s failed", self.slot, self.app)
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            if self._process is not None and self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
            if self._warm is not None:
                await self._warm.stop()
            self._uses.close()
        if self._state != "failed":
            self._state = "gone"

    def _fail(self, message: str, *, is_final: bool = False) -> None:
        self._state, self._message, self._is_final = "failed", message[:500], is_final
        logger.warning("%s, slot %s: %s: %s", self.app, self.slot, self._phase, self._message)
        self._log(f"{self._phase}: {self._message}")

    async def _live(self) -> None:
        try:
            manifest, folder = await asyncio.to_thread(self._install, self.package, self._uses)
        except InstallError as error:
            self._fail(str(error))
            return
        self._phase = "install"
        try:
            packages = await asyncio.to_thread(self._make_packages, manifest, folder, self._uses)
        except InstallError as error:
            self._fail(str(error))
            return
        self._phase = "start"
        try:
            environment = self._environment(manifest, folder, packages)
        except EngineStartError as error:
            self._fail(str(error), is_final=True)
            return
        if self._draining.is_set():
            return
        try:
            self._process = await self._start(environment)
        except (BadEnvironment, SecretMissing) as error:
            self._fail(str(error), is_final=isinstance(error, BadEnvironment))
            return
        reading = asyncio.create_task(self._pass_on(self._process))
        ending = asyncio.create_task(self._process.wait())
        draining = asyncio.create_task(self._draining.wait())
        watching = asyncio.create_task(self._watch_memory(self._process))
        try:
            await self._start_and_watch(ending, draining)
            if not ending.done():
                await self._stop(ending)
            await asyncio.wait({reading}, timeout=1.0)
            if not self._draining.is_set() and self._state != "failed":
                code = ending.result()
                said = f": {self._lines[-1]}" if self._lines else ""
                await self._note_tenants()
                self._fail(describe_end(code) + said, is_final=code == os.EX_CONFIG)
        finally:
            for task in (reading, ending, draining, watching):
                task.cancel()

    async def _start(self, environment: dict[str, str]) -> asyncio.subprocess.Process:
        warm, self._warm = self._warm, None
        if warm is not None and warm.kind == self.engine and warm.is_alive:
            return await warm.become(environment)
        if warm is not None:
            await warm.stop()
        # Not by the worker's environment, which others of this user may read.
        variables = await asyncio.to_thread(self._variables) if self._runs_code else None
        handed = [hand_over(variables)] if variables and variables.all else []
        if handed:
            environment[VARIABLES_FD] = str(handed[0])
        try:
            return await start_process(
                "vlm", "worker", environment=environment, is_piped=True, pass_fds=handed
            )
        finally:
            for number in handed:
                os.close(number)

    async def _start_and_watch(
        self, ending: "asyncio.Task[int]", draining: "asyncio.Task[bool]"
    ) -> None:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self.spec.start_s
        while not (ending.done() or draining.done()):
            card = await self._find_card(self.worker_id)
            if card is not None:
                self._card, self._state, self._phase = card, "ready", "serve"
                await asyncio.wait({ending, draining}, return_when=asyncio.FIRST_COMPLETED)
                return
            if loop.time() > give_up_at:
                self._fail(f"not ready within {self.spec.start_s:g} s")
                return
            await asyncio.wait({ending, draining}, timeout=POLL_S)

    async def _watch_memory(self, process: asyncio.subprocess.Process) -> None:
        """End a model's processes when they take more than the deployment states; an engine that runs code does so."""
        limit = self.spec.resources.memory_bytes
        while limit and not self._runs_code:
            used = await asyncio.to_thread(used_bytes, process.pid)
            if used > limit and process.returncode is None:
                # One that has not served yet would do the same again.
                is_ready = self._state == "ready"
                await self._note_tenants()
                self._fail(too_much(used, limit, is_ready=is_ready), is_final=not is_ready)
                process.kill()
                return
            await asyncio.sleep(MEMORY_POLL_S)

    async def _note_tenants(self) -> None:
        """Find whose requests an instance that served ran at its end."""
        if self._state == "ready":
            model = version_name(self.app, self.digest)
            tenants = await self._find_tenants(model, self.worker_id)
            self._tenants = () if "" in tenants else tuple(sorted(tenants))

    async def _stop(self, ending: "asyncio.Task[int]") -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        await asyncio.wait({ending}, timeout=self._settings.worker.drain_s + GRACE_S)
        if not ending.done():
            logger.warning("%s, slot %s did not stop in time; killed", self.app, self.slot)
            self._process.kill()
            await ending

    async def _pass_on(self, process: asyncio.subprocess.Process) -> None:
        """Say what the worker says, and remember its last words."""
        assert process.stderr is not None
        while True:
            try:
                line = await process.stderr.readline()
            except ValueError:  # a line beyond the limit was dropped
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._lines.append(text[-300:])
            self._log(text)
            print(f"{self.app}: {text}", file=sys.stderr, flush=True)

    def _environment(
        self, manifest: Manifest, folder: Path, packages: Path | None
    ) -> dict[str, str]:
        """What the worker is told. Raises: EngineStartError."""
        values: dict[str, str] = {
            **self._engine(manifest, packages),
            "model": str(folder),
            "served_name": version_name(self.app, self.digest),
        }
        self.engine = kind_of(values)
        kind = find_kind(self.engine)
        if kind is None:
            raise EngineStartError(f"there is no engine {self.engine!r}")
        self._runs_code = kind.runs_code
        taken, resources = kind.load_settings().model_fields, self.spec.resources
        if "num_threads" in taken:
            values.setdefault("num_threads", str(max(1, round(resources.cpu))))
        if "memory_bytes" in taken:
            values["memory_bytes"] = str(resources.memory_bytes)
        worker = self._settings.worker.model_copy(
            update={
                "id": self.worker_id, "package": self._full_name(),
                "lora": (), "health_host": self.health_socket,
            }
        )  # fmt: skip
        changes: dict[str, Any] = {"engine": EngineValues.model_validate(values), "worker": worker}
        if url := self._settings.node.worker_redis_url:
            changes["redis"] = self._settings.redis.model_copy(update={"url": url})
        environment = child_environment(
            self._settings.model_copy(update=changes),
            WORKER_GROUPS,
            HUB_SECRETS if kind.runs_code else frozenset(),
        )
        if self.gpus:
            environment[VARIABLE] = ",".join(self.gpus)
        elif self.spec.resources.gpu == 0:
            environment[VARIABLE] = ""
        return environment

    def _full_name(self) -> str:
        """The package, and the version where its environment makes that another."""
        name = f"{self.app}@{self.package}"
        return (
            name if self.digest == self.package else f"{name}+{version_name('', self.digest)[1:]}"
        )

    def _engine(self, manifest: Manifest, packages: Path | None) -> dict[str, str]:
        """Which engine runs the package, and how."""
        config, resources = manifest.config, self.spec.resources
        if config.kind == "model":
            return config.engine
        return {
            "kind": APPLICATION_KIND,
            "entry": config.entry,
            "command": json.dumps(config.command),
            "network": str(config.network),
            "packages": str(packages or ""),
            "start_s": str(self.spec.start_s),
            "uses_gpu": str(resources.gpu > 0),
            "isolation": self._settings.node.isolation,
        }
