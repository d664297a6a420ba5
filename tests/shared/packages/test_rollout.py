"""Rollouts with a simulated clock: which instances start and stop, and when the active version changes."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from shared.packages import rollout
from shared.packages.deployments import Environment, Generation, Outcome, Resources, Spec
from shared.packages.rollout import App, Load, NodeRecord, SlotReport
from shared.protocol import ModelCard

A, B, C = (f"sha256:{letter * 64}" for letter in "abc")
SPEC = Spec(min_instances=1, start_s=60)


@dataclass
class World:
    """A deployment, its nodes and the load; `behaviour` defines by digest how instances start."""

    app: App = field(default_factory=lambda: App("n"))
    rooms: dict[str, Resources] = field(default_factory=lambda: {"one": Resources(8)})
    loads: dict[str, Load] = field(default_factory=dict)
    behaviour: dict[str, str] = field(default_factory=dict)
    running: dict[int, tuple[str, SlotReport]] = field(default_factory=dict)
    now: float = 1000.0
    outcomes: list[tuple[int, Outcome]] = field(default_factory=list)
    least_ready: int = 1_000_000
    secrets: dict[str, tuple[str, ...]] = field(default_factory=dict)  #: by node
    stopping: str = ""  #: name of a node

    def deploy(self, digest: str, spec: Spec = SPEC, seconds: int = 0, **more: Any) -> Generation:
        new = Generation("n", self.app.number + 1, digest, spec, **more)
        self.app = rollout.admit(self.app, new, self.now)
        self.run(seconds)
        return new

    def nodes(self) -> dict[str, NodeRecord]:
        return {
            name: NodeRecord(
                name, room.cpu, room.memory_bytes, room.gpu, name == self.stopping,
                slots=tuple(report for node, report in self.running.values() if node == name),
                secrets=self.secrets.get(name, ()),
            )
            for name, room in self.rooms.items()
        }  # fmt: skip

    def free(self, name: str) -> Resources:
        room = self.rooms[name]
        taken = [
            self.app.revision(report.digest).spec.resources  # type: ignore[union-attr]
            for node, report in self.running.values()
            if node == name and report.state in ("starting", "ready")
            and self.app.revision(report.digest)
        ]  # fmt: skip
        return Resources(
            room.cpu - sum(t.cpu for t in taken), 0, room.gpu - sum(t.gpu for t in taken)
        )

    def step(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self.app, outcome = rollout.advance(self.app, self.nodes(), self.loads, self.now)
        if outcome is not None:
            assert self.app.candidate is not None
            number = self.app.candidate.number
            self.outcomes.append((number, outcome))
            self.app = rollout.conclude(self.app, number, outcome, self.now)
        self.run_nodes()
        if self.app.active is not None:
            self.least_ready = min(self.least_ready, self.num_ready(self.app.active.digest))

    def run_nodes(self) -> None:
        slots = {slot.id: slot for slot in self.app.slots}
        for number, (node, report) in list(self.running.items()):
            slot = slots.get(number)
            if slot is None or slot.node != node:
                del self.running[number]
            elif slot.state == "draining":
                self.running[number] = (node, replace(report, state="gone"))
            elif report.state == "starting":
                how = self.behaviour.get(report.digest, "works")
                if how == "works":
                    card = ModelCard("n@x", 1, 10, 10)
                    self.running[number] = (node, replace(report, state="ready", card=card))
                elif how == "start":
                    self.running[number] = (node, replace(report, phase=how))
                elif how == "crashes":
                    failed = replace(report, state="failed", phase="start", message="exit code 1")
                    self.running[number] = (node, failed)
        for name in self.rooms:
            node, others = self.nodes()[name], self.nodes().values()
            free = self.free(name)
            for slot in rollout.find_claimable(self.app, node, free, self.now, others)[:1]:
                report = SlotReport("n", slot.id, slot.digest, "starting", "fetch")
                self.running[slot.id] = (name, report)

    def run(self, seconds: int, loads: dict[str, Load] | None = None) -> None:
        self.loads = self.loads if loads is None else loads
        for _ in range(seconds):
            self.step()

    def fail(self, digest: str, *states: str, **changes: Any) -> None:
        """Makes the only instance of a version in one of these states fail while it serves."""
        [slot] = self.app.of(digest, *states)
        node, report = self.running[slot.id]
        failed = replace(report, state="failed", phase="serve", **changes)
        self.running[slot.id] = (node, failed)

    def num_ready(self, digest: str) -> int:
        return len(self.app.of(digest, "ready"))

    @property
    def active(self) -> str | None:
        return self.app.active.digest if self.app.active else None


@pytest.fixture
def world() -> World:
    """A world with version A active."""
    world = World()
    world.deploy(A, seconds=10)
    assert world.active == A
    world.least_ready = 1_000_000
    return world


@pytest.mark.parametrize("environment", [Environment(), Environment({"X": "1"})])
def test_an_update_starts_the_new_version_before_it_drains_the_old_one(world: World, environment):
    """This includes an update of only the environment."""
    world.loads = {A: Load(num_open=3)}
    package = A if environment.variables else B
    new = world.deploy(package, environment=environment)
    assert world.app.candidate is not None
    assert world.app.candidate.digest == new.version
    world.run(20)
    assert world.active == new.version
    assert world.num_ready(new.version) == world.num_ready(A) == 1
    world.run(10, {})
    assert not world.app.of(A)
    assert not world.app.retiring
    assert world.least_ready >= 1


@pytest.mark.parametrize(
    ("how", "says"), [("crashes", "exit code 1"), ("start", "not ready within")]
)
def test_a_version_that_does_not_start_is_rolled_back_and_the_old_one_never_stops(
    world: World, how: str, says: str
):
    world.behaviour = {B: "fetches"}  # has no time limit
    world.deploy(B, seconds=90)
    assert not world.outcomes[1:]
    world.behaviour = {B: how}
    world.run(90)
    [(number, outcome)] = world.outcomes[1:]
    assert (number, outcome.verdict) == (2, "rolled_back")
    assert says in outcome.message
    assert world.active == A
    assert world.least_ready == 1
    assert not world.app.of(B)


def test_failed_starts_are_retried_with_exponential_backoff(world: World):
    world.behaviour = {B: "crashes"}
    world.deploy(B, replace(SPEC, retry_limit=4, start_s=1e6))
    claims, seen = [], set[int]()
    for _ in range(60):
        world.step()
        for slot in world.app.of(B, "starting"):
            if slot.id not in seen:
                seen.add(slot.id)
                claims.append(slot.since)
    gaps = [round(b - a) for a, b in itertools.pairwise(claims)]
    assert len(claims) == 5
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 8


@pytest.mark.parametrize(
    ("new", "old", "is_kept"),
    [
        (Load(num_finished=40, num_failed=9), Load(num_finished=100), True),  # too few to decide
        (Load(num_finished=40, num_failed=10), Load(num_finished=100), False),
        (Load(num_finished=40, num_failed=10), Load(num_finished=80, num_failed=20), True),
        (Load(num_finished=96, num_failed=4), Load(num_finished=100), True),
    ],
)
def test_a_canary_that_fails_more_than_the_old_version_is_rolled_back(
    world: World, new: Load, old: Load, is_kept: bool
):
    world.deploy(B, replace(SPEC, canary=0.5), seconds=10)
    world.run(5, {A: old, B: new})
    assert (world.app.state == "canary") is is_kept
    assert world.active == A


def test_a_canary_that_crashes_is_rolled_back(world: World):
    world.deploy(B, replace(SPEC, canary=0.5, retry_limit=0), seconds=10)
    world.fail(B, message="OOM")
    world.run(3, {B: Load(num_open=3)})
    assert world.outcomes[-1][1].message == "serve: OOM"
    assert world.active == A
    world.run(7)
    assert world.num_ready(B) == 1  # it can still answer the requests in its queue
    world.run(20, {})
    assert not world.app.of(B)


def test_an_instance_of_a_canary_that_served_for_long_is_restarted(world: World):
    world.behaviour = {B: "start"}
    world.deploy(B, replace(SPEC, canary=0.5), seconds=9)
    world.behaviour = {}
    world.run(70)
    world.fail(B)
    world.run(9)
    assert (world.app.state, world.num_ready(B)) == ("canary", 1)
    world.fail(B)
    for world.behaviour[B], seconds in (("install", 70), ("start", 50)):
        world.run(seconds)
    assert world.app.state == "canary"
    world.run(20)
    assert "not ready within" in world.outcomes[-1][1].message


def test_other_nodes_start_the_instances_of_a_node_that_stops_while_it_finishes(world: World):
    world.rooms["two"] = Resources(8)
    world.stopping = "one"
    world.step()
    assert [(s.state, s.node) for s in world.app.of(A)] == [("draining", "one"), ("wanted", "")]
    world.run(5)
    assert [(s.state, s.node) for s in world.app.of(A)] == [("ready", "two")]


def test_rollback_in_the_middle_of_an_update(world: World):
    for digest in (B, A, C):
        world.deploy(digest, seconds=2)
    world.run(40)
    assert world.active == C
    assert world.num_ready(C) == 1
    assert not world.app.of(A) + world.app.of(B)
    assert world.least_ready >= 1


def test_instances_scale_with_the_queue_down_to_zero_and_back(world: World):
    world.deploy(A, replace(SPEC, min_instances=0, idle_s=10))
    world.loads = {A: Load(num_open=50, age_s=5)}
    counts = []
    for _ in range(40):
        world.step()
        counts.append(world.app.desired)
    assert counts[-1] == 4
    assert counts == sorted(counts)
    assert 2 in counts
    world.loads = {A: Load(num_open=4, age_s=0.1)}  # busy, but no request waits long
    world.run(60)
    assert world.app.desired == 4
    world.run(120, {})
    assert world.app.desired == 0
    assert not world.app.slots
    world.run(4, {A: Load(num_open=1, age_s=0.5)})
    assert world.num_ready(A) == 1


def test_instances_scale_with_open_sessions(world: World):
    world.deploy(A, replace(SPEC, min_instances=0, max_instances=4))
    for load, expected in (
        (Load(min_instances=3), 3),
        (Load(min_instances=9), 4),  # as deployed
        (Load(num_open=50, age_s=50, min_instances=1, max_instances=2), 2),
        (Load(num_open=50, age_s=50), 4),
    ):
        world.run(20, {A: load})
        assert world.num_ready(A) == expected


@pytest.mark.parametrize(
    ("needed", "room", "says"),
    [
        (Resources(1, 0, 1), Resources(8), "cpu=1,gpu=1, even if the node is idle (nodes: cpu=8)"),
        (Resources(1), Resources(1), "all resources are in use"),
    ],
)
def test_a_version_that_fits_on_no_node_waits_and_reports_why(world: World, needed, room, says):
    world.rooms["one"] = room
    world.deploy(B, replace(SPEC, resources=needed), seconds=30)
    before = world.app
    world.run(600)
    assert says in world.app.message
    assert world.app.slots == before.slots  # no slot starts and stops again and again
    assert world.active == A
    world.rooms["two"] = Resources(4, 0, 1)
    world.run(20)
    assert world.active == B
    assert {slot.node for slot in world.app.of(B)} == {"two"}
    assert not world.app.message


def test_idle_instances_of_the_old_version_make_room_for_the_new_one(world: World):
    world.rooms["one"] = Resources(2)
    world.deploy(A, replace(SPEC, min_instances=0, max_instances=2, idle_s=10))
    world.run(10, {A: Load(num_open=9, age_s=5)})
    assert world.num_ready(A) == 2
    world.deploy(B, replace(SPEC, max_instances=1), seconds=30)
    assert world.num_ready(A) == 2  # it has requests
    world.run(30, {})
    assert world.active == B
    assert world.num_ready(B) == 1


def test_requests_fail_within_10_s_if_no_instance_can_start(world: World):
    """While instances can start, requests wait."""
    world.fail(A, "ready")
    world.loads = {A: Load(num_open=1)}
    large, small = {"one": Resources(8)}, {"small": Resources(0.5)}
    for behaviour, rooms, seconds, lost in (
        ("crashes", large, 1, []),
        ("crashes", large, 10, [A]),
        ("works", large, 20, []),
        ("works", small, 1, []),
        ("works", small, 10, [A]),
        ("works", large, 5, []),
    ):
        world.behaviour, world.rooms = {A: behaviour}, rooms
        world.run(seconds)
        assert rollout.find_lost(world.app, world.nodes(), world.now) == lost
        assert world.num_ready(A) == (behaviour == "works" and rooms is large) or seconds == 1


def test_slots_of_an_unreachable_node_are_kept(world: World):
    for trusts, node in ((False, "one"), (True, "")):
        app, _ = rollout.advance(world.app, {}, {}, world.now + 60, trusts_absence=trusts)
        assert [slot.node for slot in app.slots] == [node]


def test_a_loading_instance_of_a_returning_node_keeps_its_slot(world: World):
    world.behaviour = {B: "loads"}
    world.deploy(B, seconds=3)
    [(number, (node, report))] = [(n, r) for n, r in world.running.items() if r[1].digest == B]
    del world.rooms["one"]
    world.run(1)  # its slot is freed
    world.rooms["one"] = Resources(8)
    world.running[number] = (node, report)
    world.app, _ = rollout.advance(world.app, world.nodes(), {}, world.now)
    assert [slot.id for slot in world.app.of(B)] == [number]


def test_an_active_version_that_keeps_crashing_is_rolled_back(world: World):
    world.deploy(B, seconds=10)
    assert world.active == B
    for _ in range(SPEC.retry_limit + 1):
        assert not rollout.is_failing(world.app, world.now)
        world.fail(B, "ready")
        world.run(10)
    assert rollout.is_failing(world.app, world.now)
    assert not rollout.is_failing(world.app, world.now + 1000)
    back = Generation("n", 3, A, SPEC, "rollback")
    world.loads = {B: Load(num_open=2)}
    world.app = rollout.take_back(world.app, back, world.now)
    assert not rollout.is_failing(world.app, world.now)
    world.run(20)
    assert world.active == A
    assert world.num_ready(B) == 1  # serves the requests in its queue
    world.run(20, {})
    assert not world.app.of(B)
    for _ in range(SPEC.retry_limit + 1):
        world.fail(A, "ready")
        world.run(10)
    assert not rollout.is_failing(world.app, world.now)  # it does not switch back and forth


@pytest.mark.parametrize(
    ("crashes", "is_failing"),
    [
        ([("a", "b"), ("a",), ("c", "a"), ("a",), ("a",)], False),
        ([("a",), ("b",), ("a",), ("b",)], True),
        ([("a",), ("a",), ("a",), ()], False),  # no tenant explains the last crash
    ],
)
def test_crashes_on_requests_of_one_tenant_roll_nothing_back(world: World, crashes, is_failing):
    assert SPEC.retry_limit == 3
    world.deploy(B, seconds=10)
    for tenants in crashes:
        world.fail(B, "ready", tenants=tenants)
        world.run(15)
    assert rollout.is_failing(world.app, world.now) == is_failing
    assert world.num_ready(B) == 1


@pytest.mark.parametrize("phase", ["starting", "ready"])
def test_a_version_waits_for_a_node_with_its_secrets(world: World, phase: str):
    """It also waits while the only node with these secrets is down."""
    world.secrets = {"one": ("other",), "two": ("other", "token")}
    spec = replace(SPEC, canary=0.1) if phase == "ready" else SPEC
    environment = Environment(secrets={"X": "token", "Y": "other"})
    wanted = Generation("n", 2, B, spec, environment=environment)
    world.behaviour = {wanted.version: "start" if phase == "starting" else "works"}
    world.rooms["two"] = Resources(8)
    world.deploy(B, spec, environment=environment, seconds=3)
    assert world.app.of(wanted.version)
    del world.rooms["two"]
    world.running = {slot: told for slot, told in world.running.items() if told[0] != "two"}
    world.run(400)
    assert (world.active, len(world.outcomes)) == (A, 1)
    assert "no node has the secret token:" in world.app.message
    world.behaviour = {}
    world.rooms["two"] = Resources(8)
    world.run(100)
    assert world.num_ready(wanted.version) == 1
    candidate = world.app.candidate
    assert candidate.is_canary if candidate else world.active == wanted.version
    assert (candidate is not None) == (phase == "ready")


def test_a_secret_name_that_looks_like_a_value_is_not_in_messages(world: World):
    value = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
    world.deploy(A, environment=Environment(secrets={"X": value}), seconds=10)
    shown = [world.app.message, *(event.text for event in world.app.events)]
    assert any("looks like a value" in text for text in shown)
    assert not any(value in text for text in shown)


def test_weights_larger_than_a_nodes_memory_are_not_placed_there(world: World):
    node = NodeRecord("one", 8.0, 10**9, 1)
    for least, stated, fits in (
        (2 * 10**9, Resources(1), False),
        (9 * 10**8, Resources(1), True),
        (2 * 10**9, Resources(1, gpu=1), True),
        (2 * 10**9, Resources(1, 10**8), True),  # the user's value overrides the estimate
    ):
        spec = replace(SPEC, resources=stated)
        new = Generation("n", 1, A, spec, least_memory_bytes=least)
        app, _ = rollout.advance(rollout.admit(App("n"), new, 1.0), {"one": node}, {}, 2.0)
        found = rollout.find_claimable(app, node, Resources(8, 10**9, 1), 2.0)
        assert bool(found) is fits
        assert fits is ("memory=2000000000" not in app.message)


@pytest.mark.parametrize("load", [Load(num_open=3), Load(is_whole=False)])
def test_an_old_version_finishes_its_queue_for_a_limited_time(world: World, load: Load):
    """It does so even if its instance was lost. While a shard that is down can have its requests, it is kept."""
    world.loads = {A: load}
    world.deploy(B, seconds=10)
    if load.num_open:
        world.fail(A)
    world.run(570)
    assert world.num_ready(A) == 1
    world.run(50)
    assert not world.app.of(A)
    assert bool(world.app.retiring) is not load.is_whole
    world.loads = {}
    world.step()
    assert not world.app.retiring
