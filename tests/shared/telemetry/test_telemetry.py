"""Definitions of latencies, metrics of deployments, log lines, and trace headers."""

import json
import logging
from datetime import datetime

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client import Histogram as LibraryHistogram

from shared.packages.deployments import Spec
from shared.packages.rollout import App, Revision, Slot
from shared.protocol import ModelCard, Usage
from shared.queue.registry import WorkerRecord
from shared.telemetry.logs import JsonFormatter, TextFormatter
from shared.telemetry.metrics import STAGES, GatewayMetrics, Histogram, Metric, RequestRecord
from shared.telemetry.tracing import parse_trace_parent


def record(**overrides) -> RequestRecord:
    values = {
        "model": "m", "stages": dict.fromkeys(STAGES, 0.1), "e2e_s": 1.2, "ttft_s": 0.2, "prompt": Usage(5),
        "num_output_tokens": 11,
    }  # fmt: skip
    return RequestRecord(**{**values, **overrides})


def value(metrics: GatewayMetrics, name: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"model": "m"})


@pytest.mark.parametrize(
    ("overrides", "tpot_s"),
    [
        ({"num_output_tokens": 11}, 0.1),
        ({"num_output_tokens": 33, "num_choices": 3}, 0.1),
        ({"num_output_tokens": 1}, None),
        ({"ttft_s": None}, None),
    ],
)
def test_time_per_output_token_requires_one_answer_of_two_tokens(overrides, tpot_s):
    metrics = GatewayMetrics()
    metrics.record_finished(record(**overrides))
    total = value(metrics, "vlm_time_per_output_token_seconds_sum")
    assert (total or None) == (tpot_s and pytest.approx(tpot_s))


def test_the_gap_before_an_event_is_divided_by_its_tokens():
    metrics = GatewayMetrics()
    metrics.record_tokens("m", 0.4, 4)
    assert value(metrics, "vlm_inter_token_latency_seconds_count") == 4
    assert value(metrics, "vlm_inter_token_latency_seconds_sum") == pytest.approx(0.4)


def test_the_latencies_of_many_requests_are_all_counted():
    metrics = GatewayMetrics()
    for stages in (*[dict.fromkeys(STAGES, 0.1)] * 2499, {}):  # the last record has no stages
        metrics.record_finished(record(e2e_s=2.0, stages=stages))
    assert value(metrics, "vlm_request_duration_seconds_count") == 2500
    assert value(metrics, "vlm_request_duration_seconds_sum") == pytest.approx(5000)
    assert value(metrics, "vlm_prompt_tokens_total") == 5 * 2500


def test_histograms_equal_those_of_prometheus_client():
    disable_created_metrics()
    metric = Metric("vlm_x_seconds", "histogram", "Of x.", ("model",), (0.1, 0.5, 1.0))
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram(metric, ours)
    library = LibraryHistogram(
        metric.name, metric.help, metric.labels, registry=theirs, buckets=metric.buckets
    )
    for model, value, count in (("a", 0.1, 1), ("a", 0.25, 4), ("b", 7.0, 1), ("a", 0.0, 1)):
        if count == 1:
            histogram.labels(model).add_all([value])
        else:
            histogram.labels(model).add(value, count)
        for _ in range(count):
            library.labels(model).observe(value)

    assert generate_latest(ours) == generate_latest(theirs)


OLD, NEW = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"


def shown(metrics: GatewayMetrics) -> set[str]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    return {line for line in lines if line.startswith("vlm_deployment_")}


def worker(digest: str, name: str, num_finished: int, num_failed: int = 0) -> WorkerRecord:
    card = ModelCard(f"n@{digest[7:19]}", 1, 10, 10)
    return WorkerRecord(name, card, "mock", num_finished=num_finished, num_failed=num_failed)


