"""The desired state of deployments: records in the store, each written once.

`deployments/NAME/GENERATION.json` is the request, and `GENERATION.outcome.json` its outcome. Redis holds the
present state only, and is filled from here.
"""

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from shared.packages.environment import Environment, version_digest
from shared.packages.store import PackageStore, StoreError

#: In Python `$` also matches before a final newline.
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$(?!\n)"
NAME_RULE = "send 1 to 63 letters, digits, dots, dashes and underscores, a letter or digit first"
#: As in `version_name`.
VERSION = r"^[0-9a-f]{12}$(?!\n)"
_KEY = re.compile(r"deployments/([^/]+)/(\d{8})(\.outcome)?\.json")
MAX_INSTANCES = 256

Name = Annotated[str, Meta(pattern=NAME)]
Cause = Literal["deploy", "rollback", "scale", "undeploy"]
Verdict = Literal["active", "rolled_back"]
Requirement = Literal["environment"]
Record = TypeVar("Record")


class Conflict(Exception):
    """Another change was first; the message says which."""


class Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Resources of one instance on a node."""

    cpu: Annotated[float, Meta(ge=0, le=4096)] = 1.0
    memory_bytes: Annotated[int, Meta(ge=0)] = 0
    gpu: Annotated[int, Meta(ge=0, le=64)] = 0


class Unreadable(StoreError):
    """A record is damaged, or of a newer version of this program; the message says which."""


class SpecBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a package is served, as requested. Units: seconds.

    Records omit defaults, so older gateways and nodes can read those without new fields, and skip the others. A
    released default never changes, because those records depend on it.
    """

    min_instances: Annotated[int, Meta(ge=0, le=MAX_INSTANCES)] = 0
    max_instances: Annotated[int, Meta(ge=1, le=MAX_INSTANCES)] = 4
    resources: Resources = Resources()
    #: The ratio of requests for the new version until it is promoted; 0: it is promoted when it is ready.
    canary: Annotated[float, Meta(ge=0, le=0.99)] = 0.0
    idle_s: Annotated[float, Meta(gt=0)] = 300.0  #: without work, until an instance is stopped
    #: Another instance is started when the oldest request has waited this long.
    target_age_s: Annotated[float, Meta(gt=0)] = 2.0
    start_s: Annotated[float, Meta(gt=0)] = 300.0  #: until a new version must be ready
    retry_limit: Annotated[int, Meta(ge=0, le=100)] = 3  #: most failed starts

    def __post_init__(self) -> None:
        """Raises: ValueError."""
        if self.min_instances > self.max_instances:
            raise ValueError("min_instances is larger than max_instances")


class Spec(SpecBody, frozen=True):
    """How a package is served, as recorded."""

    #: Features that a reader must support to serve it; a `Generation` has its own.
    requires: tuple[Requirement, ...] = ()


