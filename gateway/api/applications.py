"""`/v1/packages` and `/v1/blobs`: upload packages to the store; `/v1/applications` and `/v1/nodes`: change and list
deployments, and the machines that run them. All require a deploy key.

Blobs are streamed to the store while they arrive; an interrupted upload continues where it stopped. A change of a
deployment is recorded in the package store first, then in Redis. If Redis fails, nodes read the change from the store.
"""

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta, UnsetType
from msgspec.structs import asdict, replace
from redis.exceptions import RedisError
from starlette.responses import Response
from starlette.types import Receive

from gateway.api.fields import Data, copy_fields, invalid
from gateway.calls.models import ModelDirectory
from gateway.http.body import BodyTooSlow, PacedBody
from gateway.http.endpoint import Caller, Resource, operation
from gateway.http.errors import (
    ApiError,
    InvalidRequest,
    NotFound,
    RateLimited,
    conflict,
    record_unreadable,
    store_unavailable,
    unavailable,
)
from shared.packages import rollout
from shared.packages.deployment_state import MAX_LOG_LINES, DeploymentState
from shared.packages.deployments import (
    MAX_INSTANCES,
    NAME,
    NAME_RULE,
    VERSION,
    BadEnvironment,
    Cause,
    Conflict,
    Environment,
    Generation,
    History,
    Outcome,
    RoutedVersion,
    RouteRecord,
    Spec,
    SpecBody,
    Unreadable,
    check_environment,
    in_full,
    read_history,
    read_routes,
    record_generation,
    record_route,
    settle,
    version_name,
)
from shared.packages.garbage import blobs_of, write_hold
from shared.packages.manifest import (
    MANIFEST_TYPE,
    MAX_PACKAGE_BYTES,
    BadPackage,
    Digest,
    Manifest,
    decode_manifest,
    is_digest,
)
from shared.packages.rollout import App, Event, LogLine, NodeRecord
from shared.packages.signature import (
    MAX_SIGNATURE_CHARS,
    BadSignature,
    check_signed,
    keep_signature,
)
from shared.packages.store import (
    PIECE_BYTES,
    BadBlob,
    PackageStore,
    StoreError,
    WrongStart,
    read_manifest,
)
from shared.protocol import ModelCard
from shared.settings.limits import LimitSettings
from shared.settings.tree import DeploySettings

logger = logging.getLogger(__name__)


@dataclass
class DeployResource(Resource):
    """A resource that uses the package store, and requires a deploy key."""

    tag = "applications"
    access = "deploy"

    _configured: PackageStore | None

    @property
    def _store(self) -> PackageStore:
        """Raises: NotFound."""
        if self._configured is None:
            message = "Deployments are off: set VLM_DEPLOY__STORE for gateways and nodes."
            raise NotFound(message, code="deployments_off")
        return self._configured

    def to_error(self, error: Exception) -> Exception:
        """The error for the client if the store fails; the cause is only logged."""
        if not isinstance(error, Unreadable | StoreError):
            return error
        logger.error("%s", error)
        return record_unreadable() if isinstance(error, Unreadable) else store_unavailable()


_MAX_UPLOADS = 4  #: concurrent uploads, not counting slow ones
_SLOW_RATE = 256 * 1024  #: bytes per second; a slower upload counts as slow
_MAX_THREADS = 64  #: upload threads for all keys together
_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")


class MissingBlob(msgspec.Struct):
    """A file that the store lacks. `start`: number of the file's bytes that are stored already."""

    digest: str
    size: int
    start: int


class Plan(msgspec.Struct):
    """The files to upload. All files of the package are protected from deletion for a day."""

    digest: str
    missing: list[MissingBlob]


