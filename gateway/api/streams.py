"""`GET /v1/streams/{id}`: the rest of a resumable stream."""

from collections.abc import Mapping
from typing import ClassVar

from gateway.calls.lifecycle import Lifecycle
from gateway.calls.resume import STREAM_PATH
from gateway.calls.surface import Surface
from gateway.http.endpoint import Endpoint
from gateway.http.exchange import Exchange


class Streams(Endpoint):
    """Resume a stream, in the format of the API that began it."""

    name = "resume_stream"
    method = "GET"
    path = STREAM_PATH + "{id}"
    tag = "streams"
    answers_text = "text/event-stream"
    headers: ClassVar = {
        "last-event-id": "The last event that was received. Without it, all events are sent."
    }

    def __init__(self, lifecycle: Lifecycle, surfaces: Mapping[str, Surface]) -> None:
        self._lifecycle = lifecycle
        self._surfaces = surfaces

    async def serve(self, exchange: Exchange) -> None:
        await self._lifecycle.serve_stream(self._surfaces, exchange)
