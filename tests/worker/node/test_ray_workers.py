"""Each Ray actor asks for the GPUs that its worker uses. `tests/faults/test_ray_long.py` has a real cluster."""

from typing import Any

import pytest

from tests.worker.node.test_resources import make_settings
from worker.node.ray_workers import num_gpus


@pytest.mark.parametrize(
    ("engine", "num_there", "expected"),
    [
        ({"kind": "vllm", "tensor_parallel": 4}, 8.0, 4),
        ({"kind": "vllm", "tensor_parallel": 4}, 0.0, 4),  # a node with GPUs may join
        ({"kind": "sglang", "tensor_parallel": 2, "url": "http://gpu:30000"}, 8.0, 0),
        ({"kind": "torch"}, 8.0, 1),
        ({"kind": "torch", "device": "cpu"}, 8.0, 0),
        ({"kind": "mock"}, 8.0, 0),
    ],
)
def test_an_actor_asks_for_the_gpus_of_its_worker(
    engine: dict[str, Any], num_there: float, expected: float
):
    assert num_gpus(make_settings(**engine), num_there) == expected
