"""Health, readiness and metrics. Probes feed no metric and never reveal more than a word of why."""

import re
from collections.abc import Callable
from contextlib import suppress

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from gateway.calls.models import ModelDirectory
from gateway.http.admission import Admission
from gateway.http.errors import InvalidRequest
from shared.queue.api import GatewayQueue, QueueUnavailable
from shared.telemetry.metrics import GatewayMetrics
from shared.version import package_version


def create_probes(
    admission: Admission,
    models: ModelDirectory,
    queue: GatewayQueue,
    metrics: GatewayMetrics,
    check_operator: Callable[[Request], object],
) -> APIRouter:
    """The routes that operators' machines call. `check_operator` refuses others the metrics."""
    router = APIRouter(tags=["operation"])

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Whether this process is alive; asks nobody else."""
        return {"status": "ok"}

    @router.get("/ping")
    async def ping() -> Response:
        """As SageMaker's containers answer: alive."""
        return Response()

    @router.get("/version")
    async def version() -> dict[str, str]:
        """The version of vlm-fleet."""
        return {"version": package_version()}

    @router.get("/health", responses={503: {"description": "Not ready"}}, operation_id="health")
    @router.get("/readyz", responses={503: {"description": "Not ready"}}, operation_id="readyz")
    async def readyz(workers: str = "0") -> JSONResponse:
        """Whether this gateway accepts requests: Redis answers, and it is not shutting down.

        `workers`: also require that many ready workers. A Service must not: deployments at zero
        instances are started by the requests that it would withhold.
        """
        if not re.fullmatch("[0-9]{1,6}", workers):
            raise InvalidRequest(
                "Invalid value for workers: send a number, such as 1.",
                param="workers",
                code="invalid_value",
            )
        if admission.is_draining:
            reason = "draining"
        elif not models.is_fresh:
            reason = "no redis"
        elif models.num_live_workers < int(workers):
            reason = "no worker"
        else:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": reason}, status_code=503)

    @router.get("/metrics", response_class=Response)
    async def show_metrics(request: Request) -> Response:
        """Prometheus text; needs a key where keys are set, an operator's where those are."""
        check_operator(request)
        metrics.set_open_requests(admission.num_open)
        metrics.set_ready_workers(models.num_workers)
        with suppress(QueueUnavailable):
            for name in models.cards:
                stats = await queue.stats(name)
                metrics.set_queue_age(name, stats.age_s)
                metrics.set_queue_depth(name, stats.num_open, stats.num_backlog)
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router
