"""All HTTP endpoints of the gateway.

An API that only calls models is a `Surface`, listed in `SURFACES`. Its class defines the route, the OpenAPI description
and the error format. `tests/contract/test_surface.py` tests all surfaces. Other endpoints are operations of a
`Resource`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from gateway.api.applications import Applications, Packages
from gateway.api.completions import ChatCompletions, Completions
from gateway.api.files import BatchResource, Files
from gateway.api.keys import Audit, Keys, TenantData, UsageReport
from gateway.api.messages import CountTokens, Messages
from gateway.api.models import Adapters, Models
from gateway.api.ollama import (
    OllamaChat,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaGenerate,
    OllamaModelList,
)
from gateway.api.openapi import OpenApi
from gateway.api.pooling import Embeddings, Reranking, Scoring
from gateway.api.probes import Probes
from gateway.api.responses import ResponseInputTokens, Responses, StoredResponses
from gateway.api.run import ApplicationRun
from gateway.api.sessions import Sessions
from gateway.api.tokenize import Detokenization, Tokenization
from gateway.api.transcriptions import Transcriptions, Translations
from gateway.api.vector_stores import VectorStores
from gateway.calls.lifecycle import Lifecycle
from gateway.calls.resume import STREAM_PATH
from gateway.calls.surface import Surface
from gateway.http.auth import tenant_of
from gateway.http.endpoint import Endpoint, OperationServices, Resource, Serve
from gateway.http.exchange import Exchange
from gateway.services import Services
from shared.settings.limits import LimitSettings

SURFACES: tuple[Callable[[LimitSettings], Surface], ...] = (
    ChatCompletions,
    Completions,
    Embeddings,
    Reranking,
    Scoring,
    Tokenization,
    Detokenization,
    Responses,
    ResponseInputTokens,
    Messages,
    CountTokens,
    OllamaChat,
    OllamaGenerate,
    OllamaEmbed,
    OllamaEmbeddings,
    ApplicationRun,
    Transcriptions,
    Translations,
)


@dataclass
class Streams(Endpoint):
    """Resume a stream in the format of the API that started it."""

    name = "resume_stream"
    method = "GET"
    path = STREAM_PATH + "{id}"
    tag = "streams"
    answers_text = "text/event-stream"
    headers: ClassVar = {
        "last-event-id": "Id of the last received event. Without this header, all events are sent."
    }

    _lifecycle: Lifecycle
    _surfaces: Mapping[str, Surface]

    async def serve(self, exchange: Exchange) -> None:
        await self._lifecycle.serve_stream(self._surfaces, exchange)


def create_endpoints(
    services: Services, surfaces: Sequence[Surface]
) -> Iterator[tuple[Endpoint, Serve]]:
    """Yield all endpoints, each with the function that serves it."""
    settings = services.settings
    needed = OperationServices(
        services.admission,
        settings.limits,
        settings.gateway.body_timeout_s,
        services.audit and services.audit.append,
    )
    streams = Streams(services.lifecycle, {surface.name: surface for surface in surfaces})
    found: list[Endpoint] = [*surfaces, streams]
    for surface in surfaces:
        yield surface, partial(services.lifecycle.serve, surface)
    yield streams, streams.serve
    for resource in _create_resources(services, surfaces):
        operations = resource.operations(needed)
        found += operations
        yield from ((each, each.serve) for each in operations)
    for each in OpenApi(found, settings.limits).operations(needed):
        yield each, each.serve


def _create_resources(services: Services, surfaces: Sequence[Surface]) -> list[Resource]:
    settings, lifecycle, models = services.settings, services.lifecycle, services.models
    limits, deploy, search = settings.limits, settings.deploy, services.search
    batches, root = services.batches, settings.gateway.root_key
    find_guest = services.keys.guest if services.keys is not None else lambda _: ""
    batchable = [surface.path for surface in surfaces if surface.batchable]
    data = TenantData(lifecycle, services.sessions, batches, services.look_for_batches, search)
    return [
        Models(models, limits),
        Files(lifecycle, search, batches and batches.files),
        BatchResource(batches, services.look_for_batches, limits, batchable, find_guest),
        StoredResponses(lifecycle.kept, lifecycle.resume),
        VectorStores(lifecycle, search, settings.search.default_store),
        OllamaModelList(models),
        Sessions(lifecycle, services.sessions, limits),
        Adapters(models, limits.max_loras),
        Applications(services.durable, deploy, services.deployments, models),
        Keys(services.keys, data, bool(settings.gateway.prices), services.usage.raise_budgets),
        *([] if services.audit is None else [Audit(services.audit)]),
        UsageReport(
            services.usage,
            services.keys,
            None if root is None else tenant_of(root),
            bool(settings.gateway.prices),
        ),
        Packages(services.durable, settings.gateway.body_timeout_s),
        Probes(
            lifecycle,
            "adapters" if settings.gateway.admin_keys or settings.gateway.root_key else "use",
            settings.redis.shards,
            services.keys,
        ),
    ]
