"""`/v1/applications`: what is deployed, and how it changes. For keys that may deploy.

A change is a record in the store, which is there or not, before anything happens; Redis is told after it, and
finds it by itself where that fails.
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta, UnsetType
from msgspec.structs import asdict, replace
from redis.exceptions import RedisError

from gateway.api.operator_access import OperatorAccess
from gateway.api.package_store import ConfiguredStore, store_unavailable
from gateway.calls.models import ModelDirectory
from gateway.http.body import JsonBody, locate
from gateway.http.errors import (
    ApiError,
    InvalidRequest,
    NotFound,
    record_unreadable,
    unavailable,
)
from shared.packages import rollout
from shared.packages.deployment_state import MAX_LOG_LINES, DeploymentState
from shared.packages.deployments import (
    MAX_INSTANCES,
    NAME,
    NAME_RULE,
    Cause,
    Conflict,
    Generation,
    History,
    Outcome,
    Spec,
    SpecBody,
    in_full,
    read_history,
    record_generation,
    settle,
    version_name,
)
from shared.packages.environment import BadEnvironment, Environment, check_environment
from shared.packages.garbage import write_hold
from shared.packages.latency import add_up, quantile
from shared.packages.manifest import BadPackage, Digest, Manifest
from shared.packages.rollout import App, LogLine
from shared.packages.signature import (
    MAX_SIGNATURE_CHARS,
    BadSignature,
    check_signed,
    keep_signature,
)
from shared.packages.store import PackageStore, StoreError, read_manifest
from shared.queue.api import QueueUnavailable
from shared.settings.tree import DeploySettings

_TRIES = 20  # of a change that others are always ahead of

logger = logging.getLogger(__name__)


class Deploy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `PUT /v1/applications/{name}`."""

    digest: Digest  #: of the package's manifest, whose blobs are in the store
    spec: SpecBody = SpecBody()
    environment: Environment = Environment()  #: of an application
    if_generation: Annotated[int, Meta(ge=0)] | None = None  #: the latest that the caller knows
    #: of the digest, by `ssh-keygen -Y sign -n vlm-fleet`; kept beside the package
    signature: Annotated[str, Meta(max_length=MAX_SIGNATURE_CHARS)] | None = None


