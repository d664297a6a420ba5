"""The requests in flight at a server: sends them, dispatches events, and retries when a stream breaks.

While the server is healthy, a broken request is retried if it has no output yet or can continue. When the server is
lost, `step` raises: the worker ends, and other workers continue its requests from their token logs.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import count
from typing import Any, TypeVar

import msgspec

from engines.base import (
    Engine,
    EngineInput,
    EngineLoadFailed,
    EngineOutput,
    EngineStats,
    InvalidRequest,
)
from engines.upstream.client import DONE, ServerLost, StreamEvent, UpstreamClient
from engines.upstream.server import ServerProcess
from shared.protocol import ErrorCode

POLL_S = 0.05
MAX_TRIES = 3  #: tries of a stream that breaks while the server is healthy
RETRY_S = 0.2
BUSY = (429, 503)
_ERROR = b'"error"'
_stream_numbers = count()
OPERATOR = (401, 402, 403, 404, 405)  #: wrong key, account or address, for the operator to fix
#: Texts in error messages of vLLM and SGLang about a prompt that does not fit.
_TOO_LONG = ("context", "max_model_len", "maximum allowed length", "too long")


class StreamBroken(Exception):
    """The server reports an error inside a stream, with an HTTP status."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


class OpenRequest(ABC):
    """A request at the server. A subclass reads its stream."""

    stream_id = ""  #: id of the last send, unique in this process
    num_breaks = 0
    num_tokens = 0  #: output tokens, including those of earlier attempts
    is_started = False  #: whether there is output of this attempt
    is_complete = False  #: whether only `DONE` is missing, which some servers omit
    #: Path and JSON of a call that aborts the request at the server; None: not needed, or the server has finished.
    abort: tuple[str, object] | None = None

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """The body to post for the tokens that follow."""

    @abstractmethod
    def read(self, data: bytes) -> list[EngineOutput]:
        """Outputs of one event. Raises: StreamBroken, msgspec.MsgspecError."""

    @abstractmethod
    def can_continue(self) -> bool:
        """Whether the server continues from the tokens so far."""

    @abstractmethod
    def fail(self, message: str, code: ErrorCode) -> EngineOutput:
        """The last output of a request that fails."""


Request = TypeVar("Request", bound=EngineInput)


