"""Errors in OpenAI's format, `{"error": {message, type, param, code}}`, and their status.

    ApiError
    |-- InvalidRequest       400, and 413, 415 ...   for the client to fix; never retried
    |-- AuthenticationError  401
    |-- NotFound             404, 405
    |-- Overloaded           503, retry-after        retry later
    `-- ServerError          500, 503, 504           failures of workers and the gateway

Messages are short fixed texts with numbers, without input, addresses, paths or tracebacks.
"""

import logging
from collections.abc import Callable, Collection
from difflib import get_close_matches

import msgspec
from redis.exceptions import RedisError

from gateway.http.error_codes import ERROR_CODES
from shared.blobs.api import BlobsUnavailable
from shared.protocol import ErrorCode, Failed
from shared.queue.api import QueueUnavailable
from shared.records.store import RecordsUnavailable

Headers = list[tuple[bytes, bytes]]
_MAX_COMPARED_CHARS = 100  #: leading characters of an unknown path that are compared

logger = logging.getLogger(__name__)


class ClientGone(Exception):
    """The client has disconnected."""


class ErrorFields(msgspec.Struct):
    """Fields of an error. Only streams set `should_retry` and `retry_after`: other answers have headers for them."""

    message: str
    type: str
    param: str | None
    code: str | None
    should_retry: bool | msgspec.UnsetType = msgspec.UNSET
    retry_after: int | msgspec.UnsetType = msgspec.UNSET


class ErrorBody(msgspec.Struct):
    error: ErrorFields


class ApiError(Exception):
    """An error. Its code determines its status by default. `retry_after_s` tells clients when to retry."""

    status = 500
    type = ""  #: empty: derived from the status
    model: str | None = None  #: model that a refused body names, as a metrics label
    request_id: str | None = None  #: id of the request in the answer's headers
    allow = ""  #: methods of the path, for a 405

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        status: int | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        known, _ = ERROR_CODES.get(code or "", (self.status, ""))
        self.status = status or known
        self.type = self.type or ("invalid_request_error" if self.status < 500 else "server_error")
        self.retry_after_s = retry_after_s

    @property
    def should_retry(self) -> bool:
        """Whether the same request may soon succeed."""
        return self.retry_after_s is not None and self.code != "insufficient_quota"

    def body(self) -> bytes:
        fields = ErrorFields(self.message, self.type, self.param, self.code)
        return msgspec.json.encode(ErrorBody(fields))

    def event(self) -> bytes:
        """The error as the last event of a stream, with `should_retry` and `retry_after`."""
        fields = ErrorFields(self.message, self.type, self.param, self.code, self.should_retry)
        if self.retry_after_s is not None:
            fields.retry_after = self.retry_after_s
        return msgspec.json.encode(ErrorBody(fields))

    def headers(self) -> Headers:
        """Headers of the answer: content type, and whether and when to retry."""
        headers: Headers = [(b"content-type", b"application/json")]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % self.retry_after_s))
        if self.retry_after_s is not None or self.status >= 500:
            headers.append((b"x-should-retry", b"true" if self.should_retry else b"false"))
        if self.allow:
            headers.append((b"allow", self.allow.encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers


#: An API's format of errors: status and body.
Render = Callable[[ApiError], tuple[int, bytes]]


class InvalidRequest(ApiError):
    status = 400


class AuthenticationError(ApiError):
    status = 401


class Forbidden(ApiError):
    status = 403


class NotFound(ApiError):
    status = 404


class Overloaded(ApiError):
    """The queue is full, the gateway is stopping, or Redis is unreachable. `reason` is a label of the metrics."""

    status = 503

    def __init__(self, reason: str, message: str, *, code: str, retry_after_s: int) -> None:
        super().__init__(message, code=code, retry_after_s=retry_after_s)
        self.reason = reason


class RateLimited(Overloaded):
    """A limit of this key or address is exceeded. Other keys and addresses are served."""

    status = 429
    type = "rate_limit_error"

    def __init__(
        self, reason: str, message: str, retry_after_s: int, code: str = "rate_limit_exceeded"
    ) -> None:
        super().__init__(reason, message, code=code, retry_after_s=retry_after_s)


class ServerError(ApiError):
    """A failure of a worker or of the gateway."""


class KeyEnded(Failed, frozen=True):
    """The request's API key was revoked or has expired. The gateway creates this event; workers never send it."""


def from_failed(event: Failed) -> ApiError:
    if isinstance(event, KeyEnded):
        return AuthenticationError(event.message, code="invalid_api_key")
    status, _ = ERROR_CODES[event.code.value]
    error = ServerError if status >= 500 else InvalidRequest
    may_pass = status == 503 or event.code is ErrorCode.ADAPTER_UNAVAILABLE
    return error(
        event.message[:1000],
        code=event.code.value,
        param=event.param,
        retry_after_s=1 if may_pass else None,
    )


def method_not_allowed(methods: Collection[str]) -> NotFound:
    error = NotFound(f"Method Not Allowed: send {', '.join(methods)}.", code="method_not_allowed")
    error.allow = ", ".join(methods)
    return error


def unknown_path(path: str, known: Collection[str]) -> ApiError:
    """The error for an unknown path, with the closest known one. The client's path is not echoed."""
    near = sorted(own for own in known if path in (own.removeprefix("/v1"), "/v1" + own, own + "/"))
    if near:
        message = f"Not Found: this server serves {near[0]}; check that the base URL has /v1 once."
    else:
        nearest = get_close_matches(path[:_MAX_COMPARED_CHARS], sorted(known), 1)
        hint = f"the nearest path is {nearest[0]}; " if nearest else ""
        message = f"Not Found: {hint}GET /docs lists all paths."
    return NotFound(message, code="not_found")


def invalid(param: str, problem: str, code: str = "invalid_value") -> InvalidRequest:
    """The error for a field. `problem` must name what to send instead."""
    message = f"Invalid value for {param}: {problem}."
    return InvalidRequest(message, param=param, code=code, status=400)


def missing(param: str) -> InvalidRequest:
    return InvalidRequest(f"Missing required field: {param}.", param=param, code="missing_field")


def wrong_media_type(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="unsupported_media_type")


def conflict(message: str, code: str = "conflict", param: str | None = None) -> InvalidRequest:
    return InvalidRequest(message, code=code, param=param)


def unavailable(
    reason: str = "redis", what: str = "The service is", retry_after_s: int = 1
) -> ApiError:
    """The error while a server behind the gateway is unreachable."""
    text = f"{what} temporarily unavailable; retry."
    return Overloaded(reason, text, code="service_unavailable", retry_after_s=retry_after_s)


def record_unreadable() -> ApiError:
    return ServerError(
        "A newer version of vlm-fleet wrote the record of this deployment: update this gateway, "
        "whose log names the field that it cannot read.",
        code="record_unreadable",
    )


def store_unavailable() -> ApiError:
    message = "The package store does not answer; the gateway's log has the reason. Retry later."
    return ServerError(message, code="store_unavailable", retry_after_s=5)


def to_api_error(error: Exception) -> ApiError | None:
    """The error for an exception, without its traceback, which would retain the body. None: the client is gone."""
    match error:
        case ClientGone():
            return None
        case ApiError():
            answered = error
        case QueueUnavailable() | BlobsUnavailable() | RecordsUnavailable() | RedisError():
            answered = unavailable()
        case _:
            logger.error("a request failed", exc_info=error)
            message = "The server had an error while processing the request."
            answered = ServerError(message, code="internal_error")
    answered.__traceback__ = answered.__context__ = answered.__cause__ = None
    return answered
