"""`GET /v1/streams/{id}`: the rest of a detached answer, on any gateway, after the event named by `Last-Event-ID`."""

import asyncio

from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from gateway.api.chat.answer import AnswerHead
from gateway.api.chat.reply import Reply, ReplyOptions, new_head, send_stream
from gateway.api.chat.route import close_when_gone, fail, to_api_error
from gateway.calls.recorder import AnswerRecorder
from gateway.calls.resume import StreamRecord, Streams, answer_id, last_event_id
from gateway.calls.timings import StageClock
from gateway.http.admission import Admission
from gateway.http.context import RequestContext, context_of
from gateway.http.errors import ApiError
from gateway.http.exchange import Exchange
from shared.settings.tree import GatewaySettings


class ResumeStream:
    """The ASGI application of the streams route."""

    def __init__(
        self,
        settings: GatewaySettings,
        admission: Admission,
        streams: Streams,
        system_fingerprint: str,
    ) -> None:
        self.settings = settings
        self.admission = admission
        self.streams = streams
        self.system_fingerprint = system_fingerprint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one reader. The request itself is counted where it came in."""
        context = context_of(scope)
        exchange = Exchange(receive, send)
        error: ApiError | None = None
        try:
            with self.admission:
                await self._serve(scope["path_params"]["id"], exchange, context)
        except Exception as raised:
            error = to_api_error(raised)
        if error is not None:
            await fail(exchange, error)

    async def _serve(self, shown_id: str, exchange: Exchange, context: RequestContext) -> None:
        request_id = answer_id(shown_id)
        last_id = last_event_id(context)
        record = await self.streams.find(request_id, context.tenant)
        generation = await self.streams.follow(request_id, record.model)
        watcher = asyncio.create_task(close_when_gone(exchange, generation))
        clock = StageClock(context.received_at)
        reply = Reply(
            exchange=exchange,
            options=_options(record, last_id),
            head=_head(request_id, record, self.system_fingerprint),
            generation=generation,
            recorder=AnswerRecorder(record.model, 1, clock, metrics=None),
        )
        try:
            await send_stream(reply, self.settings)
        finally:
            generation.close()
            watcher.cancel()


def _head(request_id: str, record: StreamRecord, system_fingerprint: str) -> AnswerHead:
    tier = record.service_tier or UNSET
    return new_head(request_id, record.model, record.created, system_fingerprint, tier)


def _options(record: StreamRecord, last_id: int) -> ReplyOptions:
    return ReplyOptions(
        stream=True,
        include_usage=record.include_usage,
        with_logprobs=record.with_logprobs,
        shows_timings=record.shows_timings,
        last_event_id=last_id,
    )