def test_metrics_of_versions_instances_and_requests():
    metrics = GatewayMetrics()
    app = App(
        "n", 2, active=Revision(1, OLD, Spec()),
        candidate=Revision(2, NEW, Spec(canary=0.1), is_canary=True),
        slots=(Slot(1, OLD, "ready"), Slot(2, OLD, "ready"), Slot(3, NEW, "starting")),
        desired=2, num_promoted=1, start_s=2.5,
    )  # fmt: skip
    metrics.deployments.observe({"n": app}, [worker(OLD, "x", 5), worker(NEW, "y", 1, 2)])
    metrics.deployments.observe({"n": app}, [worker(OLD, "x", 7), worker(NEW, "y", 1, 2)])
    version, other = OLD[7:19], NEW[7:19]
    assert shown(metrics) == {
        'vlm_deployment_generation{application="n"} 2.0',
        'vlm_deployment_desired_instances{application="n"} 2.0',
        'vlm_deployment_canary_ratio{application="n"} 0.1',
        'vlm_deployment_start_seconds{application="n"} 2.5',
        f'vlm_deployment_instances{{application="n",digest="{version}",state="ready",version="active"}} 2.0',
        f'vlm_deployment_instances{{application="n",digest="{other}",state="starting",version="candidate"}} 1.0',
        'vlm_deployment_rollouts_total{application="n",outcome="active"} 1.0',
        'vlm_deployment_rollouts_total{application="n",outcome="rolled_back"} 0.0',
        f'vlm_deployment_requests_total{{application="n",digest="{version}",outcome="finished"}} 7.0',
        f'vlm_deployment_requests_total{{application="n",digest="{version}",outcome="failed"}} 0.0',
        f'vlm_deployment_requests_total{{application="n",digest="{other}",outcome="finished"}} 1.0',
        f'vlm_deployment_requests_total{{application="n",digest="{other}",outcome="failed"}} 2.0',
    }


def test_a_returning_worker_is_not_counted_twice_and_old_versions_are_removed():
    metrics = GatewayMetrics()
    app = App("n", 1, active=Revision(1, OLD, Spec()))
    for workers in ([worker(OLD, "x", 5)], [], [worker(OLD, "x", 6)], [worker(OLD, "z", 2)]):
        metrics.deployments.observe({"n": app}, workers)
    line = (
        f'vlm_deployment_requests_total{{application="n",digest="{OLD[7:19]}",outcome="finished"}}'
    )
    assert f"{line} 8.0" in shown(metrics)
    updated = replace(app, active=Revision(2, NEW, Spec()))
    metrics.deployments.observe({"n": updated}, [])
    assert not [each for each in shown(metrics) if OLD[7:19] in each]
    metrics.deployments.observe({}, [])
    assert not [each for each in shown(metrics) if "generation" in each]


HEADER = f"00-{'a' * 32}-{'b' * 16}-01"


def test_malformed_trace_headers_are_ignored():
    for malformed in (
        "", HEADER.upper(), "ff" + HEADER[2:], HEADER + "-x", HEADER[:-1], HEADER + "0", HEADER.replace("a", "0"),
        HEADER.replace("b", "0"), f"cc{HEADER[2:]}more", HEADER + "\n",
    ):  # fmt: skip
        assert parse_trace_parent(malformed.encode()) is None, malformed


NASTY = 'two\nlines "quoted" \u2028 {"level": "forged"}'


def log_record(message: str = "done", **extra: object) -> logging.LogRecord:
    return logging.Logger("gateway.x").makeRecord(
        "gateway.x", logging.INFO, __file__, 1, message, (), None, extra=extra
    )


def failure() -> logging.LogRecord:
    try:
        raise ValueError(NASTY)
    except ValueError as error:
        made = log_record("broke")
        made.exc_info = (ValueError, error, error.__traceback__)
        return made


def test_a_json_line_is_one_object_with_the_extra_fields():
    line = JsonFormatter("gateway").format(log_record(NASTY, tokens=3, e2e_s=0.25))
    assert len(line.splitlines()) == 1
    fields = json.loads(line)
    assert datetime.fromisoformat(fields.pop("time")).utcoffset() is not None
    assert fields == {
        "level": "info", "process": "gateway", "logger": "gateway.x", "message": NASTY,
        "tokens": 3, "e2e_s": 0.25,
    }  # fmt: skip
    line = JsonFormatter("worker").format(failure())  # with a traceback
    assert len(line.splitlines()) == 1
    assert "Traceback" in json.loads(line)["exception"]


def test_a_message_cannot_forge_a_text_line():
    line = TextFormatter("gateway").format(log_record("one\ntwo\rthree", tokens=3))
    assert line.endswith(r"one\ntwo\rthree tokens=3")
    assert "\n" not in line
