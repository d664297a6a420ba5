"""One instance of a deployment on this node: installs the package, starts, watches and drains the worker."""

import asyncio
import logging
import os
import re
import signal
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engines.base import EngineStartError
from shared.packages.deployments import BadEnvironment, version_name
from shared.packages.manifest import Manifest
from shared.packages.rollout import ReportState, Revision, Slot, SlotReport
from shared.protocol import ModelCard
from worker.node.cache import Uses
from worker.node.environment import SecretMissing, hand_over
from worker.node.install import VARIABLES_FD, InstallError, PackagedWorker
from worker.node.resources import VARIABLE, too_much, used_bytes
from worker.node.standby import WarmProcess
from worker.node.supervisor import describe_end, end_process, send, start_process

if TYPE_CHECKING:
    from worker.node.agent import NodeAgent

GRACE_S = 5.0
POLL_S = 0.2
MEMORY_POLL_S = 0.5
_LAST_LINES = 5

logger = logging.getLogger(__name__)


def is_of_node(app: str, worker_id: str) -> bool:
    return re.fullmatch(rf"{re.escape(app)}-\d+-\d+", worker_id) is not None


@dataclass(kw_only=True, eq=False)
class Instance:
    """A worker process of one package. Failures are in `report`, never raised."""

    node: "NodeAgent"
    app: str
    slot: Slot
    revision: Revision
    since: float
    gpus: list[str]
    health_socket: str  #: where the worker serves health and metrics
    warm: WarmProcess | None = None

    def __post_init__(self) -> None:
        self.engine = ""  #: the engine's kind, once known
        self._runs_code = False
        self._package = self.revision.package or self.slot.digest
        self.worker_id = f"{self.app}-{self.slot.id}-{os.getpid()}"
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
        self._task = asyncio.create_task(self._run(), name=f"instance {self.app} {self.slot.id}")

    @property
    def is_over(self) -> bool:
        """Whether its resources are free."""
        return self._task.done()

    @property
    def report(self) -> SlotReport:
        return SlotReport(
            self.app, self.slot.id, self.slot.digest, self._state, self._phase, self._message,
            self._is_final, self._card, self.since, self._tenants,
        )  # fmt: skip

    def drain(self) -> None:
        """Finish the running requests, then end; a running download is aborted."""
        self._uses.is_over = True
        self._draining.set()

    def kill(self) -> None:
        self.drain()
        send(self._process, signal.SIGKILL)

    async def close(self) -> None:
        self.drain()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            await self._live()
        except Exception as error:
            logger.exception("instance %s of %s failed", self.slot.id, self.app)
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            if self._process is not None:
                send(self._process, signal.SIGKILL)
                await self._process.wait()
            if self.warm is not None:
                await self.warm.stop()
            self._uses.close()
        if self._state != "failed":
            self._state = "gone"

    def _log(self, text: str) -> None:
        self.node.log(self.app, self.slot.id, text)

    def _fail(self, message: str, *, is_final: bool = False) -> None:
        self._state, self._message, self._is_final = "failed", message[:500], is_final
        logger.warning("%s, slot %s: %s: %s", self.app, self.slot.id, self._phase, self._message)
        self._log(f"{self._phase}: {self._message}")

    async def _live(self) -> None:
        node, uses = self.node, self._uses
        try:
            manifest, folder = await asyncio.to_thread(node.install, self._package, uses=uses)
            self._phase = "install"
            packages = await asyncio.to_thread(node.make_packages, manifest, folder, uses)
            self._phase = "start"
            environment = self._environment(manifest, folder, packages)
            if self._draining.is_set():
                return
            self._process = await self._start(environment)
        except (InstallError, EngineStartError, BadEnvironment, SecretMissing) as error:
            if not self._draining.is_set():
                is_final = isinstance(error, EngineStartError | BadEnvironment)
                self._fail(str(error), is_final=is_final)
            return
        reading = asyncio.create_task(self._pass_on(self._process))
        ending = asyncio.create_task(self._process.wait())
        draining = asyncio.create_task(self._draining.wait())
        watching = asyncio.create_task(self._watch_memory(self._process))
        try:
            await self._start_and_watch(ending, draining)
            if not ending.done():
                within_s = node.settings.worker.drain_s + GRACE_S
                await end_process(self._process, within_s, f"{self.app}, slot {self.slot.id}")
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
        # Passed in a file, because other processes of this user can read a worker's environment.
        handed: list[int] = []
        if self._runs_code:
            read = self.node.secrets.read
            variables = await asyncio.to_thread(read, self.revision.environment)
            if variables.all:
                handed = [hand_over(variables)]
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
        give_up_at = loop.time() + self.revision.spec.start_s
        while not (ending.done() or draining.done()):
            card = await self.node.find_card(self.worker_id)
            if card is not None:
                self._card, self._state, self._phase = card, "ready", "serve"
                await asyncio.wait({ending, draining}, return_when=asyncio.FIRST_COMPLETED)
                return
            if loop.time() > give_up_at:
                self._fail(f"not ready within {self.revision.spec.start_s:g} s")
                return
            await asyncio.wait({ending, draining}, timeout=POLL_S)

    async def _watch_memory(self, process: asyncio.subprocess.Process) -> None:
        """Kill a model's worker beyond its memory limit; engines that run code enforce their own limit."""
        limit = self.revision.spec.resources.memory_bytes
        while limit and not self._runs_code:
            used = await asyncio.to_thread(used_bytes, process.pid)
            if used > limit and process.returncode is None:
                # If it has exceeded the limit while loading, another start would do so too.
                is_ready = self._state == "ready"
                await self._note_tenants()
                self._fail(too_much(used, limit, is_ready=is_ready), is_final=not is_ready)
                process.kill()
                return
            await asyncio.sleep(MEMORY_POLL_S)

    async def _note_tenants(self) -> None:
        """Find the tenants whose requests a ready instance was running at its end."""
        if self._state == "ready":
            model = version_name(self.app, self.slot.digest)
            tenants = await self.node.find_tenants(model, self.worker_id)
            self._tenants = () if "" in tenants else tuple(sorted(tenants))

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
            self._log(text)
            print(f"{self.app}: {text}", file=sys.stderr, flush=True)

    def _environment(
        self, manifest: Manifest, folder: Path, packages: Path | None
    ) -> dict[str, str]:
        """The environment of the worker. Raises: EngineStartError."""
        worker = PackagedWorker(
            name=self.app, package=self._package, version=self.slot.digest,
            manifest=manifest, folder=folder, packages=packages,
            resources=self.revision.spec.resources, start_s=self.revision.spec.start_s,
        )  # fmt: skip
        self.engine, self._runs_code = worker.engine, worker.runs_code
        settings = self.node.settings
        url = settings.node.worker_redis_url or settings.redis.url
        settings = settings.changed(redis={"url": url})
        own = {"id": self.worker_id, "health_host": self.health_socket}
        environment = worker.environment(settings, **own)
        if self.gpus:
            environment[VARIABLE] = ",".join(self.gpus)
        elif self.revision.spec.resources.gpu == 0:
            environment[VARIABLE] = ""
        return environment
