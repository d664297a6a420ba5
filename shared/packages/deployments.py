"""The desired state of deployments and routes: records in the store, each written once.

`deployments/NAME/GENERATION.json` is the request, and `GENERATION.outcome.json` its outcome. Redis holds only the
current state, which can be restored from these records. `routes/NAME/NUMBER.json` has the weights by which gateways
split the requests to a name between versions; the highest number applies.

Environments have only the names of secrets; nodes have the values. Decoding a record does not validate variables: they
are validated when a client sends them, and before use.
"""

import logging
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from shared.packages.manifest import digest_of
from shared.packages.store import PackageStore, StoreError
from shared.protocol import ModelCard
from shared.settings.limits import MAX_ENVIRONMENT_BYTES, MAX_VARIABLES, MAX_VARIABLES_BYTES

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
#: The name of a secret: a file name, or the name of an environment variable of the node.
_SECRET = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,62}")
#: Prefixes of the API keys of well-known services, and generated identifiers such as UUIDs.
_SECRET_VALUE = re.compile(
    r"(?:sk|pk|rk|hf|gh[a-z]|github_pat|glpat|npm|xox[a-z])[_-][\w.-]*[A-Za-z0-9]{16}"
    r"|AKIA[A-Z0-9]{16}|AIza|eyJ|[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+")
#: A run of at least 16 letters and digits looks random if its words (`_WORD`) have fewer than 3 characters on average.
_LEAST_RANDOM, _LONGEST_RANDOM_WORD = 16, 3
#: Variables that applications cannot set, by the reason; a trailing * matches any suffix. The process that
#: sets up the sandbox (bubblewrap, Python, `launch.py`) already has the application's variables, so these must not
#: affect that process. Variables of the application's own interpreter (`NODE_OPTIONS`) are allowed, and so is `ENV`,
#: which only interactive shells read.
_RESERVED = {
    "the node sets it": ("PATH", "HOME", "TMPDIR", "CUDA_VISIBLE_DEVICES", "VLM_*"),
    "the dynamic loader or the C library reads it outside of the sandbox": (
        *("LD_*", "DYLD_*", "GLIBC_*", "GCONV_PATH", "LOCPATH", "NLSPATH"),
    ),
    "Python reads it outside of the sandbox": ("PYTHON*", "__PYVENV_LAUNCHER__"),
    "a shell that starts bubblewrap or Python reads it outside of the sandbox": (
        *("BASH_*", "SHELLOPTS", "BASHOPTS", "PS4"),
    ),
}
#: `(?!\n)` because `$` also matches before a final newline in Python.
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$(?!\n)"
NAME_RULE = "send 1 to 63 letters, digits, dots, dashes and underscores, a letter or digit first"
#: The version in a name that `version_name` returns.
VERSION = r"^[0-9a-f]{12}$(?!\n)"
_KEY = re.compile(r"deployments/([^/]+)/(\d{8})(\.outcome)?\.json")
_ROUTE = re.compile(r"routes/([^/]+)/(\d{8})\.json")
MAX_INSTANCES = 256

Name = Annotated[str, Meta(pattern=NAME)]
Cause = Literal["deploy", "rollback", "scale", "undeploy"]
Verdict = Literal["active", "rolled_back"]
Requirement = Literal["environment"]
Record = TypeVar("Record")

logger = logging.getLogger(__name__)


class BadEnvironment(ValueError):
    """An invalid variable or secret; the message names it, without its value."""


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Variables of an application's process."""

    variables: dict[str, str] = {}
    secrets: dict[str, str] = {}  #: by variable, the secret's name on the node


def check_environment(environment: Environment) -> None:
    """Raises: BadEnvironment for variables that are not allowed."""
    variables, secrets = environment.variables, environment.secrets
    if (count := len(variables) + len(secrets)) > MAX_VARIABLES:
        raise BadEnvironment(
            f"variables, secrets: {count} exceed the maximum of {MAX_VARIABLES}; move some into files of the package"
        )
    for group, names in (("variables", variables), ("secrets", secrets)):
        for name in names:
            _check_name(group, name)
    for name, value in variables.items():
        if "\0" in value or value.encode(errors="ignore").decode() != value:
            raise BadEnvironment(f"variables.{name}: send UTF-8 text without NUL")
        if name in secrets:
            raise BadEnvironment(f"secrets.{name}: variables has the same name; remove one")
    for name, secret in secrets.items():
        if not is_secret_name(secret):
            where = "secrets" if name == secret or is_random(name) else f"secrets.{name}"
            raise BadEnvironment(
                f"{where}: invalid name of a secret (not shown, because it may be the secret's value); "
                "put the value into a file in VLM_NODE__SECRETS_DIR, and send the file's name: 1 to 63 "
                "letters, digits, dots, dashes and underscores, no dot or dash first, and nothing that "
                "reads like a key"
            )
    _check_size(variables, MAX_VARIABLES_BYTES, "variables", "use files of the package")


