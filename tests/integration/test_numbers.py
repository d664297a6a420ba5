"""Metrics and traces of a running fleet: declared names, stage times that add up, and one trace per request
across gateway, Redis and worker at an OTLP collector.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.telemetry.metrics import GATEWAY_METRICS, STAGES, WORKER_METRICS, Metric
from tests.factories_gateway import make_body
from tests.factories_images import data_url, image_part
from tests.integration.fleet_process import Served, start_fleet
from tests.otlp_collector import Collector, Span, run_collector
from tests.waiting import wait_for

VISION_S, PREFILL_S, DECODE_S, NUM_TOKENS = 0.08, 0.0004, 0.01, 12
TOLD = [stage for stage in STAGES if stage != "media_decode"]  # only for videos
CALLER = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with run_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def slow(tmp_path_factory, collector: Collector) -> Iterator[Served]:
    """A fleet whose engine has known step times, and which exports its traces."""
    with start_fleet(
        tmp_path_factory.mktemp("slow"),
        VLM_ENGINE__MOCK__VISION_S=str(VISION_S),
        VLM_ENGINE__MOCK__PREFILL_S_PER_TOKEN=str(PREFILL_S),
        VLM_ENGINE__MOCK__DECODE_S=str(DECODE_S),
        VLM_ENGINE__MOCK__NUM_OUTPUT_TOKENS="64",
        VLM_WORKER__HEALTH_PORT="0",
        VLM_TRACES__EXPORT="otlp",
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
        OTEL_BSP_SCHEDULE_DELAY="50",
    ) as fleet:
        yield fleet


def ask(fleet: Served, seed: int, **extra) -> tuple[httpx.Response, float]:
    """Sends a question about a unique image; returns the response and the duration that the client measured."""
    content = [image_part(data_url(seed)), {"type": "text", "text": "What is it?"}]
    wish = {"model": "mock", "max_tokens": NUM_TOKENS, "temperature": 0, **extra}
    body = make_body(content, **wish)
    with fleet.client() as client:
        client.get("/healthz")  # opens the connection, so that only the request is measured
        began = time.perf_counter()
        response = client.post("/v1/chat/completions", json=body)
        return response, time.perf_counter() - began


def check_trace(spans: list[Span], timings: dict[str, float], parent: str) -> None:
    """Checks every stage below the spans of gateway and worker, with the durations of the response."""
    [gateway] = [span for span in spans if span.name == "chat mock"]
    [worker] = [span for span in spans if span.name == "generate mock"]
    assert {span.trace_id for span in spans} == {"a" * 32}
    assert (gateway.parent_id, worker.parent_id) == (parent, gateway.span_id)
    assert (gateway.service, worker.service) == ("vlm-gateway", "vlm-worker")
    owners = dict.fromkeys(TOLD, worker)
    owners |= dict.fromkeys(("ingest", "image_decode", "relay"), gateway)
    for stage, owner in owners.items():
        parts = [span for span in spans if span.name == stage]
        assert {(span.parent_id, span.service) for span in parts} == {
            (owner.span_id, owner.service)
        }
        told = sum(span.duration for span in parts)
        # The stage relay continues after the timings of the response were computed.
        tolerance = 0.05 if stage == "relay" else 1e-4
        assert told == pytest.approx(timings[f"{stage}_s"], abs=tolerance), stage


def test_a_request_is_one_trace_with_a_span_for_each_stage(slow: Served, collector: Collector):
    parts = [{"type": "text", "text": "secret prompt"}, image_part(data_url())]
    body = make_body(parts, model="mock", timings=True, max_tokens=4)
    with slow.client() as client:
        headers = {"traceparent": CALLER}
        answer = client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["traceparent"][3:35] == "a" * 32
    spans = collector.wait_for(2 + len(TOLD) + 1)  # the queue has two: Redis and engine
    check_trace(spans, answer.json()["timings"], "b" * 16)
    assert not [body for body in collector.bodies if b"secret" in body]


def test_stages_add_up_to_the_time_that_the_client_measures(slow):
    """A busy machine delays the client's reads; a missing or repeated stage is visible every time."""
    differences: list[float] = []
    for seed in range(1000, 1020):
        response, measured_s = ask(slow, seed, timings=True)
        timings = response.json()["timings"]
        header = response.headers["server-timing"].split(",")
        entries = dict(part.strip().split(";dur=") for part in header)
        for stage in STAGES:
            assert float(entries[stage]) == pytest.approx(timings[f"{stage}_s"] * 1000, abs=0.2)
        total_s = sum(timings[f"{stage}_s"] for stage in STAGES)
        assert total_s == pytest.approx(timings["e2e_s"], rel=0.02)
        differences.append(abs(measured_s - total_s) / measured_s)
        if differences[-1] <= 0.03:
            return
    pytest.fail(f"never within 3 %: {differences}")


