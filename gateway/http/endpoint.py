"""Endpoints: each is a method of a path, with its entry in the OpenAPI document.

A `Surface` (`gateway.calls.surface`) calls workers. An `Operation` is a method of a `Resource`, and the gateway
answers it without a worker: JSON in, JSON out.
"""

import asyncio
import hashlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Struct
from msgspec.inspect import type_info as inspect_type
from starlette.responses import Response
from starlette.types import Receive

from gateway.http.body import JSON, Admission, HeldBody, JsonBody, Unsupported, locate, read_body
from gateway.http.errors import ApiError, ClientGone, ErrorBody
from gateway.http.exchange import JSON_HEADERS, Exchange, RequestContext
from shared.settings.limits import LimitSettings

Serve = Callable[[Exchange], Awaitable[None]]
#: `any`: for keys with any role.
Access = Literal["public", "any", "use", "adapters", "deploy", "admin"]
Handler = Callable[..., Awaitable[Struct | Response]]
H = TypeVar("H", bound=Handler)
Result = TypeVar("Result")
_A_DAY = "Send a day, such as 2026-11-30."
_QUERY_HINTS = {
    "from": _A_DAY,
    "to": _A_DAY,
    "stream": "Stored answers are sent whole: send false.",
}


class Endpoint:
    """A method of a path. The docstring is its summary in the OpenAPI document."""

    #: Operation name in the OpenAPI document, traces and stream records.
    name: str
    method: str = "POST"
    path: str
    aliases: Sequence[str] = ()
    tag: str = ""
    #: Role of the keys that may call the endpoint.
    access: Access = "use"
    #: Whether the endpoint is for orchestrators and Prometheus: any host name may be used, and calls are not logged.
    is_probe: bool = False
    #: Whether the endpoint logs and counts its requests itself.
    is_recorded: bool = False
    #: Whether the error for an unknown path may suggest this one.
    is_suggested: bool = False
    is_documented: bool = True
    request_type: type[Struct] | None = None
    answer_type: type[Struct] | None = None
    status: int = 200  #: status of a successful answer
    #: Type of a stream's events.
    chunk_type: type[Struct] | None = None
    error_type: type[Struct] = ErrorBody
    query_type: type[Struct] | None = None
    #: Media type of an answer that is not JSON.
    answers_text: str = ""
    media_type: str = JSON.decode()
    #: Media type of a form with the same fields, which is also accepted.
    form_type: str = ""
    #: Error statuses that differ in this API, by OpenAI's status.
    statuses: ClassVar[Mapping[str, str]] = {}
    headers: ClassVar[Mapping[str, str]] = {}
    #: What to send instead of an invalid value, by the field's path or last name. Default: the values of its type.
    hints: ClassVar[Mapping[str, str]] = {}
    #: Unknown fields that are refused, with their no-op values.
    unsupported: ClassVar[Unsupported] = {}

    @property
    def summary(self) -> str:
        return (self.__doc__ or "").partition("\n")[0].rstrip(".")

    def error(self, error: ApiError) -> tuple[int, bytes]:
        """Status and body of an error before the answer has begun."""
        return error.status, error.body()

    def describe_fields(self, properties: dict[str, Any]) -> None:
        """Add descriptions, such as limits that several fields share, to the schemas of the request's fields."""


@dataclass(frozen=True, slots=True)
class OperationServices:
    admission: Admission
    limits: LimitSettings
    body_timeout_s: float
    #: Writes an audit entry. Arguments: operation, name of the changed object, request.
    audit: Callable[[str, str, RequestContext], Awaitable[None]] | None


def owner_of(tenant: str, kind: str = "search") -> str:
    """The owner id of a tenant's objects of `kind`; by default, of files and vector stores. The id is not secret."""
    return hashlib.sha256(f"{kind} {tenant}".encode()).hexdigest()[:32]


class Caller(Struct, frozen=True):
    context: RequestContext
    held: HeldBody
    #: A body that is not JSON.
    body: bytes
    #: Receives the body of an upload.
    receive: Receive

    @property
    def path(self) -> dict[str, str]:
        return self.context.path

    @property
    def tenant(self) -> str:
        """Owner of the objects that the request creates and reads; not a secret."""
        return owner_of(self.context.tenant)