class Rollback(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/applications/{name}:rollback`."""

    generation: Annotated[int, Meta(ge=1)] | None = None  #: where to; the last that served before


class Scale(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/applications/{name}:scale`."""

    min_instances: Annotated[int, Meta(ge=0, le=MAX_INSTANCES)] | None = None
    max_instances: Annotated[int, Meta(ge=1, le=MAX_INSTANCES)] | None = None


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/applications/{name}:promote`."""


class SlotObject(msgspec.Struct):
    """One instance. `phase`: how far it is, while it starts."""

    id: int
    digest: str
    state: str
    phase: str
    node: str
    since: float


class RevisionObject(msgspec.Struct):
    """A version as it is served."""

    generation: int
    digest: str  #: of the version: the package's, or where it has an environment one of both
    package: str
    environment: dict[str, Any]
    spec: dict[str, Any]
    num_ready: int
    #: requests that its instances of now hold, have answered, and have failed
    num_running: int
    num_finished: int
    num_failed: int
    #: Of their answers of the last minutes, without the wait: within which 95 % had the first token
    #: (other tasks than generating: the whole answer), and each further one. 0: none yet
    p95_first_s: float
    p95_token_s: float


class EventObject(msgspec.Struct):
    """What happened; `at` in epoch seconds."""

    at: float
    text: str


class GenerationObject(msgspec.Struct):
    """A change that was asked for, and what came of it."""

    generation: int
    digest: str  #: of the package
    version: str
    cause: Cause
    created_at: float
    outcome: Literal["active", "rolled_back"] | None
    message: str


class LogQuery(msgspec.Struct):
    """Which of the latest lines."""

    limit: Annotated[int, Meta(ge=1, le=MAX_LOG_LINES)] = 100
    slot: int | None = None


class Log(msgspec.Struct):
    """Lines that instances have logged, the oldest first."""

    data: list[LogLine]
    object: str = "list"


class Application(msgspec.Struct):
    """A deployment as it is now."""

    name: str
    generation: int
    #: `starting` and `canary` while a new version is on its way, `active`, `undeployed`, or
    #: `unreadable` where a newer version of this program wrote how it is.
    state: str
    active: RevisionObject | None
    candidate: RevisionObject | None
    desired: int
    slots: list[SlotObject]
    message: str
    events: list[EventObject]
    #: The latest last; in lists, it is left out.
    generations: list[GenerationObject] | UnsetType = msgspec.UNSET


class ApplicationList(msgspec.Struct):
    """All deployments, and the store where packages go."""

    data: list[Application]
    store: str
    object: str = "list"


class Applications:
    """Changes deployments, and tells how they are."""

    def __init__(
        self, deploy: DeploySettings, deployments: DeploymentState, models: ModelDirectory
    ) -> None:
        self._store = ConfiguredStore(deploy.store)
        self._signers = deploy.signers
        self._deployments = deployments
        self._models = models

    async def list(self) -> ApplicationList:
        """Raises: ApiError, RedisError."""
        apps = await self._deployments.apps()
        await self._store.open()
        found = [self._to_object(app) for app in apps.values()]
        found += [self._to_unreadable(name) for name in self._deployments.unreadable]
        return ApplicationList(sorted(found, key=lambda each: each.name), self._store.url)

    async def get(self, name: str) -> Application:
        """Raises: ApiError, RedisError."""
        history, app = await asyncio.gather(self._history(name), self._find(name))
        if history is None:
            raise _unknown(name)
        if app is None and name in self._deployments.unreadable:
            found = self._to_unreadable(name, history.last.number)
        else:
            found = self._to_object(app or App(name, history.last.number))
        found.generations = [
            _to_generation(each, history) for _, each in sorted(history.generations.items())
        ]
        return found

    async def log(self, name: str, query: LogQuery) -> Log:
        """Raises: ApiError, RedisError."""
        lines = await self._deployments.log(name, MAX_LOG_LINES)
        if not lines and await self._history(name) is None:
            raise _unknown(name)
        chosen = [line for line in lines if query.slot in (None, line.slot)]
        return Log(chosen[-query.limit :])

    async def deploy(self, name: str, wanted: Deploy) -> tuple[int, Application]:
        """Returns the status too: 200 where nothing was to do. Raises: ApiError, RedisError."""
        if name in self._models.cards:
            raise _invalid("name", "a worker serves a model of this name; take another")
        try:
            check_environment(wanted.environment)
        except BadEnvironment as error:
            raise _invalid("environment", f"{error}") from None
        async with self._held(wanted.digest, wanted.signature) as manifest:
            if manifest.config.kind == "model" and wanted.environment != Environment():
                raise _invalid(
                    "environment",
                    "a model has no variables; its engine's settings are a part of its package (--set)",
                )
            return await self._deploy(name, wanted, manifest.least_memory_bytes)

    async def _deploy(
        self, name: str, wanted: Deploy, least_memory_bytes: int
    ) -> tuple[int, Application]:
        history = await self._history(name)
        last = history.last if history else None
        number = last.number if last else 0
        if wanted.if_generation is not None and wanted.if_generation != number:
            raise _conflict(f"The latest generation is {number}, not {wanted.if_generation}.")
        generation = Generation(
            name, number + 1, wanted.digest, Spec(**asdict(wanted.spec)),
            environment=wanted.environment, least_memory_bytes=least_memory_bytes,
        )  # fmt: skip
        if (
            last is not None
            and history is not None
            and (last.version, last.spec) == (generation.version, generation.spec)
        ):
            outcome = history.outcomes.get(number)
            if outcome is None or outcome.verdict == "active":
                return 200, await self.get(name)
        active = history.active if history else None
        if (
            active is not None
            and active.version == generation.version
            and active.spec.resources != generation.spec.resources
        ):
            await self._check_room(generation)
        await self._add(generation, history)
        return 202, await self.get(name)

    async def _check_room(self, generation: Generation) -> None:
        """Other resources for a version that serves are in force at once. Raises: ApiError, RedisError."""
        nodes = await self._deployments.nodes()
        may_grow = not nodes or any(node.takes for node in nodes.values())
        revision = rollout.to_revision(generation, 0.0)
        obstacle = rollout.find_obstacle(App(generation.name), revision, nodes)
        if obstacle and not may_grow:
            raise _conflict(f"The resources stay as they are: {obstacle}.")

    async def rollback(self, name: str, wanted: Rollback) -> Application:
        """Take the candidate back, or have an earlier version serve again. Raises: ApiError, RedisError."""
        history = await self._known(name)
        candidate = history.candidate
        if candidate is not None and wanted.generation is None:
            await self._settle(name, candidate.number, Outcome("rolled_back", "asked for"))
            return await self.get(name)
        active = history.active
        if wanted.generation is None:
            back = history.before(active.version if active else "")
        else:
            back = history.generations.get(wanted.generation)
        if back is None or not back.digest:
            raise _conflict("There is no such earlier version to go back to.")
        generation = history.back_to(back, (active or back).spec)
        async with self._held(back.digest):
            await self._add(generation, history)
        return await self.get(name)

    async def promote(self, name: str) -> Application:
        """Have the canary serve all requests. Raises: ApiError, RedisError."""
        history = await self._known(name)
        app = await self._find(name)
        candidate = history.candidate
        is_ready = app is not None and candidate and app.of(candidate.version, "ready")
        if candidate is None or not is_ready:
            raise _conflict("There is no candidate that is ready.")
        await self._settle(name, candidate.number, Outcome("active"))
        return await self.get(name)

    async def scale(self, name: str, wanted: Scale) -> Application:
        """Raises: ApiError, RedisError."""
        history = await self._known(name)
        active = history.active
        if active is None or history.candidate is not None:
            raise _conflict("A new version is on its way; scale it when it is active.")
        least, most = wanted.min_instances, wanted.max_instances
        try:
            spec = replace(
                active.spec,
                min_instances=active.spec.min_instances if least is None else least,
                max_instances=active.spec.max_instances if most is None else most,
            )
        except ValueError as error:
            raise _invalid("min_instances", f"{error}") from None
        number = history.last.number + 1
        await self._add(replace(active, number=number, spec=spec, cause="scale"), history)
        return await self.get(name)

    async def undeploy(self, name: str) -> Application:
        """Raises: ApiError, RedisError."""
        history = await self._known(name)
        if history.last.digest:
            last = history.last
            await self._add(Generation(name, last.number + 1, "", last.spec, "undeploy"), history)
        return await self.get(name)

    # What they share

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
                quantile(add_up(each.first_counts for each in workers), 0.95),
                quantile(add_up(each.token_counts for each in workers), 0.95),
            )  # fmt: skip

        slots = [SlotObject(s.id, s.digest, s.state, s.phase, s.node, s.since) for s in app.slots]
        events = [EventObject(event.at, event.text) for event in app.events]
        return Application(
            app.name, app.number, app.state, to_revision(app.active), to_revision(app.candidate),
            app.desired, slots, app.message, events,
        )  # fmt: skip

    def _to_unreadable(self, name: str, number: int = 0) -> Application:
        found = self._to_object(App(name, number, message=record_unreadable().message))
        found.state = "unreadable"
        return found

    @asynccontextmanager
    async def _held(self, digest: str, signature: str | None = None) -> AsyncIterator[Manifest]:
        """A package that is whole, signed and stays in the block. Raises: ApiError, StoreError."""
        store = await self._store.open()
        key = await asyncio.to_thread(write_hold, store, package=digest)
        try:
            manifest = await asyncio.to_thread(_check_package, store, digest)
            await asyncio.to_thread(_check_signature, store, digest, signature, self._signers)
            yield manifest
        finally:
            await asyncio.to_thread(store.delete, key)

    async def _history(self, name: str) -> History | None:
        return await asyncio.to_thread(read_history, await self._store.open(), name)

    async def _known(self, name: str) -> History:
        history = await self._history(name)
        if history is None or not history.last.digest:
            raise _unknown(name)
        return history

    async def _find(self, name: str) -> App | None:
        return (await self._deployments.apps()).get(name)

    async def _add(self, generation: Generation, history: History | None) -> None:
        """Record a generation, and what it makes of the one before. Raises: ApiError, StoreError."""
        store = await self._store.open()
        name, number = generation.name, generation.number
        generation = replace(generation, created_at=time.time())  # noqa: TID251
        await asyncio.to_thread(record_generation, store, generation)
        logger.info("deployment %s: generation %d (%s)", name, number, generation.cause)
        if history is not None and history.candidate is not None:
            outcome = Outcome("rolled_back", f"generation {number} came after it")
            await asyncio.to_thread(settle, store, name, history.candidate.number, outcome)
        active = history.active if history else None
        if not generation.digest or (active is not None and active.version == generation.version):
            await asyncio.to_thread(settle, store, name, number, Outcome("active"))
        if history is not None and history.last.digest:
            await self._change(name, lambda app, now: _admitted(app, generation, now))
        else:
            await self._change(name, lambda app, now: _admitted(app, generation, now), App(name))

    async def _settle(self, name: str, number: int, wanted: Outcome) -> None:
        store = await self._store.open()
        outcome = await asyncio.to_thread(settle, store, name, number, wanted)
        await self._change(name, lambda app, now: rollout.conclude(app, number, outcome, now))
        if outcome.verdict != wanted.verdict:
            raise _conflict(f"The rollout has just ended: {outcome.verdict}.")

    async def _change(
        self, name: str, change: Callable[[App, float], App], new: App | None = None
    ) -> None:
        """Tell Redis; where that fails, nodes find out by the store."""
        try:
            now = await self._deployments.now()
            for _ in range(_TRIES):
                before = await self._find(name)
                start = before or new
                if start is None or await self._deployments.put(before, change(start, now)):
                    return
        except (RedisError, OSError) as error:
            logger.warning("the deployment %s is recorded, Redis not told: %s", name, error)


