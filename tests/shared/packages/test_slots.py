"""Many nodes claim many slots by the real script on a real Redis. SLOTS=1000 prints what that costs it."""

import asyncio
import os
import time

from shared.packages import rollout
from shared.packages.deployment_state import DeploymentState
from shared.packages.deployments import Resources, Spec
from shared.packages.rollout import App, NodeRecord, Revision, Slot, SlotReport
from shared.redis.client import create_redis
from shared.settings.tree import RedisSettings
from tests.waiting import until

NUM_SLOTS = int(os.environ.get("SLOTS", "60"))
SLOTS_PER_APP = 100
SLOTS_PER_NODE = 10
DIGEST = f"sha256:{'a' * 64}"
SPEC = Spec(max_instances=SLOTS_PER_APP)


class Node:
    """What `NodeAgent` does in a tick, without processes."""

    def __init__(self, deployments: DeploymentState, name: str) -> None:
        self.deployments, self.name = deployments, name
        self.held: dict[tuple[str, int], SlotReport] = {}
        self.num_lost = 0

    @property
    def record(self) -> NodeRecord:
        return NodeRecord(self.name, SLOTS_PER_NODE, 0, 0, slots=tuple(self.held.values()))

    async def tick(self) -> None:
        now = await self.deployments.now()
        await self.deployments.announce(self.record, 60.0)
        for name, app in sorted((await self.deployments.apps()).items()):
            free = Resources(SLOTS_PER_NODE - len(self.held))
            found = rollout.find_claimable(app, self.record, free, now)
            if not found:
                continue
            claimed = await self.deployments.claim(name, [slot.id for slot in found], self.name)
            if claimed is None:
                self.num_lost += 1
            else:
                self.held[name, claimed] = SlotReport(name, claimed, DIGEST, "ready")


async def test_every_slot_is_taken_once(redis_server, redis_prefix):
    redis = create_redis(RedisSettings(url=redis_server, key_prefix=redis_prefix))
    deployments = DeploymentState(redis, redis_prefix)
    wanted = tuple(Slot(number, DIGEST) for number in range(min(NUM_SLOTS, SLOTS_PER_APP)))
    num_apps = max(1, NUM_SLOTS // SLOTS_PER_APP)
    for number in range(num_apps):
        app = App(f"app{number}", 1, active=Revision(1, DIGEST, SPEC), slots=wanted)
        assert await deployments.put(None, app)
    nodes = [Node(deployments, f"node{n}") for n in range(-(-NUM_SLOTS // SLOTS_PER_NODE))]

    async def cost() -> tuple[float, float, int]:
        cpu, stats = await redis.info("cpu"), await redis.info("stats")
        used = cpu["used_cpu_user"] + cpu["used_cpu_sys"]
        return time.monotonic(), used, stats["total_commands_processed"]

    began, num_ticks = await cost(), 0
    while sum(len(node.held) for node in nodes) < num_apps * len(wanted):
        await asyncio.gather(*(node.tick() for node in nodes))
        num_ticks += 1
    ended = await cost()
    keys = [key for node in nodes for key in node.held]
    assert len(keys) == len(set(keys)) == num_apps * len(wanted)
    records = {node.name: node.record for node in nodes}
    for name, app in (await deployments.apps()).items():
        after, _ = rollout.advance(app, records, {}, await deployments.now())
        assert len(after.slots) == len(wanted)
        assert all(
            (name, slot.id) in next(n for n in nodes if n.name == slot.node).held
            for slot in after.slots
        )
    if NUM_SLOTS >= 1000:
        resting = await cost()
        for _ in range(4):
            await asyncio.gather(*(node.tick() for node in nodes))
        rested = await cost()
        seconds, redis_s = (b - a for a, b in zip(began[:2], ended[:2], strict=True))
        idle_s, idle_redis_s = (b - a for a, b in zip(resting[:2], rested[:2], strict=True))
        num_lost = sum(node.num_lost for node in nodes)
        print(
            f"\n{len(keys)} slots of {num_apps} deployments, {len(nodes)} nodes: {num_ticks} ticks, "
            f"{len(keys) / seconds:.0f} claims/s, {len(keys) / redis_s:.0f} for each second of "
            f"Redis's CPU, {num_lost} claims lost to others; at rest, two ticks a second of all nodes "
            f"take {100 * idle_redis_s / 2:.1f} % of a core of Redis ({idle_s / 4:.2f} s a tick here)"
        )
    await deployments.close()
    await redis.aclose()


async def test_a_claim_that_is_not_renewed_counts_no_more(redis_server, redis_prefix, monkeypatch):
    redis = create_redis(RedisSettings(url=redis_server, key_prefix=redis_prefix))
    deployments = DeploymentState(redis, redis_prefix)
    assert [await deployments.claim("n", [7, 8], node) for node in ("one", "two")] == [7, 8]
    assert await deployments.claim("n", [7, 8], "three") is None
    assert await deployments.claim("other", [7, 8], "three") == 7
    monkeypatch.setattr("shared.packages.deployment_state.CLAIM_S", 0.05)
    await until(lambda: deployments.claim("n", [7, 8], "three"))
    await deployments.close()
    await redis.aclose()
