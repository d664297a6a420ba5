"""The gateway's spans of a trace, as a collector receives them, with a scripted worker."""

import sys
from operator import methodcaller

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from shared.protocol import ErrorCode
from shared.settings.tree import SettingsError, TraceSettings
from shared.telemetry import create_tracer
from tests.factories_gateway import TEXT_BODIES, make_body
from tests.factories_images import data_url, image_part
from tests.otlp_collector import run_collector

CALLER = f"00-{'a' * 32}-{'b' * 16}-01"
SERVER = 2


@pytest.fixture
def collector(monkeypatch):
    with run_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        yield collector


@pytest.fixture
def traced(collector, fleet, worker):
    """A gateway that sends its spans when it stops."""
    return fleet.gateway(traces={"export": "otlp"})


def tree(spans):
    [root] = [span for span in spans if span.kind == SERVER]
    return root, {span.name: span for span in spans if span.parent_id == root.span_id}


async def test_a_span_for_the_request_and_one_for_each_stage_below_it(traced, worker, collector):
    body = make_body(
        [{"type": "text", "text": "secret prompt"}, image_part(data_url())],
        max_tokens=5, temperature=0.5, seed=-3, stop="secret stop", user="secret user", timings=True,
    )  # fmt: skip
    async with traced as gateway:
        headers = {"traceparent": CALLER, "authorization": "Bearer secret-key"}
        response = await gateway.chat(body, headers=headers)
    root, stages = tree(collector.spans)
    assert (root.name, root.trace_id, root.parent_id) == ("chat tiny", "a" * 32, "b" * 16)
    assert set(stages) == {"ingest", "image_decode", "relay"}
    timings = response.json()["timings"]
    for name in ("ingest", "image_decode"):
        assert stages[name].duration == pytest.approx(timings[f"{name}_s"], abs=1e-5)
    assert stages["ingest"].begin == root.begin
    assert stages["relay"].end == root.end
    assert root.duration == pytest.approx(timings["e2e_s"], abs=0.05)
    expected = {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "tiny", "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5, "gen_ai.request.seed": -3, "gen_ai.request.stream": False,
        "gen_ai.response.id": response.json()["id"], "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["stop"], "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3, "gen_ai.usage.cache_read.input_tokens": 2,
        "vlm.usage.image_tokens": 4, "vlm.outcome": "ok", "http.response.status_code": 200,
    }  # fmt: skip
    assert root.attributes.items() >= expected.items()
    assert root.service == "vlm-gateway"
    assert not root.is_error
    assert not [body for body in collector.bodies if b"secret" in body or b"base64" in body]


async def test_operations_and_attributes_have_the_names_of_the_conventions(traced, collector):
    async with traced as gateway:
        for path, body in TEXT_BODIES.items():
            answer = await gateway.client.post(path, json={"model": "tiny", **body})
            assert answer.status_code == 200, answer.text
        await gateway.stream(make_body(n=1, top_k=3, top_p=0.5, presence_penalty=1))
    roots = [span for span in collector.spans if span.kind == SERVER]
    operations = [
        "text_completion" if "prompt" in body else "chat" for body in TEXT_BODIES.values()
    ]
    expected = [*operations, "chat"]
    assert [root.attributes["gen_ai.operation.name"] for root in roots] == expected
    assert [root.name for root in roots] == [f"{operation} tiny" for operation in expected]
    known = {v for k, v in vars(gen_ai_attributes).items() if k.startswith("GEN_AI_")}
    used = {name for root in roots for name in root.attributes if name.startswith("gen_ai.")}
    assert {"gen_ai.request.top_k", "gen_ai.response.time_to_first_chunk"} <= used
    assert used <= known


async def test_an_unsampled_caller_gets_no_spans(traced, worker, collector):
    async with traced as gateway:
        await gateway.chat(headers={"traceparent": CALLER[:-2] + "00"})
    assert worker.requests[0].trace_parent.endswith("-00")
    assert collector.spans == []


async def test_server_failures_are_span_errors_and_client_errors_are_not(traced, worker, collector):
    worker.script = methodcaller("fail", ErrorCode.ENGINE_FAILURE)
    async with traced as gateway:
        await gateway.chat()
        await gateway.chat(make_body(max_tokens=10**30, temperature=9))
    failed, refused = sorted(collector.spans, key=lambda s: s.name == "chat other")[-2:]
    assert (failed.is_error, failed.attributes["error.type"]) == (True, "engine_failure")
    assert (refused.is_error, refused.attributes["vlm.outcome"]) == (False, "invalid_value")
    assert refused.attributes["http.response.status_code"] == 400


async def test_without_traces_the_callers_header_is_passed_on_and_answered(gateway, worker):
    response = await gateway.chat(headers={"traceparent": CALLER})
    assert response.headers["traceparent"] == worker.requests[0].trace_parent == CALLER
    response = await gateway.chat()
    assert "traceparent" not in response.headers
    assert worker.requests[1].trace_parent is None


def test_otel_sdk_disabled_disables_traces_and_the_extra_is_required(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("OTEL_SDK_DISABLED", "true")
        assert create_tracer(TraceSettings(export="otlp"), "gateway", "g") is None
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.delitem(sys.modules, "shared.telemetry.spans", raising=False)
    # Another test can have imported the module.
    monkeypatch.delattr("shared.telemetry.spans", raising=False)
    with pytest.raises(SettingsError, match=r"VLM_TRACES__EXPORT: .* pip install .*traces"):
        create_tracer(TraceSettings(export="otlp"), "gateway", "g")


async def test_metrics_of_the_conventions_are_exported_if_enabled(monkeypatch, collector, traced):
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    async with traced as gateway:
        assert (await gateway.chat()).status_code == 200
        assert (await gateway.chat(make_body(model="unknown"))).status_code == 404
    measured = {
        (name, attributes.get("gen_ai.token.type"), attributes.get("error.type")): (count, total)
        for name, attributes, count, total in collector.measured
    }
    duration = "gen_ai.server.request.duration"
    assert set(measured) == {
        (duration, None, None),
        (duration, None, "model_not_found"),
        ("gen_ai.server.time_to_first_token", None, None),
        ("gen_ai.server.time_per_output_token", None, None),
        ("gen_ai.client.token.usage", "input", None),
        ("gen_ai.client.token.usage", "output", None),
    }
    assert measured["gen_ai.client.token.usage", "output", None] == (1, 3)
    assert measured["gen_ai.client.token.usage", "input", None] == (1, 7)
    assert {count for count, _ in measured.values()} == {1}
    attributes = next(found for name, found, _, _ in collector.measured if name == duration)
    assert attributes["gen_ai.operation.name"] == "chat"
