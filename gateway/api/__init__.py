"""The APIs that are served, one file or folder each.

A new API of models is one new file: a class that implements `gateway.calls.surface.Surface`, and
its line in `SURFACES`. Its route, its part of the OpenAPI document and its errors follow.
`tests/contract/test_surface.py` tests all of them. The other routes are listed below.
"""

from collections.abc import Callable, Sequence
from functools import partial

from fastapi import APIRouter

from gateway.api.adapters import create_adapter_routes
from gateway.api.applications import create_application_routes
from gateway.api.batches import BatchRoutes
from gateway.api.chat import ChatCompletions
from gateway.api.completions import Completions
from gateway.api.embeddings import Embeddings
from gateway.api.files import Files
from gateway.api.messages import CountTokens, Messages
from gateway.api.models import create_model_routes
from gateway.api.ollama import (
    OllamaChat,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaGenerate,
    OllamaRoutes,
)
from gateway.api.operator_access import OperatorAccess
from gateway.api.packages import create_package_routes
from gateway.api.probes import create_probes
from gateway.api.rerank import Reranking, Scoring
from gateway.api.responses import ResponseInputTokens, ResponseRoutes, Responses
from gateway.api.routes import Operation
from gateway.api.run import Running
from gateway.api.sessions import Sessions
from gateway.api.similar import Similar
from gateway.api.tokenize import Detokenizing, Tokenizing
from gateway.api.vector_stores import VectorStores
from gateway.calls.surface import Surface
from gateway.http.auth import KeyRing
from gateway.http.wrong_keys import WrongKeys
from gateway.services import Services
from shared.settings.limits import LimitSettings

SURFACES: tuple[Callable[[LimitSettings], Surface], ...] = (
    ChatCompletions,
    Completions,
    Embeddings,
    Reranking,
    Scoring,
    Tokenizing,
    Detokenizing,
    Responses,
    ResponseInputTokens,
    Messages,
    CountTokens,
    OllamaChat,
    OllamaGenerate,
    OllamaEmbed,
    OllamaEmbeddings,
    Running,
)


def create_operations(services: Services, surfaces: Sequence[Surface]) -> list[Operation]:
    """The plain routes of clients: over the search process, and of what the fleet serves."""
    lifecycle, limits = services.lifecycle, services.settings.limits
    search, batches = services.search, services.batches
    stores = VectorStores(lifecycle, search, limits, services.settings.search.default_store)
    batchable = [surface.path for surface in surfaces if surface.batchable]
    return [
        *stores.operations(),
        *Files(
            search, batches and batches.files, lifecycle.kept, lifecycle.loader, limits
        ).operations(),
        *BatchRoutes(batches, services.look_for_batches, limits, batchable).operations(),
        *Similar(stores).operations(),
        *ResponseRoutes(lifecycle.kept).operations(),
        *OllamaRoutes(lifecycle.models).operations(),
        *Sessions(lifecycle, services.sessions, limits).operations(),
    ]


def create_routers(services: Services, keys: KeyRing, wrong_keys: WrongKeys) -> list[APIRouter]:
    """What is no API of models: their list, operators' calls, probes."""
    settings, models = services.settings, services.models
    access = partial(
        OperatorAccess, wrong_keys=wrong_keys, admission=services.admission, settings=settings
    )
    return [
        create_model_routes(models, settings.limits),
        create_adapter_routes(models, access(keys.check_admin), settings.limits.max_loras),
        create_application_routes(
            models, services.deployments, access(keys.check_deployer), settings.deploy
        ),
        create_package_routes(
            access(keys.check_deployer), settings.deploy.store, settings.gateway.body_timeout_s
        ),
        create_probes(
            services.admission,
            models,
            services.queue,
            services.metrics,
            access(keys.check_admin).check if settings.gateway.admin_keys else lambda _: None,
        ),
    ]