def _admitted(app: App, generation: Generation, now: float) -> App:
    return app if app.number >= generation.number else rollout.admit(app, generation, now)


def _check_package(store: PackageStore, digest: str) -> Manifest:
    """See that the package is whole in the store and can be run. Raises: InvalidRequest, StoreError."""
    try:
        manifest = read_manifest(store, digest)
    except (BadPackage, StoreError) as error:
        raise _invalid("digest", f"{error}") from None
    sizes = {layer.digest: layer for layer in manifest.layers}
    for layer in sizes.values():
        if store.size(layer.digest) != layer.size:
            raise _invalid("digest", f"{layer.path}: its blob is not in the store, or was cut")
    return manifest


def _check_signature(
    store: PackageStore, digest: str, signature: str | None, signers: Path | None
) -> None:
    """Store a signature that counts, and see that there is one. Raises: InvalidRequest, StoreError."""
    try:
        if signature is not None:
            if signers is None:
                raise BadSignature(
                    "this gateway cannot verify it: set VLM_DEPLOY__ALLOWED_SIGNERS of the gateway, or "
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


def _unknown(name: str) -> NotFound:
    return NotFound(
        "There is no deployment of this name: GET /v1/applications lists them.",
        param="name",
        code="application_not_found",
    )


def _invalid(field: str, problem: str) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid value for {field}: {problem}.", param=field, code="invalid_value"
    )


