"""Quotas: what a model's open calls and a tenant's minute may come to, for all gateways together.

A call that is submitted with a reservation counts until it ends. Where tokens a minute are limited, what its answer
might come to is taken at once; what it did not come to is refunded after its end.
"""

from typing import Any

from redis.asyncio import Redis

from shared.queue.api import QueueUnavailable, Reservation
from shared.queue.keys import RedisKeys
from shared.queue.scripts import REFUND, named
from shared.redis.client import redis_errors_as, retry_idempotent
from shared.redis.link import RedisSender


class RedisQuotas:
    """The quotas under one key prefix: `Quotas`."""

    def __init__(self, redis: Redis, keys_prefix: str) -> None:
        self._keys = RedisKeys(keys_prefix)
        self._sender = RedisSender(redis)

    @redis_errors_as(QueueUnavailable)
    async def refund(self, reservation: Reservation) -> bool:
        keys = [self._keys.rates(reservation.model, reservation.tenant)]
        keys += [self._keys.request(reservation.model, name) for name in reservation.request_ids]
        arguments = named(
            tokens_per_minute=reservation.limits.max_tenant_tokens_per_minute,
            num_tokens=reservation.num_answer_tokens,
        )
        return await retry_idempotent(lambda: self._sender.run(REFUND, keys, arguments)) == 1

    async def close(self) -> None:
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
