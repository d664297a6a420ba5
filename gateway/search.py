"""HTTP client of the search process."""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, get_args
from urllib.parse import urlsplit

import httpx
import msgspec

from gateway.http.errors import ApiError, InvalidRequest, NotFound, conflict, unavailable
from shared.search import Fault, Request
from shared.settings.tree import SearchSettings

TIMEOUT_S = 60.0
_CONNECT_S = 2.0
#: Assumed duration of the first outage; maximum of retry-after.
RESTART_S, MAX_RETRY_S = 5.0, 30.0
_unavailable = partial(unavailable, "search", "The vector stores are")
_CODES = {
    "conflict": "model_changed", "full": "store_full", "too_large": "request_too_large",
    "invalid": "invalid_value",
}  # fmt: skip
T = TypeVar("T")


class SearchClient:
    """Sends requests to the search process over one connection pool."""

    def __init__(self, settings: SearchSettings) -> None:
        parts = urlsplit(settings.url)
        is_unix = parts.scheme == "unix"
        token = settings.token.get_secret_value()
        self.is_on = bool(settings.url)
        self._outage = Outage()
        is_tls = parts.scheme == "https"  # loading the system's certificates is slow
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=parts.path, verify=False) if is_unix else None,
            verify=is_tls,
            base_url="http://search" if is_unix else settings.url,
            headers={"authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(TIMEOUT_S, connect=_CONNECT_S),
            trust_env=False,
        )

    async def ask(self, request: Request[T], name: Callable[[str], str | None] | None = None) -> T:
        """Send a request. `name`: translates the parameter of an error to the API's field name. Raises: ApiError."""
        if not self.is_on:
            raise NotFound(
                "Vector stores are not served here: start `vlm serve --search`, or `vlm search-node` "
                "with VLM_SEARCH__URL set for it and for the gateways.",
                code="search_not_served",
            )
        try:
            answer = await self._client.post("/", content=msgspec.msgpack.encode(request))
        except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
            raise _unavailable(self._outage.begin(time.monotonic())) from None
        except httpx.HTTPError:
            raise _unavailable() from None
        self._outage.end(time.monotonic())
        if answer.status_code == 422:
            raise to_error(msgspec.msgpack.decode(answer.content, type=Fault), name)
        if answer.status_code != 200:
            raise _unavailable()
        [base] = type(request).__orig_bases__  # type: ignore[attr-defined]
        return msgspec.msgpack.decode(answer.content, type=get_args(base)[0])

    async def close(self) -> None:
        await self._client.aclose()


def to_error(fault: Fault, name: Callable[[str], str | None] | None = None) -> ApiError:
    """The client's error for a fault of the search process."""
    param: Any = (name(fault.param) if name else fault.param) or None
    if fault.code == "not_found":
        return NotFound(fault.message, param=fault.param, code="not_found")
    if fault.code == "read_only":
        return conflict(fault.message, code="store_read_only")
    if (code := _CODES.get(fault.code)) is None:
        return _unavailable()
    return InvalidRequest(fault.message, param=param, code=code)


class Outage:
    """Estimates retry-after while the search process is unavailable, from the duration of the last outage."""

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._last_s = RESTART_S

    def begin(self, now: float) -> int:
        """Record a failure. Returns retry-after: how much longer the last outage took, else the length of this one."""
        self._began_at = self._began_at or now
        so_far_s = now - self._began_at
        left_s = self._last_s - so_far_s
        return math.ceil(max(1.0, min(MAX_RETRY_S, left_s if left_s > 0 else so_far_s)))

    def end(self, now: float) -> None:
        if self._began_at is not None:
            self._last_s = now - self._began_at
            self._began_at = None
