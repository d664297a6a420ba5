"""Latencies are computed by their definitions."""

import pytest

from shared.telemetry.metrics import GatewayMetrics, RequestRecord


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
