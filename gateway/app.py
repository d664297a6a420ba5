"""The gateway's HTTP application, assembled from its endpoints."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Router as LifespanRouter
from starlette.types import ASGIApp

from gateway.api import SURFACES, create_endpoints
from gateway.api.messages import render_error as render_anthropic
from gateway.api.ollama import render_error as render_ollama
from gateway.calls.surface import Surface
from gateway.http.auth import KeyRing, WrongKeys
from gateway.http.errors import Render
from gateway.http.router import Router
from gateway.page import PageEndpoint, load_page
from gateway.services import Services
from shared.settings.limits import LimitSettings

#: Response headers that pages of allowed origins may read.
_SHOWN_TO_PAGES = (
    "request-id",
    "retry-after",
    "server-timing",
    "x-request-id",
    "x-should-retry",
    "x-vlm-fallback-from",
    "x-vlm-ignored",
    "x-vlm-package",
    "x-vlm-stream",
)


def create_app(
    services: Services,
    surfaces: Sequence[Callable[[LimitSettings], Surface]] = SURFACES,
) -> ASGIApp:
    settings = services.settings
    gateway, limits = settings.gateway, settings.limits
    served = [create(limits) for create in surfaces]
    keys = KeyRing(
        gateway.api_keys, gateway.admin_keys, gateway.deploy_keys, gateway.root_key,
        services.tokens or services.keys,
    )  # fmt: skip
    services.run_batches({each.path: each for each in served if each.batchable}, keys.knows)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await services.start()
        try:
            yield
        finally:
            await services.stop()

    pages = (PageEndpoint(path, file) for path, file in load_page().items())
    router = Router(
        [*create_endpoints(services, served), *((page, page.serve) for page in pages)],
        lifespan=LifespanRouter(lifespan=lifespan).lifespan,
        keys=keys,
        wrong_keys=WrongKeys(limits.max_wrong_keys_per_minute),
        metrics=services.metrics,
        origins=gateway.cors_origins,
        hosts=gateway.hosts,
        find_render=_find_render,
        refuses_unknown_fields=gateway.unknown_fields == "refuse",
    )
    if not gateway.cors_origins:
        return router
    return CORSMiddleware(  # before keys are checked
        router,
        allow_origins=gateway.cors_origins,
        allow_methods=["GET", "POST", "PUT", "DELETE"],
        allow_headers=["*"],
        expose_headers=_SHOWN_TO_PAGES,
    )


def _find_render(path: str, headers: Mapping[bytes, bytes]) -> Render | None:
    """The format of errors at a path of no surface; None: OpenAI's."""
    if path.startswith("/api/"):
        return render_ollama
    if path.startswith("/v1/models") and b"anthropic-version" in headers:
        return render_anthropic
    return None
