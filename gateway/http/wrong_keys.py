"""Who guesses keys: the wrong keys of each client address within a minute.

Guesses beyond the limit are refused with 429, and the log names the address. A right key always
passes, so that nobody can lock out others behind the same proxy; what keeps guesses from being
right is the length of the keys. The table is bounded: of too many addresses the one that began its
minute first is forgotten.
"""

import ipaddress
import logging
import math
import time
from collections.abc import Callable

from gateway.http.errors import ApiError

MAX_ADDRESSES = 10_000
WINDOW_S = 60.0
_IPV6_PREFIX = 64  #: bits of an address that one customer has at least

logger = logging.getLogger(__name__)


class TooManyWrongKeys(ApiError):
    """The client's address has sent as many wrong keys as it may."""

    status = 429
    type = "rate_limit_error"


class WrongKeys:
    """The count of each address. `per_minute`: 0 refuses none."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._minutes: dict[str, tuple[int, float]] = {}  # wrong keys, and until when they count

    def count(self, host: str) -> None:
        """Note a wrong key. Raises: TooManyWrongKeys."""
        address, now = _place(host), self._clock()
        num_keys, until = self._minutes.get(address, (0, 0.0))
        if until <= now:
            self._minutes.pop(address, None)  # a new minute goes to the end
            num_keys, until = 0, now + WINDOW_S
        self._minutes[address] = (num_keys + 1, until)
        if len(self._minutes) > MAX_ADDRESSES:
            del self._minutes[next(iter(self._minutes))]
        if self._per_minute and num_keys >= self._per_minute:
            if num_keys == self._per_minute:
                logger.warning("%s sends wrong API keys, more than %d a minute", address, num_keys)
            raise TooManyWrongKeys(
                "Too many wrong API keys from this address: send a known key, or retry later.",
                code="too_many_wrong_keys",
                retry_after_s=math.ceil(until - now),
            )


def _place(host: str) -> str:
    """The address, or of IPv6 the network: one client has many addresses there."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "unknown"
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), _IPV6_PREFIX), strict=False))
