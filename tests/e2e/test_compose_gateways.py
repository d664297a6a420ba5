"""Two gateways of the compose stack, each on a port of its own: one is replaced while the other takes its requests."""

from collections.abc import Iterator

import pytest

from tests.e2e.compose_load import Load
from tests.e2e.compose_stack import ComposeStack, docker, run_stack, two_free_ports

SCALE = ("--scale", "gateway=2", "--scale", "worker=2")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def stack() -> Iterator[ComposeStack]:
    with run_stack(GATEWAY_PORT=two_free_ports()) as stack:
        stack.up(*SCALE)
        yield stack


def test_gateways_are_replaced_one_by_one_under_load_without_a_failed_request(stack):
    assert len(set(stack.urls)) == 2
    load = Load(stack.urls)
    with load.running():
        load.wait_for_answers(10)
        for gateway in stack.containers("gateway"):
            docker("stop", "--time", "40", gateway)
            assert stack.inspect(gateway)["State"]["ExitCode"] == 0
            docker("rm", gateway)
            stack.up(*SCALE)
            load.wait_for_answers(10)
    assert load.failures == []
    assert len(set(stack.urls)) == 2
    print(f"{load.num_answers} answers, {load.num_refused} refusals taken to the neighbor")
