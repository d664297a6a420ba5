"""Health, readiness, metrics and status of the fleet. Probe requests are neither logged nor counted."""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, Response

from gateway.api.fields import Data, NewestQuery, copy_fields
from gateway.calls.lifecycle import Lifecycle
from gateway.http.endpoint import Access, Caller, Operation, OperationServices, Resource, operation
from gateway.http.exchange import short_hash
from gateway.keys.directory import KeyDirectory
from shared.queue.api import OpenRequest, QueueUnavailable
from shared.version import package_version


class ReadyQuery(Struct):
    workers: Annotated[int, Meta(ge=0)] = 0


class ModelStatus(Struct):
    """A model's workers and queue."""

    id: str
    num_workers: int
    num_open: int  #: waiting and running requests
    num_backlog: int  #: batch requests in `num_open` that no worker has claimed
    oldest_wait_s: float  #: wait of the oldest unclaimed request outside the backlog


class WorkerStatus(Struct):
    """State of a worker at its last heartbeat."""

    id: str
    model: str
    engine: str
    state: str  #: `ready` or `draining`
    num_running: int
    num_waiting: int
    max_num_seqs: int
    num_finished: int  #: finished requests since the worker started
    num_failed: int


class FleetStatus(Struct):
    """Queues and workers, as this gateway sees them."""

    version: str
    state: str  #: the status that `/readyz` returns
    num_open: int  #: open requests of this gateway
    models: list[ModelStatus]
    workers: list[WorkerStatus]


class LiveRequests(Data[OpenRequest]):
    """Waiting and running requests, newest first."""


@dataclass
class Probes(Resource):
    tag = "operation"

    _lifecycle: Lifecycle
    _metrics_access: Access
    _shards: Collection[str]
    _keys: KeyDirectory | None

    @operation("GET", "/healthz", access="public", is_probe=True)
    async def healthz(self, caller: Caller) -> Response:
        """Show whether this process is alive."""
        return JSONResponse({"status": "ok"})

    @operation("GET", "/ping", access="public", is_probe=True)
    async def ping(self, caller: Caller) -> Response:
        """Answer SageMaker's health check."""
        return Response()

    @operation("GET", "/version")
    async def version(self, caller: Caller) -> Response:
        """Show the version of vlm-fleet."""
        return JSONResponse({"version": package_version()})

    @operation("GET", "/readyz", aliases=("/health",), access="public", is_probe=True)
    async def readyz(self, caller: Caller, query: ReadyQuery) -> Response:
        """Show whether this gateway can reach Redis and is not shutting down.

        `workers`: also require this number of ready workers. Omit it in a Kubernetes readiness probe: while the probe
        fails, no request arrives, and a deployment that has zero instances starts one only when a request arrives.
        """
        state = self._state(query.workers)
        return JSONResponse({"status": state}, status_code=200 if state == "ready" else 503)

    def _state(self, num_workers: int = 0) -> str:
        if self._lifecycle.admission.is_draining:
            return "draining"
        if not self._lifecycle.models.is_fresh:
            return "no redis"
        return "no worker" if self._lifecycle.models.num_workers.total() < num_workers else "ready"

    @operation("GET", "/v1/admin/status", access="admin")
    async def fleet_status(self, caller: Caller) -> FleetStatus:
        """Show the queues and the workers."""
        models = self._lifecycle.models
        queues = []
        for name in sorted(models.cards):
            stats = await self._lifecycle.dispatcher.queue.stats(name)
            own = {"num_workers": models.num_workers[name], "oldest_wait_s": round(stats.age_s, 3)}
            queues.append(copy_fields(stats, ModelStatus, id=name, **own))
        workers = [
            copy_fields(each, WorkerStatus, id=each.worker_id, model=each.card.name)
            for each in sorted(models.workers, key=lambda each: (each.card.name, each.worker_id))
        ]
        return FleetStatus(
            package_version(), self._state(), self._lifecycle.admission.num_open, queues, workers
        )

    @operation("GET", "/v1/admin/requests", access="admin")
    async def live_requests(self, caller: Caller, query: NewestQuery) -> LiveRequests:
        """List the newest waiting and running requests of all gateways."""
        queue, models = self._lifecycle.dispatcher.queue, self._lifecycle.models
        found = await queue.open_requests(models.cards, query.limit)
        name_of = short_hash
        if self._keys is not None:
            await self._keys.know(each.key for each in found)
            name_of = self._keys.name_of
        return LiveRequests([replace(each, key=name_of(each.key)) for each in found])

    def operations(self, services: OperationServices) -> list[Operation]:
        found = super().operations(services)
        for each in found:
            if each.path == "/metrics":
                each.access = self._metrics_access
        return found

    @operation("GET", "/metrics", is_probe=True)
    async def metrics(self, caller: Caller) -> Response:
        """Show Prometheus metrics. If any admin or root key is set, only keys that may load adapters can read them."""
        lifecycle, queue = self._lifecycle, self._lifecycle.dispatcher.queue
        metrics, models = lifecycle.metrics, lifecycle.models
        metrics.set_open(lifecycle.admission.num_open, models.num_workers)
        servers: dict[str, dict[str, str]] = {}
        with suppress(QueueUnavailable):
            servers = await queue.servers()
            metrics.set_queues({name: await queue.stats(name) for name in models.cards})
        metrics.set_redis(self._shards, servers)
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)