class _Body:
    """A request's body as a file object, which the store reads in a thread. Not seekable."""

    def __init__(self, receive: Receive, size: int, timeout_s: float) -> None:
        self._paced = PacedBody(receive, timeout_s)
        self._left = size
        self._loop = asyncio.get_running_loop()
        self._has_more = True
        self._reading: asyncio.Task[None] | None = None
        self._looked_at = (0, 0.0)
        self.error: ApiError | None = None  #: the reason if the body ends early

    def seekable(self) -> bool:
        return False

    def read(self, size: int = -1) -> bytes:
        """Raises: OSError; `error` has the reason."""
        return asyncio.run_coroutine_threadsafe(self._next(), self._loop).result()

    def cut(self, error: ApiError) -> None:
        """Make the current or the next `read` raise OSError."""
        self.error = self.error or error
        if self._reading is not None:
            self._reading.cancel()

    def is_slow(self, period_s: float) -> bool:
        """Whether the client sent less than `_SLOW_RATE` over the last `period_s`."""
        num_bytes, waited_s = self._looked_at
        self._looked_at = (self._paced.num_bytes, self._paced.waited_s)
        waited_s = self._paced.waited_s - waited_s
        has_waited = waited_s > period_s / 2  # else the store is slow, not the client
        return has_waited and self._paced.num_bytes - num_bytes < waited_s * _SLOW_RATE

    async def _next(self) -> bytes:
        pieces = bytearray()
        self._reading = asyncio.ensure_future(self._read(pieces))
        await asyncio.wait([self._reading])
        if self.error is None:
            self._reading.result()
            self._left -= len(pieces)
            if self._left < 0 or (self._left and not self._has_more):
                self.error = _cut("the body's length differs from Content-Length")
        if self.error is not None:
            raise OSError(0, self.error.message)
        return bytes(pieces)

    async def _read(self, pieces: bytearray) -> None:
        while self._has_more and len(pieces) < PIECE_BYTES:
            try:
                message = await self._paced.receive()
            except BodyTooSlow as slow:
                self.error = _cut(slow.problem)
                return
            if message["type"] == "http.disconnect":
                self.error = _cut("the client disconnected")
                return
            pieces += message.get("body", b"")
            self._has_more = message.get("more_body", False)


def _cut(problem: str) -> ApiError:
    return InvalidRequest(f"The upload was cut: {problem}.", code="timeout")


class Packages(DeployResource):
    def __init__(self, store: PackageStore | None, timeout_s: float) -> None:
        super().__init__(store)
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(_MAX_UPLOADS)
        self._slow: Counter[str] = Counter()  # by API key: number of slow uploads
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "upload")

    @operation("POST", "/v1/packages", media_type=MANIFEST_TYPE)
    async def plan_upload(self, caller: Caller) -> Plan:
        """List the files of a package that the store lacks, and protect the package from deletion for a day."""
        store = self._store
        try:
            package = decode_manifest(caller.body)
        except BadPackage as error:
            raise InvalidRequest(f"{error}.", param="manifest", code="invalid_value") from None
        sizes = {layer.digest: layer.size for layer in package.layers}

        def look() -> Iterator[MissingBlob]:
            write_hold(store, blobs_of(package))
            for digest, size in sizes.items():
                if store.size(digest) != size:
                    yield MissingBlob(digest, size, store.partial(digest))

        return Plan(package.digest, await asyncio.to_thread(lambda: list(look())))

    @operation("HEAD", "/v1/blobs/{digest}")
    async def has_blob(self, caller: Caller) -> Response:
        """Show whether the store has a complete file. If not, `upload-offset` is the number of stored bytes."""
        digest, store = _check_digest(caller), self._store
        size = await asyncio.to_thread(store.size, digest)
        if size is not None:
            return Response(status_code=200, headers={"content-length": str(size)})
        start = await asyncio.to_thread(store.partial, digest)
        return Response(status_code=404, headers={"upload-offset": str(start)})

    @operation(
        "PUT",
        "/v1/blobs/{digest}",
        media_type="application/octet-stream",
        is_upload=True,
        status=201,
    )
    async def upload_blob(self, caller: Caller) -> Response:
        """Store a file, or with `Content-Range` the rest of an interrupted upload."""
        digest, key = _check_digest(caller), caller.context.tenant
        start, size = _extent(caller.context.headers)
        store = self._store
        body = _Body(caller.receive, size, self._timeout_s)
        try:
            async with self._places:
                writing = asyncio.get_running_loop().run_in_executor(
                    self._threads, store.put, digest, cast(IO[bytes], body), None, start
                )
                period_s = self._timeout_s / 10
                while not writing.done() and not body.is_slow(period_s):
                    await asyncio.wait([writing], timeout=period_s)
            self._slow[key] += 1
            try:
                if not writing.done() and self._slow[key] > LimitSettings.max_slow_uploads:
                    limit = LimitSettings.max_slow_uploads
                    message = f"Too many slow uploads: send at most {limit} files at a time."
                    body.cut(RateLimited("slow_uploads", message, retry_after_s=5))
                await writing
            finally:
                self._slow[key] -= 1
                self._slow += Counter()  # removes zeros
        except BadBlob as error:
            raise InvalidRequest(f"{error}.", code="digest_mismatch") from None
        except WrongStart:
            raise conflict("Wrong offset: HEAD returns the right one in upload-offset.") from None
        except StoreError:
            if body.error is None:
                raise
            raise body.error from None
        return Response(status_code=201)


