"""The worker's spans of a trace, as a collector receives them."""

import time
from itertools import pairwise
from socket import socket

import msgspec
import pytest

from shared.protocol import Finished, SamplingParams
from shared.settings.tree import TraceSettings
from shared.telemetry import create_tracer, spans
from shared.telemetry.tracing import epoch_ns
from tests.factories_queue import MODEL, make_request
from tests.factories_worker import run_worker
from tests.otlp_collector import run_collector

CALLER = f"00-{'a' * 32}-{'b' * 16}-01"
CONSUMER = 5


@pytest.fixture
def collector():
    with run_collector() as collector:
        yield collector


@pytest.fixture
def tracer(collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    tracer = create_tracer(TraceSettings(export="otlp"), "worker", "w")
    assert tracer is not None
    yield tracer
    tracer.close()


def tree(spans):
    [root] = [span for span in spans if span.kind == CONSUMER]
    stages = [span for span in spans if span.parent_id == root.span_id]
    return root, sorted(stages, key=lambda span: span.begin)


async def test_stage_spans_are_contiguous_below_the_gateways_span(ends, answers, tracer, collector):
    mock = {"vision_s": 0.002, "prefill_s_per_token": 0.0001, "decode_s": 0.002}
    async with run_worker(ends, mock=mock, tracer=tracer):
        request = await ends.enqueue(make_request("secret prompt", trace_parent=CALLER))
        finished = (await answers.end(request))[-1]
    tracer.close()
    root, stages = tree(collector.spans)
    assert (root.name, root.service) == ("generate tiny", "vlm-worker")
    assert (root.trace_id, root.parent_id) == ("a" * 32, "b" * 16)
    assert [s.name for s in stages] == ["queue", "preprocess", "queue", "prefill", "decode"]
    queues = [s.attributes.get("vlm.queue") for s in stages if s.name == "queue"]
    assert queues == ["redis", "engine"]
    for before, after in pairwise(stages):
        assert after.begin == pytest.approx(before.end, abs=2e-6)
    assert stages[0].begin == root.begin
    assert stages[-1].end <= root.end
    assert isinstance(finished, Finished)
    for name, seconds in msgspec.structs.asdict(finished.timings).items():
        told = sum(s.duration for s in stages if f"{s.name}_s" == name)
        assert told == pytest.approx(seconds, abs=2e-6), name
    assert root.attributes["vlm.request.id"] == request.id
    assert (root.attributes["vlm.outcome"], root.is_error) == ("ok", False)
    assert not [body for body in collector.bodies if b"secret" in body]


async def test_a_sampled_request_has_one_span_with_its_outcome_and_stages(
    ends, answers, tracer, collector
):
    mock = {"decode_s": 0.01, "num_output_tokens": 200}
    untraced = [make_request(trace_parent=parent) for parent in (None, CALLER[:-2] + "00")]
    too_long = make_request("x" * 20_000, trace_parent=CALLER)
    endless = make_request(trace_parent=CALLER, sampling=SamplingParams(ignore_eos=True))
    async with run_worker(ends, mock=mock, tracer=tracer) as running:
        for request in (*untraced, too_long):
            await answers.end(await ends.enqueue(request))
        await ends.enqueue(endless)
        await answers.tokens(endless, 1)
        await ends.queue.cancel(MODEL, [endless.id])
        await running.stop()
    tracer.close()
    roots = {s.attributes["vlm.request.id"]: s for s in collector.spans if s.kind == CONSUMER}
    assert roots.keys() == {too_long.id, endless.id}
    failed, cancelled = roots[too_long.id], roots[endless.id]
    stages = {span.name for span in collector.spans if span.parent_id == failed.span_id}
    assert stages == {"queue", "preprocess"}
    assert (failed.attributes["error.type"], failed.is_error) == ("context_length_exceeded", True)
    assert (cancelled.attributes["vlm.outcome"], cancelled.is_error) == ("cancelled", False)


def test_a_collector_that_is_down_does_not_delay_the_shutdown(monkeypatch):
    else_s = spans.CLOSE_WITHIN_S
    monkeypatch.setattr(spans, "CLOSE_WITHIN_S", 0.1)
    with socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but not listening
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        tracer = create_tracer(TraceSettings(export="otlp"), "worker", "w")
        assert tracer is not None
        tracer.begin("generate", "consumer", CALLER, epoch_ns(0.0)).end(0.0, [])
        began_at = time.monotonic()
        tracer.close()
    assert time.monotonic() - began_at < else_s