def _conflict(message: str) -> InvalidRequest:
    return InvalidRequest(message, status=409, code="conflict")


def create_application_routes(
    models: ModelDirectory,
    deployments: DeploymentState,
    access: OperatorAccess,
    deploy: DeploySettings,
) -> APIRouter:
    """The operations."""
    apps = Applications(deploy, deployments, models)
    router = APIRouter(prefix="/v1/applications", tags=["applications"])

    @router.get("", operation_id="list_applications", openapi_extra=_describe())
    async def list_applications(request: Request) -> Response:
        """What is deployed."""
        access.check(request)
        return _json(await _asked(apps.list()))

    @router.get("/{name}", operation_id="retrieve_application", openapi_extra=_describe())
    async def retrieve_application(request: Request, name: str) -> Response:
        """One deployment: versions, instances, events, and all its generations."""
        access.check(request)
        return _json(await _asked(apps.get(_check_name(name))))

    @router.get("/{name}/logs", operation_id="retrieve_application_log", openapi_extra=_describe())
    async def retrieve_log(request: Request, name: str) -> Response:
        """What the instances of a deployment have logged: `limit` lines, of one `slot` or of all."""
        access.check(request)
        try:
            query = msgspec.convert(dict(request.query_params), LogQuery, strict=False)
        except msgspec.ValidationError as error:
            raise locate(str(error), {}) from None
        return _json(await _asked(apps.log(_check_name(name), query)))

    @router.put("/{name}", operation_id="deploy_application", openapi_extra=_describe(Deploy))
    async def deploy_application(request: Request, name: str) -> Response:
        """Have a package served under a name: started beside what serves, then in its place."""
        wanted = await access.read(request, _DEPLOY)
        status, found = await _asked(apps.deploy(_check_name(name), wanted))
        return _json(found, status)

    @router.delete("/{name}", operation_id="undeploy_application", openapi_extra=_describe())
    async def undeploy_application(request: Request, name: str) -> Response:
        """Stop serving a name; what waits is still answered."""
        access.check(request)
        return _json(await _asked(apps.undeploy(_check_name(name))), 202)

    @router.post(
        "/{name}:rollback", operation_id="rollback_application", openapi_extra=_describe(Rollback)
    )
    async def rollback_application(request: Request, name: str) -> Response:
        """Take a new version back; where none is on its way, have the one before serve again."""
        wanted = await access.read(request, _ROLLBACK)
        return _json(await _asked(apps.rollback(_check_name(name), wanted)), 202)

    @router.post(
        "/{name}:promote", operation_id="promote_application", openapi_extra=_describe(Nothing)
    )
    async def promote_application(request: Request, name: str) -> Response:
        """Have a canary serve all requests."""
        await access.read(request, _NOTHING)
        return _json(await _asked(apps.promote(_check_name(name))), 202)

    @router.post("/{name}:scale", operation_id="scale_application", openapi_extra=_describe(Scale))
    async def scale_application(request: Request, name: str) -> Response:
        """Change how many instances there may be."""
        wanted = await access.read(request, _SCALE)
        return _json(await _asked(apps.scale(_check_name(name), wanted)), 202)

    return router


