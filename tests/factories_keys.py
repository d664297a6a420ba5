"""Gateways whose keys are created and revoked at run time, and the command line for it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
from typer.testing import CliRunner, Result

import vlm
from shared.settings.tree import Settings
from tests.factories_gateway import (
    RunningGateway,
    ScriptedWorker,
    make_body,
    make_settings,
    run_gateway_on_socket,
    run_worker,
)

ROOT = {"authorization": "Bearer the-root-key"}
PATH = "/v1/admin/keys"
KEYS = {"root_key": "the-root-key", "api_keys": ("of-the-settings",)}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def code(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


class Team:
    """Gateways and a worker."""

    def __init__(self, gateways: list[RunningGateway], worker: ScriptedWorker) -> None:
        self.gateways, self.worker = gateways, worker

    async def admin(
        self, method: str, path: str = "", number: int = 0, **body: Any
    ) -> httpx.Response:
        client = self.gateways[number].client
        return await client.request(method, PATH + path, json=body or None, headers=ROOT)

    async def create(self, name: str = "alice", number: int = 0, **body: Any) -> str:
        answer = await self.admin("POST", number=number, name=name, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()["key"]

    async def get(self, key: str, path: str = "/v1/models", number: int = 0) -> httpx.Response:
        return await self.gateways[number].client.get(path, headers=bearer(key))

    async def chat(
        self, key: str, number: int = 0, text: str = "hello", **body: Any
    ) -> httpx.Response:
        return await self.gateways[number].chat(make_body(text, **body), headers=bearer(key))

    async def status(self, key: str, number: int = 0) -> int:
        return (await self.chat(key, number)).status_code

    async def refresh(self) -> None:
        """Makes every gateway read the keys now."""
        for gateway in self.gateways:
            assert gateway.services.keys is not None
            await gateway.services.keys.refresh()


@asynccontextmanager
async def open_team(settings: Settings, num_gateways: int) -> AsyncIterator[Team]:
    redis = settings.redis
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(run_worker(redis.url, redis.key_prefix))
        running = [run_gateway_on_socket(settings) for _ in range(num_gateways)]
        yield Team([await stack.enter_async_context(each) for each in running], worker)


@asynccontextmanager
async def run_team(
    redis_url: str,
    prefix: str,
    store: str,
    num_gateways: int = 2,
    prices: dict[str, Any] | None = None,
    files: str | None = None,
    **limits: int,
) -> AsyncIterator[Team]:
    gateway = KEYS | {"prices": prices or {}} | ({"files": files} if files else {})
    deploy = {"store": store}
    settings = make_settings(redis_url, prefix, gateway=gateway, limits=limits, deploy=deploy)
    async with open_team(settings, num_gateways) as team:
        yield team


async def run_command(
    gateway: RunningGateway, *arguments: str, key: str = "the-root-key"
) -> Result:
    """Runs `vlm` with these arguments against a gateway."""
    env = {"VLM_URL": gateway.url, "VLM_API_KEY": key, "COLUMNS": "200"}
    return await asyncio.to_thread(CliRunner().invoke, vlm.app, arguments, env=env)
