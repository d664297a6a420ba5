"""The gateway's HTTP application: which paths there are and what every request passes on its way.

Middleware is pure ASGI only: Starlette's `BaseHTTPMiddleware` hides that a client has left. The chat route is a plain
ASGI application too, for speed; the others are FastAPI's.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.chat.route import ChatCompletions
from gateway.api.openapi import CHAT_PATH, create_openapi
from gateway.api.probes import create_probes
from gateway.api.streams import ResumeStream
from gateway.calls.models import ModelDirectory
from gateway.calls.resume import STREAM_PATH, Streams
from gateway.http.auth import AuthMiddleware, KeyRing
from gateway.http.context import ContextMiddleware
from gateway.http.errors import ApiError, from_status, unexpected
from gateway.http.wrong_keys import WrongKeys
from gateway.page import PageMiddleware, load_page
from gateway.services import Services
from shared.version import package_version

_DESCRIPTION = "An OpenAI-compatible gateway to a fleet of workers for vision-language models."


def create_app(services: Services) -> FastAPI:
    """The application around the services, which start and stop with it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await services.start()
        try:
            yield
        finally:
            await services.stop()

    settings = services.settings
    app = FastAPI(
        title="vlm-fleet",
        version=package_version(),
        description=_DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # we have our own
    )
    streams = Streams(services.queue, services.dispatcher, settings.gateway.request_timeout_s)
    chat = create_chat(services, streams)
    app.add_middleware(ChatMiddleware, chat=chat)
    app.add_middleware(
        AuthMiddleware,
        keys=KeyRing(settings.gateway.api_keys),
        wrong_keys=WrongKeys(settings.limits.max_wrong_keys_per_minute),
    )
    app.add_middleware(PageMiddleware, files=load_page())
    app.add_middleware(ContextMiddleware)
    app.add_exception_handler(ApiError, _show_api_error)
    app.add_exception_handler(HTTPException, _show_http_error)
    app.add_exception_handler(Exception, _show_unexpected)
    app.router.routes.append(Route(CHAT_PATH, chat, methods=["POST"]))
    resume = create_resume(services, streams)
    app.router.routes.append(Route(STREAM_PATH + "{id}", resume, methods=["GET"]))
    app.include_router(create_model_routes(services.models))
    app.include_router(
        create_probes(
            services.admission,
            services.models,
            services.queue,
            services.metrics,
            services.deferred_tasks,
        )
    )
    app.openapi = lambda: create_openapi(app, settings.limits)
    return app


class ChatMiddleware:
    """Pure ASGI, innermost: hands chat requests over before the router, whose wrappers cost a tenth of them."""

    def __init__(self, app: ASGIApp, chat: ASGIApp) -> None:
        self.app = app
        self.chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the chat application for its path and method, the router for all others."""
        is_chat = scope["type"] == "http" and scope["path"] == CHAT_PATH
        if is_chat and scope["method"] == "POST":
            await self.chat(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def create_chat(services: Services, streams: Streams) -> ChatCompletions:
    """The chat route."""
    return ChatCompletions(
        services.settings.gateway,
        services.admission,
        services.intake,
        streams,
        services.metrics,
        services.deferred_tasks,
        services.tracer,
        system_fingerprint=_fingerprint(),
    )


def create_resume(services: Services, streams: Streams) -> ResumeStream:
    """The route of answers that are taken up again."""
    return ResumeStream(
        services.settings.gateway,
        services.admission,
        streams,
        system_fingerprint=_fingerprint(),
    )


def _fingerprint() -> str:
    return f"vlm-fleet-{package_version()}"


def create_model_routes(models: ModelDirectory) -> APIRouter:
    """`/v1/models`."""
    router = APIRouter(prefix="/v1/models", tags=["models"])

    @router.get("", operation_id="list_models")
    async def list_models() -> Response:
        """The models that the fleet serves."""
        return _json(models.listing())

    @router.get("/{name:path}", operation_id="retrieve_model")
    async def retrieve_model(name: str) -> Response:
        """One model."""
        return _json(models.shown(name))

    return router


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def _show_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return Response(error.body(), error.status, headers)


async def _show_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = await _show_api_error(request, from_status(error.status_code))
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def _show_unexpected(request: Request, error: Exception) -> Response:
    return await _show_api_error(request, unexpected())