def check_values(values: Mapping[str, str]) -> None:
    """Check all values of a process, secrets included. Raises: BadEnvironment."""
    whose = "variables, secrets"
    _check_size(values, MAX_ENVIRONMENT_BYTES, whose, "deploy with fewer or shorter values")


def _check_size(values: Mapping[str, str], most: int, whose: str, advice: str) -> None:
    size = sum(len(name) + len(value.encode()) for name, value in values.items())
    if size > most:
        raise BadEnvironment(f"{whose}: {size} bytes exceed the maximum of {most}; {advice}")


def is_secret_name(text: str) -> bool:
    """True if the name of a secret is valid. A name that looks like a key is invalid."""
    return _SECRET.fullmatch(text) is not None and not is_random(text)


def is_random(text: str) -> bool:
    """True if a text looks like a random key or token."""
    rows = re.split(r"[^A-Za-z0-9]", text)
    return _SECRET_VALUE.match(text) is not None or any(
        len(row) >= _LEAST_RANDOM and len(row) < _LONGEST_RANDOM_WORD * len(_WORD.findall(row))
        for row in rows
    )


def why_reserved(name: str) -> str:
    """The reason why a variable name is reserved; empty if it is not."""
    for reason, patterns in _RESERVED.items():
        if any(fnmatchcase(name.upper(), pattern) for pattern in patterns):
            return reason
    return ""


def _check_name(group: str, name: str) -> None:
    if not _VARIABLE.fullmatch(name):
        raise BadEnvironment(
            f"{group}: a name has 1 to 128 letters, digits and underscores, no digit first"
        )
    if reason := why_reserved(name):
        raise BadEnvironment(f"{group}.{name}: {reason}; use another name")


def version_digest(package: str, environment: Environment) -> str:
    """The digest of a package and its environment; without variables, the digest of the package."""
    if environment == Environment():
        return package
    return digest_of(msgspec.json.encode((package, environment), order="sorted"))


class Conflict(Exception):
    """Another change was written first; the message names it."""


class Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Resources of one instance on a node."""

    cpu: Annotated[float, Meta(ge=0, le=4096)] = 1.0
    memory_bytes: Annotated[int, Meta(ge=0)] = 0
    gpu: Annotated[int, Meta(ge=0, le=64)] = 0

    def __str__(self) -> str:
        """The format of `vlm deploy --resources`."""
        given = (("cpu", f"{self.cpu:g}"), ("memory", self.memory_bytes), ("gpu", self.gpu))
        return ",".join(f"{name}={value}" for name, value in given if value not in (0, "0"))


class Unreadable(StoreError):
    """A record is damaged or was written by a newer release; the message names the record."""


class SpecBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a package is served, as requested. Units: seconds.

    Records omit fields with default values, so that older gateways and nodes can read records that do not use new
    fields. A released default never changes, because stored records depend on it.
    """

    min_instances: Annotated[int, Meta(ge=0, le=MAX_INSTANCES)] = 0
    max_instances: Annotated[int, Meta(ge=1, le=MAX_INSTANCES)] = 4
    resources: Resources = Resources()
    #: Ratio of requests that the new version gets until its promotion; 0: promote it as soon as it is ready.
    canary: Annotated[float, Meta(ge=0, le=0.99)] = 0.0
    idle_s: Annotated[float, Meta(gt=0)] = 300.0  #: idle time until an instance is stopped
    #: Another instance is started when the oldest request has waited this long.
    target_age_s: Annotated[float, Meta(gt=0)] = 2.0
    start_s: Annotated[float, Meta(gt=0)] = 300.0  #: time limit for a new version to become ready
    retry_limit: Annotated[int, Meta(ge=0, le=100)] = 3  #: failed starts before a rollback

    def __post_init__(self) -> None:
        """Raises: ValueError."""
        if self.min_instances > self.max_instances:
            raise ValueError("min_instances is larger than max_instances; lower min_instances")


class Spec(SpecBody, frozen=True):
    """How a package is served, as recorded."""

    #: Features that a gateway or node must support to serve the package.
    requires: tuple[Requirement, ...] = ()


