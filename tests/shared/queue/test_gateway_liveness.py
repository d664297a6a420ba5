"""Which gateways are gone: those whose mailbox stays away, not those whose mailbox was lost once."""

from shared.queue.publish import GONE_AFTER_S, GatewayLiveness


def test_a_gateway_is_gone_when_its_mailbox_stays_away():
    gateway_liveness = GatewayLiveness()
    assert gateway_liveness.update(["a"], 0.0) == set()
    assert gateway_liveness.update(["a"], GONE_AFTER_S - 0.1) == set()
    assert gateway_liveness.update(["a", "b"], GONE_AFTER_S) == {"a"}


def test_a_gateway_that_makes_its_mailbox_again_is_there():
    gateway_liveness = GatewayLiveness()
    gateway_liveness.update(["a"], 0.0)
    gateway_liveness.update([], 5.0)
    assert gateway_liveness.update(["a"], GONE_AFTER_S + 1) == set()
