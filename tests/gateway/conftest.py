"""A gateway and a scripted worker per test, on the Redis of the test run."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from shared.protocol import ModelCard
from tests.factories_gateway import (
    CARD,
    RunningGateway,
    ScriptedWorker,
    make_settings,
    run_gateway_on_socket,
    run_worker,
)


@pytest.fixture
def changes() -> dict[str, dict[str, Any]]:
    """Settings by group that differ from the tests' defaults; tests override this fixture by parametrization."""
    return {}


@pytest.fixture
def card() -> ModelCard:
    """The model card of the worker; tests override this fixture by parametrization."""
    return CARD


@pytest.fixture
async def worker(
    redis_server: str, redis_prefix: str, card: ModelCard, redis: Any
) -> AsyncIterator[ScriptedWorker]:
    async with run_worker(redis_server, redis_prefix, card) as worker:  # ends before `redis`
        yield worker


@pytest.fixture
async def gateway(
    redis_server: str, redis_prefix: str, worker: ScriptedWorker, changes: dict[str, dict[str, Any]]
) -> AsyncIterator[RunningGateway]:
    async with Fleet(redis_server, redis_prefix).gateway(**changes) as gateway:
        yield gateway


class Fleet:
    """Starts gateways and scripted workers of one queue."""

    def __init__(self, redis_url: str, prefix: str) -> None:
        self.redis_url, self.prefix = redis_url, prefix

    def gateway(self, **changes: dict[str, Any]) -> AbstractAsyncContextManager[RunningGateway]:
        return run_gateway_on_socket(make_settings(self.redis_url, self.prefix, **changes))

    def worker(self, card: ModelCard = CARD) -> AbstractAsyncContextManager[ScriptedWorker]:
        return run_worker(self.redis_url, self.prefix, card)


@pytest.fixture
def fleet(redis_server: str, redis_prefix: str) -> Fleet:
    return Fleet(redis_server, redis_prefix)
