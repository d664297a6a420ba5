"""Events that wait for publication are merged without loss or repetition."""

import time
from typing import Any

import pytest
from msgspec.structs import replace

from engines.base import EngineOutput
from shared.protocol import (
    Call,
    CallEvent,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    Grammar,
    OutputLogprob,
    Started,
    TokenLogprob,
    Tokens,
    Usage,
    decode_log,
    encode,
)
from shared.queue.api import Claim
from tests.factories_queue import make_request
from worker.active_requests import MIN_COALESCED_STREAMS, ActiveRequest, Outbox


def make_active(request: Call | None = None) -> ActiveRequest:
    request = request or make_request()
    claim = Claim(
        request.id, request.reply_to, encode(request), (), b"1-0", attempt=2, failures=0,
        is_last_chance=False, waited_s=1.0, remaining_s=60.0,
    )  # fmt: skip
    return ActiveRequest.of(claim, now=100.0)


def events_in(publication) -> tuple[CallEvent, ...]:
    return decode_log([publication.events])


def delta(active: ActiveRequest, index: int, *tokens: int) -> Tokens:
    logprobs = tuple(OutputLogprob(TokenLogprob(str(token), -1.0)) for token in tokens)
    return Tokens(active.request_id, 2, index, tokens, "".join(map(str, tokens)), logprobs)


def output(active: ActiveRequest, index: int, *tokens: int, **fields: Any) -> list[EngineOutput]:
    event = delta(active, index, *tokens)
    return [EngineOutput(active.engine_id, index, tokens, event.text, event.logprobs, **fields)]


async def test_tokens_without_a_stream_wait_for_the_end_for_a_limited_time():
    active, streaming = make_active(request=make_request(wants_stream=False)), make_active()
    hasty, outbox = Outbox(hold_s=0.0), Outbox(hold_s=1000.0)
    hasty.post(active, output(active, 0, 1))
    assert events_in((await hasty.take())[0]) == (delta(active, 0, 1),)
    outbox.post(active, [EngineOutput(active.engine_id, usage=Usage(3))])
    outbox.post(active, output(active, 0, 1))
    outbox.post(streaming, output(streaming, 0, 2))
    assert [publication.claim for publication in await outbox.take()] == [streaming.claim]

    ended = {"usage": Usage(3, 2), "finish_reason": FinishReason.STOP}
    outbox.post(active, output(active, 1, 2, **ended))
    [publication] = await outbox.take()
    *beginning, finished = events_in(publication)
    assert beginning == [Started(active.request_id, 2, Usage(3)), delta(active, 0, 1, 2)]
    assert isinstance(finished, Finished)
    assert {"usage": finished.usage, "finish_reason": finished.finish_reason} == ended


async def test_streams_of_a_busy_worker_are_published_at_intervals(monkeypatch):
    """The first token and the end are published immediately; waiting tokens do not need a further one."""
    monkeypatch.setattr("worker.active_requests.STREAM_HOLD_S", 0.5)
    outbox, streams = Outbox(), [make_active() for _ in range(MIN_COALESCED_STREAMS)]
    for active in streams:
        outbox.post(active, output(active, 0, 1))
    assert len(await outbox.take()) == len(streams)
    published_at = time.monotonic()
    first, second, third = streams[:3]
    for active in (first, second):
        outbox.post(active, output(active, 1, 2))
        outbox.post(active, output(active, 2, 3))
    outbox.post(late := make_active(), output(late, 0, 1))
    outbox.end(third, Finished(third.request_id, 2, FinishReason.STOP, Usage(3, 1)))
    assert {item.claim.id for item in await outbox.take()} == {late.claim.id, third.claim.id}
    held = await outbox.take()
    assert time.monotonic() - published_at > 0.4
    assert [events_in(item) for item in held] == [
        (delta(active, 1, 2, 3),) for active in (first, second)
    ]


async def test_dropped_events_and_events_after_the_end_are_not_published():
    dropped, ended, other, outbox = make_active(), make_active(), make_active(), Outbox()
    outbox.end(ended, Failed(ended.request_id, 2, ErrorCode.DEADLINE_EXCEEDED, "late"))
    await outbox.take()
    for active in (dropped, ended, other):
        outbox.post(active, output(active, 0, 1))
    outbox.drop(dropped)
    outbox.post(quiet := make_active(), [EngineOutput(quiet.engine_id)])  # no tokens yet
    assert [publication.claim for publication in await outbox.take()] == [other.claim]


async def test_a_failed_request_ends_alone_after_its_tokens():
    broken, full, other, outbox = make_active(), make_active(), make_active(), Outbox()
    outbox.post(broken, [EngineOutput(broken.engine_id, finish_reason=FinishReason.STOP)])
    outbox.post(full, [*output(full, 0, 1, usage=Usage(3)), EngineOutput("", 1, error="full")])
    outbox.post(other, output(other, 0, 1))
    types = [[*map(type, events_in(publication))] for publication in await outbox.take()]
    assert types == [[Failed], [Started, Tokens, Failed], [Tokens]]


@pytest.mark.parametrize("param", ["structured_outputs.json", "tools"])
def test_the_error_of_a_too_complex_grammar_names_its_field(param):
    request = make_request()
    grammar = None if param == "tools" else Grammar("json", "{}", param)
    active = make_active(replace(request, task=replace(request.task, grammar=grammar)))
    slow = EngineOutput(active.engine_id, error="x", error_code=ErrorCode.GRAMMAR_TOO_COMPLEX)
    [failed] = active.events([slow])
    assert isinstance(failed, Failed)
    assert (failed.code, failed.param) == (ErrorCode.GRAMMAR_TOO_COMPLEX, param)
