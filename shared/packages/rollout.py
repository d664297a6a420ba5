"""The state machine of deployments: pure functions from the current state to the next.

    candidate: starting -> [canary] -> active; the old version retires once its queue is empty
                        -> rolled back: too many failures, or not ready in time
    slot:      wanted -> starting (on a node) -> ready -> draining -> gone

Any node computes the next state and writes it by compare-and-set. The old version keeps its instances until the new
one is active. Units: seconds of Redis's clock.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from shared.packages.deployments import (
    Environment,
    Generation,
    Outcome,
    Resources,
    Spec,
    is_secret_name,
)
from shared.protocol import ModelCard

SlotState = Literal["wanted", "starting", "ready", "draining"]
ReportState = Literal["starting", "ready", "failed", "gone"]

#: Time after which all gateways route by a new state. They refresh the state once a second.
SETTLE_S = 5.0
#: A retiring version is stopped after this time, even with requests in its queue.
RETIRE_S = 600.0
#: A slot is lost if its node has not reported it for this long.
FORGOTTEN_S = 10.0
SCALE_PAUSE_S = 2.0
#: After this many consecutive failed starts, waiting requests of the version fail.
MAX_FAILED_STARTS = 2
LONGEST_BACKOFF_S = 60.0
#: A slot that is ready for this long resets the failure counts.
STABLE_S = 120.0
#: A version that fails too often within this time after its promotion is rolled back.
PROBATION_S = 600.0
#: After `MIN_ANSWERS` answers, a canary is rolled back if its failure ratio exceeds the old one by `MAX_MORE_FAILED`.
MIN_ANSWERS = 50
MAX_MORE_FAILED = 0.05
MAX_EVENTS = 50
#: Phases before the start of an instance, which do not count toward `start_s`.
_INSTALLS = ("", "fetch", "install")


class Slot(msgspec.Struct, frozen=True, omit_defaults=True):
    """An instance of a version: wanted, or on a node."""

    id: int
    digest: str
    state: SlotState = "wanted"
    node: str = ""
    since: float = 0.0
    not_before: float = 0.0  #: earliest time of a claim
    phase: str = ""


class Revision(msgspec.Struct, frozen=True, omit_defaults=True):
    """A deployed version: active, candidate or retiring."""

    number: int  #: of its generation
    digest: str  #: of the version: the package and its environment
    spec: Spec
    since: float = 0.0
    #: When an installed instance first started; for a canary, when one last started. 0: never.
    started_at: float = 0.0
    #: Failed starts and failed instances since the last stable instance. Crashes that the requests of one tenant may
    #: have caused are counted in `num_crashes` instead.
    num_failed: int = 0
    num_crashes: int = 0
    num_failed_starts: int = 0  #: consecutive
    crash_tenants: tuple[str, ...] = ()  #: tenants with requests in all `num_crashes` crashes
    card: ModelCard | None = None  #: the card that its first instance announced
    is_canary: bool = False
    is_new: bool = False  #: False if a rollback activated it
    promoted_at: float = 0.0
    package: str = ""  #: digest of the package, if it differs from `digest`
    environment: Environment = Environment()
    least_memory_bytes: int = 0  #: memory of an instance, if the spec does not set it

    @property
    def needs(self) -> Resources:
        """Resources of an instance. Without a GPU, the memory defaults to the size of the weights."""
        stated = self.spec.resources
        if stated.memory_bytes or stated.gpu:
            return stated
        return replace(stated, memory_bytes=self.least_memory_bytes)


class Event(msgspec.Struct, frozen=True):
    """A change of a deployment, for its event list."""

    at: float
    text: str


class App(msgspec.Struct, frozen=True):
    """The state of a deployment. `version` counts the changes of this record."""

    name: str
    number: int = 0  #: of the latest generation
    version: int = 0
    active: Revision | None = None
    candidate: Revision | None = None
    retiring: tuple[Revision, ...] = ()
    slots: tuple[Slot, ...] = ()
    next_slot: int = 0
    desired: int = 0  #: desired number of instances of the active version
    scaled_at: float = 0.0
    busy_at: float = 0.0
    message: str = ""
    events: tuple[Event, ...] = ()
    num_promoted: int = 0  #: promotions since the record was created
    num_rolled_back: int = 0
    start_s: float = 0.0  #: time from the claim of the latest instance until it was ready

    @property
    def state(self) -> str:
        if self.candidate is not None:
            return "canary" if self.candidate.is_canary else "starting"
        return "undeployed" if self.active is None else "active"

    @property
    def revisions(self) -> list[Revision]:
        return [r for r in (self.active, self.candidate, *self.retiring) if r is not None]

    def revision(self, digest: str) -> Revision | None:
        return next((found for found in self.revisions if found.digest == digest), None)

    def of(self, digest: str, *states: SlotState) -> list[Slot]:
        return [s for s in self.slots if s.digest == digest and (not states or s.state in states)]


class SlotReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node's report of a slot."""

    app: str
    slot: int
    digest: str
    state: ReportState
    phase: str = ""
    message: str = ""
    is_final: bool = False  #: a failure that another start would repeat
    card: ModelCard | None = None
    since: float = 0.0  #: time of the claim
    tenants: tuple[str, ...] = ()  #: after a failure: tenants whose requests were running, if known


