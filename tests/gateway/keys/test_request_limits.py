"""Limits of a key on each request: the length of answers, and the priority. With a real Redis."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from shared.protocol import Generate, Priority
from tests.factories_gateway import CARD, MODEL, make_body
from tests.factories_keys import Team, bearer, run_team
from tests.waiting import until

PROMPT = {"model": MODEL, "prompt": "hello"}
INPUT = {"model": MODEL, "input": "hello"}
CHAT = make_body()
AT_MOST_8 = (
    ("/v1/chat/completions", CHAT, "max_tokens"),
    ("/v1/chat/completions", CHAT, "max_completion_tokens"),
    ("/v1/completions", PROMPT, "max_tokens"),  # the API's default is 16
    ("/v1/messages", CHAT, "max_tokens"),  # a required field
    ("/v1/responses", INPUT, "max_output_tokens"),
    ("/api/chat", CHAT, "options.num_predict"),
    ("/api/generate", PROMPT, "options.num_predict"),
)
UNLIMITED = ("/api/chat", {**CHAT, "options": {"num_predict": -1}})


@pytest.fixture
async def team(redis_server, redis_prefix, tmp_path) -> AsyncIterator[Team]:
    store, files = f"file://{tmp_path}/store", f"file://{tmp_path}/files"
    async with run_team(redis_server, redis_prefix, store, 1, files=files) as team:
        yield team


async def post(team: Team, key: str, path: str, body: Any, **headers: str) -> httpx.Response:
    headers |= bearer(key)
    return await team.gateways[0].client.post(path, json=body, headers=headers)


def max_tokens(team: Team) -> int | None:
    task = team.worker.requests[-1].task
    assert isinstance(task, Generate)
    return task.sampling.max_tokens


async def test_an_answer_longer_than_the_keys_limit_is_refused_by_field_or_cut(team: Team):
    key = await team.create(max_output_tokens=8)
    for path, body, field in AT_MOST_8:
        outer, _, inner = field.partition(".")
        fits, long = ({**body, outer: {inner: n} if inner else n} for n in (8, 9))
        assert (await post(team, key, path, fits)).status_code == 200
        assert max_tokens(team) == 8
        num_before = len(team.worker.requests)
        refused = await post(team, key, path, long)
        assert refused.status_code == 400
        assert f"{field}: send at most 8" in refused.text
        assert len(team.worker.requests) == num_before
    without = [(path, body) for path, body, _ in AT_MOST_8 if path != "/v1/messages"]
    for path, body in (*without, UNLIMITED):
        assert (await post(team, key, path, body)).status_code == 200
        assert max_tokens(team) == 8
    refused = await post(team, key, "/v1/completions", {**PROMPT, "min_tokens": 9})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "min_tokens")


async def test_requests_and_tasks_of_sessions_run_at_the_priority_that_the_key_allows(
    team: Team, fleet
):
    key = await team.create(max_priority="batch")
    for asked in ({}, {"service_tier": "auto"}, {"service_tier": "priority"}):
        answer = await post(team, key, "/v1/chat/completions", {**CHAT, **asked})
        assert answer.json().get("service_tier") == ("flex" if asked else None)
    headers = {"x-vlm-priority": "interactive"}
    body = {**CHAT, "max_tokens": 8}
    assert (await post(team, key, "/v1/messages", body, **headers)).status_code == 200
    assert {call.priority for call in team.worker.requests} == {Priority.BATCH}
    card = replace(CARD, name="app", tasks=("run",), package="app@sha256:0")
    async with fleet.worker(card) as worker:
        await team.gateways[0].services.models.refresh()
        path = "/v1/applications/app/sessions"
        made = (await post(team, key, path, {"priority": "interactive"})).json()
        assert made["priority"] == "batch"
        tasks = {"tasks": [{"id": "one", "input": 1}]}
        sent = await post(team, key, f"/v1/sessions/{made['id']}/tasks", tasks)
        assert sent.status_code == 200
        [call] = await until(lambda: worker.requests)
        assert call.priority is Priority.BATCH
