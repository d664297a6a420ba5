"""What every HTTP request meets first: its context is noted, its key is checked, its path chosen.

Pure ASGI, as Starlette's `BaseHTTPMiddleware` hides that a client has left. The paths of APIs are
served from here: the router and its wrappers would cost them a tenth of their time.
"""

import re
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.auth import KeyRing, WrongKey
from gateway.http.context import SCOPE_KEY, RequestContext
from gateway.http.errors import AuthenticationError, Forbidden, Render, send_error
from gateway.http.exchange import shown_id, with_ids
from gateway.http.wrong_keys import TooManyWrongKeys, WrongKeys
from shared.telemetry.logs import request_id
from shared.telemetry.trace_context import parse_trace_parent

_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
#: Bodies that a page may send anywhere without a preflight; all others need one, which
#: `cors_origins` answers. Source: Fetch, "CORS-safelisted request-header".
_SIMPLE_TYPES = (
    b"", b"application/x-www-form-urlencoded", b"multipart/form-data", b"text/plain",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Api:
    """Who answers a POST to a path, and the shape of its errors."""

    serve: ASGIApp
    render: Render


class GatewayMiddleware:
    """The outermost application. Without keys it asks nobody for one, and checks where pages come from."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: KeyRing,
        wrong_keys: WrongKeys,
        public_paths: Collection[str],
        apis: Mapping[str, Api],
        origins: Collection[str] = (),
    ) -> None:
        """`apis`: by path; one with names, as in `/v1/things/{name}`, is that of many. `origins`: of pages that may post."""
        self.app = app
        self.keys = keys
        self.wrong_keys = wrong_keys
        self.public_paths = public_paths
        self._apis = {path: api for path, api in apis.items() if "{" not in path}
        named = [(path, api) for path, api in apis.items() if "{" in path]
        self._named = [(compile_path(path)[0], api) for path, api in named]
        self._needs_key = not keys.is_open
        self._origins = frozenset(origin.encode() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 or 429, or pass the request on with a `RequestContext` in its scope."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        context = scope[SCOPE_KEY] = _note(scope)
        path = scope["path"]
        api = self._apis.get(path) or self._find_named(path, context)
        try:
            if not self._needs_key:
                self._check_origin(scope["method"], context.headers)
            elif path not in self.public_paths:
                context.tenant = self._authenticate(scope)
        except (AuthenticationError, TooManyWrongKeys, Forbidden) as error:
            error.request_id = shown_id(context)
            await send_error(_naming(context, send), error, api and api.render)
            return
        if api is not None and scope["method"] == "POST":
            await api.serve(scope, receive, send)
        else:
            await self.app(scope, receive, _naming(context, send))

    def _find_named(self, path: str, context: RequestContext) -> Api | None:
        for pattern, api in self._named:
            if (match := pattern.match(path)) is not None:
                context.path = match.groupdict()
                return api
        return None

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


def _naming(context: RequestContext, send: Send) -> Send:
    """A `send` that names the request in the answer's headers; `Exchange` does so itself."""

    async def send_with_ids(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message["headers"])
            if all(name != b"x-request-id" for name, _ in headers):
                message["headers"] = with_ids(context, headers)
        await send(message)

    return send_with_ids
