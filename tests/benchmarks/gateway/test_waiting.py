"""What waiting costs is measured on real queues and real streams, and what waits stays there."""

import asyncio

import pytest

from benchmarks.gateway.run import BenchError, run_vlm_fleet
from benchmarks.gateway.waiting import (
    measure_depths,
    measure_streams,
    to_depth_table,
    to_stream_table,
)


def test_requests_are_measured_beside_those_that_wait():
    costs = asyncio.run(measure_depths([0, 60], num_requests=20, rounds=2))
    assert [cost.depth for cost in costs] == [0, 60]
    assert all(cost.took_us > cost.redis_us > 0 for cost in costs)
    assert to_depth_table(costs).row_count == 2


def test_streams_that_are_open_at_once_are_counted_by_process():
    with run_vlm_fleet({"VLM_ENGINE__MOCK__DECODE_S": "0.05"}) as target:
        cost = asyncio.run(measure_streams(target, 3))
    assert cost.num_streams == 3
    assert set(cost.bytes_of) == {"gateway", "worker", "redis-server"}
    assert to_stream_table(cost).row_count == 3


def test_streams_that_a_gateway_refuses_end_the_measurement():
    refusing = {"VLM_ENGINE__MOCK__DECODE_S": "0.5", "VLM_LIMITS__MAX_OPEN_REQUESTS": "2"}
    with run_vlm_fleet(refusing) as target, pytest.raises(BenchError, match="refused"):
        asyncio.run(measure_streams(target, 4))
