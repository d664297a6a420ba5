"""What every HTTP request meets first: its context is noted, its key is checked, its path chosen.

Pure ASGI, as Starlette's `BaseHTTPMiddleware` hides that a client has left. The paths of APIs are
served from here: the router and its wrappers would cost them a tenth of their time.
"""

import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.auth import PUBLIC_PATHS as PROBE_PATHS
from gateway.http.auth import KeyRing, WrongKey
from gateway.http.context import SCOPE_KEY, RequestContext, short_hash
from gateway.http.errors import AuthenticationError, Forbidden, Render, send_error
from gateway.http.exchange import shown_id, with_ids
from gateway.http.wrong_keys import TooManyWrongKeys, WrongKeys
from shared.telemetry.logs import request_id
from shared.telemetry.metrics import CLIENT_GONE, GatewayMetrics
from shared.telemetry.trace_context import parse_trace_parent

#: For orchestrators and Prometheus, which call by the names of services.
_ANY_HOST = PROBE_PATHS | {"/metrics"}
_HOST = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::[0-9]{1,5})?")
_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
#: Bodies that a page may send anywhere without a preflight; all others need one, which
#: `cors_origins` answers. Source: Fetch, "CORS-safelisted request-header".
_SIMPLE_TYPES = (
    b"", b"application/x-www-form-urlencoded", b"multipart/form-data", b"text/plain",
)  # fmt: skip
_REFUSED = frozenset({401, 403, 404, 405, 429})
_MAX_REFUSALS_LOGGED = 10  #: lines a second

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Api:
    """Who answers a POST to a path, and the shape of its errors."""

    serve: ASGIApp
    render: Render


