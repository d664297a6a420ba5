"""What one API key may use of a gateway: requests, tokens, places; and what all keys together may.

Tokens are those that a request may come to: its text at four characters a token, its pictures, and the longest answer
that it allows. A key beyond its own limits gets 429, a fleet beyond its own 503. As long as tokens are plenty a key may
hold any number of them; when half are held, no key gets more than its share. It must not know HTTP or Redis.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gateway.errors import Overloaded
from shared.limits import LimitSettings
from shared.protocol import GenerateRequest, TextPart

CHARS_PER_TOKEN = 4
TOKENS_PER_IMAGE = 576  #: of LLaVA-1.5; others are near enough
#: Of an answer whose length the client leaves open.
OPEN_ANSWER_TOKENS = 512
MINUTE_S = 60.0


class KeyLimitExceeded(Overloaded):
    """The key has used what it may; others are served."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, reason: str, what: str, retry_after_s: int) -> None:
        message = f"Rate limit reached for this key: {what}. Retry later."
        super().__init__(reason, message, code="rate_limit_exceeded", retry_after_s=retry_after_s)


class Bucket:
    """So much a minute, and at most a minute's worth at once. Where one is left, more may be taken, into debt."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._rate = per_minute / MINUTE_S
        self._most = self._level = float(per_minute)
        self._at = now

    def wait_s(self, now: float) -> float:
        """How long until something may be taken; 0 is now."""
        self._level = min(self._most, self._level + (now - self._at) * self._rate)
        self._at = now
        return 0.0 if self._level > 1 - 1e-9 else (1 - self._level) / self._rate

    def take(self, amount: int) -> None:
        """Take it; what is owed is waited for later."""
        self._level -= amount


class KeyLimits:
    """The use of each tenant; there are as many as keys. `retry_after_s` says when places are free again."""

    def __init__(
        self,
        limits: LimitSettings,
        retry_after_s: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._num_open: Counter[str] = Counter()
        self._open_tokens: Counter[str] = Counter()
        self._request_buckets: dict[str, Bucket] = {}
        self._token_buckets: dict[str, Bucket] = {}

    @contextmanager
    def request(self, tenant: str) -> Iterator[None]:
        """A place for one request of a tenant. Raises: KeyLimitExceeded."""
        most = self._limits.max_key_open_requests
        if most and self._num_open[tenant] >= most:
            raise KeyLimitExceeded("key_open", f"{most} open requests", self._retry_after_s())
        per_minute = self._limits.max_key_requests_per_minute
        self._take(self._request_buckets, tenant, per_minute, 1, "requests")
        self._num_open[tenant] += 1
        try:
            yield
        finally:
            self._release(self._num_open, tenant, 1)

    def hold_tokens(self, requests: Sequence[GenerateRequest]) -> Callable[[], None]:
        """The tokens of one request's choices; returns how to let them go. Raises: Overloaded, KeyLimitExceeded."""
        tenant = requests[0].cache_salt
        num_tokens = sum(map(possible_tokens, requests))
        self._check_share(tenant, num_tokens)
        per_minute = self._limits.max_key_tokens_per_minute
        self._take(self._token_buckets, tenant, per_minute, num_tokens, "tokens")
        self._open_tokens[tenant] += num_tokens
        return lambda: self._release(self._open_tokens, tenant, num_tokens)

    def _check_share(self, tenant: str, num_tokens: int) -> None:
        """A request alone is never too much, or it could never be served."""
        most, held = self._limits.max_open_tokens, self._open_tokens.total()
        if held and held + num_tokens > most:
            raise Overloaded(
                "open_tokens",
                "The server is overloaded; retry later.",
                code="server_overloaded",
                retry_after_s=self._retry_after_s(),
            )
        own = self._open_tokens[tenant]
        num_sharing = len(self._open_tokens) + (own == 0)
        if own and held + num_tokens > most / 2 and own + num_tokens > most / num_sharing:
            what = "its share of the tokens in use"
            raise KeyLimitExceeded("key_share", what, self._retry_after_s())

    def _take(
        self, buckets: dict[str, Bucket], tenant: str, per_minute: int, amount: int, what: str
    ) -> None:
        if not per_minute:
            return
        now = self._clock()
        bucket = buckets.setdefault(tenant, Bucket(per_minute, now))
        if wait_s := bucket.wait_s(now):
            told = f"{per_minute} {what} per minute"
            raise KeyLimitExceeded(f"key_{what}", told, math.ceil(wait_s))
        bucket.take(amount)

    @staticmethod
    def _release(counter: Counter[str], tenant: str, amount: int) -> None:
        counter[tenant] -= amount
        if counter[tenant] <= 0:
            del counter[tenant]


def possible_tokens(request: GenerateRequest) -> int:
    """What a request may come to."""
    parts = [part for message in request.messages for part in message.parts]
    num_chars = sum(len(part.text) for part in parts if isinstance(part, TextPart))
    answer = request.sampling.max_tokens or OPEN_ANSWER_TOKENS
    return num_chars // CHARS_PER_TOKEN + TOKENS_PER_IMAGE * len(request.images) + answer
