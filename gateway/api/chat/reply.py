"""The two ways back to the client, over the same events: a whole answer, or a stream of server-sent events."""

from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from gateway.api.chat.answer import AnswerHead
from gateway.api.chat.schemas import encode
from gateway.api.chat.sse import KEEP_ALIVE, ChunkWriter
from gateway.api.chat.whole import GatheredChoice, to_completion
from gateway.calls.open_call import Generation
from gateway.calls.recorder import AnswerRecorder
from gateway.calls.timings import body_timings, server_timing
from gateway.http.errors import Headers
from gateway.http.exchange import Exchange
from shared.settings.tree import GatewaySettings

_JSON: Headers = [(b"content-type", b"application/json")]
_STREAM_PATH = b"/v1/streams/"  #: where a detached answer is taken up again
_EVENT_STREAM: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies shall pass chunks on at once
]


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """How the client wants its answer; the request itself, which may be large, is not kept for it."""

    stream: bool
    include_usage: bool
    with_logprobs: bool
    shows_timings: bool
    last_event_id: int | None = (
        None  #: events are numbered, and the client has these; None: no numbers
    )


@dataclass(frozen=True, slots=True)
class Reply:
    """All that is needed to answer one request."""

    exchange: Exchange
    options: ReplyOptions
    head: AnswerHead
    generation: Generation
    recorder: AnswerRecorder


async def send_whole(reply: Reply) -> None:
    """Gather the answer, then send it. Raises: ApiError, Gone."""
    recorder = reply.recorder
    choices = [GatheredChoice() for _ in reply.generation.choices]
    while not recorder.is_complete:
        events = await reply.generation.receive()
        recorder.note(events)
        for index, event in events:
            choices[index].add(event)
    completion = to_completion(
        reply.head, choices, recorder.totals, with_logprobs=reply.options.with_logprobs
    )
    e2e_s = recorder.clock.elapsed_s()
    stages = recorder.stages(e2e_s)
    if reply.options.shows_timings:
        completion.timings = body_timings(stages, e2e_s)
    headers = [*_JSON, *_timing_headers(stages, e2e_s, is_whole=True)]
    await reply.exchange.answer(200, headers, encode(completion))


async def send_stream(reply: Reply, settings: GatewaySettings) -> None:
    """Send chunks as they come. Raises: ApiError, Gone; before the status line or after it."""
    generation, recorder, exchange = reply.generation, reply.recorder, reply.exchange
    include_usage, with_logprobs = reply.options.include_usage, reply.options.with_logprobs
    last_id = reply.options.last_event_id
    writer = ChunkWriter(
        reply.head, include_usage=include_usage, with_logprobs=with_logprobs, last_id=last_id
    )
    where = [] if last_id is None else [(b"x-vlm-stream", _STREAM_PATH + reply.head.id.encode())]
    # The status line waits for the first event, so that a prompt that is too long is a 400.
    events = await generation.receive(settings.headers_after_s)
    recorder.note(events)
    await exchange.start(200, [*_EVENT_STREAM, *where, *_known_timing(recorder)])
    while not recorder.is_complete:
        frames = writer.frames(events) if events else [KEEP_ALIVE]
        if data := b"".join(frames):
            await exchange.write(data)
        events = await generation.receive(settings.keep_alive_s)
        recorder.note(events)
    timings = _body_timings(reply)
    frames = writer.frames(events, UNSET if include_usage else timings)
    if include_usage:
        frames.append(writer.usage(recorder.totals.usage(), timings))
    await exchange.write(b"".join((*frames, writer.done())), is_last=True)


def _body_timings(reply: Reply) -> dict[str, float] | UnsetType:
    if not reply.options.shows_timings:
        return UNSET
    e2e_s = reply.recorder.clock.elapsed_s()
    return body_timings(reply.recorder.stages(e2e_s), e2e_s)


def _known_timing(recorder: AnswerRecorder) -> Headers:
    """What can be said of the time when a stream begins."""
    clock = recorder.clock
    stages = {"ingest": clock.ingest_s, "image_decode": clock.image_decode_s}
    return _timing_headers(stages, clock.elapsed_s(), is_whole=False)


def _timing_headers(stages: dict[str, float], elapsed_s: float, *, is_whole: bool) -> Headers:
    return [
        (b"server-timing", server_timing(stages, elapsed_s if is_whole else None)),
        (b"openai-processing-ms", b"%d" % round(elapsed_s * 1e3)),
    ]


def new_head(
    request_id: str,
    model: str,
    created: int,
    system_fingerprint: str,
    service_tier: str | UnsetType = UNSET,
) -> AnswerHead:
    """The fields that every piece of an answer repeats."""
    return AnswerHead(f"chatcmpl-{request_id}", created, model, system_fingerprint, service_tier)