def test_each_stage_has_the_time_spent_in_it(slow):
    """A busy machine only adds time."""
    seen = [ask(slow, seed, timings=True)[0].json()["timings"] for seed in range(100, 103)]
    least = {f"{stage}_s": min(timings[f"{stage}_s"] for timings in seen) for stage in STAGES}
    assert VISION_S <= least["vision_s"] < VISION_S + 0.05
    assert least["decode_s"] == pytest.approx((NUM_TOKENS - 1) * DECODE_S, rel=0.5)
    assert least["prefill_s"] >= 64 * PREFILL_S
    assert least["queue_s"] < 0.1


def check_declared(metrics: tuple[Metric, ...], text: str) -> None:
    shown = {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in text_string_to_metric_families(text)
    }
    for metric in metrics:
        assert metric.name in shown, metric.name
        assert shown[metric.name].type == metric.kind
        assert shown[metric.name].documentation == metric.help
    ours = {name for name in shown if name.startswith("vlm_")}
    assert ours == {metric.name for metric in metrics}


def worker_metrics(fleet: Served) -> str:
    worker = fleet.child("worker")
    [port] = {c.laddr.port for c in worker.net_connections() if c.status == "LISTEN"}
    return httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, verify=False).text


def test_each_process_shows_exactly_its_declared_metrics(slow):
    image = image_part(data_url(seed=700))
    for words in ("One.", "Something else."):  # images in the prefix cache are not encoded
        content = [{"type": "text", "text": words}, image]
        assert ask(slow, 0, messages=[{"role": "user", "content": content}])[0].is_success
    with slow.client() as client:
        check_declared(GATEWAY_METRICS, client.get("/metrics").text)
    shown = worker_metrics(slow)
    check_declared(WORKER_METRICS, shown)
    assert value(shown, "vlm_encoder_cache_hits_total") == 1


def value(text: str, name: str, **labels: str) -> float:
    """Returns the value of the one series with this name and these labels."""
    samples = (s for family in text_string_to_metric_families(text) for s in family.samples)
    [found] = [s.value for s in samples if s.name == name and s.labels.items() >= labels.items()]
    return found


def test_gauges_report_two_open_streams(slow):
    """Waits, because a gauge can be as old as a heartbeat."""
    body = {
        "model": "mock", "stream": True, "max_tokens": 4000, "ignore_eos": True,
        "messages": [{"role": "user", "content": "What is it?"}],
    }  # fmt: skip
    at_rest = value(worker_metrics(slow), "vlm_num_requests_running")
    with slow.client() as client, ExitStack() as stack:
        asked = [client.stream("POST", "/v1/chat/completions", json=body) for _ in range(2)]
        streams = [stack.enter_context(each).iter_lines() for each in asked]
        assert all(next(lines).startswith("data: ") for lines in streams)

        def read() -> tuple[float, ...]:
            worker, gateway = worker_metrics(slow), client.get("/metrics").text
            return (
                value(worker, "vlm_num_requests_running"),
                value(worker, "vlm_num_requests_waiting"),
                value(gateway, "vlm_queue_depth", model="mock"),
                value(gateway, "vlm_open_requests"),
            )

        wait_for(lambda: read() == (2, 0, 2, 2), 20)
        assert 0 < value(worker_metrics(slow), "vlm_kv_cache_usage_ratio") < 0.5
    assert at_rest == 0