_DEPLOY, _ROLLBACK = JsonBody(Deploy), JsonBody(Rollback)
_SCALE, _NOTHING = JsonBody(Scale), JsonBody(Nothing)


def _check_name(name: str) -> str:
    """Raises: InvalidRequest."""
    if not re.match(NAME, name):
        raise _invalid("name", NAME_RULE)
    return name


async def _asked(operation: Awaitable[Any]) -> Any:
    try:
        with store_unavailable():
            return await operation
    except Conflict as error:
        raise _conflict(f"{error}.") from None
    except ApiError:
        raise
    except (QueueUnavailable, RedisError, OSError):
        raise unavailable() from None


def _json(content: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


_RESPONSES = {
    "202": "The change is recorded, and begins.",
    "400": "The package or a field cannot be; the message says why.",
    "403": "The key may not deploy.",
    "404": "There is no such deployment, or deployments are off.",
    "409": "Another change came first, or there is nothing to change.",
    "503": "The store of packages or Redis is away.",
}


def _describe(body: type | None = None) -> dict[str, Any]:
    described: dict[str, Any] = {
        "responses": {status: {"description": text} for status, text in _RESPONSES.items()}
    }
    if body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _inline(msgspec.json.schema(body))}},
        }
    return described


def _inline(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without references, as these bodies are no part of the document's components."""
    definitions = schema.pop("$defs", {})

    def resolve(part: Any) -> Any:
        if isinstance(part, dict):
            if "$ref" in part:
                return resolve(definitions[part["$ref"].rpartition("/")[2]])
            return {name: resolve(value) for name, value in part.items()}
        return [resolve(each) for each in part] if isinstance(part, list) else part

    return resolve(schema)