class Generation(msgspec.Struct, frozen=True):
    """One change of a deployment. An empty digest: the deployment is removed. Units: epoch seconds."""

    name: Name
    number: int
    digest: str  #: of the package
    spec: Spec
    cause: Cause = "deploy"
    created_at: float = 0.0
    environment: Environment = Environment()
    #: memory of one instance, if the spec does not set it
    least_memory_bytes: int = 0

    def __post_init__(self) -> None:
        """Require support for environments, because older nodes would serve the package without its environment."""
        requires = ("environment",) if self.environment != Environment() else ()
        if self.spec.requires != requires:
            spec = msgspec.structs.replace(self.spec, requires=requires)
            msgspec.structs.force_setattr(self, "spec", spec)

    @property
    def version(self) -> str:
        """The digest of the served version: the package, combined with its environment if it has one."""
        return self.digest and version_digest(self.digest, self.environment)


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a generation. It is written once and never changes."""

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
        """The generation that is served: the latest promoted one."""
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
            f"another client created generation {generation.number} of {generation.name} at the same "
            "time; check the deployment, then deploy again"
        )


def settle(store: PackageStore, name: str, number: int, outcome: Outcome) -> Outcome:
    """Write an outcome, unless one exists. Returns the stored outcome. Raises: StoreError."""
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
    return {name: found[-1] for name, found in _numbers(store, "deployments", _KEY).items()}


def _key(name: str, number: int, kind: str = "") -> str:
    return f"deployments/{name}/{number:08d}{kind and '.' + kind}.json"


def decode_record(store: PackageStore, key: str, kind: type[Record]) -> Record:
    """Read and decode a record. Raises: StoreError, such as Unreadable."""
    data = store.get(key)
    try:
        return msgspec.json.decode(data or b"", type=kind)
    except msgspec.MsgspecError as error:
        raise Unreadable(
            f"{store.url}: the record {key} is damaged, or needs a newer release: {error}"
        ) from None


class RoutedVersion(msgspec.Struct, frozen=True):
    """A version and its weight. `card`: the model card of its workers, stored for times without a running worker."""

    weight: int
    card: ModelCard

    @property
    def package(self) -> str:
        return self.card.package.partition("@")[2].partition("+")[0]


class RouteRecord(msgspec.Struct, frozen=True):
    """The versions of a name, by the first digits of their digests. Without versions, the route is removed."""

    name: str
    number: int
    versions: dict[str, RoutedVersion] = {}

    @property
    def weights(self) -> dict[str, int]:
        return {version: each.weight for version, each in self.versions.items()}


def record_route(store: PackageStore, route: RouteRecord) -> None:
    """Write a route. Raises: Conflict if its number exists; StoreError."""
    if not store.put_if_absent(_route_key(route.name, route.number), msgspec.json.encode(route)):
        raise Conflict(f"another client has just changed the route of {route.name}; try again")


def read_routes(
    store: PackageStore, known: Mapping[str, RouteRecord] = {}
) -> dict[str, RouteRecord]:
    """The latest route of each name, including removed routes. Unreadable routes are skipped. Raises: StoreError.

    `known`: routes of an earlier call. A route with an unchanged number is not read again.
    """
    found: dict[str, RouteRecord] = {}
    for name, numbers in _numbers(store, "routes", _ROUTE).items():
        try:
            last, route = numbers[-1], known.get(name)
            found[name] = route if route and route.number == last else _read(store, name, last)
        except Unreadable as error:
            logger.error("%s", error)
    return found


def read_packages(store: PackageStore, num_kept: int) -> set[str]:
    """The packages of the last `num_kept` routes of each name. Raises: StoreError, such as Unreadable."""
    routes = (
        _read(store, name, number)
        for name, numbers in _numbers(store, "routes", _ROUTE).items()
        for number in numbers[-num_kept:]
    )
    return {each.package for route in routes for each in route.versions.values()} - {""}


def _numbers(store: PackageStore, folder: str, key: re.Pattern[str]) -> dict[str, list[int]]:
    """The numbers of each name's records in a folder, in ascending order."""
    numbers: dict[str, list[int]] = {}
    for match in filter(None, map(key.fullmatch, store.list(folder))):
        numbers.setdefault(match[1], []).append(int(match[2]))
    return numbers


def _read(store: PackageStore, name: str, number: int) -> RouteRecord:
    return decode_record(store, _route_key(name, number), RouteRecord)


def _route_key(name: str, number: int) -> str:
    return f"routes/{name}/{number:08d}.json"
