"""The gateway process and its HTTP application.

The command line configures logging, then calls `run_gateway` with all settings.
"""

import asyncio
import logging
import resource
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
from gateway.http.auth import KeyRing, WrongKeys, check_exposure
from gateway.http.errors import Render
from gateway.http.router import Router
from gateway.http.server import RESERVED_FILES
from gateway.page import load_page
from gateway.services import Services
from shared.process import end_startup, return_large_buffers
from shared.queue.shards import check_shards
from shared.settings.limits import LimitSettings
from shared.settings.tree import Settings, SettingsError

logger = logging.getLogger(__name__)

#: Response headers that web pages of allowed origins can read.
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
    services: Services, surfaces: Sequence[Callable[[LimitSettings], Surface]] = SURFACES
) -> ASGIApp:
    settings = services.settings
    gateway, limits = settings.gateway, settings.limits
    served = [create(limits) for create in surfaces]
    keys = KeyRing(gateway, services.tokens or services.keys)
    services.run_batches({each.path: each for each in served if each.batchable}, keys.knows)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await services.start()
        try:
            yield
        finally:
            await services.stop()

    router = Router(
        endpoints=[
            *create_endpoints(services, served),
            *((page, page.serve) for page in load_page()),
        ],
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
    return CORSMiddleware(  # outside the router, because preflight requests have no key
        router,
        allow_origins=gateway.cors_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=_SHOWN_TO_PAGES,
    )


def _find_render(path: str, headers: Mapping[bytes, bytes]) -> Render | None:
    """The error format for a path that no surface serves. None: OpenAI's format."""
    if path.startswith("/api/"):
        return render_ollama
    if path.startswith("/v1/models") and b"anthropic-version" in headers:
        return render_anthropic
    return None


def raise_file_limit(num_needed: int) -> None:
    """Raise the limit on file descriptors, and warn if it is less than needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    except (ValueError, OSError):  # some systems allow less than they report
        pass
    if soft != resource.RLIM_INFINITY and soft < num_needed:
        logger.warning(
            "%d file descriptors are too few for limits.max_open_requests: raise the limit "
            "(ulimit -n, LimitNOFILE) to %d, or lower limits.max_open_requests; further connections "
            "are refused",
            soft,
            num_needed,
        )


def run_gateway(settings: Settings) -> int:
    """Serve until a signal arrives. Returns the exit code. Raises: SettingsError."""
    return_large_buffers()
    check_exposure(settings.gateway)
    raise_file_limit(settings.limits.max_open_requests + RESERVED_FILES)
    for name in ("uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.WARNING)
    asyncio.run(check_shards(settings.redis))
    services = Services(settings)
    server = services.create_server(create_app(services))
    end_startup()
    try:
        server.run()
    except SystemExit as stop:  # uvicorn has logged the reason
        if not server.lifespan.should_exit:
            raise SettingsError("cannot listen: choose another --host or --port") from None
        return stop.code if isinstance(stop.code, int) else 1
    return 0
