"""The gateway's ASGI application: routes requests, checks host, origin and key, and logs.

Pure ASGI, because Starlette's `BaseHTTPMiddleware` hides that a client has disconnected.
"""

import ipaddress
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import InitVar, dataclass
from functools import lru_cache

from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.auth import KeyRing, WrongKey, WrongKeys
from gateway.http.endpoint import Endpoint, Serve
from gateway.http.errors import Forbidden, Render, method_not_allowed, to_api_error, unknown_path
from gateway.http.exchange import HAS_MESSAGE, Exchange, RequestContext, short_hash
from shared.telemetry.logs import request_id
from shared.telemetry.metrics import CLIENT_GONE, GatewayMetrics
from shared.telemetry.tracing import parse_trace_parent

_HOST = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::[0-9]{1,5})?")
_ADDRESS = "an IP address"  #: stands for all IP addresses
_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
#: Content types that a web page can post without a preflight. Preflights are checked against `cors_origins`.
#: Source: Fetch, "CORS-safelisted request-header".
_SIMPLE_TYPES = (
    b"", b"application/x-www-form-urlencoded", b"multipart/form-data", b"text/plain",
)  # fmt: skip
_REFUSED = frozenset({401, 403, 404, 405, 429})
_MAX_REFUSALS_LOGGED = 10  #: lines per second
#: Unsupported paths of OpenAI's API that match a route with an id.
_NOT_SERVED = frozenset({"/v1/responses/compact"})

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Route:
    """The endpoints of one path by method, and the path's parameters."""

    template: str
    endpoints: dict[str, tuple[Endpoint, Serve]]

    @property
    def first(self) -> Endpoint:
        return next(iter(self.endpoints.values()))[0]


