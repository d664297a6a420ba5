"""The gateway's HTTP application, assembled from the surfaces.

Surfaces are plain ASGI applications behind one middleware, for speed; the other routes are
FastAPI's.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api import SURFACES, create_operations, create_routers
from gateway.api.messages import render_error
from gateway.api.ollama import encode_error
from gateway.api.openapi import create_openapi
from gateway.api.routes import create_routes, schemas_of
from gateway.calls.resume import STREAM_PATH
from gateway.calls.surface import Surface
from gateway.http.auth import PUBLIC_PATHS, KeyRing
from gateway.http.errors import ApiError, Render, from_status, unexpected, unknown_path
from gateway.http.middleware import Api, GatewayMiddleware
from gateway.http.wrong_keys import WrongKeys
from gateway.page import create_page_routes
from gateway.services import Services
from shared.settings.limits import LimitSettings
from shared.version import package_version

_DESCRIPTION = "An OpenAI-compatible gateway to a fleet of workers for vision-language models."

#: Headers of an answer that a page of an allowed origin may read.
_SHOWN_TO_PAGES = (
    "request-id",
    "retry-after",
    "server-timing",
    "x-request-id",
    "x-should-retry",
    "x-vlm-ignored",
    "x-vlm-package",
    "x-vlm-stream",
)


def create_app(
    services: Services,
    surfaces: Sequence[Callable[[LimitSettings], Surface]] = SURFACES,
) -> FastAPI:
    """The application around the services, which start and stop with it."""
    settings, lifecycle = services.settings, services.lifecycle
    app = _create_empty(services)
    served = [create(settings.limits) for create in surfaces]
    operations = create_operations(services, served)
    gateway = settings.gateway
    keys = KeyRing(gateway.api_keys, gateway.admin_keys, gateway.deploy_keys)
    services.run_batches({each.path: each for each in served if each.batchable}, keys.knows)
    apis = {
        path: Api(partial(lifecycle.serve, each), each.error)
        for each in served
        for path in (each.path, *each.aliases)
    }
    page = create_page_routes()
    wrong_keys = WrongKeys(settings.limits.max_wrong_keys_per_minute)

    def wrap(inner: ASGIApp) -> ASGIApp:
        middleware = GatewayMiddleware(
            inner,
            keys=keys,
            wrong_keys=wrong_keys,
            public_paths=PUBLIC_PATHS | {route.path for route in page},
            apis=apis,
            find_render=_find_render,
            origins=gateway.cors_origins,
            hosts=gateway.hosts,
            metrics=services.metrics,
            refuses_unknown_fields=gateway.unknown_fields == "refuse",
        )
        if not gateway.cors_origins:
            return middleware
        return CORSMiddleware(  # outermost: it answers before keys are asked for
            middleware,
            allow_origins=gateway.cors_origins,
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["*"],
            expose_headers=_SHOWN_TO_PAGES,
        )

    app.wrap = wrap
    known = (*(surface.path for surface in served), "/v1/models")
    app.add_exception_handler(HTTPException, partial(_show_http_error, known))
    app.router.routes += page
    for path, api in apis.items():  # a POST does not come that far: the others are refused
        app.router.routes.append(Route(path, Endpoint(api.serve), methods=["POST"]))
    by_name = {surface.name: surface for surface in served}
    resume = Endpoint(partial(lifecycle.serve_stream, by_name))
    app.router.routes.append(Route(STREAM_PATH + "{id}", resume, methods=["GET"]))
    operation_routes = create_routes(operations, services.admission, gateway, settings.limits)
    for router in (*create_routers(services, keys, wrong_keys), operation_routes):
        app.router.routes += router.routes  # `include_router` would make each route again
    app.openapi = lambda: create_openapi(app, served, schemas_of(operations))
    return app


class _Application(FastAPI):
    """FastAPI, with `wrap` outside of its own middleware: most requests are answered there, and never reach it."""

    wrap: Callable[[ASGIApp], ASGIApp]

    def build_middleware_stack(self) -> ASGIApp:
        """All that a request passes. Called once, at the first one."""
        return self.wrap(super().build_middleware_stack())


def _create_empty(services: Services) -> _Application:
    """An application that serves nothing yet, and tells errors in our words."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await services.start()
        try:
            yield
        finally:
            await services.stop()

    app = _Application(
        title="vlm-fleet",
        version=package_version(),
        description=_DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's pages load their scripts from another host
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # we have our own
    )
    app.add_exception_handler(ApiError, _show_api_error)
    app.add_exception_handler(Exception, _show_unexpected)
    return app


#: Operations of APIs that we speak, at paths where names of things are known to others.
_NOT_SERVED = ("/v1/responses/compact",)


class Endpoint:
    """An ASGI application of a function: Starlette takes a bare one for a view."""

    def __init__(self, serve: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.serve(scope, receive, send)


async def _show_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    render = _find_render(request.url.path, dict(request.headers.raw))
    status, body = render(error) if render else (error.status, error.body())
    return Response(body, status, headers)


def _find_render(path: str, headers: Mapping[bytes, bytes]) -> Render | None:
    """The form of errors at a path of no surface; None: OpenAI's."""
    if path.startswith("/api/"):
        return lambda error: (error.status, encode_error(error))
    if path.startswith("/v1/models") and b"anthropic-version" in headers:
        return render_error
    return None


async def _show_http_error(known: Sequence[str], request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    is_unknown = error.status_code == 404 or path in _NOT_SERVED
    shown = unknown_path(path, known) if is_unknown else from_status(error.status_code)
    if methods := Headers(error.headers).get("allow"):
        shown.message = f"Method Not Allowed: send {methods}."
    response = await _show_api_error(request, shown)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def _show_unexpected(request: Request, error: Exception) -> Response:
    return await _show_api_error(request, unexpected())