class GatewayMiddleware:
    """The outermost application. Without keys it asks nobody for one, and checks which host and which origin a request names."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: KeyRing,
        wrong_keys: WrongKeys,
        public_paths: Collection[str],
        apis: Mapping[str, Api],
        find_render: Callable[[str, Mapping[bytes, bytes]], Render | None],
        origins: Collection[str] = (),
        hosts: Collection[str] = (),
        metrics: GatewayMetrics,
        refuses_unknown_fields: bool = False,
    ) -> None:
        """`apis`: by path; one with names, as in `/v1/things/{name}`, is that of many. `origins`: of pages that may post.

        `find_render`: the form of errors at other paths, by path and headers; None: OpenAI's.
        `hosts`: names by which clients without keys may call this gateway, besides localhost.
        """
        self.app = app
        self.keys = keys
        self.wrong_keys = wrong_keys
        self.public_paths = public_paths
        self._apis = {path: api for path, api in apis.items() if "{" not in path}
        named = [(path, api) for path, api in apis.items() if "{" in path]
        self._named = [(path, compile_path(path)[0], api) for path, api in named]
        self._log = AccessLog(metrics)
        self._find_render = find_render
        self._needs_key = not keys.is_open
        self._origins = frozenset(origin.encode() for origin in origins)
        self._hosts = {"localhost", *hosts}
        self._refuses_unknown_fields = refuses_unknown_fields

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 or 429, or pass the request on with a `RequestContext` in its scope."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        context = scope[SCOPE_KEY] = _note(scope)
        context.refuses_unknown_fields = self._refuses_unknown_fields
        path = scope["path"]
        api = self._apis.get(path)
        if api is not None:
            context.route = path
        else:
            api = self._find_named(path, context)
        is_noted = path not in _ANY_HOST
        try:
            if not self._needs_key:
                if path not in _ANY_HOST:
                    self._check_host(scope["headers"])
                self._check_origin(scope["method"], context.headers)
            elif path not in self.public_paths:
                context.tenant = self._authenticate(scope)
        except (AuthenticationError, TooManyWrongKeys, Forbidden) as error:
            error.request_id = shown_id(context)
            if is_noted:
                self._log.note(context, scope["method"], context.route or "refused", error.status)
            render = api.render if api else self._find_render(path, context.headers)
            await send_error(_Naming(context, send), error, render)
            return
        if api is not None and scope["method"] == "POST":
            await api.serve(scope, receive, send)
            return
        naming = _Naming(context, send)
        try:
            await self.app(scope, receive, naming)
        finally:
            if is_noted:
                route = getattr(scope.get("route"), "path", "") or context.route or "unknown"
                self._log.note(context, scope["method"], route, naming.status)

    def _find_named(self, path: str, context: RequestContext) -> Api | None:
        for template, pattern, api in self._named:
            if (match := pattern.match(path)) is not None:
                context.path, context.route = match.groupdict(), template
                return api
        return None

    def _check_host(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Refuse names that are not ours: a page may point its own at this address (DNS rebinding).

        Raises: Forbidden.
        """
        for name, value in headers:
            if name == b"host" and not self._is_own_host(value.decode("latin-1")):
                raise Forbidden(
                    "This Host is not allowed: call the gateway by its IP address or as localhost; "
                    "its operator allows other names by VLM_GATEWAY__HOSTS.",
                    code="host_not_allowed",
                )

    def _is_own_host(self, value: str) -> bool:
        match = _HOST.fullmatch(value)
        if match is None:
            return False
        with suppress(ValueError):
            ipaddress.ip_address(match["ipv6"] or match["name"])
            return True
        return (match["name"] or "").lower() in self._hosts

    def _check_origin(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Refuse what a page of another origin posts without a preflight. Raises: Forbidden.

        Browsers say where a request comes from, and no page can leave that out. Others, such as
        curl, say nothing. Source: Fetch, "`Origin` header"; Fetch Metadata.
        """
        site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
        if method != "POST" or (site is None and origin is None):
            return
        media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if media_type not in _SIMPLE_TYPES or origin in self._origins or b"*" in self._origins:
            return
        if site is not None:  # of the gateway as the browser sees it, whatever proxy is between
            is_own = site in (b"same-origin", b"none")
        else:
            is_own = (origin or b"").partition(b"://")[2] == headers.get(b"host")
        if not is_own:
            raise Forbidden(
                "Pages of this origin may not call this server; its operator allows an origin by VLM_GATEWAY__CORS_ORIGINS.",
                code="origin_not_allowed",
            )

    def _authenticate(self, scope: Scope) -> str:
        """The cache salt of the caller. Raises: AuthenticationError, TooManyWrongKeys."""
        try:
            return self.keys.authenticate(scope["headers"])
        except WrongKey:
            host, _ = scope.get("client") or ("", 0)
            self.wrong_keys.count(host)
            raise


def _note(scope: Scope) -> RequestContext:
    """Start the clock, and name the request in log lines."""
    headers = dict(scope["headers"])
    context = RequestContext(secrets.token_hex(16), headers, time.perf_counter())
    request_id.set(context.id)  # each request is a task of its own
    if (caller := headers.get(b"traceparent")) is not None:
        context.trace_parent = parse_trace_parent(caller)
    client_id = headers.get(b"x-request-id")
    if client_id is not None and _SANE_ID.fullmatch(client_id):
        context.client_id = client_id.decode()
    return context


class _Naming:
    """A `send` that names the request in the answer's headers; `Exchange` does so itself."""

    def __init__(self, context: RequestContext, send: Send) -> None:
        self._context = context
        self._send = send
        self.status: int | None = None  #: what the client was told, if anything

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = list(message["headers"])
            if all(name != b"x-request-id" for name, _ in headers):
                message["headers"] = with_ids(self._context, headers)
        await self._send(message)


class AccessLog:
    """Counts and logs the requests that no `Recorder` notes. Refusals share a few lines a second."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._second = 0  # of the latest refusal
        self._num_refused = 0  # within it
        self._num_unlogged = 0

    def note(self, context: RequestContext, method: str, route: str, status: int | None) -> None:
        """Note a request that has ended. `route`: a template, never the client's path."""
        self._metrics.record_http(method, route, status)
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
