"""`vlm node`: claims slots of deployments, runs their instances, and advances rollouts.

There is no leader. Nodes change the record of a deployment by compare-and-set, and each second another node advances
it. Final decisions are written to the store before they are applied.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from secrets import token_hex
from tempfile import TemporaryDirectory
from zlib import crc32

from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from redis.exceptions import RedisError

from engines.application.sandbox import check_isolation
from engines.base import EngineStartError
from engines.child_process import hide_process
from engines.registry import engine_kinds
from shared.packages import rollout
from shared.packages.deployment_state import MAX_LOG_LINES, DeploymentState
from shared.packages.deployments import (
    Conflict,
    Resources,
    Unreadable,
    last_numbers,
    read_history,
    record_generation,
    settle,
    version_name,
)
from shared.packages.rollout import App, Load, LogLine, NodeRecord, Revision, Slot
from shared.packages.store import PackageStore, StoreError, open_store
from shared.process import cancel, on_stop_signal, resolve_structs, wait_for
from shared.protocol import ErrorCode, ModelCard
from shared.queue.api import QueueUnavailable
from shared.queue.registry import Registry, WorkerRecord
from shared.queue.shards import create_gateway_queue
from shared.redis.client import OutageLog, create_redis
from shared.settings.tree import Settings, SettingsError
from worker.health import HealthServer, collect_metrics
from worker.node.cache import open_cache
from worker.node.environment import Secrets
from worker.node.install import install, make_packages
from worker.node.instance import Instance, is_of_node
from worker.node.resources import find_gpus, room_bytes
from worker.node.standby import Standby

TICK_S = 0.5
#: A node without a heartbeat for this long is lost, and its instances are replaced.
RECORD_TTL_S = 30.0
#: Interval of comparisons between the store and Redis.
SYNC_S = 30.0
SYNC_EMPTY_S = 2.0
#: An instance without a slot in any record is stopped after this time, in which Redis may be restored.
UNKNOWN_S = 10.0
#: Attempts to find the tenants of an instance that ended.
TENANT_TRIES = 10
MAX_LOG_CHARS = 500  #: maximum length of a log line
_LOST_MESSAGE = (
    "No instance can answer the request: the instances that ran it ended, or none can start; retry."
)

logger = logging.getLogger(__name__)


class NodeAgent:
    def __init__(self, settings: Settings, *, tick_s: float = TICK_S) -> None:
        """Raises: SettingsError."""
        deploy = settings.deploy
        if not deploy.store:
            raise SettingsError(
                "VLM_DEPLOY__STORE: set the URL of the package store, such as file:///srv/packages"
            )
        try:
            self._store: PackageStore = open_store(deploy.store)
        except StoreError as error:
            raise SettingsError(f"VLM_DEPLOY__STORE: {error}") from None
        try:
            check_isolation(settings.node.isolation)
        except EngineStartError as error:
            raise SettingsError(str(error)) from None
        self.secrets = Secrets(settings.node)
        self.settings = settings
        self._tick_s = tick_s
        self.id = deploy.node_id or f"{socket.gethostname()}-{os.getpid()}-{token_hex(3)}"
        cache, hidden = open_cache(deploy), frozenset(settings.node.secrets)
        self.install = partial(install, self._store, cache=cache, signers=deploy.signers)
        self.make_packages = partial(make_packages, cache=cache, hidden=hidden)
        self._gpus = find_gpus(os.environ)
        self._room = Resources(
            deploy.cpu or float(os.cpu_count() or 1),
            deploy.memory_bytes or room_bytes(),
            len(self._gpus),
        )
        self._redis: Redis = create_redis(settings.redis)
        prefix = settings.redis.key_prefix
        self._deployments = DeploymentState(self._redis, prefix)
        self._registry = Registry(self._redis, prefix)
        self._queue = create_gateway_queue(settings.redis, self._redis)
        self._outage = OutageLog(settings.redis.address)
        self._instances: dict[tuple[str, int], Instance] = {}
        self._standby = Standby(hidden)
        self._engines: dict[str, str] = {}  # kinds of engines that ran here, by digest
        self._unknown_since: dict[tuple[str, int], float] = {}
        self._workers: list[WorkerRecord] = []
        self._logged: set[str] = set()
        self._unsent: dict[str, deque[LogLine]] = {}  # log lines of instances, by deployment
        self._synced_at = float("-inf")
        self._beaten_at = time.monotonic()
        self._trusts_at = 0.0  # from this time on, a node without a record counts as lost
        self._stopping = asyncio.Event()
        self._is_told_to_stop = False  # whether `stop` was called
        self._sockets = TemporaryDirectory(prefix="vlm-node-")

    def stop(self) -> None:
        """Claim no more slots, drain the instances, and end. A second call kills the instances."""
        if self._is_told_to_stop:
            self.kill()
        self._is_told_to_stop = True
        self._stopping.set()

    def kill(self) -> None:
        """Claim no more slots, kill the instances, and end."""
        self._stopping.set()
        for instance in self._instances.values():
            instance.kill()

    async def run(self) -> None:
        resolve_structs()
        logger.info("node %s: packages from %s", self.id, self._store.url)
        with contextlib.suppress(RedisError, OSError):  # the record of an earlier process
            await self._deployments.withdraw(self.id)
        beating = asyncio.create_task(self._keep_beating(), name="heartbeat")
        try:
            while not self._stopping.is_set():
                await self._try_tick()
                await wait_for(self._stopping, self._tick_s)
            await self._leave(beating)
        finally:
            beating.cancel()
            for part in (self._deployments, self._registry, self._queue):
                await part.close()
            await self._redis.aclose()
            self._sockets.cleanup()

    async def metrics(self) -> CollectorRegistry:
        return await collect_metrics(
            ({"application": each.app, "worker": each.worker_id}, each.health_socket)
            for each in self._instances.values()
            if not each.is_over
        )

    async def _try_tick(self) -> None:
        try:
            await self.tick()
        except (RedisError, QueueUnavailable, OSError) as error:
            self._outage.failed(error)
        except StoreError as error:
            logger.warning("%s", error)
        except Exception:
            logger.exception("cannot update the deployments")
        else:
            self._outage.succeeded()

    def _engine_at_rest(self, apps: Mapping[str, App]) -> str | None:
        """The engine of a deployment that has run here, has zero instances, and starts slowly."""
        self._engines |= {each.slot.digest: each.engine for each in self._instances.values()}
        for app in apps.values():
            if app.active is None or app.desired or not self.settings.deploy.standby:
                continue
            kind = engine_kinds().get(self._engines.get(app.active.digest, ""))
            if kind is not None and kind.preload is not None:
                return self._engines[app.active.digest]
        return None

    async def _keep_beating(self) -> None:
        """Send heartbeats, also while the package store is slow."""
        while True:
            try:
                await self._deployments.announce(self._record(), RECORD_TTL_S)
                if not self._stopping.is_set() and await self._deployments.is_told_to_drain(
                    self.id
                ):
                    logger.info("node %s: was asked to drain", self.id)
                    self._stopping.set()
            except (RedisError, OSError) as error:
                self._outage.failed(error)
            else:
                now = time.monotonic()
                # Other nodes may have lost Redis too: give them time to announce themselves again.
                if now - self._beaten_at > RECORD_TTL_S / 2:
                    self._trusts_at = now + RECORD_TTL_S
                self._beaten_at = now
            await asyncio.sleep(self._tick_s)

    async def _leave(self, beating: asyncio.Task[None]) -> None:
        await self._standby.keep(None)
        await asyncio.gather(*(each.close() for each in self._instances.values()))
        await cancel(beating)
        try:
            await self._send_logs()
            await self._deployments.withdraw(self.id)
        except (RedisError, OSError):
            logger.info("could not delete the node's record, which will expire")

    # One pass over all deployments

    async def tick(self) -> None:
        """Apply the records of all deployments, and claim slots. Raises: RedisError, StoreError."""
        now = await self._deployments.now()
        apps = await self._deployments.apps()
        await self._send_logs()
        self._sync_instances(apps)
        await self._standby.keep(self._engine_at_rest(apps))
        await self._sync(apps, now)
        if not apps:
            return
        nodes = await self._deployments.nodes()
        own = {name for name in apps if self._is_on_duty(name, nodes, now)}
        self._workers = await self._registry.workers() if own else []
        for name, app in sorted(apps.items()):
            if name in own:
                try:
                    app = await self._advance(app, nodes, now)
                except Unreadable as error:  # the other deployments continue
                    self._log_once(error)
            if app is not None and not self._stopping.is_set():
                await self._claim(app, nodes, now)

    def _record(self) -> NodeRecord:
        return NodeRecord(
            self.id, self._room.cpu, self._room.memory_bytes, self._room.gpu,
            self._stopping.is_set(), tuple(each.report for each in self._instances.values()),
            self.secrets.names,
        )  # fmt: skip

    def _is_on_duty(self, name: str, nodes: Mapping[str, NodeRecord], now: float) -> bool:
        names = sorted(nodes)
        return bool(names) and names[(int(now) + crc32(name.encode())) % len(names)] == self.id

    def _sync_instances(self, apps: Mapping[str, App]) -> None:
        """Drain instances whose slots were removed; drop ended instances that were reported."""
        for key, instance in list(self._instances.items()):
            if key[0] in self._deployments.unreadable:  # keep it until the record can be read
                # After this time, nodes that can read the record have recorded the end of the instance.
                if instance.is_over and self._unknown_s(key) > UNKNOWN_S:
                    self._forget(key)
                continue
            slots = apps[key[0]].slots if key[0] in apps else ()
            slot = next((each for each in slots if each.id == key[1]), None)
            # "": the record does not have this node's claim yet.
            if slot is not None and slot.node in ("", self.id):
                self._unknown_since.pop(key, None)
                if slot.state == "draining":
                    instance.drain()
            elif instance.is_over:
                self._forget(key)
            elif self._unknown_s(key) > UNKNOWN_S:
                instance.drain()

    def _unknown_s(self, key: tuple[str, int]) -> float:
        """Seconds since a readable record last had the instance."""
        now = time.monotonic()
        return now - self._unknown_since.setdefault(key, now)

    def _forget(self, key: tuple[str, int]) -> None:
        del self._instances[key]
        self._unknown_since.pop(key, None)

    async def _sync(self, apps: dict[str, App], now: float) -> None:
        """Copy generations that are missing in Redis from the store."""
        pause_s = SYNC_S if apps else SYNC_EMPTY_S
        if time.monotonic() - self._synced_at < pause_s:
            return
        self._synced_at = time.monotonic()
        numbers = await asyncio.to_thread(last_numbers, self._store)
        for name, number in numbers.items():
            app = apps.get(name)
            if app is not None and app.number >= number:
                continue
            try:
                history = await asyncio.to_thread(read_history, self._store, name)
            except Unreadable as error:
                self._log_once(error)
                continue
            if history is None or (app is None and not history.last.digest):
                continue
            if app is None:
                after = rollout.restore(
                    name, history.active, history.candidate, history.last.number, now
                )
            else:
                after = rollout.admit(app, history.last, now)
            written = await self._deployments.put(app, after)
            if written is not None:
                apps[name] = written
        if apps:
            await self._deployments.keep()

    async def _advance(self, app: App, nodes: Mapping[str, NodeRecord], now: float) -> App | None:
        """Advance a deployment. Returns its record; None if another node was first, or it was removed."""
        limits = await self._deployments.session_limits(app.name, now)
        digests = [revision.digest for revision in app.revisions]
        loads = {digest: await self._load(app.name, digest, limits) for digest in digests}
        trusts = time.monotonic() >= self._trusts_at
        after, outcome = rollout.advance(app, nodes, loads, now, trusts_absence=trusts)
        if outcome is not None and after.candidate is not None:
            number = after.candidate.number
            outcome = await asyncio.to_thread(settle, self._store, app.name, number, outcome)
            after = rollout.conclude(after, number, outcome, now)
            logger.info("%s: %s", app.name, after.events[-1].text)
        if rollout.is_failing(after, now):
            after = await self._roll_back(after, now)
        gone = [r.digest for r in app.retiring if after.revision(r.digest) is None]
        lost = rollout.find_lost(after, nodes, now) if trusts else ()
        others = [each for each in self._workers if not is_of_node(app.name, each.worker_id)]
        for digest in {*gone, *lost}:
            model = version_name(app.name, digest)
            if any(each.card.name == model for each in others):  # a worker outside nodes serves it
                continue
            # If a shard is down, `fail_all` raises, but fails requests of other shards. Those of the shard time out.
            with contextlib.suppress(QueueUnavailable):
                if num := await self._queue.fail_all(model, ErrorCode.WORKER_LOST, _LOST_MESSAGE):
                    logger.warning("%s: %d requests failed: no instance can run them", model, num)
            if digest in gone:
                await self._registry.forget(model)
        if after.state == "undeployed" and not after.slots and not after.retiring:
            await self._deployments.remove(app)
            return None
        return app if after == app else await self._deployments.put(app, after)

    async def _roll_back(self, app: App, now: float) -> App:
        """Roll back to the previous version, unless there is none or the deployment has changed meanwhile."""
        try:
            history = await asyncio.to_thread(read_history, self._store, app.name)
        except Unreadable as error:  # leave the deployment as it is
            self._log_once(error)
            return app
        active = app.active
        if history is None or active is None or history.last.number != app.number:
            return app
        back = history.before(active.digest)
        if back is None or await asyncio.to_thread(self._store.size, back.digest) is None:
            return app  # no earlier version, or its package was deleted after an undeploy
        generation = replace(history.back_to(back, active.spec), created_at=now)
        try:
            await asyncio.to_thread(record_generation, self._store, generation)
        except Conflict:
            return app
        logger.warning("%s: %s; rolling back to %s", app.name, app.message, back.version)
        return rollout.take_back(app, generation, now)

    def _log_once(self, error: Unreadable) -> None:
        """Log an unreadable record only once, because records never change."""
        if (text := str(error)) not in self._logged:
            self._logged.add(text)
            logger.error("%s", text)

    async def _load(self, name: str, digest: str, limits: tuple[int, int]) -> Load:
        model = version_name(name, digest)
        stats = await self._queue.stats(model)
        workers = [worker for worker in self._workers if worker.card.name == model]
        return Load(
            stats.num_open, stats.age_s,
            sum(worker.num_finished for worker in workers),
            sum(worker.num_failed for worker in workers),
            *limits, stats.is_whole,
        )  # fmt: skip

    async def _claim(self, app: App, nodes: Mapping[str, NodeRecord], now: float) -> None:
        found = rollout.find_claimable(app, self._record(), self._free(), now, nodes.values())
        if not found:
            return
        claimed = await self._deployments.claim(app.name, [slot.id for slot in found], self.id)
        for slot in found:
            if slot.id == claimed and (revision := app.revision(slot.digest)) is not None:
                self._start(app.name, slot, revision, now)

    def _free(self) -> Resources:
        taken = [each.revision.needs for each in self._instances.values() if not each.is_over]
        return Resources(
            self._room.cpu - sum(each.cpu for each in taken),
            self._room.memory_bytes - sum(each.memory_bytes for each in taken),
            self._room.gpu - sum(each.gpu for each in taken),
        )

    def _start(self, name: str, slot: Slot, revision: Revision, now: float) -> None:
        used = {gpu for each in self._instances.values() if not each.is_over for gpu in each.gpus}
        gpus = [gpu for gpu in self._gpus if gpu not in used][: revision.spec.resources.gpu]
        logger.info("%s: claims slot %d of %s", name, slot.id, slot.digest)
        self._instances[name, slot.id] = Instance(
            node=self, app=name, slot=slot, revision=revision, since=now, gpus=gpus,
            health_socket=f"{self._sockets.name}/{token_hex(6)}", warm=self._standby.take(),
        )  # fmt: skip

    def log(self, app: str, slot: int, text: str) -> None:
        """Buffer a line for Redis; the oldest are dropped while Redis is unavailable."""
        line = LogLine(time.time(), self.id, slot, text[:MAX_LOG_CHARS])  # noqa: TID251
        self._unsent.setdefault(app, deque(maxlen=MAX_LOG_LINES)).append(line)

    async def _send_logs(self) -> None:
        for app, lines in list(self._unsent.items()):
            if some := list(lines):
                await self._deployments.add_log(app, some)
                for _ in some:
                    lines.popleft()

    async def find_card(self, worker_id: str) -> ModelCard | None:
        try:
            worker = await self._registry.worker(worker_id)
        except (RedisError, OSError):
            return None
        return worker.card if worker is not None and worker.state == "ready" else None

    async def find_tenants(self, model: str, worker_id: str) -> frozenset[str]:
        for _ in range(TENANT_TRIES):
            with contextlib.suppress(QueueUnavailable):
                return await self._queue.crash_tenants(model, worker_id)
            await asyncio.sleep(TICK_S)
        return frozenset()


def run_agent(settings: Settings) -> int:
    """Run a node until a signal. Returns the exit code."""
    hide_process()
    try:
        asyncio.run(_run_until_signal(settings))
    except SettingsError as error:
        logger.critical("%s", error)
        return os.EX_CONFIG
    return 0


async def _run_until_signal(settings: Settings) -> None:
    if settings.redis.has_password and not settings.node.worker_redis_url:
        raise SettingsError(
            "VLM_NODE__WORKER_REDIS_URL: required because VLM_REDIS_URL holds a password, which the "
            "node's workers must not read; set it to the URL of the Redis user `worker`"
        )
    agent = NodeAgent(settings)
    server = HealthServer(lambda: True, lambda: True, agent.metrics)
    host, port = settings.node.metrics_host, settings.node.metrics_port
    await server.start(host, port, "VLM_NODE__METRICS_PORT")
    logger.info("node %s: metrics on port %d", agent.id, server.port)
    on_stop_signal(agent.stop)
    try:
        await agent.run()
    finally:
        await server.close()
