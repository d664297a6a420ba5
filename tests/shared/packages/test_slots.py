"""Many nodes claim many slots by the real script on a real Redis."""

import asyncio

from shared.packages import rollout
from shared.packages.deployment_state import DeploymentState
from shared.packages.deployments import Resources, Spec
from shared.packages.rollout import App, NodeRecord, Revision, Slot, SlotReport
from shared.redis.client import create_redis
from shared.settings.tree import RedisSettings
from tests.waiting import until

NUM_SLOTS = 60
SLOTS_PER_NODE = 10
DIGEST = f"sha256:{'a' * 64}"
SPEC = Spec(max_instances=NUM_SLOTS)


class Node:
    """What `NodeAgent` does in a tick, without processes."""

    def __init__(self, deployments: DeploymentState, name: str) -> None:
        self.deployments, self.name = deployments, name
        self.held: dict[tuple[str, int], SlotReport] = {}

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
            if claimed is not None:
                self.held[name, claimed] = SlotReport(name, claimed, DIGEST, "ready")


async def test_every_slot_is_taken_once(redis_server, redis_prefix):
    redis = create_redis(RedisSettings(url=redis_server, key_prefix=redis_prefix))
    deployments = DeploymentState(redis, redis_prefix)
    slots = tuple(Slot(number, DIGEST) for number in range(NUM_SLOTS))
    app = App("app", 1, active=Revision(1, DIGEST, SPEC), slots=slots)
    assert await deployments.put(None, app)
    nodes = [Node(deployments, f"node{n}") for n in range(NUM_SLOTS // SLOTS_PER_NODE)]

    while sum(len(node.held) for node in nodes) < NUM_SLOTS:
        await asyncio.gather(*(node.tick() for node in nodes))

    keys = [key for node in nodes for key in node.held]
    assert len(keys) == len(set(keys)) == NUM_SLOTS
    held = {node.name: node.held for node in nodes}
    records = {node.name: node.record for node in nodes}
    app = (await deployments.apps())["app"]
    after, _ = rollout.advance(app, records, {}, await deployments.now())
    assert len(after.slots) == NUM_SLOTS
    assert all(("app", slot.id) in held[slot.node] for slot in after.slots)
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
