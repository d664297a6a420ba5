"""What is to be served under a name: the truth, in the store, as records that are written once.

`deployments/NAME/GENERATION.json` says what was asked for, `GENERATION.outcome.json` beside it what came of it.
Redis only holds what is now, and is filled from here.
"""

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from shared.packages.environment import Environment, version_digest
from shared.packages.store import PackageStore, StoreError

#: In Python `$` also stands before a last newline.
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$(?!\n)"
NAME_RULE = "send 1 to 63 letters, digits, dots, dashes and underscores, a letter or digit first"
_KEY = re.compile(r"deployments/([^/]+)/(\d{8})(\.outcome)?\.json")
MAX_INSTANCES = 256
#: Times are known to a tenth.
LEAST_LATENCY = 1.2

Name = Annotated[str, Meta(pattern=NAME)]
Cause = Literal["deploy", "rollback", "scale", "undeploy"]
Verdict = Literal["active", "rolled_back"]
Requirement = Literal["environment"]
Record = TypeVar("Record")


class Conflict(Exception):
    """Another change came first; the message says which."""


class Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one instance needs of a node."""

    cpu: Annotated[float, Meta(ge=0, le=4096)] = 1.0
    memory_bytes: Annotated[int, Meta(ge=0)] = 0
    gpu: Annotated[int, Meta(ge=0, le=64)] = 0


class Unreadable(StoreError):
    """A record is damaged, or of a newer version of this program; the message says which."""


class SpecBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a package is served, as it is asked for. Units: seconds.

    Records leave defaults out, so gateways and nodes of before read all that use nothing new, and leave
    the others alone. A default, once released, stays: it is what those records mean.
    """

    min_instances: Annotated[int, Meta(ge=0, le=MAX_INSTANCES)] = 0
    max_instances: Annotated[int, Meta(ge=1, le=MAX_INSTANCES)] = 4
    resources: Resources = Resources()
    #: Of the requests, for the new version until it is promoted; 0: it takes over when it is ready.
    canary: Annotated[float, Meta(ge=0, le=0.99)] = 0.0
    idle_s: Annotated[float, Meta(gt=0)] = 300.0  #: without work, before an instance is stopped
    #: One more instance is started when the oldest request waits that long.
    target_age_s: Annotated[float, Meta(gt=0)] = 2.0
    start_s: Annotated[float, Meta(gt=0)] = 300.0  #: in which a new version has to be ready
    retry_limit: Annotated[int, Meta(ge=0, le=100)] = 3  #: failed starts that it may have
    #: A canary that takes that many times as long as the old version is rolled back; 0: it is not.
    canary_latency: Annotated[float, Meta(ge=0, le=1000)] = 0.0

    def __post_init__(self) -> None:
        """Raises: ValueError."""
        if 0 < self.canary_latency < LEAST_LATENCY:
            raise ValueError(f"canary_latency is below {LEAST_LATENCY:g}; 0 compares no times")
        if self.min_instances > self.max_instances:
            raise ValueError("min_instances is larger than max_instances")


class Spec(SpecBody, frozen=True):
    """How a package is served, as it is recorded."""

    #: What a reader must know of to serve it beside these fields; a `Generation` says it of itself.
    requires: tuple[Requirement, ...] = ()


class Generation(msgspec.Struct, frozen=True):
    """One change of a deployment. Without a digest: it is undeployed. Units: epoch seconds."""

    name: Name
    number: int
    digest: str  #: of the package
    spec: Spec
    cause: Cause = "deploy"
    created_at: float = 0.0
    environment: Environment = Environment()
    #: of one instance, where the spec says nothing of memory
    least_memory_bytes: int = 0

    def __post_init__(self) -> None:
        """Readers of before would take the package without its environment: their specs know no `requires`."""
        requires = ("environment",) if self.environment != Environment() else ()
        if self.spec.requires != requires:
            spec = msgspec.structs.replace(self.spec, requires=requires)
            msgspec.structs.force_setattr(self, "spec", spec)

    @property
    def version(self) -> str:
        """The digest of what serves: the package's, or that of the package in its environment."""
        return self.digest and version_digest(self.digest, self.environment)


