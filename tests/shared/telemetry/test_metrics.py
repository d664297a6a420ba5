"""Latencies are computed by their definitions."""

import pytest
from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client import Histogram as LibraryHistogram

from shared.telemetry.metrics import GatewayMetrics, Histogram, Metric, RequestRecord


def record(**overrides) -> RequestRecord:
    values = {
        "model": "m", "stages": {"queue": 0.1}, "e2e_s": 1.2, "ttft_s": 0.2, "num_prompt_tokens": 5,
        "num_image_tokens": 0, "num_cached_tokens": 0, "num_output_tokens": 11,
    }  # fmt: skip
    return RequestRecord(**{**values, **overrides})


def value(metrics: GatewayMetrics, name: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"model": "m"})


@pytest.mark.parametrize(
    ("num_output_tokens", "num_choices", "tpot_s"), [(11, 1, 0.1), (22, 2, 0.1), (33, 3, 0.1)]
)
def test_time_per_output_token_is_that_of_one_answer(num_output_tokens, num_choices, tpot_s):
    metrics = GatewayMetrics()
    metrics.record_finished(record(num_output_tokens=num_output_tokens, num_choices=num_choices))
    total = value(metrics, "vlm_time_per_output_token_seconds_sum")
    assert total == pytest.approx(tpot_s)


@pytest.mark.parametrize("overrides", [{"num_output_tokens": 1}, {"ttft_s": None}])
def test_time_per_output_token_is_undefined_without_two_tokens_of_text(overrides):
    metrics = GatewayMetrics()
    metrics.record_finished(record(**overrides))
    assert not value(metrics, "vlm_time_per_output_token_seconds_count")


def test_the_gap_before_an_event_is_shared_by_its_tokens():
    metrics = GatewayMetrics()
    metrics.record_tokens("m", 0.4, 4)
    assert value(metrics, "vlm_inter_token_latency_seconds_count") == 4
    assert value(metrics, "vlm_inter_token_latency_seconds_sum") == pytest.approx(0.4)


def test_a_histogram_shows_what_the_library_shows():
    disable_created_metrics()
    metric = Metric("vlm_x_seconds", "histogram", "Of x.", ("model",), (0.1, 0.5, 1.0))
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram(metric, ours)
    library = LibraryHistogram(
        metric.name, metric.help, metric.labels, registry=theirs, buckets=metric.buckets
    )
    for model, value, count in (("a", 0.1, 1), ("a", 0.25, 4), ("b", 7.0, 1), ("a", 0.0, 1)):
        histogram.labels(model).observe(value, count)
        for _ in range(count):
            library.labels(model).observe(value)

    assert generate_latest(ours) == generate_latest(theirs)