class Resource:
    """Operations on one kind of object: the methods that `operation` marks."""

    tag: ClassVar[str] = ""
    access: ClassVar[Access] = "use"

    def operations(self, services: OperationServices) -> list["Operation"]:
        marked = [
            (found._operation, name) for name, found in vars(type(self)).items()
            if hasattr(found, "_operation")
        ]  # fmt: skip
        return [Operation(self, getattr(self, name), services, **m) for m, name in marked]

    def to_error(self, error: Exception) -> Exception:
        """Convert an exception of this resource's store to an ApiError."""
        return error


def operation(method: str, path: str, **attributes: Any) -> Callable[[H], H]:
    """Mark a method as an operation of the same name. The docstring's first line is the summary.

    The method's parameters are the `Caller` and, if needed, a `body` and a `query`; it returns the answer.
    `attributes`: attributes of `Endpoint`. `commas`: field of `LimitSettings` that limits the commas in the body.
    `is_upload`: the method reads the body.
    """

    def mark(handler: H) -> H:
        handler._operation = {"method": method, "path": path, **attributes}  # type: ignore[attr-defined]
        return handler

    return mark


class Operation(Endpoint):
    def __init__(
        self,
        resource: Resource,
        handler: Handler,
        services: OperationServices,
        *,
        is_upload: bool = False,
        commas: str = "max_input_commas",
        **attributes: Any,
    ) -> None:
        self.name, self.__doc__ = handler.__name__, handler.__doc__
        self.tag, self.access = resource.tag, resource.access
        signature = inspect.signature(handler)
        parameters, answer = signature.parameters, signature.return_annotation
        if isinstance(answer, type) and issubclass(answer, Struct):
            self.answer_type = answer
        if (body := parameters.get("body")) is not None:
            self.request_type = body.annotation
        if (query := parameters.get("query")) is not None:
            self.query_type = query.annotation
        for name, value in attributes.items():
            setattr(self, name, value)
        self._resource, self._handler, self._services = resource, handler, services
        self._is_upload = is_upload
        self._max_commas: int = getattr(services.limits, commas)
        self._body: JsonBody[Any] | None = None
        if body is not None and self.request_type is not None:
            self._body = JsonBody(self.request_type, self.hints, self.unsupported)
        is_json = self.media_type == JSON.decode()
        self._is_audited = (
            is_json
            and self.access in ("adapters", "deploy", "admin")
            and self.method not in ("GET", "HEAD")
        )
        self._has_body = not is_upload and (self.request_type is not None or not is_json)

    async def serve(self, exchange: Exchange) -> None:
        """Raises: ApiError, ClientGone, and exceptions that `to_api_error` converts."""
        admission = self._services.admission
        is_admitted = self.access == "use" and not self.is_probe  # operators are not limited
        with admission if is_admitted else nullcontext(), HeldBody(admission) as held:
            try:
                answer = await self._answer(exchange, held)
            except Exception as error:
                raise self._resource.to_error(error) from None
            if isinstance(answer, Response):
                await answer({"type": "http"}, exchange.receive, exchange.send)
            else:
                await exchange.answer(self.status, JSON_HEADERS, msgspec.json.encode(answer))

    async def _answer(self, exchange: Exchange, held: HeldBody) -> Struct | Response:
        context, services, body = exchange.context, self._services, b""
        if self._has_body:
            body = await read_body(
                exchange,
                held,
                services.limits,
                timeout_s=services.body_timeout_s,
                max_commas=self._max_commas,
                media_type=self.media_type.encode(),
            )
        arguments: dict[str, Any] = {}
        if self._body is not None:
            is_strict = self.access != "use"  # operators get an error for a typo
            arguments["body"] = self._body.decode(body, None if is_strict else context)
        if self.query_type is not None:
            values = dict(parse_qsl(context.query.decode("latin-1"), keep_blank_values=True))
            try:
                arguments["query"] = msgspec.convert(values, self.query_type, strict=False)
            except msgspec.ValidationError as error:
                info = inspect_type(self.query_type)
                raise locate(str(error), _QUERY_HINTS, info) from None
        if self._is_audited and services.audit is not None:
            given = arguments.get("body")
            name = "/".join(context.path.values()) or getattr(given, "name", "")
            name = name or getattr(given, "lora_name", "")
            await services.audit(self.name, name, context)
        work = self._handler(Caller(context, held, body, exchange.receive), **arguments)
        return await (work if self._is_upload else while_connected(work, exchange))


async def while_connected(work: Awaitable[Result], exchange: Exchange) -> Result:
    """Run work, and cancel it if the client disconnects. Raises: ClientGone."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(exchange.wait_until_gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        watching.cancel()
        if working.cancel():
            await asyncio.wait([working])
