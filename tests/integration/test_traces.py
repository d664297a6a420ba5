"""One trace across the gateway's process, Redis and the worker's, at a collector that speaks OTLP."""

import json
from pathlib import Path

import pytest

from shared.telemetry.metrics import STAGES
from tests.factories_gateway import make_body
from tests.factories_images import data_url, image_part
from tests.integration.fleet_process import start_fleet
from tests.otlp_collector import Span, run_collector

TOLD = [stage for stage in STAGES if stage != "media_decode"]  # of videos alone
CALLER = f"00-{'a' * 32}-{'b' * 16}-01"
PARTS = [{"type": "text", "text": "secret prompt"}, image_part(data_url())]
BODY = make_body(PARTS, model="mock", timings=True, max_tokens=4)


def check(spans: list[Span], timings: dict[str, float], parent: str) -> None:
    """Every stage in its process, below one span each of gateway and worker, as long as the answer says."""
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
        # What comes after the answer's own numbers were made is relay.
        tolerance = 0.05 if stage == "relay" else 1e-4
        assert told == pytest.approx(timings[f"{stage}_s"], abs=tolerance), stage


def test_a_request_is_one_trace_with_a_span_for_each_stage(tmp_path: Path):
    with run_collector() as collector:
        fleet = start_fleet(
            tmp_path,
            VLM_TRACES__EXPORT="otlp",
            OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
            OTEL_BSP_SCHEDULE_DELAY="50",
            VLM_LOGS__FORMAT="json",
            VLM_LOGS__LEVEL="info",
        )
        try:
            with fleet.client() as client:
                headers = {"traceparent": CALLER}
                answer = client.post("/v1/chat/completions", json=BODY, headers=headers)
            assert answer.status_code == 200, answer.text
            assert answer.headers["traceparent"][3:35] == "a" * 32
            spans = collector.wait_for(2 + len(TOLD) + 1)  # the queue has two: Redis and engine
            line = next(line for line in fleet.process.stderr or () if '"outcome"' in line)
        finally:
            fleet.end()
    check(spans, answer.json()["timings"], "b" * 16)
    assert not [body for body in collector.bodies if b"secret" in body]
    logged = json.loads(line)
    assert (logged["process"], logged["outcome"], logged["trace_id"]) == ("gateway", "ok", "a" * 32)
    assert logged["request_id"] in answer.json()["id"]
    assert "secret" not in line