class StreamEngine(Engine[Request]):
    """The part of an engine that sends requests to a server and receives their streams."""

    def __init__(
        self, name: str, path: str, metrics: Mapping[str, str], client: UpstreamClient,
        server: ServerProcess | None = None,
    ) -> None:  # fmt: skip
        """`metrics`: fields of `EngineStats` by the name of the server's metric. A `server` is stopped by `close`."""
        self._name, self._path, self._metrics = name, path, metrics
        self._client, self._server = client, server
        self._open: dict[str, OpenRequest] = {}
        self._finished_early: list[EngineOutput] = []
        self._num_steps = 0
        self.startup_s: dict[str, float] = {}

    def wake(self) -> None:
        self._client.wake()

    def abort(self, request_id: str) -> None:
        if (request := self._open.pop(request_id, None)) is not None:
            self._client.cancel(request.stream_id, request.abort)
        self._finished_early = [
            output for output in self._finished_early if output.request_id != request_id
        ]

    def step(self) -> list[EngineOutput]:
        """Wait for tokens. Raises: EngineLoadFailed if the server is lost."""
        self._num_steps += 1
        outputs, self._finished_early = self._finished_early, []
        try:
            events = self._client.receive(0.0 if outputs else POLL_S)
        except ServerLost as error:
            if self._server is not None:
                self._server.check()
            raise EngineLoadFailed(
                f"{self._name} at {self._client.url} fails its health check: {error}"
            ) from None
        for event in events:
            request = self._open.get(event.stream_id.rpartition("/")[0])
            if request is not None and request.stream_id == event.stream_id:
                outputs += self._handle(request, event)
        return outputs

    def has_work(self) -> bool:
        """Whether a request is open, an output is pending, or the server is lost."""
        return bool(self._open or self._finished_early or self._client.lost)

    def stats(self) -> EngineStats:
        """Counts of this worker, and the server's caches."""
        num_running = sum(request.is_started for request in tuple(self._open.values()))
        stats = EngineStats(
            num_running=num_running,
            num_waiting=len(self._open) - num_running,
            num_steps=self._num_steps,
            startup_s=self.startup_s,
        )
        for name, target in self._metrics.items():
            if (value := self._client.metrics.get(name)) is not None:
                setattr(stats, target, value if target.endswith("_ratio") else int(value))
        return stats

    def close(self) -> None:
        """Close all streams and stop a server that was started here. Idempotent."""
        self._open.clear()
        self._client.close()
        if self._server is not None:
            self._server.close()

    def _check_id(self, request_id: str) -> None:
        if request_id in self._open:
            raise InvalidRequest(f"request id {request_id!r} is in use")

    def _send(self, request: OpenRequest, delay_s: float = 0.0) -> None:
        self._open[request.request_id] = request
        body = request.body()
        request.stream_id = f"{request.request_id}/{next(_stream_numbers)}"
        self._client.start(request.stream_id, self._path, msgspec.json.encode(body), delay_s)

    def _handle(self, request: OpenRequest, event: StreamEvent) -> list[EngineOutput]:
        data = event.data
        if event.kind == "broken":
            if not request.is_complete:
                return self._retry(request, data.decode())
            data = DONE
        if event.kind == "refused":
            return self._refuse(request, event.status, error_message(data))
        try:
            found = msgspec.json.decode(data) if _ERROR in data else None
            if isinstance(found, dict) and (error := found.get("error")):
                code = error.get("code") if isinstance(error, dict) else None
                status = code if isinstance(code, int) and 400 <= code < 600 else 500
                return self._refuse(request, status, error_message(data))
            outputs = request.read(data)
        except StreamBroken as error:
            return self._refuse(request, error.status, str(error))
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            return self._retry(request, f"an event cannot be read: {error}")
        if outputs and outputs[-1].finish_reason is not None:
            del self._open[request.request_id]
            self._client.cancel(request.stream_id, request.abort)
        return outputs

    def _refuse(self, request: OpenRequest, status: int, message: str) -> list[EngineOutput]:
        """Handle an error of the server, received as a response or inside a stream."""
        if status in BUSY and (request.can_continue() or not request.num_tokens):
            self._client.cancel(request.stream_id)
            self._send(request, delay_s=RETRY_S)
            return []
        if status >= 500 or status in (408, *BUSY):  # 408: a timeout
            return self._retry(request, message or f"status {status}")
        code = ErrorCode.INVALID_REQUEST
        if status in OPERATOR or status < 400:  # a redirect
            code = ErrorCode.ENGINE_FAILURE
        elif any(words in message for words in _TOO_LONG):
            code = ErrorCode.CONTEXT_LENGTH_EXCEEDED
        told = message or f"The model's engine refuses the request with status {status}."
        return self._fail(request, code, told)

    def _retry(self, request: OpenRequest, reason: str) -> list[EngineOutput]:
        """Continue a broken request from its tokens."""
        request.num_breaks += 1
        if request.num_breaks < MAX_TRIES and (request.can_continue() or not request.num_tokens):
            self._client.cancel(request.stream_id)
            self._send(request, delay_s=RETRY_S * request.num_breaks)
            return []
        message = f"The model's engine failed: {reason}"
        return self._fail(request, ErrorCode.ENGINE_FAILURE, message)

    def _fail(self, request: OpenRequest, code: ErrorCode, message: str) -> list[EngineOutput]:
        self._client.cancel(request.stream_id)
        del self._open[request.request_id]
        return [request.fail(message, code)]


def error_message(data: bytes) -> str:
    """The message in an error body; empty if there is none."""
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return ""
    for name in ("error", "message", "detail", "error_message"):
        while isinstance(found, dict) and found.get(name):
            found = found[name]
    return found[:300] if isinstance(found, str) else ""