class LogLine(msgspec.Struct, frozen=True):
    """A line of an instance's log. Units: epoch seconds."""

    at: float
    node: str
    slot: int
    text: str


class NodeRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The heartbeat of a node."""

    id: str
    cpu: float
    memory_bytes: int
    gpu: int
    is_stopping: bool = False
    slots: tuple[SlotReport, ...] = ()
    secrets: tuple[str, ...] = ()  #: names of its secrets


class Load(msgspec.Struct, frozen=True):
    """Load and outcomes of a version."""

    num_open: int = 0
    age_s: float = 0.0  #: of the oldest unclaimed request
    num_finished: int = 0
    num_failed: int = 0
    #: Instances that open sessions request, in total; 0: unspecified.
    min_instances: int = 0
    max_instances: int = 0
    is_whole: bool = True  #: False: a shard is down, and may have more requests


NO_LOAD = Load()


def admit(app: App, generation: Generation, now: float) -> App:
    app = replace(app, number=generation.number, message="")
    if not generation.digest:
        app = _note(app, now, f"generation {generation.number}: undeployed")
        for revision in (app.candidate, app.active):
            app = _retire(app, revision, now)
        return replace(app, active=None, candidate=None, desired=0)
    text = f"generation {generation.number} ({generation.cause}): {generation.version[:19]}"
    app = _note(app, now, text)
    spec, digest = generation.spec, generation.version
    if app.candidate is not None and app.candidate.digest != digest:
        app = _retire(app, app.candidate, now)
    if app.active is not None and app.active.digest == digest:
        active = replace(app.active, number=generation.number, spec=spec)
        desired = min(max(app.desired, spec.min_instances), spec.max_instances)
        return replace(app, active=active, candidate=None, desired=desired)
    known = app.revision(digest)
    candidate = replace(
        to_revision(generation, now), card=known.card if known else None,
        is_new=generation.cause == "deploy",
    )  # fmt: skip
    retiring = tuple(each for each in app.retiring if each.digest != digest)
    return replace(app, candidate=candidate, retiring=retiring)


def restore(
    name: str, active: Generation | None, candidate: Generation | None, number: int, now: float
) -> App:
    """Restore the state of a deployment from the package store after Redis has lost it."""
    app = App(name, number)
    if active is not None:
        desired = max(1, active.spec.min_instances)
        app = replace(app, active=to_revision(active, now), desired=desired, busy_at=now)
    if candidate is not None:
        app = admit(app, candidate, now)
    return _note(app, now, "restored from the store")


def to_revision(generation: Generation, now: float) -> Revision:
    version, package = generation.version, generation.digest
    return Revision(
        generation.number, version, generation.spec, since=now,
        package=package if package != version else "", environment=generation.environment,
        least_memory_bytes=generation.least_memory_bytes,
    )  # fmt: skip


def advance(
    app: App,
    nodes: Mapping[str, NodeRecord],
    loads: Mapping[str, Load],
    now: float,
    *,
    trusts_absence: bool = True,
) -> tuple[App, Outcome | None]:
    """Returns the next state, and the outcome of the candidate (None while it is undecided).

    `trusts_absence`: treat a node without a record as lost; False while nodes may be unable to reach Redis.
    """
    app = _adopt(app, nodes, now)
    app = _follow(app, nodes, now, trusts_absence=trusts_absence)
    app = _retire_idle(app, loads, now)
    app = _scale(app, loads, now)
    app = _place(app, loads, now)
    app = _explain(app, nodes, now)
    app = _pause(app, nodes, now)
    outcome, candidate = _judge(app, loads, now), app.candidate
    if outcome is not None or candidate is None or candidate.is_canary or app.active is None:
        return app, outcome
    if candidate.spec.canary > 0 and app.of(candidate.digest, "ready"):
        app = replace(app, candidate=replace(candidate, is_canary=True))
        app = _note(app, now, f"canary: {candidate.spec.canary:.0%} of the requests")
    return app, outcome


def conclude(app: App, number: int, outcome: Outcome, now: float) -> App:
    candidate = app.candidate
    if candidate is None or candidate.number != number:
        return app
    app = replace(app, candidate=None, message=outcome.message)
    if outcome.verdict == "rolled_back":
        # A canary may start again to answer the requests in its queue.
        num_failed = 0 if candidate.is_canary else candidate.num_failed
        app = _retire(app, replace(candidate, num_failed=num_failed), now)
        app = replace(app, num_rolled_back=app.num_rolled_back + 1)
        return _note(app, now, f"generation {number} was rolled back: {outcome.message}")
    app = _retire(app, app.active, now)
    num_running = len(app.of(candidate.digest, "starting", "ready"))
    desired = max(num_running, candidate.spec.min_instances)
    active = replace(candidate, is_canary=False, promoted_at=now)
    app = replace(
        app, active=active, desired=desired, busy_at=now, scaled_at=now,
        num_promoted=app.num_promoted + 1,
    )  # fmt: skip
    return _note(app, now, f"generation {number} is active")


def is_failing(app: App, now: float) -> bool:
    """True if the active version must be rolled back, because it is new and fails too often."""
    active = app.active
    return (
        active is not None
        and app.candidate is None
        and active.is_new
        and active.num_failed > active.spec.retry_limit
        and now - active.promoted_at < PROBATION_S
    )


def take_back(app: App, back: Generation, now: float) -> App:
    """Roll back to an earlier version. The failing version may start again to answer the requests in its queue."""
    assert app.active is not None
    failing = app.active
    text = f"generation {failing.number} failed {failing.num_failed} times: {app.message}"
    app = replace(_note(app, now, text), active=replace(failing, num_failed=0))
    return admit(app, back, now)


def find_claimable(
    app: App, node: NodeRecord, free: Resources, now: float, others: Collection[NodeRecord] = ()
) -> list[Slot]:
    """Wanted slots that fit on the node and that no node has reported."""
    if node.is_stopping:
        return []
    reported = {r.slot for each in (node, *others) for r in each.slots if r.app == app.name}
    return [
        slot
        for slot in app.slots
        if slot.state == "wanted" and slot.not_before <= now and slot.id not in reported
        if (revision := app.revision(slot.digest)) is not None
        if fits(revision.needs, free) and not find_missing(revision, node)
    ]


def fits(needed: Resources, free: Resources) -> bool:
    return (
        needed.cpu <= free.cpu
        and needed.memory_bytes <= free.memory_bytes
        and needed.gpu <= free.gpu
    )


def find_missing(revision: Revision, node: NodeRecord) -> list[str]:
    return sorted(set(revision.environment.secrets.values()).difference(node.secrets))


# Reports of nodes


def _adopt(app: App, nodes: Mapping[str, NodeRecord], now: float) -> App:
    """Record slots that nodes have claimed, and running instances that are unknown after a restore."""
    known = {slot.id: slot for slot in app.slots}
    for node in nodes.values():
        for report in node.slots:
            if report.app != app.name or app.revision(report.digest) is None:
                continue
            slot = known.get(report.slot)
            since = report.since or now
            if slot is not None and slot.state == "wanted":
                known[slot.id] = replace(slot, state="starting", node=node.id, since=since)
            elif slot is None and report.state in ("starting", "ready"):
                known[report.slot] = Slot(
                    report.slot, report.digest, "starting", node.id, since=now
                )
                app = replace(app, next_slot=max(app.next_slot, report.slot + 1))
    slots = tuple(known.values())
    return app if slots == app.slots else replace(app, slots=slots)


def _follow(app: App, nodes: Mapping[str, NodeRecord], now: float, *, trusts_absence: bool) -> App:
    for slot in app.slots:
        if not slot.node:
            continue
        node = nodes.get(slot.node)
        if node is None and not trusts_absence:
            continue
        reports = node.slots if node is not None else ()
        own = (each for each in reports if each.app == app.name and each.slot == slot.id)
        report = next(own, None)
        if node is None or (report is None and now - slot.since > FORGOTTEN_S):
            where = f"node {slot.node} " + ("is gone" if node is None else "does not report it")
            app = _free(app, slot, now, where)
        elif report is not None and node.is_stopping and report.state in ("starting", "ready"):
            if slot.state != "draining":  # another node starts an instance meanwhile
                app = _put(app, replace(slot, state="draining", since=now))
        elif report is not None:
            app = _apply_report(app, slot, report, now)
    return app


def _apply_report(app: App, slot: Slot, report: SlotReport, now: float) -> App:
    if report.state == "gone":
        return _remove(app, slot)
    if report.state == "failed":
        return _fail(app, slot, report, now)
    if slot.state == "draining":
        return app
    revision = app.revision(slot.digest)
    if report.state == "starting":
        if revision is not None and report.phase not in _INSTALLS:
            starts_again = revision.is_canary and slot.phase in _INSTALLS
            if starts_again or not revision.started_at:
                app = _change(app, replace(revision, started_at=now))
        return _put(app, replace(slot, phase=report.phase)) if report.phase != slot.phase else app
    if slot.state != "ready":
        app = _put(app, replace(slot, state="ready", since=now, phase=""))
        if slot.phase or not app.start_s:  # without a phase, the slot's start was not observed
            app = replace(app, start_s=now - slot.since)
        if revision is not None:
            card = revision.card or report.card
            app = _change(app, replace(revision, card=card, num_failed_starts=0))
        return _note(app, now, f"slot {slot.id} of {slot.digest[:19]} is ready on {slot.node}")
    if revision is None or now - slot.since <= STABLE_S:
        return app
    if revision.num_failed or revision.num_crashes:
        return _change(app, replace(revision, num_failed=0, num_crashes=0, crash_tenants=()))
    return app


def _fail(app: App, slot: Slot, report: SlotReport, now: float) -> App:
    """Count a failed start or instance, and replace it after a pause that grows with the failures."""
    why = f"{report.phase}: {report.message}"
    revision = app.revision(slot.digest)
    if slot.state == "draining" or revision is None:
        return _free(app, slot, now, why)
    limit = revision.spec.retry_limit
    revision = _count_failure(revision, report.tenants)
    num_failed = max(revision.num_failed, limit + 1 if report.is_final else 0)
    num_starts = revision.num_failed_starts + 1 if slot.state == "starting" else 0
    if report.is_final:
        num_starts = MAX_FAILED_STARTS
    revision = replace(revision, num_failed=num_failed, num_failed_starts=num_starts)
    app = replace(_change(app, revision), message=why)
    pause_s = min(LONGEST_BACKOFF_S, 2.0 ** min(max(0, num_failed - 1), 6))
    return _free(app, slot, now, why, pause_s)


def _count_failure(revision: Revision, tenants: Sequence[str]) -> Revision:
    """Count a failure. Consecutive crashes with a common tenant are counted in `num_crashes`, not in `num_failed`."""
    earlier = revision.crash_tenants if revision.num_crashes else tenants
    common = tuple(tenant for tenant in tenants if tenant in earlier)
    if common:
        return replace(revision, num_crashes=revision.num_crashes + 1, crash_tenants=common)
    if not tenants:
        return replace(revision, num_failed=revision.num_failed + 1)
    num_failed = revision.num_failed + revision.num_crashes + 1
    return replace(revision, num_failed=num_failed, num_crashes=0, crash_tenants=())


def _free(app: App, slot: Slot, now: float, why: str, pause_s: float = 0.0) -> App:
    """Replace an ended instance after `pause_s`."""
    app = _note(app, now, f"slot {slot.id} of {slot.digest[:19]} failed: {why}")
    if slot.state == "draining" or app.revision(slot.digest) is None:
        return _remove(app, slot)
    # A new number, so that late reports of the old slot are ignored.
    return _want(_remove(app, slot), slot.digest, now, not_before=now + pause_s)


# End of a rollout


def _pause(app: App, nodes: Mapping[str, NodeRecord], now: float) -> App:
    """Pause a candidate while no node has its secrets. It gets no requests, and its start deadline is reset."""
    candidate = app.candidate
    if candidate is None or not (candidate.started_at or candidate.is_canary):
        return app
    if app.of(candidate.digest, "starting", "ready"):
        return app
    lack = _find_lack(candidate, nodes)
    if not lack:
        return app
    app = replace(app, candidate=replace(candidate, started_at=0.0, is_canary=False))
    return _note(app, now, f"generation {candidate.number} waits: {lack}")


def _judge(app: App, loads: Mapping[str, Load], now: float) -> Outcome | None:
    candidate = app.candidate
    if candidate is None:
        return None
    spec = candidate.spec
    ready, starting = app.of(candidate.digest, "ready"), app.of(candidate.digest, "starting")
    if candidate.num_failed > spec.retry_limit:
        return Outcome("rolled_back", app.message or "its instances ended")
    since = candidate.started_at
    if candidate.is_canary:  # it was ready before: only the restart of its instances counts
        begins = [slot.since for slot in app.of(candidate.digest, "wanted")]
        begins += [now if slot.phase in _INSTALLS else candidate.started_at for slot in starting]
        since = max(begins, default=now)
    if not ready and candidate.started_at and now - since > spec.start_s:
        return Outcome("rolled_back", f"not ready within {spec.start_s:g} s")
    if candidate.is_canary:
        old = loads.get(app.active.digest, NO_LOAD) if app.active else NO_LOAD
        new = loads.get(candidate.digest, NO_LOAD)
        return _compare(new, old)
    is_whole = not spec.canary or app.active is None
    if is_whole and ready and not starting and not _is_coming(app, candidate, now):
        return Outcome("active")
    return None


def _is_coming(app: App, candidate: Revision, now: float) -> bool:
    """True if more instances can become ready soon, because slots were added only recently."""
    waiting = app.of(candidate.digest, "wanted")
    return bool(waiting) and now - max(slot.since for slot in app.of(candidate.digest)) < SETTLE_S


def _compare(new: Load, old: Load) -> Outcome | None:
    num_answers = new.num_finished + new.num_failed
    if num_answers < MIN_ANSWERS:
        return None
    share = new.num_failed / num_answers
    usual = old.num_failed / max(1, old.num_finished + old.num_failed)
    if share <= usual + MAX_MORE_FAILED:
        return None
    return Outcome(
        "rolled_back",
        f"{share:.0%} of {num_answers} answers failed, compared with {usual:.0%} of the old version",
    )


# Number of instances


def _scale(app: App, loads: Mapping[str, Load], now: float) -> App:
    active = app.active
    if active is None:
        return app
    load, spec = loads.get(active.digest, NO_LOAD), active.spec
    least = min(max(spec.min_instances, load.min_instances), spec.max_instances)
    most = min(spec.max_instances, max(least, load.max_instances or spec.max_instances))
    desired = min(max(app.desired, least), most)
    # A candidate with instances stops this version from scaling down. Until then, scaling down may free resources.
    is_replacing = app.candidate and app.of(app.candidate.digest, "starting", "ready")
    if (load.num_open or is_replacing) and now - app.busy_at > 1.0:  # each update is a write
        app = replace(app, busy_at=now)
    is_settled = now - app.scaled_at >= SCALE_PAUSE_S
    is_starting = bool(app.of(active.digest, "starting", "wanted"))
    has_just_begun = app.candidate is not None and now - app.candidate.since < SETTLE_S
    if load.num_open and not desired:
        desired = 1
    elif load.age_s > spec.target_age_s and is_settled and not is_starting:
        more = min(math.ceil(load.age_s / spec.target_age_s), max(1, desired))
        desired = min(desired + more, most)
    elif now - app.busy_at > spec.idle_s and is_settled and not is_starting and not has_just_begun:
        desired = max(desired - 1, least)
    if desired == app.desired:
        return app
    app = _note(app, now, f"scaled from {app.desired} to {desired}")
    return replace(app, desired=desired, scaled_at=now, busy_at=now)


def _place(app: App, loads: Mapping[str, Load], now: float) -> App:
    wanted: dict[str, int] = {}
    if app.active is not None:
        wanted[app.active.digest] = app.desired
    if app.candidate is not None:
        wanted[app.candidate.digest] = _size_of_candidate(app, app.candidate)
    for revision in app.retiring:
        num_slots = len(app.of(revision.digest, "starting", "ready"))
        has_work = _can_work(revision) and loads.get(revision.digest, NO_LOAD).num_open > 0
        is_needed = has_work and now - revision.since <= RETIRE_S
        wanted.setdefault(revision.digest, max(num_slots, int(is_needed)))
    for digest in {slot.digest for slot in app.slots} | wanted.keys():
        app = _resize(app, digest, wanted.get(digest, 0), now)
    return app


def _size_of_candidate(app: App, candidate: Revision) -> int:
    spec = candidate.spec
    num_old = len(app.of(app.active.digest, "ready", "starting")) if app.active else 0
    least = spec.min_instances
    if spec.canary and app.active is not None:
        num_old, least = math.ceil(spec.canary * num_old), 1
    return min(max(1, least, num_old), spec.max_instances)


def _resize(app: App, digest: str, count: int, now: float) -> App:
    alive = app.of(digest, "wanted", "starting", "ready")
    order = {"wanted": 0, "starting": 1, "ready": 2}
    for slot in sorted(alive, key=lambda each: (order[each.state], -each.id))[: -count or None]:
        if len(alive) <= count:
            break
        alive.remove(slot)
        if slot.state == "wanted":
            app = _remove(app, slot)
        else:
            app = _put(app, replace(slot, state="draining", since=now))
    for _ in range(count - len(alive)):
        app = _want(app, digest, now)
    return app


def _retire(app: App, revision: Revision | None, now: float) -> App:
    if revision is None:
        return app
    others = tuple(each for each in app.retiring if each.digest != revision.digest)
    return replace(app, retiring=(*others, replace(revision, since=now, is_canary=False)))


def _retire_idle(app: App, loads: Mapping[str, Load], now: float) -> App:
    """Drain idle retiring versions, and remove retiring versions without instances."""
    for revision in app.retiring:
        age_s, load = now - revision.since, loads.get(revision.digest, NO_LOAD)
        may_have_work = _can_work(revision) and (load.num_open > 0 or not load.is_whole)
        if age_s <= SETTLE_S or (may_have_work and age_s <= RETIRE_S):
            continue
        app = _resize(app, revision.digest, 0, now)
        # the node fails the remaining requests of a removed version, and needs all shards for that
        if load.is_whole and not app.of(revision.digest):
            left = tuple(each for each in app.retiring if each.digest != revision.digest)
            app = _note(replace(app, retiring=left), now, f"{revision.digest[:19]} is gone")
    return app


def find_lost(app: App, nodes: Mapping[str, NodeRecord], now: float) -> list[str]:
    """Versions that cannot get an instance, because their starts fail or no node can run one."""
    lost = [r.digest for r in app.retiring if not _can_work(r) and not app.of(r.digest)]
    active = app.active
    if active is None or app.of(active.digest, "ready", "draining"):
        return lost
    waiting = () if app.of(active.digest, "starting") else app.of(active.digest, "wanted")
    is_stuck = any(now - slot.since > SETTLE_S for slot in waiting)
    is_blocked = is_stuck and bool(find_obstacle(active, nodes))
    if is_blocked or active.num_failed_starts >= MAX_FAILED_STARTS:
        lost.append(active.digest)
    return lost


def _can_work(revision: Revision) -> bool:
    return revision.num_failed <= revision.spec.retry_limit


def _explain(app: App, nodes: Mapping[str, NodeRecord], now: float) -> App:
    """Set the message that explains waiting slots: no node is large enough, or all resources are in use."""
    for slot in app.slots:
        revision = app.revision(slot.digest)
        if slot.state != "wanted" or revision is None:
            continue
        text = find_obstacle(revision, nodes)
        is_late = slot.since and now - slot.since > SETTLE_S
        if not text and revision is app.candidate and is_late:
            text = (
                f"all resources are in use, and an instance needs {revision.needs}: wait for idle instances "
                "(idle_s), undeploy another name, lower --resources, or add a node"
            )
        if text:
            return app if app.message == text else replace(app, message=text)
    return app


def find_obstacle(revision: Revision, nodes: Mapping[str, NodeRecord]) -> str:
    """The reason why no node can run an instance, even an idle node; empty if a node can."""
    if lack := _find_lack(revision, nodes):
        return lack
    rooms = [Resources(node.cpu, node.memory_bytes, node.gpu) for node in nodes.values()]
    if any(fits(revision.needs, room) for room in rooms):
        return ""
    nodes_have = "; ".join(sorted({str(room) for room in rooms}))
    return (
        f"no node has room for an instance of {revision.needs}, even if the node is idle (nodes: "
        f"{nodes_have or 'none'}): add a larger node, or deploy with less --resources"
    )


def _find_lack(revision: Revision, nodes: Mapping[str, NodeRecord]) -> str:
    """The error message if no node has the secrets of a version; empty if a node has them."""
    lacks = [find_missing(revision, node) for node in nodes.values()]
    least = min(lacks, key=len, default=[])
    if not least:
        return ""
    names = ", ".join(name for name in least if is_secret_name(name))
    if not names:  # a record of an earlier release
        return "a secret's name looks like a value: deploy again with --secret NAME=SECRET"
    return (
        f"no node has the secret {names}: put a file of that name below its VLM_NODE__SECRETS_DIR, "
        "or name an environment variable of the node in VLM_NODE__SECRETS"
    )


# Helpers


def _want(app: App, digest: str, now: float, not_before: float = 0.0) -> App:
    """Add a wanted slot. Its number is at least the time in ms, so that it is new even if Redis lost the record."""
    number = max(app.next_slot, int(now * 1000))
    slot = Slot(number, digest, since=now, not_before=not_before)
    return replace(app, next_slot=number + 1, slots=(*app.slots, slot))


def _put(app: App, slot: Slot) -> App:
    return replace(app, slots=tuple(slot if each.id == slot.id else each for each in app.slots))


def _remove(app: App, slot: Slot) -> App:
    return replace(app, slots=tuple(each for each in app.slots if each.id != slot.id))


def _change(app: App, revision: Revision) -> App:
    def new(old: Revision | None) -> Revision | None:
        return revision if old is not None and old.digest == revision.digest else old

    retiring = tuple(revision if each.digest == revision.digest else each for each in app.retiring)
    return replace(app, active=new(app.active), candidate=new(app.candidate), retiring=retiring)


def _note(app: App, now: float, text: str) -> App:
    return replace(app, events=(*app.events, Event(now, text[:300]))[-MAX_EVENTS:])
