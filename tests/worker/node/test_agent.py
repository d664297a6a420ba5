"""Two real nodes on one Redis and one store. Only their instances are simulated."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar
from unittest.mock import AsyncMock, Mock

import pytest

from shared.packages import rollout
from shared.packages.deployment_state import DeploymentState
from shared.packages.deployments import Generation, Resources, Spec, record_generation, version_name
from shared.packages.rollout import App, Revision, Slot, SlotReport
from shared.packages.store import FileStore, blob_key
from shared.protocol import ModelCard
from shared.queue.api import QueueUnavailable
from shared.queue.gateway import RedisGatewayQueue
from shared.queue.keys import RedisKeys
from shared.queue.registry import Registry, WorkerRecord
from shared.redis.client import create_redis
from shared.settings.tree import DeploySettings, RedisSettings, Settings
from tests.factories_queue import enqueue, make_request
from tests.waiting import until, until_equal
from tests.worker.node.test_install import add
from worker.node import agent as agents
from worker.node.agent import NodeAgent
from worker.node.install import InstallError
from worker.node.instance import Instance

WITHIN_S = 30.0


class FakeInstance:
    """Is ready immediately, unless its package is in `failing` or `loading`; stops as soon as it is drained."""

    failing: ClassVar[set[str]] = set()
    loading: ClassVar[set[str]] = set()
    all: ClassVar[list["FakeInstance"]] = []

    def __init__(self, *, app: str, slot: Slot, revision: Revision, gpus: list[str], **_: Any):
        self.slot, self.revision, self.gpus, self.digest = slot, revision, gpus, slot.digest
        self.key = (app, slot.id)
        self.engine = "mock"
        self.state: Any = "failed" if slot.digest in self.failing else "ready"
        if slot.digest in self.loading:
            self.state = "starting"
        self.all.append(self)

    @property
    def is_over(self) -> bool:
        return self.state in ("failed", "gone")

    @property
    def report(self) -> SlotReport:
        app, slot = self.key
        card = ModelCard(f"{app}@{self.digest[7:19]}", 1, 10, 10)
        return SlotReport(app, slot, self.digest, self.state, "start", "exit code 1", card=card)

    def drain(self) -> None:
        self.state = "gone"

    async def close(self) -> None:
        self.drain()


class Machines:
    """Nodes that run until the test kills them."""

    def __init__(self, settings: Settings, store: FileStore, deployments: DeploymentState) -> None:
        self.settings, self.store, self.deployments = settings, store, deployments
        self.running: dict[str, tuple[NodeAgent, asyncio.Task[None]]] = {}

    def start(self, name: str, gpus: list[str] | None = None, **room: Any) -> NodeAgent:
        room = {"cpu": 8.0, "memory_bytes": 10**9, **room}
        deploy = self.settings.deploy.model_copy(update={"node_id": name, **room})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(agents, "find_gpus", lambda _: gpus or [])
            agent = NodeAgent(self.settings.model_copy(update={"deploy": deploy}), tick_s=0.02)
        self.running[name] = agent, asyncio.create_task(agent.run())
        return agent

    async def kill(self, name: str) -> None:
        """Stops a node without cleanup, as `kill -9` does."""
        agent, task = self.running.pop(name)
        agent.tick = lambda: asyncio.sleep(3600)  # type: ignore[method-assign]
        task.cancel()
        await asyncio.wait({task})

    def add_package(self, text: str) -> str:
        return add(self.store, {"config.json": text.encode()})

    def deploy(self, digest: str, number: int = 1, **spec: Any) -> None:
        """Records a deployment in the store, where the nodes read it."""
        record_generation(self.store, Generation("n", number, digest, Spec(**spec)))

    async def wait(self, is_so: Callable[[App], Any]) -> App:
        async def found() -> App | None:
            app = (await self.deployments.apps()).get("n")
            return app if app is not None and is_so(app) else None

        return await until(found, WITHIN_S)

    async def nodes(self) -> set[str]:
        return set(await self.deployments.nodes())

    async def active(self, name: str) -> dict[str, App] | None:
        """Returns all applications once the named one has an active version."""
        apps = await self.deployments.apps()
        return apps if name in apps and apps[name].active is not None else None


@pytest.fixture
async def machines(redis_server, redis_prefix, tmp_path, monkeypatch) -> AsyncIterator[Machines]:
    monkeypatch.setattr(agents, "Instance", FakeInstance)
    monkeypatch.setattr(agents, "SYNC_S", 0.1)
    monkeypatch.setattr(agents, "SYNC_EMPTY_S", 0.1)
    monkeypatch.setattr(agents, "RECORD_TTL_S", 2.0)
    monkeypatch.setattr(rollout, "SETTLE_S", 0.2)
    monkeypatch.setattr("os.fsync", lambda _: None)
    monkeypatch.setattr(FakeInstance, "failing", set())
    monkeypatch.setattr(FakeInstance, "loading", set())
    monkeypatch.setattr(FakeInstance, "all", [])
    store = FileStore(tmp_path / "store")
    settings = Settings().model_copy(
        update={
            "redis": RedisSettings(url=redis_server, key_prefix=redis_prefix),
            "deploy": DeploySettings(store=store.url, cache_dir=str(tmp_path / "cache")),
        }
    )
    redis = create_redis(settings.redis)
    machines = Machines(settings, store, DeploymentState(redis, redis_prefix))
    yield machines
    for agent, _ in machines.running.values():
        agent.stop()
    await asyncio.gather(*(task for _, task in machines.running.values()))
    await machines.deployments.close()
    await redis.aclose()


def nodes_of(app: App) -> list[str]:
    return sorted(slot.node for slot in app.slots if slot.state == "ready")


async def test_an_instance_is_placed_where_it_fits_and_gets_its_gpu(machines):
    machines.start("small", cpu=1.0)
    machines.start("large", ["7"], cpu=4.0)
    machines.deploy(machines.add_package("{}"), min_instances=1, resources=Resources(cpu=2, gpu=1))
    app = await machines.wait(lambda app: app.active is not None)
    assert nodes_of(app) == ["large"]
    [instance] = FakeInstance.all
    assert instance.gpus == ["7"]
    # There is no second GPU, so the second slot waits and no instance is restarted.
    spec = Spec(min_instances=2, resources=Resources(cpu=2, gpu=1))
    record_generation(machines.store, Generation("n", 2, instance.digest, spec, "scale"))
    app = await machines.wait(lambda app: len(app.slots) == 2)
    for _ in range(20):
        await machines.running["large"][0].tick()
    assert nodes_of((await machines.deployments.apps())["n"]) == ["large"]
    assert len(FakeInstance.all) == 1


async def test_instances_are_spread_and_each_slot_is_claimed_once(machines):
    for name in ("one", "two", "three"):
        machines.start(name, cpu=2.0)
    machines.deploy(machines.add_package("{}"), min_instances=6, max_instances=6)
    app = await machines.wait(lambda app: len(nodes_of(app)) == 6)
    assert nodes_of(app) == ["one", "one", "three", "three", "two", "two"]
    keys = [instance.key for instance in FakeInstance.all]
    assert len(keys) == len(set(keys)) == 6


@pytest.mark.parametrize("is_killed", [True, False])
async def test_a_rollout_continues_when_the_loading_node_leaves(machines, is_killed):
    """A node is killed or stopped while it loads the new version; the other node loads it instead."""
    old, new = machines.add_package("{}"), machines.add_package("[]")
    machines.start("one", cpu=2.0)
    machines.deploy(old, min_instances=1)
    await machines.wait(lambda app: app.active is not None)
    machines.start("two", cpu=2.0)
    await until_equal(machines.nodes, {"one", "two"})
    FakeInstance.loading.add(new)
    machines.deploy(new, 2, min_instances=1)

    def loads_at(app: App) -> str:
        return next((s.node for s in app.slots if s.digest == new and s.state == "starting"), "")

    first = loads_at(await machines.wait(loads_at))
    if is_killed:
        await machines.kill(first)
    else:
        agent, task = machines.running.pop(first)
        agent.stop()
        await asyncio.wait_for(task, WITHIN_S)
    app = await machines.wait(lambda app: loads_at(app) not in ("", first))
    assert app.active is not None
    assert app.active.digest == old
    for instance in FakeInstance.all:
        if instance.state == "starting":
            instance.state = "ready"
    app = await machines.wait(lambda app: app.active.digest == new and not app.retiring)
    assert app.active is not None
    assert app.active.num_failed == 0
    assert nodes_of(app) == [{"one": "two", "two": "one"}[first]]


@asynccontextmanager
async def nothing_freed_or_loaded_twice(machines: Machines) -> AsyncIterator[None]:
    """Runs the block with two nodes and four instances, and checks them afterwards."""
    machines.start("one", cpu=2.0)
    machines.start("two", cpu=2.0)
    machines.deploy(machines.add_package("{}"), min_instances=4, resources=Resources(cpu=1))
    before = await machines.wait(lambda app: len(nodes_of(app)) == 4)
    yield
    await until_equal(machines.nodes, {"one", "two"})
    after = await machines.wait(lambda app: len(nodes_of(app)) == 4)
    assert {slot.id for slot in after.slots} == {slot.id for slot in before.slots}
    assert len(FakeInstance.all) == 4


async def test_a_store_that_hangs_frees_no_slot_and_loads_nothing_twice(machines, monkeypatch):
    hanging, released = threading.Barrier(3, timeout=WITHIN_S), threading.Event()

    def hang(_: object) -> dict[str, int]:
        hanging.wait()
        released.wait(WITHIN_S)
        return {}

    async with nothing_freed_or_loaded_twice(machines):
        monkeypatch.setattr(agents, "last_numbers", hang)
        await asyncio.to_thread(hanging.wait)
        ends_at = time.monotonic() + 2 * agents.RECORD_TTL_S
        while time.monotonic() < ends_at:
            assert await machines.nodes() == {"one", "two"}
            await asyncio.sleep(0.1)
        monkeypatch.setattr(agents, "last_numbers", lambda _: {"n": 1})
        released.set()


async def test_a_redis_that_pauses_frees_no_slot_and_loads_nothing_twice(machines, redis):
    pause_s = 2 * agents.RECORD_TTL_S
    async with nothing_freed_or_loaded_twice(machines):
        await redis.execute_command("CLIENT", "PAUSE", round(1000 * pause_s))
        await asyncio.sleep(pause_s + agents.RECORD_TTL_S)  # until node records expire


async def test_an_instance_that_is_stopped_does_not_finish_its_download():
    def install(package, uses):
        while not uses.is_over:
            time.sleep(0.01)
        raise InstallError("interrupted")

    wanted: Any = {"slot": Slot(1, "x"), "revision": Revision(1, "x", Spec()), "gpus": []}
    node = Mock(install=install)
    instance = Instance(node=node, app="n", since=0.0, health_socket="", **wanted)
    await asyncio.sleep(0.1)
    await asyncio.wait_for(instance.close(), WITHIN_S)
    assert instance.report.state == "gone"  # not a failure of the version


async def test_a_request_to_a_version_that_cannot_start_fails(machines, redis, redis_prefix):
    machines.start("one")
    digest = machines.add_package("{}")
    machines.deploy(digest, min_instances=0)
    await machines.wait(lambda app: app.active is not None)
    FakeInstance.failing.add(digest)
    for instance in FakeInstance.all:
        instance.state = "failed"
    queue = RedisGatewayQueue(redis, redis_prefix)
    request = make_request(model=version_name("n", digest))
    await enqueue(queue, request)

    async def has_failed() -> bool:
        state = await queue.state(request.model, request.id)
        assert state is not None
        return state.state == "failed"

    await until(has_failed)
    await queue.close()


async def test_a_shard_that_is_down_blocks_no_rollout(machines):
    node = machines.start("one")
    node._queue.fail_all = AsyncMock(side_effect=QueueUnavailable("the shard is down"))
    bad, good = machines.add_package("{}"), machines.add_package("[]")
    FakeInstance.failing.add(bad)
    machines.deploy(bad, retry_limit=0)
    await until(lambda: node._queue.fail_all.called)
    record_generation(machines.store, Generation("z", 1, good, Spec(min_instances=1)))
    await until(lambda: machines.active("z"))


async def test_requests_of_other_workers_do_not_fail_as_nodes_retire(machines, redis, redis_prefix):
    machines.start("one")
    old, new = machines.add_package("{}"), machines.add_package("[]")
    machines.deploy(old, min_instances=1, retry_limit=0)
    await machines.wait(lambda app: app.active is not None)
    registry, queue = Registry(redis, redis_prefix), RedisGatewayQueue(redis, redis_prefix)
    card = ModelCard(version_name("n", old), 1, 10, 10)
    await registry.announce(WorkerRecord("n-3f2a-pod-1-abcdef", card, "mock"), ttl_s=60)
    FakeInstance.failing.add(old)
    for instance in FakeInstance.all:
        instance.state = "failed"
    request = make_request(model=card.name)
    await enqueue(queue, request)
    machines.deploy(new, 2, min_instances=1)
    await machines.wait(lambda app: app.active.digest == new and not app.retiring)
    state = await queue.state(request.model, request.id)
    assert state is not None
    assert state.state != "failed"
    for part in (registry, queue):
        await part.close()


@pytest.mark.parametrize("is_collected", [False, True])
async def test_a_failing_version_is_rolled_back_unless_the_earlier_one_is_gone(
    machines, is_collected
):
    machines.start("one")
    for number, text in enumerate(("{}", "[]"), 1):
        machines.deploy(machines.add_package(text), number, min_instances=1, retry_limit=0)
        app = await machines.wait(lambda app, n=number: app.num_promoted == n and not app.retiring)
        if is_collected and number == 1:
            machines.store.delete(blob_key(app.active.digest))
    FakeInstance.all[-1].state = "failed"
    await machines.wait(lambda app: app.active.num_failed or app.number == 3)
    keys = machines.store.list("deployments/n")
    assert ("deployments/n/00000003.json" in keys) is not is_collected


async def test_records_of_a_newer_release_are_kept_and_other_apps_managed(
    machines, redis_prefix, monkeypatch
):
    monkeypatch.setattr(agents, "UNKNOWN_S", 0.0)
    node = machines.start("one")
    machines.deploy(machines.add_package("{}"), min_instances=1)
    await machines.wait(lambda app: app.active is not None)
    [instance] = FakeInstance.all
    newer = b'{"name":"n","number":2,"digest":"sha256:%s","spec":{"newer":1}}' % (b"0" * 64)
    machines.store.put_if_absent("deployments/n/00000002.json", newer)
    redis = create_redis(machines.settings.redis)
    key = RedisKeys(redis_prefix).apps
    record = b'9 {"name":"n","active":{"number":2,"digest":"x","spec":{"newer":1}}}'
    await redis.hset(key, "n", record)
    other = Generation("z", 1, machines.add_package("[]"), Spec(min_instances=1))
    record_generation(machines.store, other)
    await until(lambda: machines.active("z"))
    for _ in range(3):
        await node.tick()
    assert instance.state == "ready"
    assert await redis.hget(key, "n") == record
    await redis.aclose()
    instance.state = "failed"  # as recorded by nodes that can read the record

    async def is_forgotten() -> bool:
        [record] = (await machines.deployments.nodes()).values()
        return "n" not in {slot.app for slot in record.slots}

    await until(is_forgotten)


async def test_apps_with_damaged_records_keep_running_and_others_are_managed(machines, caplog):
    node = machines.start("one")
    digest = machines.add_package("{}")
    machines.deploy(digest, min_instances=1, retry_limit=0)
    before = await machines.wait(lambda app: app.active is not None)
    machines.store.put_if_absent("deployments/n/00000002.json", b"{")
    machines.store.put_if_absent("deployments/a/00000001.outcome.json", b"{")
    unsettled = Generation("a", 1, digest, Spec(min_instances=1))
    now = await machines.deployments.now()
    await machines.deployments.put(None, rollout.admit(App("a"), unsettled, now))
    [instance] = FakeInstance.all
    instance.state = "failed"  # a rollback is due, but the history is unreadable
    after = await machines.wait(lambda app: nodes_of(app) and app.slots != before.slots)
    assert after.active.num_failed == 1
    record_generation(machines.store, Generation("z", 1, digest, Spec(min_instances=1)))
    apps = await until(lambda: machines.active("z"))
    assert apps["a"].candidate is not None
    for _ in range(3):
        await node.tick()
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == len(set(said)) > 1  # not logged at every tick
