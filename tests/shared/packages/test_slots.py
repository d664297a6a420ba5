"""Concurrent claims of slots by many nodes, with the real script on a real Redis."""

import asyncio

import pytest

from shared.packages.deployment_state import DeploymentState
from tests.waiting import until


@pytest.fixture
async def deployments(redis, redis_prefix):
    deployments = DeploymentState(redis, redis_prefix)
    yield deployments
    await deployments.close()


async def test_every_slot_is_claimed_once(deployments):
    slots = [*range(60)]

    async def claim_all(node: str) -> list[int]:
        found: list[int] = []
        while (slot := await deployments.claim("app", slots, node)) is not None:
            found.append(slot)
        return found

    claimed = await asyncio.gather(*(claim_all(f"node{number}") for number in range(6)))
    assert sorted(slot for found in claimed for slot in found) == slots


async def test_a_claim_that_is_not_renewed_expires(deployments, monkeypatch):
    assert [await deployments.claim("n", [7, 8], node) for node in ("one", "two")] == [7, 8]
    assert await deployments.claim("n", [7, 8], "three") is None
    assert await deployments.claim("other", [7, 8], "three") == 7
    monkeypatch.setattr("shared.packages.deployment_state.CLAIM_S", 0.05)
    await until(lambda: deployments.claim("n", [7, 8], "three"))
