"""The commands `vlm keys` and `vlm forget`: the data of one key is deleted, and that of other keys stays."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from search.commands import LocalEmbedder, embed
from tests.factories_gateway import (
    CARD,
    MODEL,
    Answer,
    RunningGateway,
    make_body,
    say_hello,
    say_nothing,
    talk_on,
)
from tests.factories_images import encoded
from tests.factories_keys import PATH, ROOT, run_command
from tests.factories_numbers import run_fleet
from tests.factories_search import serve_search
from tests.waiting import until

RUNS = replace(CARD, tasks=("run",), package=f"{MODEL}@sha256:0")
PATHS = ("/v1/files", "/v1/batches", "/v1/vector_stores", "/v1/sessions")


@pytest.fixture
async def gateway(fleet, tmp_path) -> AsyncIterator[RunningGateway]:
    keys = {"root_key": "the-root-key", "files": f"file://{tmp_path}/files"}
    async with (
        serve_search(tmp_path / "search") as search,
        fleet.gateway(search=dict(search), gateway=keys) as gateway,
    ):
        yield gateway


async def create_users(gateway: RunningGateway, *names: str, **fields: Any) -> "list[User]":
    keys = [
        await gateway.client.post(PATH, json={"name": name, **fields}, headers=ROOT)
        for name in names
    ]
    assert {answer.status_code for answer in keys} == {200}, keys[0].text
    return [User(gateway, answer.json()["key"]) for answer in keys]


class User:
    """A user who stores an object of each kind with a key."""

    def __init__(self, gateway: RunningGateway, key: str) -> None:
        self.gateway, self.client = gateway, gateway.client
        self.headers = {"authorization": f"Bearer {key}"}

    async def ask(self, method: str, path: str, **content: Any) -> Any:
        answer = await self.client.request(method, path, headers=self.headers, **content)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def status(self, path: str) -> int:
        return (await self.client.get(path, headers=self.headers)).status_code

    async def store(self) -> list[str]:
        """Stores an object of each kind; returns their paths."""
        image = await self.upload("vision", encoded())
        text = await self.upload("assistants", b"some text")
        batch = await self.gateway.begin_batch(self.headers, {"model": MODEL})
        session = await self.begin_session("one")
        await self.ask("GET", f"{session}/tasks/one?wait=20")
        files = [f"/v1/files/{name}" for name in (image, batch["input_file_id"], text)]
        return [*files, f"/v1/batches/{batch['id']}", session]

    async def begin_session(self, *tasks: str) -> str:
        session = await self.ask("POST", f"/v1/applications/{MODEL}/sessions", json={})
        path = f"/v1/sessions/{session['id']}"
        body = {"tasks": [{"id": task, "input": 1} for task in tasks]}
        await self.ask("POST", f"{path}/tasks", json=body)
        return path

    async def upload(self, purpose: str, data: bytes) -> str:
        files = {"file": ("name.png" if purpose == "vision" else "name.txt", data)}
        return (await self.ask("POST", "/v1/files", data={"purpose": purpose}, files=files))["id"]


async def say_done(answer: Answer) -> None:
    await answer.finish(json.dumps({"output": ["done"]}) + "\n")


async def test_only_the_data_of_the_given_key_is_deleted(
    gateway: RunningGateway, fleet, redis_prefix, redis
):
    async with fleet.worker(RUNS) as worker:
        worker.script = say_done
        await gateway.services.models.refresh()
        users = alice, bob = await create_users(gateway, "alice", "bob")
        stored = {user: await user.store() for user in users}
        assert {await user.status(path) for user in users for path in stored[user]} == {200}
        task_ids = [request.id for request in worker.requests]
        done = await run_command(gateway, "forget", "--key", "alice")
        assert done.exit_code == 0, done.output
        assert "deleted 1 answers, 1 sessions, 1 batches, 0 vector stores, 1 files" in done.stderr
        assert {await alice.status(path) for path in stored[alice]} == {404}
        assert {await bob.status(path) for path in stored[bob]} == {200}
        for path in PATHS:
            assert (await alice.ask("GET", path))["data"] == []
        left = [key.decode() async for key in redis.scan_iter(f"{redis_prefix}:*")]
        assert not any(task_ids[0] in key for key in left)
        assert any(task_ids[1] in key for key in left)
        again = await run_command(gateway, "forget", "--key", "alice")
        assert "deleted 0 answers, 0 sessions, 0 batches" in again.stderr


async def test_revoking_a_key_cancels_the_tasks_of_its_sessions(gateway: RunningGateway, fleet):
    async def num_open() -> int:
        return len((await gateway.client.get("/v1/admin/requests", headers=ROOT)).json()["data"])

    async with fleet.worker(RUNS) as worker:
        worker.script = say_nothing
        await gateway.services.models.refresh()
        for user in (await create_users(gateway, "alice", "bob"))[::-1]:
            path = await user.begin_session("0", "1", "2")
        waiting = asyncio.create_task(user.status(f"{path}/tasks/0?wait=20"))
        await until(lambda: gateway.services.admission.num_open)
        assert await num_open() == 6
        for _ in range(2):
            done = await run_command(gateway, "keys", "revoke", "alice")
            assert done.exit_code == 0, done.output
            assert await num_open() == 3
        assert await waiting == 401


async def test_vector_stores_and_session_data_are_deleted_and_collections_stay(
    ends, redis_server, redis_prefix, tmp_path, redis, fleet
):
    (tmp_path / "inputs.jsonl").write_text('{"text": "a"}\n')
    embedder = LocalEmbedder("mock_pooling", "")
    embed([tmp_path / "inputs.jsonl"], tmp_path / "collection", embedder)
    embedder.close()
    collections = (str(tmp_path / "collection"),)
    async with (
        serve_search(tmp_path / "search", collections=collections) as search,
        fleet.worker(replace(RUNS, name="app", package="app@sha256:0")),
        run_fleet(
            ends, redis_server, search=dict(search), gateway={"root_key": "the-root-key"}
        ) as (gateway, _),
    ):
        users = await create_users(gateway, "alice", "bob")
        for user in users:
            await user.ask("POST", "/v1/vector_stores", json={"name": "mine"})
        alice = users[0]
        await alice.upload("assistants", b"private")
        common = {"common_data": "a secret"}
        await alice.ask("POST", "/v1/applications/app/sessions", json=common)
        blobs = f"{redis_prefix}:blob:*:holders"
        assert [key async for key in redis.scan_iter(blobs)]
        done = await run_command(gateway, "forget", "--key", "alice")
        assert "1 sessions, 0 batches, 1 vector stores, 1 files" in done.stderr
        listed = [(await user.ask("GET", "/v1/vector_stores"))["data"] for user in users]
        assert [len(stores) for stores in listed] == [1, 2]

        async def has_no_holder() -> bool:
            return not [key async for key in redis.scan_iter(blobs)]

        await until(has_no_holder)


async def test_keys_are_managed_by_the_command_line(gateway: RunningGateway):
    async def keys(*arguments: str, key: str = "the-root-key") -> list[str]:
        done = await run_command(gateway, "keys", *arguments, key=key)
        assert done.exit_code == 0, done.output
        return done.stdout.splitlines()

    async def show(key: str) -> dict[str, Any]:
        return json.loads("".join(await keys("show", "alice", key=key)))

    *_, key = await keys(
        "create", "--name", "alice", "--roles", "use,admin", "--models", "qwen*,shapes", "--rpm", "60", "--tpm", "1000",
        "--open", "8", "--expires", "90d", "--max-output-tokens", "8", "--max-priority", "batch",
    )  # fmt: skip
    shown = await show(key)
    assert shown["expires_at"] - shown["created_at"] == 90 * 86400
    expected = {
        "name": "alice", "state": "active", "roles": ["use", "admin"], "models": ["qwen*", "shapes"],
        "requests_per_minute": 60, "tokens_per_minute": 1000, "open_requests": 8, "max_output_tokens": 8,
        "max_priority": "batch",
    }  # fmt: skip
    assert shown.items() >= expected.items()
    await keys("create", "--name", "boss", "--roles", "admin")
    await keys("update", "alice", "--rpm", "5", "--remove", "tpm,expires")
    changes = {"requests_per_minute": 5, "tokens_per_minute": None, "expires_at": None}
    assert (await show(key)).items() >= changes.items()
    *_, new = await keys("rotate", "alice")
    assert (await run_command(gateway, "keys", "list", key=key)).exit_code == 4
    rows = [line.split()[:2] for line in (await keys("list", key=new))[2:] if line.strip()]
    assert rows == [["alice", "active"], ["boss", "active"]]
    await keys("revoke", "alice")
    refused = await run_command(gateway, "keys", "list", key=new)
    assert refused.exit_code == 4
    assert "Incorrect API key" in refused.stderr


WRONG: list[tuple[list[str], int, str]] = [
    (["keys", "create"], 2, "--name"),
    (["keys", "create", "--name", "a", "--roles", "root"], 4, "roles"),
    (["keys", "update", "a", "--budget", "-1"], 2, "--budget"),
    (["keys", "update", "a", "--tag", "b"], 4, "no key of this name"),
    *[(["keys", "revoke", name], 4, "`vlm keys list`") for name in ("nobody", "a/b")],
]


async def test_wrong_arguments_are_refused(gateway: RunningGateway):
    for arguments, code, says in WRONG:
        done = await run_command(gateway, *arguments)
        assert done.exit_code == code, (arguments, done.output)
        assert says in " ".join(done.stderr.split())


async def test_batches_use_half_of_the_open_requests_of_their_key(gateway: RunningGateway, fleet):
    [user] = await create_users(gateway, "alice", open_requests=2)
    async with fleet.worker() as worker:
        worker.script = talk_on
        for _ in range(2):
            await gateway.begin_batch(user.headers, *[make_body()] * 8)
        await until(lambda: len(worker.answers) > 0, 10.0)
        worker.script = say_hello
        for _ in range(3):
            await user.ask("POST", "/v1/chat/completions", json=make_body())


async def test_a_revoked_key_attaches_no_more_files(gateway: RunningGateway, fleet):
    card = replace(CARD, tasks=("embed",), dimensions=4, digest="d")
    [user] = await create_users(gateway, "alice")

    async def revoke(_answer: Answer) -> None:
        await run_command(gateway, "keys", "revoke", "alice")

    async with fleet.worker(card) as worker:
        worker.script = revoke
        await gateway.services.models.refresh()
        body = {"name": "notes", "file_ids": [await user.upload("assistants", b"a") for _ in "ab"]}
        answer = await user.client.post("/v1/vector_stores", headers=user.headers, json=body)
        assert answer.status_code in (401, 503), answer.text  # the revocation is seen now or later
        assert len(worker.answers) == 1
