"""Sends a line of a batch to its endpoint, like a request over HTTP."""

import asyncio
import secrets
import time
from collections.abc import Mapping

from starlette.types import Message

from gateway.batches.runner import LineAnswer
from gateway.calls.lifecycle import Lifecycle
from gateway.calls.surface import Surface
from gateway.http.exchange import Exchange, RequestContext
from shared.telemetry.logs import request_id

_HEADERS = {b"content-type": b"application/json", b"x-vlm-priority": b"batch"}


class LineAsker:
    """Calls the endpoints of one gateway."""

    def __init__(self, lifecycle: Lifecycle, surfaces: Mapping[str, Surface]) -> None:
        self._lifecycle = lifecycle
        self._surfaces = surfaces

    async def ask(self, tenant: str, path: str, body: bytes) -> LineAnswer:
        """The response of the endpoint; cancelling the call cancels the request."""
        context = RequestContext(
            secrets.token_hex(16),
            dict(_HEADERS),
            time.perf_counter(),
            tenant=tenant,
            refuses_unknown_fields=self._lifecycle.settings.unknown_fields == "refuse",
        )
        request_id.set(context.id)
        client = _InProcess(body)
        exchange = Exchange(context, client.receive, client.send)
        await self._lifecycle.serve(self._surfaces[path], exchange)
        return LineAnswer(client.status, client.headers, context.shown_id, bytes(client.body))


class _InProcess:
    """An in-process client: sends one body, stays connected, and reads the whole response."""

    def __init__(self, body: bytes) -> None:
        self._messages: list[Message] = [{"type": "http.request", "body": body}]
        self.status = 500
        self.headers: dict[bytes, bytes] = {}
        self.body = bytearray()

    async def receive(self) -> Message:
        if not self._messages:
            await asyncio.get_running_loop().create_future()
        return self._messages.pop()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.body += message.get("body", b"")
