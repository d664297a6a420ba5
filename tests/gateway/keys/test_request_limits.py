"""What a key allows each of its requests: the length of answers, and the priority. With a real Redis."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from shared.protocol import Generate, Priority
from tests.factories_gateway import (
    CARD,
    MODEL,
    RunningGateway,
    ScriptedWorker,
    make_body,
    make_settings,
    run_gateway_on_socket,
    run_worker,
    say_nothing,
)
from tests.factories_keys import run_command
from tests.factories_search import serve_search
from tests.waiting import until

PROMPT = {"model": MODEL, "prompt": "hello"}
INPUT = {"model": MODEL, "input": "hello"}
CHAT = make_body()


class User:
    """A client with a key, and the worker that answers it."""

    def __init__(self, gateway: RunningGateway, worker: ScriptedWorker) -> None:
        self.gateway, self.worker, self.key = gateway, worker, ""

    async def create_key(self, *arguments: str) -> dict[str, Any]:
        """Take a new key; returns how it is shown."""
        made = await run_command(self.gateway, "keys", "create", "--name", "a", *arguments)
        assert made.exit_code == 0, made.output
        self.key = made.stdout.splitlines()[-1]
        return json.loads((await run_command(self.gateway, "keys", "show", "a")).stdout)

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        headers["authorization"] = f"Bearer {self.key}"
        return await self.gateway.client.post(path, json=body, headers=headers)

    @property
    def max_tokens(self) -> int | None:
        task = self.worker.requests[-1].task
        assert isinstance(task, Generate)
        return task.sampling.max_tokens


@pytest.fixture
async def user(redis_server, redis_prefix, tmp_path) -> AsyncIterator[User]:
    keys = {"root_key": "the-root-key", "files": f"file://{tmp_path}/files"}
    settings = make_settings(redis_server, redis_prefix, gateway=keys)
    async with (
        run_worker(redis_server, redis_prefix) as worker,
        run_gateway_on_socket(settings) as gateway,
    ):
        yield User(gateway, worker)


AT_MOST_8 = (
    ("/v1/chat/completions", CHAT, "max_tokens"),
    ("/v1/chat/completions", CHAT, "max_completion_tokens"),
    ("/v1/completions", PROMPT, "max_tokens"),
    ("/v1/completions", PROMPT, "min_tokens"),
    ("/v1/messages", CHAT, "max_tokens"),
    ("/v1/responses", INPUT, "max_output_tokens"),
    ("/api/chat", CHAT, "options.num_predict"),
    ("/api/generate", PROMPT, "options.num_predict"),
)
WITHOUT_LIMIT = (
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", PROMPT),  # whose own default is 16
    ("/v1/responses", INPUT),
    ("/api/chat", {**CHAT, "options": {"num_predict": -1}}),
    ("/api/generate", PROMPT),
)


async def test_a_longer_answer_than_the_key_allows_is_refused_by_the_fields_name_or_cut(user: User):
    shown = await user.create_key("--max-output-tokens", "8")
    assert (shown["max_output_tokens"], shown["max_priority"]) == (8, "interactive")
    for path, body, field in AT_MOST_8:
        outer, _, inner = field.partition(".")
        fits, long = ({**body, outer: {inner: n} if inner else n} for n in (8, 9))
        assert (await user.post(path, fits)).status_code == 200
        assert user.max_tokens == 8
        num_before = len(user.worker.requests)
        refused = await user.post(path, long)
        assert refused.status_code == 400
        assert f"{field}: send at most 8" in refused.text
        assert len(user.worker.requests) == num_before
    for path, body in WITHOUT_LIMIT:
        assert (await user.post(path, body)).status_code == 200
        assert user.max_tokens == 8


async def test_a_line_of_a_batch_is_held_to_the_keys_limit(user: User):
    await user.create_key("--max-output-tokens", "8")
    headers = {"authorization": f"Bearer {user.key}"}
    batch = await user.gateway.begin_batch(headers, {**CHAT, "max_tokens": 9}, CHAT)
    path = f"/v1/batches/{batch['id']}"

    async def ended() -> dict[str, Any] | None:
        batch = (await user.gateway.client.get(path, headers=headers)).json()
        return batch if batch["status"] == "completed" else None

    found = await until(ended)
    assert found is not None
    assert found["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    assert user.max_tokens == 8


async def test_requests_run_at_the_priority_that_the_key_allows(user: User):
    shown = await user.create_key("--max-priority", "batch")
    assert shown["max_priority"] == "batch"
    for asked in ({}, {"service_tier": "auto"}, {"service_tier": "priority"}):
        answer = await user.post("/v1/chat/completions", {**CHAT, **asked})
        assert answer.json().get("service_tier") == ("flex" if asked else None)
    headers = {"x-vlm-priority": "interactive"}
    body = {**CHAT, "max_tokens": 8}
    assert (await user.post("/v1/messages", body, **headers)).status_code == 200
    assert {call.priority for call in user.worker.requests} == {Priority.BATCH}


async def test_tasks_of_a_session_run_at_the_priority_that_the_key_allows(
    user: User, redis_server, redis_prefix
):
    card = replace(CARD, tasks=("run",), package=f"{MODEL}@sha256:0")
    async with run_worker(redis_server, redis_prefix, card) as worker:
        await user.gateway.services.models.refresh()
        await user.create_key("--max-priority", "batch")
        path = f"/v1/applications/{MODEL}/sessions"
        made = (await user.post(path, {"priority": "interactive"})).json()
        assert made["priority"] == "batch"
        tasks = {"tasks": [{"id": "one", "input": 1}]}
        assert (await user.post(f"/v1/sessions/{made['id']}/tasks", tasks)).status_code == 200
        await until(lambda: worker.requests + user.worker.requests)
        [call] = worker.requests + user.worker.requests
        assert call.priority is Priority.BATCH


async def test_vectors_of_a_store_are_computed_at_the_priority_that_the_key_allows(
    redis_server, redis_prefix, tmp_path
):
    card = replace(CARD, tasks=("embed",), dimensions=4, digest="d")
    async with (
        serve_search(tmp_path / "search") as search,
        run_worker(redis_server, redis_prefix, card) as worker,
    ):
        keys = {"root_key": "the-root-key"}
        settings = make_settings(redis_server, redis_prefix, search=dict(search), gateway=keys)
        async with run_gateway_on_socket(settings) as gateway:
            user = User(gateway, worker)
            worker.script = say_nothing
            await user.create_key("--max-priority", "batch")
            made = (await user.post("/v1/vector_stores", {"name": "notes"})).json()
            path = f"/v1/vector_stores/{made['id']}/search"
            searching = asyncio.create_task(user.post(path, {"query": "hello"}))
            [call] = await until(lambda: worker.requests)
            assert call.priority is Priority.BATCH
            searching.cancel()
