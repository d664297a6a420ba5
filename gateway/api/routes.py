"""Plain routes: JSON in, JSON out, no stream, a few of which ask the fleet on their way.

An `Operation` is one method of one path; `create_routes` serves them, with their part of the
OpenAPI document.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Struct
from redis.exceptions import RedisError
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.api.fields import UNSUPPORTED
from gateway.http.admission import Admission, HeldBody
from gateway.http.body import JsonBody, locate, read_body
from gateway.http.context import SCOPE_KEY, RequestContext
from gateway.http.errors import unavailable
from shared.blobs.api import BlobsUnavailable
from shared.queue.api import QueueUnavailable
from shared.records.api import RecordsUnavailable
from shared.settings.limits import LimitSettings
from shared.settings.tree import GatewaySettings

T = TypeVar("T", bound=msgspec.Struct)
_REFERENCE = "#/components/schemas/{name}"
_CLIENT_GONE = 499
#: What to say of a query's parameter outside its closed set.
_QUERY_HINTS = {"order": "Send asc or desc.", "include": "Send embedding, or leave it out."}


class Caller(Struct, frozen=True):
    """One request, its body read."""

    context: RequestContext
    held: HeldBody
    path: dict[str, str]
    query: dict[str, str]
    body: bytes

    @property
    def tenant(self) -> str:
        """The owner of what the request makes and sees; no secret."""
        return hashlib.sha256(b"search " + self.context.tenant.encode()).hexdigest()[:32]

    def read_query(self, type_: type[T]) -> T:
        """The query string as a struct. Raises: InvalidRequest that names the parameter."""
        try:
            return msgspec.convert(self.query, type_, strict=False)
        except msgspec.ValidationError as error:
            raise locate(str(error), _QUERY_HINTS) from None


Handler = Callable[[Caller], Awaitable[msgspec.Struct | Response]]


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of a path. `request`: of its JSON body, None where it has none."""

    method: str
    path: str
    name: str
    summary: str
    handler: Handler
    answer: type[msgspec.Struct] | None
    request: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] | None = None
    tag: str = "vector stores"
    media_type: str = "application/json"
    max_commas: int = 0  #: of a body; 0: those of inputs


def create_routes(
    operations: Sequence[Operation],
    admission: Admission,
    settings: GatewaySettings,
    limits: LimitSettings,
) -> APIRouter:
    """The routes of operations."""
    router = APIRouter()
    for operation in operations:
        router.add_api_route(
            operation.path,
            _endpoint(operation, admission, settings, limits),
            methods=[operation.method],
            operation_id=operation.name,
            summary=operation.summary,
            tags=[operation.tag],
            responses=_responses(operation),
            openapi_extra=_describe(operation, limits),
        )
    return router


def schemas_of(operations: Sequence[Operation]) -> list[type[msgspec.Struct]]:
    """What the operations' part of the OpenAPI document refers to."""
    types = [type_ for each in operations for type_ in (each.request, each.answer) if type_]
    return list(dict.fromkeys(types))


def _endpoint(
    operation: Operation, admission: Admission, settings: GatewaySettings, limits: LimitSettings
) -> Callable[[Request], Awaitable[Response]]:
    has_body = operation.request is not None

    async def serve(request: Request) -> Response:
        context: RequestContext = request.scope[SCOPE_KEY]
        with ExitStack() as opened:
            opened.enter_context(admission)
            held = opened.enter_context(admission.hold_body())
            body = b""
            if has_body:
                body = await read_body(
                    request.receive,
                    context,
                    held,
                    limits,
                    timeout_s=settings.body_timeout_s,
                    max_commas=operation.max_commas or limits.max_input_commas,
                    media_type=operation.media_type.encode(),
                )
            caller = Caller(context, held, request.path_params, dict(request.query_params), body)
            answer = await run_while_awaited(operation.handler(caller), request)
            if isinstance(answer, StreamingResponse):
                return _Streamed(answer, opened.pop_all())
            return answer

    return serve


class _Streamed(Response):
    """An answer whose request is open until all of it is sent."""

    def __init__(self, answer: StreamingResponse, opened: ExitStack) -> None:
        super().__init__()
        self._answer = answer
        self._opened = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._opened:
            await self._answer(scope, receive, send)


async def run_while_awaited(
    work: Awaitable[msgspec.Struct | Response], request: Request
) -> Response:
    """Do the work unless its client leaves before. Raises: ApiError."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_until_gone(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return Response(status_code=_CLIENT_GONE)
        answer = working.result()
    except (QueueUnavailable, BlobsUnavailable, RecordsUnavailable, RedisError):
        raise unavailable() from None
    finally:
        watching.cancel()
        if working.cancel():
            await asyncio.wait([working])
    if isinstance(answer, Response):
        return answer
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _responses(operation: Operation) -> dict[int | str, dict[str, Any]]:
    content: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string"}}}
    if operation.answer is not None:
        reference = {"$ref": _REFERENCE.format(name=operation.answer.__name__)}
        content = {"application/json": {"schema": reference}}
    error = {"$ref": _REFERENCE.format(name="ErrorBody")}
    errors: dict[int | str, dict[str, Any]] = {
        status: {"description": text, "content": {"application/json": {"schema": error}}}
        for status, text in {
            400: "The request cannot be served as it is; `param` names the field.",
            401: "No API key, or an unknown one.",
            404: "There is no such thing of this key's.",
            408: "The body did not arrive in time.",
            409: "The store is read-only, or its model is no longer served.",
            413: "The body is too large, or a limit of the key is reached.",
            415: "The body has another media type.",
            429: "Too much at a time for this key; `retry-after` says when.",
            500: "The server failed.",
            503: "Not now; `retry-after` says when.",
            504: "The deadline has passed.",
        }.items()
    }
    return {200: {"description": "The answer", "content": content}, **errors}


def _describe(operation: Operation, limits: LimitSettings) -> dict[str, Any]:
    pieces = operation.path.split("/")
    names = [piece[1:-1].partition(":")[0] for piece in pieces if piece.startswith("{")]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]
    if operation.query is not None:
        schema = msgspec.json.schema(operation.query)
        [properties] = [found["properties"] for found in schema["$defs"].values()]
        parameters += [
            {"name": name, "in": "query", "schema": kind} for name, kind in properties.items()
        ]
    described: dict[str, Any] = {"parameters": parameters} if parameters else {}
    if operation.request is not None:
        reference = {"$ref": _REFERENCE.format(name=operation.request.__name__)}
        described["requestBody"] = {
            "description": f"At most {limits.max_body_bytes} bytes.",
            "required": True,
            "content": {operation.media_type: {"schema": reference}},
        }
    return described


def body_of(type_: type[T], path: str = "", **hints: str) -> JsonBody[T]:
    """Reads the bodies of an operation. `path`: of `UNSUPPORTED`."""
    return JsonBody(type_, hints, UNSUPPORTED.get(path))