class Outcome(msgspec.Struct, frozen=True):
    """What came of a generation; whoever writes it first decides."""

    verdict: Verdict
    message: str = ""


class History(msgspec.Struct):
    """A deployment's generations by their numbers, and what came of them."""

    generations: dict[int, Generation] = {}
    outcomes: dict[int, Outcome] = {}

    @property
    def last(self) -> Generation:
        """The latest generation; there is one."""
        return self.generations[max(self.generations)]

    @property
    def active(self) -> Generation | None:
        """What serves: the latest generation that was promoted."""
        promoted = [n for n, outcome in self.outcomes.items() if outcome.verdict == "active"]
        found = self.generations.get(max(promoted)) if promoted else None
        return found if found is not None and found.digest else None

    @property
    def candidate(self) -> Generation | None:
        """The latest generation, while nothing has come of it."""
        last = self.last
        return last if last.number not in self.outcomes and last.digest else None

    def before(self, version: str) -> Generation | None:
        """The last generation that served another version: where a rollback leads."""
        served = (n for n, outcome in self.outcomes.items() if outcome.verdict == "active")
        for number in sorted(served, reverse=True):
            found = self.generations.get(number)
            if found is not None and found.version not in ("", version):
                return found
        return None

    def back_to(self, earlier: Generation, spec: Spec) -> Generation:
        """The next generation, where that is an earlier version: it is known, so it is no canary."""
        spec = msgspec.structs.replace(spec, canary=0.0)
        number = self.last.number + 1
        return msgspec.structs.replace(
            earlier, number=number, spec=spec, cause="rollback", created_at=0.0
        )


def in_full(record: msgspec.Struct) -> dict[str, Any]:
    """All fields of a record that can be asked for, also those that it leaves out."""
    return {
        name: in_full(value) if isinstance(value, msgspec.Struct) else value
        for name, value in msgspec.structs.asdict(record).items()
        if name != "requires"
    }


def version_name(name: str, digest: str) -> str:
    """The model name, and so the queue, of one version of a deployment."""
    return f"{name}@{digest.removeprefix('sha256:')[:12]}"


def record_generation(store: PackageStore, generation: Generation) -> None:
    """Write a generation. Raises: Conflict if there is one of its number; StoreError."""
    key = _key(generation.name, generation.number)
    if not store.put_if_absent(key, msgspec.json.encode(generation)):
        raise Conflict(
            f"generation {generation.number} of {generation.name} was made by another deployment at the "
            "same time; look at it, then deploy again"
        )


def settle(store: PackageStore, name: str, number: int, outcome: Outcome) -> Outcome:
    """Write what came of a generation. Returns what is written: this, or what came before it. Raises: StoreError."""
    key = _key(name, number, "outcome")
    if store.put_if_absent(key, msgspec.json.encode(outcome)):
        return outcome
    return _decode(store, key, Outcome)


def read_history(store: PackageStore, name: str) -> History | None:
    """All of a deployment; None if there is none. Raises: StoreError, such as Unreadable."""
    history = History()
    for key in store.list(f"deployments/{name}"):
        match = _KEY.fullmatch(key)
        if match is None or match[1] != name:
            continue
        number = int(match[2])
        if match[3]:
            history.outcomes[number] = _decode(store, key, Outcome)
        else:
            history.generations[number] = _decode(store, key, Generation)
    return history if history.generations else None


def last_numbers(store: PackageStore) -> dict[str, int]:
    """The number of the latest generation of every deployment. Raises: StoreError."""
    numbers: dict[str, int] = {}
    for key in store.list("deployments"):
        match = _KEY.fullmatch(key)
        if match is not None and not match[3]:
            numbers[match[1]] = max(int(match[2]), numbers.get(match[1], 0))
    return numbers


def _key(name: str, number: int, kind: str = "") -> str:
    return f"deployments/{name}/{number:08d}{kind and '.' + kind}.json"


def _decode(store: PackageStore, key: str, kind: type[Record]) -> Record:
    data = store.get(key)
    try:
        return msgspec.json.decode(data or b"", type=kind)
    except msgspec.MsgspecError as error:
        raise Unreadable(
            f"{store.url}: {key} cannot be read; it is damaged, or of a newer version: {error}"
        ) from None
