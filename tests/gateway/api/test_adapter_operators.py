"""Loading adapters: a worker that never does, and an operator who does not wait for it."""

import asyncio
from contextlib import suppress

import httpx
import pytest

HEADERS = {"authorization": "Bearer sk-admin"}


@pytest.fixture
def changes():
    return {"gateway": {"api_keys": ["sk-one"], "admin_keys": ["sk-admin"]}}


async def test_an_operator_who_leaves_lets_the_next_one_in(gateway, redis, redis_prefix):
    load = {"lora_name": "slow", "lora_path": "slow"}
    waiting = asyncio.create_task(
        gateway.client.post("/v1/load_lora_adapter", json=load, headers=HEADERS)
    )
    async with asyncio.timeout(30):
        while not await redis.keys(f"{redis_prefix}:*adapters*"):
            await asyncio.sleep(0.02)
        waiting.cancel()
        with suppress(asyncio.CancelledError, httpx.HTTPError):
            await waiting
        unload = {"lora_name": "other"}
        answer = await gateway.client.post("/v1/unload_lora_adapter", json=unload, headers=HEADERS)
        assert answer.status_code == 404
        while await redis.keys(f"{redis_prefix}:*adapters*"):
            await asyncio.sleep(0.02)
