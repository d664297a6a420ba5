"""Gateways that are gone: nobody hears their requests any more, so that these need not be computed.

A gateway's mailbox lives as long as the gateway renews it. Redis may lose it, or let it expire while it was frozen
itself; the gateway makes it again within seconds then. Only one that stays away is taken for dead.
"""

from collections.abc import Iterable

#: Longer than a living gateway needs to make its mailbox again.
GONE_AFTER_S = 10.0


class GatewayLiveness:
    """How long each gateway's mailbox has been missing. Units: readings of one monotonic clock."""

    def __init__(self) -> None:
        self._missing_since: dict[str, float] = {}

    def note(self, present: Iterable[tuple[str, bool]], now: float) -> set[str]:
        """Take what was found, by gateway; returns those that are gone. Others are forgotten."""
        self._missing_since = {
            gateway: self._missing_since.get(gateway, now)
            for gateway, is_present in present
            if not is_present
        }
        return {g for g, since in self._missing_since.items() if now - since >= GONE_AFTER_S}