class Generation(msgspec.Struct, frozen=True):
    """One change of a deployment. Without a digest: undeployed. Units: epoch seconds."""

    name: Name
    number: int
    digest: str  #: of the package
    spec: Spec
    cause: Cause = "deploy"
    created_at: float = 0.0
    environment: Environment = Environment()
    #: of one instance, if the spec has no memory
    least_memory_bytes: int = 0

    def __post_init__(self) -> None:
        """Older readers would serve the package without its environment: their specs have no `requires`."""
        requires = ("environment",) if self.environment != Environment() else ()
        if self.spec.requires != requires:
            spec = msgspec.structs.replace(self.spec, requires=requires)
            msgspec.structs.force_setattr(self, "spec", spec)

    @property
    def version(self) -> str:
        """The digest of the served version: of the package, or of the package in its environment."""
        return self.digest and version_digest(self.digest, self.environment)


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a generation; the first record is final."""

    verdict: Verdict
    message: str = ""


class History(msgspec.Struct):
    """The generations of a deployment by number, and their outcomes."""

    generations: dict[int, Generation] = {}
    outcomes: dict[int, Outcome] = {}

    @property
    def last(self) -> Generation:
        return self.generations[max(self.generations)]

    @property
    def active(self) -> Generation | None:
        """The served generation: the latest that was promoted."""
        promoted = [n for n, outcome in self.outcomes.items() if outcome.verdict == "active"]
        found = self.generations.get(max(promoted)) if promoted else None
        return found if found is not None and found.digest else None

    @property
    def candidate(self) -> Generation | None:
        """The latest generation, while it has no outcome."""
        last = self.last
        return last if last.number not in self.outcomes and last.digest else None

    def before(self, version: str) -> Generation | None:
        """The last generation of another version: the target of a rollback."""
        served = (n for n, outcome in self.outcomes.items() if outcome.verdict == "active")
        for number in sorted(served, reverse=True):
            found = self.generations.get(number)
            if found is not None and found.version not in ("", version):
                return found
        return None

    def back_to(self, earlier: Generation, spec: Spec) -> Generation:
        """A generation that returns to an earlier version, without a canary."""
        spec = msgspec.structs.replace(spec, canary=0.0)
        number = self.last.number + 1
        return msgspec.structs.replace(
            earlier, number=number, spec=spec, cause="rollback", created_at=0.0
        )


def in_full(record: msgspec.Struct) -> dict[str, Any]:
    """All fields of a record, including omitted defaults."""
    return {
        name: in_full(value) if isinstance(value, msgspec.Struct) else value
        for name, value in msgspec.structs.asdict(record).items()
        if name != "requires"
    }


def version_name(name: str, digest: str) -> str:
    """The model name, and queue, of one version of a deployment."""
    return f"{name}@{digest.removeprefix('sha256:')[:12]}"


def record_generation(store: PackageStore, generation: Generation) -> None:
    """Write a generation. Raises: Conflict if its number exists; StoreError."""
    key = _key(generation.name, generation.number)
    if not store.put_if_absent(key, msgspec.json.encode(generation)):
        raise Conflict(
            f"generation {generation.number} of {generation.name} was made by another deployment at the "
            "same time; look at it, then deploy again"
        )


def settle(store: PackageStore, name: str, number: int, outcome: Outcome) -> Outcome:
    """Write an outcome. Returns the recorded one: this, or an earlier one. Raises: StoreError."""
    key = _key(name, number, "outcome")
    if store.put_if_absent(key, msgspec.json.encode(outcome)):
        return outcome
    return decode_record(store, key, Outcome)


def read_history(store: PackageStore, name: str) -> History | None:
    """The history of a deployment; None if there is none. Raises: StoreError, such as Unreadable."""
    history = History()
    for key in store.list(f"deployments/{name}"):
        match = _KEY.fullmatch(key)
        if match is None or match[1] != name:
            continue
        number = int(match[2])
        if match[3]:
            history.outcomes[number] = decode_record(store, key, Outcome)
        else:
            history.generations[number] = decode_record(store, key, Generation)
    return history if history.generations else None


def last_numbers(store: PackageStore) -> dict[str, int]:
    """The latest generation number of every deployment. Raises: StoreError."""
    numbers: dict[str, int] = {}
    for key in store.list("deployments"):
        match = _KEY.fullmatch(key)
        if match is not None and not match[3]:
            numbers[match[1]] = max(int(match[2]), numbers.get(match[1], 0))
    return numbers


def _key(name: str, number: int, kind: str = "") -> str:
    return f"deployments/{name}/{number:08d}{kind and '.' + kind}.json"


def decode_record(store: PackageStore, key: str, kind: type[Record]) -> Record:
    """Raises: StoreError, such as Unreadable."""
    data = store.get(key)
    try:
        return msgspec.json.decode(data or b"", type=kind)
    except msgspec.MsgspecError as error:
        raise Unreadable(
            f"{store.url}: {key} cannot be read; it is damaged, or of a newer version: {error}"
        ) from None