def _extent(headers: Mapping[bytes, bytes]) -> tuple[int, int]:
    """Offset of the body in the blob, and the blob's size. Raises: InvalidRequest."""
    length = headers.get(b"content-length", b"")
    if not length.isdigit() or int(length) > MAX_PACKAGE_BYTES:
        message = f"Send Content-Length: at most {MAX_PACKAGE_BYTES} bytes."
        raise InvalidRequest(message, status=411, code="invalid_http")
    size, given = int(length), headers.get(b"content-range")
    if given is None:
        return 0, size
    match = _RANGE.fullmatch(given.decode("latin-1"))
    if match is None or int(match[2]) + 1 != int(match[3]) or int(match[3]) - int(match[1]) != size:
        raise InvalidRequest(
            "Invalid value for Content-Range: send `bytes START-LAST/SIZE` up to the blob's end.",
            code="invalid_value",
        )
    return int(match[1]), size


def _check_digest(caller: Caller) -> str:
    """Raises: InvalidRequest."""
    digest = caller.path["digest"]
    if not is_digest(digest):
        raise invalid("digest", "send sha256: and 64 hex digits")
    return digest


_PATH = "/v1/applications/{name}"
_TRIES = 20  # how often a change is tried while others change the same record


class Deploy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    digest: Digest  #: digest of the package's manifest; the store must have its blobs
    spec: SpecBody = SpecBody()
    environment: Environment = Environment()  #: refused for models
    #: Refuse the deployment if the latest generation has another number.
    if_generation: Annotated[int, Meta(ge=0)] | None = None
    #: Signature of the digest, by `ssh-keygen -Y sign -n vlm-fleet`; stored with the package.
    signature: Annotated[str, Meta(max_length=MAX_SIGNATURE_CHARS)] | None = None