@dataclass(kw_only=True, eq=False)
class Router:
    """Routes requests. Without API keys it checks host and origin instead."""

    endpoints: InitVar[Iterable[tuple[Endpoint, Serve]]]
    lifespan: ASGIApp
    keys: KeyRing
    wrong_keys: WrongKeys
    metrics: InitVar[GatewayMetrics]
    origins: Collection[str]  #: origins of web pages that may send POST requests
    hosts: Collection[str]  #: names of this gateway besides localhost, for clients without keys
    #: Error format by path and headers, for paths without a surface.
    find_render: Callable[[str, Mapping[bytes, bytes]], Render | None]
    refuses_unknown_fields: bool

    def __post_init__(
        self, endpoints: Iterable[tuple[Endpoint, Serve]], metrics: GatewayMetrics
    ) -> None:
        self._log = AccessLog(metrics)
        self._origins = frozenset(origin.encode() for origin in self.origins)
        self._hosts = {_ADDRESS, "localhost", *self.hosts}
        self._routes: dict[str, Route] = {}
        for endpoint, serve in endpoints:
            for path in (endpoint.path, *endpoint.aliases):
                route = self._routes.setdefault(path, Route(compile_path(path)[1], {}))
                route.endpoints[endpoint.method] = endpoint, serve
        self._patterns = [
            (compile_path(path)[0], route) for path, route in self._routes.items() if "{" in path
        ]
        self._known = sorted(
            path for path, route in self._routes.items() if route.first.is_suggested
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.lifespan(scope, receive, send)
            return
        context = _create_context(scope)
        context.refuses_unknown_fields = self.refuses_unknown_fields
        exchange = Exchange(context, receive, send)
        exchange.has_message = scope.get("extensions", {}).get(HAS_MESSAGE)
        endpoint, is_logged = None, True
        try:
            # An id with an encoded slash matches only in the path before decoding.
            raw_path = (scope.get("raw_path") or b"").decode("latin-1")
            route = self._find(scope["path"], context) or self._find(raw_path, context)
            endpoint = route and route.first
            await self._check_access(endpoint, scope, context)
            endpoint, serve = _choose(route, scope["path"], context.method, self._known)
            is_logged = not endpoint.is_recorded
            await serve(exchange)
        except Exception as raised:
            error = to_api_error(raised)
            if error is not None and exchange.status is None:
                render = self.find_render(scope["path"], context.headers)
                if endpoint is not None and endpoint.is_recorded:
                    render = endpoint.error
                await exchange.fail(error, render)
        if is_logged and not (endpoint and endpoint.is_probe):
            self._log.note(context, context.route or "unknown", exchange.status)

    def _find(self, path: str, context: RequestContext) -> Route | None:
        route = self._routes.get(path)
        if route is None or "{" in path:
            route = None
            for pattern, found in self._patterns:
                if (match := pattern.match(path)) is None:
                    continue
                if route is None or context.method in found.endpoints:
                    route, context.path = found, match.groupdict()
                if context.method in found.endpoints:
                    break
        if route is not None:
            context.route = route.template
        return route

    async def _check_access(
        self, endpoint: Endpoint | None, scope: Scope, context: RequestContext
    ) -> None:
        """Raises: AuthenticationError, RateLimited, Forbidden."""
        access = "use" if endpoint is None else endpoint.access
        if self.keys.is_open:
            if endpoint is None or not endpoint.is_probe:
                self._check_host(scope["headers"])
            self._check_origin(context)
        try:
            if access != "public":
                context.tenant = await self.keys.authenticate(scope["headers"], access)
        except WrongKey:
            self.wrong_keys.count(context.address)
            raise

    def _check_host(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Refuse unknown host names, because DNS rebinding resolves a page's name to this address. Raises: Forbidden."""
        for name, value in headers:
            if name == b"host" and _host_name(value) not in self._hosts:
                raise Forbidden(
                    "This Host is not allowed: call the gateway by its IP address or as localhost; "
                    "its operator can allow other names with VLM_GATEWAY__HOSTS.",
                    code="host_not_allowed",
                )

    def _check_origin(self, context: RequestContext) -> None:
        """Refuse cross-origin POST requests that browsers send without a preflight. Raises: Forbidden.

        Browsers send the origin, and pages cannot omit it. Other clients, such as curl, send none. Source: Fetch,
        "`Origin` header"; Fetch Metadata.
        """
        headers = context.headers
        site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
        if context.method != "POST" or (site is None and origin is None):
            return
        media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if media_type not in _SIMPLE_TYPES or origin in self._origins or b"*" in self._origins:
            return
        if site is not None:  # set by the browser: correct even if a proxy changes `Host`
            is_own = site in (b"same-origin", b"none")
        else:
            is_own = (origin or b"").partition(b"://")[2] == headers.get(b"host")
        if not is_own:
            message = "The origin of this page may not call this server: allow it in VLM_GATEWAY__CORS_ORIGINS."
            raise Forbidden(message, code="origin_not_allowed")


@lru_cache(maxsize=32)
def _host_name(value: bytes) -> str | None:
    """The name of a Host header, or `_ADDRESS` for an IP address; None if it is malformed."""
    match = _HOST.fullmatch(value.decode("latin-1"))
    if match is None:
        return None
    with suppress(ValueError):
        ipaddress.ip_address(match["ipv6"] or match["name"])
        return _ADDRESS
    return (match["name"] or "").lower() or None


def _choose(
    route: Route | None, path: str, method: str, known: Collection[str]
) -> tuple[Endpoint, Serve]:
    if route is None or path in _NOT_SERVED:
        raise unknown_path(path, known)
    found = route.endpoints.get("GET" if method == "HEAD" else method)
    found = route.endpoints.get(method, found)
    if found is None:
        raise method_not_allowed(sorted(route.endpoints))
    return found


def _create_context(scope: Scope) -> RequestContext:
    """Create the request's context and set its id for log lines."""
    headers = dict(scope["headers"])
    context = RequestContext(
        os.urandom(16).hex(),
        headers,
        time.perf_counter(),
        method=scope["method"],
        query=scope["query_string"],
        address=(scope.get("client") or ("",))[0],
    )
    request_id.set(context.id)  # each request is a task with its own context
    if (caller := headers.get(b"traceparent")) is not None:
        context.trace_parent = parse_trace_parent(caller)
    client_id = headers.get(b"x-request-id")
    if client_id is not None and _SANE_ID.fullmatch(client_id):
        context.client_id = client_id.decode()
    return context


class AccessLog:
    """Counts and logs requests that `gateway.calls.recorder` does not. At most a few refusals per second are logged."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._second = 0  # second of the last refusal
        self._num_refused = 0  # refusals within this second
        self._num_unlogged = 0

    def note(self, context: RequestContext, route: str, status: int | None) -> None:
        """Log a request that has ended. `route` is a template, never the client's path."""
        self._metrics.record_http(context.method, route, status)
        if status in _REFUSED and not self._may_log():
            self._num_unlogged += 1
            return
        e2e_s = round(time.perf_counter() - context.received_at, 6)
        fields = {
            "request_id": context.id, "route": route, "status": status or CLIENT_GONE, "e2e_s": e2e_s,
        }  # fmt: skip
        if context.tenant:
            fields["tenant"] = short_hash(context.tenant)
        if self._num_unlogged:
            fields["num_unlogged"], self._num_unlogged = self._num_unlogged, 0
        logger.info("request ended", extra=fields)

    def _may_log(self) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._num_refused = second, 0
        self._num_refused += 1
        return self._num_refused <= _MAX_REFUSALS_LOGGED
