"""One instance of a deployment on this node: installs the package, starts, watches and drains the worker."""

import asyncio
import logging
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engines.application.child import Variables
from engines.base import EngineStartError
from shared.packages.deployments import Resources, Spec, version_name
from shared.packages.environment import BadEnvironment
from shared.packages.manifest import Manifest
from shared.packages.rollout import ReportState, SlotReport
from shared.protocol import ModelCard
from shared.settings.tree import Settings
from worker.node.cache import Uses
from worker.node.install import InstallError
from worker.node.package import VARIABLES_FD, PackagedWorker
from worker.node.resources import VARIABLE, too_much, used_bytes
from worker.node.secrets import SecretMissing, hand_over
from worker.node.standby import WarmProcess
from worker.node.supervisor import describe_end, start_process

GRACE_S = 5.0
POLL_S = 0.2
MEMORY_POLL_S = 0.5
_LAST_LINES = 5

logger = logging.getLogger(__name__)

Install = Callable[[str, Uses], tuple[Manifest, Path]]
#: Installs the Python packages of an application; returns their folder, if it has any.
MakePackages = Callable[[Manifest, Path, Uses], Path | None]
#: Finds the model card of a ready worker by its id.
FindCard = Callable[[str], Awaitable[ModelCard | None]]
#: Finds the tenants whose requests a worker was running when it ended, by its model and id.
FindTenants = Callable[[str, str], Awaitable[frozenset[str]]]


def is_of_node(app: str, worker_id: str) -> bool:
    return re.fullmatch(rf"{re.escape(app)}-\d+-\d+", worker_id) is not None


@dataclass(kw_only=True, eq=False)
class Instance:
    """A worker process of one package. Failures are in `report`, never raised."""

    app: str
    slot: int
    since: float
    digest: str
    package: str
    spec: Spec
    needs: Resources
    gpus: list[str]
    settings: Settings
    install: Install
    make_packages: MakePackages
    variables: Callable[[], Variables]
    find_card: FindCard
    find_tenants: FindTenants
    health_socket: str  #: where the worker serves health and metrics
    log: Callable[[str], None]
    warm: WarmProcess | None = None

    def __post_init__(self) -> None:
        self.engine = ""  #: its kind, once known
        self._runs_code = False
        self.worker_id = f"{self.app}-{self.slot}-{os.getpid()}"
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
        self._task = asyncio.create_task(self._run(), name=f"instance {self.app} {self.slot}")

    @property
    def is_over(self) -> bool:
        """Whether its resources are free."""
        return self._task.done()

    @property
    def report(self) -> SlotReport:
        return SlotReport(
            self.app, self.slot, self.digest, self._state, self._phase, self._message,
            self._is_final, self._card, self.since, self._tenants,
        )  # fmt: skip

    def drain(self) -> None:
        """Finish the running requests, then end."""
        self._draining.set()

    def kill(self) -> None:
        self.drain()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def close(self) -> None:
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
            if self.warm is not None:
                await self.warm.stop()
            self._uses.close()
        if self._state != "failed":
            self._state = "gone"

    def _fail(self, message: str, *, is_final: bool = False) -> None:
        self._state, self._message, self._is_final = "failed", message[:500], is_final
        logger.warning("%s, slot %s: %s: %s", self.app, self.slot, self._phase, self._message)
        self.log(f"{self._phase}: {self._message}")

    async def _live(self) -> None:
        try:
            manifest, folder = await asyncio.to_thread(self.install, self.package, self._uses)
            self._phase = "install"
            packages = await asyncio.to_thread(self.make_packages, manifest, folder, self._uses)
            self._phase = "start"
            environment = self._environment(manifest, folder, packages)
            if self._draining.is_set():
                return
            self._process = await self._start(environment)
        except (InstallError, EngineStartError, BadEnvironment, SecretMissing) as error:
            self._fail(str(error), is_final=isinstance(error, EngineStartError | BadEnvironment))
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
        warm, self.warm = self.warm, None
        if warm is not None and warm.kind == self.engine and warm.is_alive:
            return await warm.become(environment)
        if warm is not None:
            await warm.stop()
        # Not in the worker's environment, which other processes of this user can read.
        variables = await asyncio.to_thread(self.variables) if self._runs_code else None
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
            card = await self.find_card(self.worker_id)
            if card is not None:
                self._card, self._state, self._phase = card, "ready", "serve"
                await asyncio.wait({ending, draining}, return_when=asyncio.FIRST_COMPLETED)
                return
            if loop.time() > give_up_at:
                self._fail(f"not ready within {self.spec.start_s:g} s")
                return
            await asyncio.wait({ending, draining}, timeout=POLL_S)

    async def _watch_memory(self, process: asyncio.subprocess.Process) -> None:
        """Kill a model's worker beyond its memory limit; engines that run code enforce theirs."""
        limit = self.spec.resources.memory_bytes
        while limit and not self._runs_code:
            used = await asyncio.to_thread(used_bytes, process.pid)
            if used > limit and process.returncode is None:
                # Another start would fail the same way.
                is_ready = self._state == "ready"
                await self._note_tenants()
                self._fail(too_much(used, limit, is_ready=is_ready), is_final=not is_ready)
                process.kill()
                return
            await asyncio.sleep(MEMORY_POLL_S)

    async def _note_tenants(self) -> None:
        """Find the tenants whose requests a ready instance was running at its end."""
        if self._state == "ready":
            model = version_name(self.app, self.digest)
            tenants = await self.find_tenants(model, self.worker_id)
            self._tenants = () if "" in tenants else tuple(sorted(tenants))

    async def _stop(self, ending: "asyncio.Task[int]") -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        await asyncio.wait({ending}, timeout=self.settings.worker.drain_s + GRACE_S)
        if not ending.done():
            logger.warning("%s, slot %s did not stop in time; killed", self.app, self.slot)
            self._process.kill()
            await ending

    async def _pass_on(self, process: asyncio.subprocess.Process) -> None:
        """Forward the worker's stderr to the log, and keep its last lines."""
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
            self.log(text)
            print(f"{self.app}: {text}", file=sys.stderr, flush=True)

    def _environment(
        self, manifest: Manifest, folder: Path, packages: Path | None
    ) -> dict[str, str]:
        """The environment of the worker. Raises: EngineStartError."""
        worker = PackagedWorker(
            name=self.app, package=self.package, version=self.digest,
            manifest=manifest, folder=folder, packages=packages,
            resources=self.spec.resources, start_s=self.spec.start_s,
        )  # fmt: skip
        self.engine, self._runs_code = worker.engine, worker.runs_code
        url = self.settings.node.worker_redis_url or self.settings.redis.url
        settings = self.settings.changed(redis={"url": url})
        own = {"id": self.worker_id, "health_host": self.health_socket}
        environment = worker.environment(settings, **own)
        if self.gpus:
            environment[VARIABLE] = ",".join(self.gpus)
        elif self.spec.resources.gpu == 0:
            environment[VARIABLE] = ""
        return environment