class Rollback(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    #: Generation to restore; null: the previously active generation.
    generation: Annotated[int, Meta(ge=1)] | None = None


class Scale(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    min_instances: Annotated[int, Meta(ge=0, le=MAX_INSTANCES)] | None = None
    max_instances: Annotated[int, Meta(ge=1, le=MAX_INSTANCES)] | None = None


class Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/applications/{name}:route`, and its answer."""

    #: Weights by version (the first 12 digits of its digest). Empty: remove the route.
    weights: Annotated[
        dict[Annotated[str, Meta(pattern=VERSION)], Annotated[int, Meta(ge=0, le=10**6)]],
        Meta(max_length=16),
    ]

    def __post_init__(self) -> None:
        """Raises: ValueError."""
        if self.weights and not any(self.weights.values()):
            raise ValueError("weights: send a weight above 0 for at least one version")


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/applications/{name}:promote`."""


class SlotObject(msgspec.Struct):
    """One instance. `phase` is the progress of its start."""

    id: int
    digest: str
    state: str
    phase: str
    node: str
    since: float


class RevisionObject(msgspec.Struct):
    generation: int
    digest: str  #: of the version: the package's digest, or if there is an environment, a digest of both
    package: str
    environment: dict[str, Any]
    spec: dict[str, Any]
    num_ready: int
    #: Requests of its current instances: running or waiting, finished, failed.
    num_running: int
    num_finished: int
    num_failed: int


class GenerationObject(msgspec.Struct):
    generation: int
    digest: str  #: digest of the package
    version: str
    cause: Cause
    created_at: float
    outcome: Literal["active", "rolled_back"] | None
    message: str


class LogQuery(msgspec.Struct, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=MAX_LOG_LINES)] = 100  #: number of latest lines
    slot: int | None = None  #: only lines of this instance


class Log(Data[LogLine]):
    """Log lines of instances, oldest first."""


class Application(msgspec.Struct):
    name: str
    generation: int
    #: `starting` while a new version starts, `canary` while it gets a fraction of the requests, `active`, `undeployed`,
    #: or `unreadable` if a newer version of vlm-fleet wrote the record.
    state: str
    active: RevisionObject | None
    candidate: RevisionObject | None
    desired: int
    slots: list[SlotObject]
    message: str
    events: Sequence[Event]
    #: Oldest first. Omitted in lists.
    generations: list[GenerationObject] | UnsetType = msgspec.UNSET


class ApplicationList(Data[Application], kw_only=True):
    """All deployments, routes, and the package store."""

    routes: dict[str, dict[str, int]]  #: weights of versions by name
    store: str


class NodeInstance(msgspec.Struct):
    application: str
    slot: int
    digest: str
    state: str


class NodeObject(msgspec.Struct):
    id: str
    cpu: float
    memory_bytes: int
    gpu: int
    state: str  #: `ready` or `draining`
    instances: list[NodeInstance]

    @classmethod
    def of(cls, node: NodeRecord) -> "NodeObject":
        instances = [copy_fields(each, NodeInstance, application=each.app) for each in node.slots]
        state = "draining" if node.is_stopping else "ready"
        return copy_fields(node, cls, state=state, instances=instances)


class NodeList(Data[NodeObject]):
    pass


@dataclass
class Applications(DeployResource):
    _settings: DeploySettings
    _deployments: DeploymentState
    _models: ModelDirectory

    def to_error(self, error: Exception) -> Exception:
        if isinstance(error, Conflict):
            return conflict(f"{error}.")
        return unavailable() if isinstance(error, OSError) else super().to_error(error)

    @operation("GET", "/v1/applications")
    async def list_applications(self, caller: Caller) -> ApplicationList:
        """List deployments."""
        apps = await self._deployments.without_lost()
        routes = await asyncio.to_thread(read_routes, self._store)
        found = [self._to_object(app) for app in apps.values()]
        found += [self._to_unreadable(name) for name in self._deployments.unreadable]
        found.sort(key=lambda each: each.name)
        weights = {name: routes[name].weights for name in sorted(routes) if routes[name].versions}
        return ApplicationList(found, routes=weights, store=self._settings.store)

    @operation("GET", _PATH)
    async def retrieve_application(self, caller: Caller) -> Application:
        """Show one deployment: versions, instances, events and all its generations."""
        return await self._get(_check_name(caller))

    async def _get(self, name: str) -> Application:
        history, apps = await asyncio.gather(self._history(name), self._deployments.without_lost())
        if history is None:
            raise _unknown()
        app = apps.get(name)
        if app is None and name in self._deployments.unreadable:
            found = self._to_unreadable(name, history.last.number)
        else:
            found = self._to_object(app or App(name, history.last.number))
        found.generations = [
            _to_generation(each, history) for _, each in sorted(history.generations.items())
        ]
        return found

    @operation("GET", _PATH + "/logs")
    async def retrieve_application_log(self, caller: Caller, query: LogQuery) -> Log:
        """Show the latest log lines of a deployment's instances."""
        name = _check_name(caller)
        lines = await self._deployments.log(name, MAX_LOG_LINES)
        if not lines and await self._history(name) is None:
            raise _unknown()
        chosen = [line for line in lines if query.slot in (None, line.slot)]
        return Log(chosen[-query.limit :])

    def _check_unserved(self, name: str) -> None:
        """Raises: InvalidRequest."""
        if name in self._models.cards:
            raise invalid("name", "a worker serves a model of this name; send another name")

    @operation("PUT", _PATH, answer_type=Application, status=202)
    async def deploy_application(self, caller: Caller, body: Deploy) -> Response:
        """Deploy a package under a name. The current version serves until the new one is ready."""
        name = _check_name(caller)
        self._check_unserved(name)
        try:
            check_environment(body.environment)
        except BadEnvironment as error:
            raise invalid("environment", f"{error}") from None
        async with self._held(body.digest, body.signature) as manifest:
            if manifest.config.kind == "model" and body.environment != Environment():
                problem = "models do not support environment variables; set engine settings with vlm deploy --set"
                raise invalid("environment", problem)
            status, found = await self._deploy(name, body, manifest.least_memory_bytes)
        return Response(msgspec.json.encode(found), status, media_type="application/json")

    async def _deploy(
        self, name: str, wanted: Deploy, least_memory_bytes: int
    ) -> tuple[int, Application]:
        history = await self._history(name)
        active = history.active if history else None
        number = history.last.number if history else 0
        if wanted.if_generation is not None and wanted.if_generation != number:
            raise conflict(f"The latest generation is {number}, not {wanted.if_generation}.")
        generation = Generation(
            name, number + 1, wanted.digest, Spec(**asdict(wanted.spec)),
            environment=wanted.environment, least_memory_bytes=least_memory_bytes,
        )  # fmt: skip
        new = (generation.version, generation.spec)
        if history is not None and (history.last.version, history.last.spec) == new:
            outcome = history.outcomes.get(number)
            if outcome is None or outcome.verdict == "active":
                return 200, await self._get(name)
        if active is not None and active.version == generation.version:
            await self._check_room(active, generation)
        await self._add(generation, history)
        return 202, await self._get(name)

    async def _check_room(self, active: Generation, wanted: Generation) -> None:
        """Check that nodes can provide the active version's changed resources. Raises: ApiError, RedisError."""
        if active.spec.resources == wanted.spec.resources:
            return
        nodes = await self._deployments.nodes()
        obstacle = rollout.find_obstacle(rollout.to_revision(wanted, 0.0), nodes)
        if obstacle and nodes:
            raise conflict(f"The resources were not changed: {obstacle}.")

    @operation("POST", _PATH + ":rollback", status=202)
    async def rollback_application(self, caller: Caller, body: Rollback) -> Application:
        """Stop the rollout of a new version. Without a rollout, serve the previous version again."""
        name, history = await self._known(caller)
        candidate = history.candidate
        if candidate is not None and body.generation is None:
            await self._settle(name, candidate.number, Outcome("rolled_back", "requested"))
            return await self._get(name)
        active = history.active
        if body.generation is None:
            back = history.before(active.version if active else "")
        else:
            back = history.generations.get(body.generation)
        if back is None or not back.digest:
            raise conflict("No such version: GET /v1/applications/{name} lists the generations.")
        generation = history.back_to(back, (active or back).spec)
        async with self._held(back.digest):
            await self._add(generation, history)
        return await self._get(name)

    @operation("POST", _PATH + ":promote", status=202)
    async def promote_application(self, caller: Caller, body: Nothing) -> Application:
        """Send all requests to the canary."""
        name, history = await self._known(caller)
        app = await self._find(name)
        candidate = history.candidate
        is_ready = app is not None and candidate and app.of(candidate.version, "ready")
        if candidate is None or not is_ready:
            raise conflict("No new version is ready: wait for its instances, or deploy one.")
        await self._check_retired(name, history.active)
        await self._settle(name, candidate.number, Outcome("active"))
        return await self._get(name)

    @operation("POST", _PATH + ":scale", status=202)
    async def scale_application(self, caller: Caller, body: Scale) -> Application:
        """Change the minimum and maximum number of instances."""
        name, history = await self._known(caller)
        active = history.active
        if active is None or history.candidate is not None:
            raise conflict("A new version is being rolled out: scale it when it is active.")
        given = {name: value for name, value in asdict(body).items() if value is not None}
        try:
            spec = replace(active.spec, **given)
        except ValueError as error:
            raise invalid("min_instances", f"{error}") from None
        number = history.last.number + 1
        await self._add(replace(active, number=number, spec=spec, cause="scale"), history)
        return await self._get(name)

    @operation("DELETE", _PATH, status=202)
    async def undeploy_application(self, caller: Caller) -> Application:
        """Stop serving a name. Queued requests are still answered."""
        name, history = await self._known(caller)
        last = history.last
        await self._add(Generation(name, last.number + 1, "", last.spec, "undeploy"), history)
        return await self._get(name)

    @operation("POST", _PATH + ":route")
    async def route_application(self, caller: Caller, body: Weights) -> Weights:
        """Route a name's requests to versions by weight, instead of by the deployment's own weights."""
        name, store = _check_name(caller), self._store
        history, before = await self._history(name), await self._route(name)
        await self._models.refresh()
        if not (body.weights or before.versions):
            raise _unknown("route")
        if body.weights and history is not None and history.candidate is not None:
            raise conflict("A new version is being rolled out: set the route when it is active.")
        if body.weights:
            self._check_unserved(name)
        app = await self._find(name)
        versions = {
            version: RoutedVersion(weight, self._card(name, version, before, app))
            for version, weight in body.weights.items()
        }
        async with AsyncExitStack() as stack:
            for package in {each.package for each in versions.values()} - {""}:
                await stack.enter_async_context(self._held(package))
            route = RouteRecord(name, before.number + 1, versions)
            await asyncio.to_thread(record_route, store, route)
        logger.info("route %s: %s", name, body.weights or "removed")
        self._models.table.put(route)
        await self._models.refresh()
        return body

    def _card(self, name: str, version: str, before: RouteRecord, app: App | None) -> ModelCard:
        """The card of a version that can serve. Raises: ApiError."""
        model = version_name(name, version)
        retiring = app.retiring if app is not None else ()
        if any(version_name(name, each.digest) == model for each in retiring):
            raise conflict(f"Nodes are stopping {model}; deploy it again, or send another version.")
        known = before.versions.get(version)
        card = self._models.cards.get(model) or (known.card if known else None)
        if card is None:
            raise conflict(f"No worker serves {model} now; start one, then set the route.")
        return card

    async def _check_retired(self, name: str, active: Generation | None) -> None:
        """Refuse to retire a version that a route sends requests to, if only nodes serve it. Raises: ApiError."""
        model = version_name(name, active.version) if active is not None else ""
        routed = (await self._route(name)).versions.get(model.rpartition("@")[2])
        if active is None or routed is None or not routed.weight:
            return
        app = await self._find(name)
        await self._models.refresh()
        started = ("starting", "ready", "draining")
        num_slots = len(app.of(active.version, *started)) if app is not None else 0
        if self._models.num_workers[model] <= num_slots:
            raise conflict(
                f"The route of {name} sends requests to {model}, and only nodes serve it: start other "
                "workers for it, or set its weight to 0."
            )

    async def _route(self, name: str) -> RouteRecord:
        found = await asyncio.to_thread(read_routes, self._store)
        return found.get(name, RouteRecord(name, 0))

    @operation("GET", "/v1/nodes")
    async def list_nodes(self, caller: Caller) -> NodeList:
        """List the nodes and their instances."""
        nodes = await self._deployments.nodes()
        return NodeList([NodeObject.of(nodes[node_id]) for node_id in sorted(nodes)])

    @operation("POST", "/v1/nodes/{name}:drain")
    async def drain_node(self, caller: Caller) -> NodeObject:
        """Drain a node: its instances finish their requests and stop. Other nodes start the instances again."""
        nodes = await self._deployments.nodes()
        node = nodes.get(caller.path["name"])
        if node is None:
            message = f"There is no node of this name. Nodes: {', '.join(sorted(nodes)) or 'none'}."
            raise NotFound(message, param="name", code="node_not_found")
        await self._deployments.drain(node.id)
        return NodeObject.of(replace(node, is_stopping=True))

    # Helpers

    def _to_object(self, app: App) -> Application:
        def to_revision(revision: rollout.Revision | None) -> RevisionObject | None:
            if revision is None:
                return None
            digest = revision.digest
            model = version_name(app.name, digest)
            workers = [each for each in self._models.workers if each.card.name == model]
            return RevisionObject(
                revision.number, digest, revision.package or digest,
                in_full(revision.environment), in_full(revision.spec), len(app.of(digest, "ready")),
                sum(each.num_running + each.num_waiting for each in workers),
                sum(each.num_finished for each in workers),
                sum(each.num_failed for each in workers),
            )  # fmt: skip

        slots = [SlotObject(s.id, s.digest, s.state, s.phase, s.node, s.since) for s in app.slots]
        return Application(
            app.name, app.number, app.state, to_revision(app.active), to_revision(app.candidate),
            app.desired, slots, app.message, app.events,
        )  # fmt: skip

    def _to_unreadable(self, name: str, number: int = 0) -> Application:
        found = self._to_object(App(name, number, message=record_unreadable().message))
        found.state = "unreadable"
        return found

    @asynccontextmanager
    async def _held(self, digest: str, signature: str | None = None) -> AsyncIterator[Manifest]:
        """Check a package and its signature. Keep the package during the `with` block. Raises: ApiError, StoreError."""
        store, signers = self._store, self._settings.signers
        key = await asyncio.to_thread(write_hold, store, package=digest)
        try:
            manifest = await asyncio.to_thread(_check_package, store, digest)
            await asyncio.to_thread(_check_signature, store, digest, signature, signers)
            yield manifest
        finally:
            await asyncio.to_thread(store.delete, key)

    async def _history(self, name: str) -> History | None:
        return await asyncio.to_thread(read_history, self._store, name)

    async def _known(self, caller: Caller) -> tuple[str, History]:
        name = _check_name(caller)
        history = await self._history(name)
        if history is None or not history.last.digest:
            raise _unknown()
        return name, history

    async def _find(self, name: str) -> App | None:
        return (await self._deployments.apps()).get(name)

    async def _add(self, generation: Generation, history: History | None) -> None:
        """Record a generation and the outcome of the previous one. Raises: ApiError, StoreError."""
        store, name, number = self._store, generation.name, generation.number
        active = history.active if history else None
        if active is not None and active.version != generation.version:
            await self._check_retired(name, active)
        generation = replace(generation, created_at=time.time())  # noqa: TID251
        await asyncio.to_thread(record_generation, store, generation)
        logger.info("deployment %s: generation %d (%s)", name, number, generation.cause)
        if history is not None and history.candidate is not None:
            outcome = Outcome("rolled_back", f"generation {number} replaced it")
            await asyncio.to_thread(settle, store, name, history.candidate.number, outcome)
        if not generation.digest or (active is not None and active.version == generation.version):
            await asyncio.to_thread(settle, store, name, number, Outcome("active"))
        new = None if history is not None and history.last.digest else App(name)
        await self._change(name, lambda app, now: _admitted(app, generation, now), new)

    async def _settle(self, name: str, number: int, wanted: Outcome) -> None:
        outcome = await asyncio.to_thread(settle, self._store, name, number, wanted)
        await self._change(name, lambda app, now: rollout.conclude(app, number, outcome, now))
        if outcome.verdict != wanted.verdict:
            raise conflict(f"The rollout has just ended: {outcome.verdict}.")

    async def _change(
        self, name: str, change: Callable[[App, float], App], new: App | None = None
    ) -> None:
        """Write a change to Redis. If this fails, nodes read the change from the store."""
        try:
            now = await self._deployments.now()
            for _ in range(_TRIES):
                before = await self._find(name)
                start = before or new
                if start is None or await self._deployments.put(before, change(start, now)):
                    return
        except (RedisError, OSError) as error:
            logger.warning("deployment %s: recorded in the store, not in Redis: %s", name, error)


def _admitted(app: App, generation: Generation, now: float) -> App:
    return app if app.number >= generation.number else rollout.admit(app, generation, now)


def _check_package(store: PackageStore, digest: str) -> Manifest:
    """Check that the package is complete in the store and can run. Raises: InvalidRequest, StoreError."""
    try:
        manifest = read_manifest(store, digest)
    except (BadPackage, StoreError) as error:
        raise invalid("digest", f"{error}") from None
    sizes = {layer.digest: layer for layer in manifest.layers}
    for layer in sizes.values():
        if store.size(layer.digest) != layer.size:
            raise invalid("digest", f"{layer.path}: blob missing or incomplete; push it again")
    return manifest


def _check_signature(
    store: PackageStore, digest: str, signature: str | None, signers: Path | None
) -> None:
    """Store a valid signature. With `signers`, require one. Raises: InvalidRequest, StoreError."""
    try:
        if signature is not None:
            if signers is None:
                raise BadSignature(
                    "this gateway cannot verify signatures: set VLM_DEPLOY__ALLOWED_SIGNERS of the gateway, or "
                    "send no signature"
                )
            keep_signature(store, digest, signature, signers)
        if signers is not None:
            name = check_signed(store, digest, signers)
            logger.info("the package %s is signed by %s", digest, name)
    except BadSignature as error:
        raise InvalidRequest(f"{error}.", param="signature", code="invalid_signature") from None


def _to_generation(generation: Generation, history: History) -> GenerationObject:
    outcome = history.outcomes.get(generation.number)
    return GenerationObject(
        generation.number, generation.digest, generation.version, generation.cause,
        generation.created_at,
        outcome.verdict if outcome else None, outcome.message if outcome else "",
    )  # fmt: skip


def _unknown(what: str = "deployment") -> NotFound:
    return NotFound(
        f"There is no {what} of this name: GET /v1/applications lists them.",
        param="name",
        code="application_not_found",
    )


def _check_name(caller: Caller) -> str:
    """Raises: InvalidRequest."""
    name = caller.path["name"]
    if not re.match(NAME, name):
        raise invalid("name", NAME_RULE)
    return name
