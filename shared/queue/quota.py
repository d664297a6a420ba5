"""Quotas: what a model's open calls and a tenant's minute may come to, for all gateways together.

A call that is submitted with a reservation counts until it ends. Where tokens a minute are limited, what its answer
might come to is taken at once; what it did not come to is refunded after its end.
"""

from typing import Any, Protocol

from msgspec import Struct
from redis.asyncio import Redis

from shared.queue.api import QueueUnavailable
from shared.queue.keys import RedisKeys
from shared.queue.scripts import REFUND, named
from shared.redis.client import redis_errors_as, retry_idempotent
from shared.redis.link import RedisSender


class Limits(Struct, frozen=True):
    """Of one model, for all gateways together; 0 means any."""

    max_tokens: int = 0  #: that all open calls may come to; tenants share them
    max_tenant_requests: int = 0  #: open at once
    max_tenant_requests_per_minute: int = 0
    max_tenant_tokens_per_minute: int = 0


class Reservation(Struct, frozen=True):
    """What the calls of one request count as: each with the same tokens."""

    model: str
    tenant: str
    request_ids: tuple[str, ...]
    num_tokens: int  #: of prompt and answer, taken from the tenant's minute
    num_answer_tokens: int  #: among them; what the answer does not come to is refunded
    num_open_tokens: int  #: while it is open: more than `num_tokens` where it takes more memory
    limits: Limits

    @property
    def is_refundable(self) -> bool:
        """Whether a minute was charged."""
        return self.limits.max_tenant_tokens_per_minute > 0


class Quotas(Protocol):
    """What becomes of reservations. They are made as a call is submitted, and released as it ends."""

    async def refund(self, reservation: Reservation) -> bool:
        """Give a tenant's minute back what answers did not come to, or charge it for what they came to beyond.

        Does so once. False if one of the answers has not ended, and this is to be called again. Raises:
        QueueUnavailable.
        """
        ...


class RedisQuotas:
    """The quotas under one key prefix: `Quotas`."""

    def __init__(self, redis: Redis, keys_prefix: str) -> None:
        self._keys = RedisKeys(keys_prefix)
        self._sender = RedisSender(redis)

    @redis_errors_as(QueueUnavailable)
    async def refund(self, reservation: Reservation) -> bool:
        """See `Quotas.refund`."""
        keys = [self._keys.rates(reservation.model, reservation.tenant)]
        keys += [self._keys.request(reservation.model, name) for name in reservation.request_ids]
        arguments = named(
            tokens_per_minute=reservation.limits.max_tenant_tokens_per_minute,
            num_tokens=reservation.num_answer_tokens,
        )
        return await retry_idempotent(lambda: self._sender.run(REFUND, keys, arguments)) == 1

    async def close(self) -> None:
        """Hang up."""
        await self._sender.close()


def quota_keys(keys: RedisKeys, reservation: Reservation) -> list[str]:
    """What the submit script looks at for a reservation."""
    model = reservation.model
    return [
        keys.reservations(model),
        keys.usage(model),
        keys.rates(model, reservation.tenant),
    ]


def quota_arguments(reservation: Reservation) -> dict[str, Any]:
    """The submit script's view of a reservation."""
    limits = reservation.limits
    return {
        "tenant": reservation.tenant,
        "num_tokens": reservation.num_tokens,
        "reserved_tokens": reservation.num_open_tokens,
        "max_tokens": limits.max_tokens,
        "max_tenant_requests": limits.max_tenant_requests,
        "requests_per_minute": limits.max_tenant_requests_per_minute,
        "tokens_per_minute": limits.max_tenant_tokens_per_minute,
    }
