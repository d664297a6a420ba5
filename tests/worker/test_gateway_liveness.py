"""Which gateways are gone: those whose mailbox stays away, not those whose mailbox was lost once."""

from worker.gateway_liveness import GONE_AFTER_S, Absence


def test_a_gateway_is_gone_when_its_mailbox_stays_away():
    absence = Absence()
    assert absence.note([("a", False), ("b", True)], 0.0) == set()
    assert absence.note([("a", False), ("b", True)], GONE_AFTER_S - 0.1) == set()
    assert absence.note([("a", False), ("b", False)], GONE_AFTER_S) == {"a"}


def test_a_gateway_that_makes_its_mailbox_again_is_there():
    absence = Absence()
    absence.note([("a", False)], 0.0)
    absence.note([("a", True)], 5.0)
    assert absence.note([("a", False)], GONE_AFTER_S + 1) == set()
