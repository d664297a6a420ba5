"""API keys that are created and revoked while two gateways run, with a real Redis and a store."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
from redis.exceptions import RedisError

from gateway.keys import directory
from gateway.keys.directory import KeyDirectory, KeyStore
from shared.packages.store import open_store
from shared.process import cancel
from shared.queue.keys import RedisKeys
from shared.redis.embedded import EmbeddedRedis
from tests.factories_gateway import MODEL, make_body, make_settings, run_gateway_on_socket, talk_on
from tests.factories_keys import KEYS, PATH, ROOT, Team, bearer, code, run_team
from tests.waiting import until, until_equal


async def test_a_key_works_on_every_gateway_until_it_is_revoked(team: Team):
    key = await team.create()
    assert await team.status(key) == 200
    await until_equal(lambda: team.status(key, 1), 200, 2.0)
    listed = (await team.admin("GET")).json()["data"]
    assert [(each["name"], each["state"]) for each in listed] == [("alice", "active")]
    assert key not in str(listed)
    revoked = await team.admin("DELETE", "/alice", number=1)
    assert (revoked.status_code, revoked.json()["state"]) == (200, "revoked")
    assert await team.status(key, 1) == 401
    await until_equal(lambda: team.status(key), 401, 2.0)
    assert (await team.admin("DELETE", "/alice")).json()["state"] == "revoked"  # idempotent
    assert await team.status("of-the-settings") == 200


async def test_revoking_a_key_ends_its_streams_on_every_gateway_and_no_others(team: Team):
    """P16 for running streams."""
    team.worker.script = talk_on
    alice, bob = await team.create("alice"), await team.create("bob")
    paths = ("/v1/chat/completions", "/v1/messages")
    await until(lambda: "bob" in keys_of(team, 1).records, 2.0)

    async def ask(key: str, number: int, path: str = paths[0], *, stream: bool = True) -> Any:
        body = make_body(stream=stream, max_tokens=4096)
        client, headers = team.gateways[number].client, bearer(key) | {"x-vlm-resumable": "true"}
        return await client.post(path, json=body, headers=headers)

    whole = [asyncio.create_task(ask(alice, 0, path, stream=False)) for path in paths]
    streams = [asyncio.create_task(ask(key, number)) for key in (alice, bob) for number in (0, 1)]
    await until(lambda: len(team.worker.answers) == 6)
    began_at = time.monotonic()
    await team.admin("DELETE", "/alice")
    ended = await asyncio.gather(*streams[:2], *whole)
    assert time.monotonic() - began_at < 2.0
    message = "The API key of this request was revoked or expired."
    assert all(message in answer.text for answer in ended)
    assert all('"invalid_api_key","should_retry":false' in each.text for each in ended[:2])
    assert [answer.status_code for answer in ended[2:]] == [401, 401]
    await until(lambda: sum(each.refused == "cancelled" for each in team.worker.answers) == 4)
    assert not any(task.done() for task in streams[2:])
    await cancel(*streams)


def keys_of(team: Team, number: int = 0) -> KeyDirectory:
    keys = team.gateways[number].services.keys
    assert keys is not None
    return keys


async def test_a_request_whose_body_arrives_after_the_key_was_revoked_is_refused(team: Team):
    key, sent, keys = await team.create(), asyncio.Event(), keys_of(team)

    async def body() -> AsyncIterator[bytes]:
        data = json.dumps(make_body()).encode()
        yield data[:10]
        sent.set()
        await until(lambda: keys.records["alice"].is_revoked)
        yield data[10:]

    client = team.gateways[0].client
    headers = {**bearer(key), "content-type": "application/json"}
    sending = client.post("/v1/chat/completions", content=body(), headers=headers)
    request = asyncio.create_task(sending)
    await sent.wait()
    await team.admin("DELETE", "/alice")
    assert (await request).status_code == 401
    assert team.worker.answers == []


async def test_a_rotated_key_keeps_its_data_and_the_old_one_ends(team: Team):
    old = await team.create()
    body = {"model": MODEL, "input": "hello"}
    client = team.gateways[0].client
    kept = (await client.post("/v1/responses", json=body, headers=bearer(old))).json()["id"]
    new = (await team.admin("POST", "/alice:rotate")).json()["key"]
    assert new != old
    assert await team.status(old) == 401
    assert (await client.get(f"/v1/responses/{kept}", headers=bearer(new))).status_code == 200
    other = await team.create("bob")
    assert (await client.get(f"/v1/responses/{kept}", headers=bearer(other))).status_code == 404


async def test_each_key_has_its_own_limits(redis_server, redis_prefix, tmp_path):
    store = f"file://{tmp_path}/store"
    limits: dict[str, Any] = {"max_key_requests_per_minute": 3}
    async with run_team(redis_server, redis_prefix, store, 1, **limits) as team:
        few = await team.create("few", requests_per_minute=2)
        many = await team.create("many", requests_per_minute=5)
        usual = await team.create("usual")
        for key, expected in ((few, 2), (many, 5), (usual, 3)):
            statuses = [await team.status(key) for _ in range(expected + 1)]
            assert statuses == [200] * expected + [429]
        team.worker.script = talk_on
        one = await team.create("one", open_requests=1)
        num_before = len(team.worker.answers)
        stream = asyncio.create_task(team.chat(one, stream=True))
        await until(lambda: len(team.worker.answers) > num_before)
        assert await team.status(one) == 429
        await cancel(stream)


async def test_limits_of_a_key_are_changed_on_every_gateway(team: Team):
    key = await team.create(requests_per_minute=1, max_output_tokens=9, tag="blue")
    await until_equal(lambda: team.status(key, 1), 200, 2.0)
    assert [await team.status(key, number) for number in (0, 1)] == [429, 429]
    changed = await team.admin("PATCH", "/alice", requests_per_minute=600)
    assert (changed.status_code, changed.json()["requests_per_minute"]) == (200, 600)
    await until_equal(lambda: team.status(key, 1), 200, 2.0)
    assert await team.status(key) == 200
    await team.admin("PATCH", "/alice", models=["qwen*"])
    await until_equal(lambda: team.status(key, 1), 403, 2.0)
    changed = await team.admin("PATCH", "/alice", models=None, requests_per_minute=None)
    assert (changed.json()["models"], changed.json()["requests_per_minute"]) == (None, None)
    await until_equal(lambda: team.status(key, 1), 200, 2.0)
    assert (changed.json()["max_output_tokens"], changed.json()["tag"]) == (9, "blue")
    log = (await team.gateways[0].client.get("/v1/admin/audit?limit=1", headers=ROOT)).json()
    assert (log["data"][0]["action"], log["data"][0]["name"]) == ("update_key", "alice")


BAD_FIELDS: list[tuple[str, Any]] = [
    ("requests_per_minute", 0), ("tokens_per_minute", -1), ("open_requests", 0), ("open_requests", 1.5),
    ("open_requests", 2**31 + 1), ("models", []), ("budget", 0), ("budget", 1e300), ("budget", 5),
    ("expires_in_s", 0), ("max_output_tokens", 0), ("max_priority", "urgent"), ("period", "week"),
    ("tag", "x" * 65), ("name", "a b"), ("roles", ["root"]), ("roles", []), ("rpm", 5),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), [("POST", ""), ("PATCH", "/alice")])
async def test_a_bad_field_of_a_key_or_a_change_is_named(team: Team, method: str, path: str):
    await team.create()
    for field, value in BAD_FIELDS:
        named: dict[str, Any] = {"name": "new"} if method == "POST" else {}
        answer = await team.admin(method, path, **{**named, field: value})
        assert answer.status_code == 400, answer.text
        assert re.split(r"[.[]", answer.json()["error"]["param"])[0] == field
    for change in ({"name": "bob"}, {"roles": ["admin"]}):  # fields that other APIs have
        answer = await team.gateways[0].client.patch(f"{PATH}/alice", json=change, headers=ROOT)
        assert code(answer)[::2] == (400, next(iter(change)))


async def test_invalid_operations_on_a_key_are_refused(team: Team):
    await team.create()
    await team.create("boss", roles=["admin"])
    assert code(await team.admin("POST", name="alice")) == (409, "key_exists", "name")
    assert code(await team.admin("DELETE", "/boss")) == (409, "last_admin_key", "name")
    assert code(await team.admin("GET", "/nobody")) == (404, "key_not_found", "name")
    assert code(await team.admin("PATCH", "/bob", tag="x")) == (404, "key_not_found", "name")
    empty = await team.gateways[0].client.patch(f"{PATH}/alice", json={}, headers=ROOT)
    assert code(empty)[:2] == (400, "missing_field")
    for body in (b'{"budget": NaN}', b'{"tokens_per_minute": 1e400}', b"", b"[]"):
        answer = await team.gateways[0].client.patch(
            f"{PATH}/alice", content=body, headers=ROOT | {"content-type": "application/json"}
        )
        assert answer.status_code == 400, answer.text
    await team.admin("DELETE", "/alice")
    for refused in (
        await team.admin("PATCH", "/alice", tag="x"), await team.admin("POST", "/alice:rotate"),
    ):  # fmt: skip
        assert code(refused) == (409, "key_revoked", "name")
    assert code(await team.admin("POST", name="alice")) == (409, "key_exists", "name")


async def test_a_key_can_use_only_its_models(team: Team):
    client = team.gateways[0].client
    other = await team.create("other", models=["qwen*"])
    own = await team.create(models=[MODEL[:2] + "*"])
    assert await team.status(own) == 200
    assert code(await team.chat(other)) == (403, "model_not_allowed", "model")
    for key, expected in ((own, [MODEL]), (other, [])):
        listed = await client.get("/v1/models", headers=bearer(key))
        assert [model["id"] for model in listed.json()["data"]] == expected
        tags = await client.get("/api/tags", headers=bearer(key))
        assert len(tags.json()["models"]) == len(expected)
    shown = await client.get(f"/v1/models/{MODEL}", headers=bearer(other))
    assert shown.status_code == 403
    unknown = await team.gateways[0].chat(make_body(model="qwen-none"), headers=bearer(other))
    assert unknown.status_code == 404
    assert MODEL not in unknown.text
    for path, field in (("embeddings", "model"), ("vector_stores", "embedding_model")):
        body = {field: MODEL, "input": "x"}
        refused = await client.post(f"/v1/{path}", json=body, headers=bearer(other))
        assert code(refused) == (403, "model_not_allowed", field)
    operator = bearer(await team.create("operator", roles=["adapters"], models=["other-*"]))
    for action, path in (("load", {"lora_path": "poems"}), ("unload", {})):
        body = {"lora_name": "poems", **path}
        answer = await client.post(f"/v1/{action}_lora_adapter", json=body, headers=operator)
        assert code(answer)[:2] == (403, "model_not_allowed")


async def test_roles_are_separate(team: Team):
    client = team.gateways[0].client
    paths = {"use": "/v1/models", "deploy": "/v1/nodes", "admin": PATH, "adapters": "/metrics"}
    keys = {role: await team.create(role, roles=[role]) for role in paths}
    for role, key in {**keys, "root": "the-root-key"}.items():
        for needed, path in paths.items():
            answer = await client.get(path, headers=bearer(key))
            allowed = needed == role or (role, needed) == ("root", "admin")
            assert answer.status_code == (200 if allowed else 403), (role, path)
    lora = {"lora_name": "x"}
    for role, status in (("use", 403), ("deploy", 403), ("adapters", 404)):
        answer = await client.post("/v1/unload_lora_adapter", json=lora, headers=bearer(keys[role]))
        assert answer.status_code == status


async def test_an_expired_key_cannot_be_rotated(team: Team):
    key = await team.create(expires_in_s=1)
    await until_equal(lambda: team.status(key), 401, 5.0)
    assert code(await team.admin("POST", "/alice:rotate")) == (409, "key_expired", "name")


async def test_a_redis_that_was_restored_or_emptied_revives_no_revoked_key(
    redis_server, redis_prefix, tmp_path, redis
):
    store = f"file://{tmp_path}/store"
    api_keys = RedisKeys(redis_prefix).api_keys
    async with run_team(redis_server, redis_prefix, store, 1) as team:
        lost, kept = await team.create("lost"), await team.create("kept")
        copy = await redis.hgetall(api_keys)
        await team.admin("DELETE", "/lost")
    for restored in (copy, {}):
        await redis.delete(api_keys)
        if restored:
            await redis.hset(api_keys, mapping=restored)
        async with run_team(redis_server, redis_prefix, store, 1) as team:
            assert (await team.status(lost), await team.status(kept)) == (401, 200)
    async with run_team(redis_server, redis_prefix, store, 1) as team:  # with a running gateway
        await redis.delete(api_keys)
        await redis.hset(api_keys, mapping=copy)
        await team.refresh()
        assert (await team.status(lost), await team.status(kept)) == (401, 200)
        assert (await redis.hget(api_keys, "lost")).startswith(b"2 ")


async def test_a_retry_completes_a_revocation_that_only_reached_the_store(team: Team, monkeypatch):
    key = await team.create()

    async def lose(*_: object) -> bool:
        raise RedisError

    with monkeypatch.context() as patch:
        patch.setattr(KeyStore, "put", lose)
        assert (await team.admin("DELETE", "/alice")).status_code == 503
    await team.admin("DELETE", "/alice")
    assert await team.status(key) == 401
    assert (await team.admin("DELETE", "/alice")).json()["state"] == "revoked"


async def test_without_redis_stored_keys_get_a_503_and_keys_of_the_settings_work(
    tmp_path, redis_prefix, monkeypatch
):
    for name, seconds in (("STALE_S", 0.3), ("POLL_S", 0.05), ("WAIT_S", 30.0)):
        monkeypatch.setattr(directory, name, seconds)
    server = EmbeddedRedis(tmp_path)
    try:
        settings = make_settings(server.start(), redis_prefix, gateway=KEYS)
        async with run_gateway_on_socket(settings) as gateway:
            client = gateway.client
            key = (await client.post(PATH, json={"name": "a"}, headers=ROOT)).json()["key"]

            async def status(key: str, path: str = "/v1/models") -> int:
                return (await client.get(path, headers=bearer(key))).status_code

            assert await status(key) == 200
            redis = psutil.Process(server.pid)
            redis.suspend()
            await until_equal(lambda: status("vlm-unknown"), 503, 5.0)
            waiting = asyncio.create_task(status(key))
            await until_equal(lambda: status("vlm-unknown"), 503, 5.0)
            assert not waiting.done()
            redis.resume()
            assert await waiting == 200
            server.stop()
            await until_equal(lambda: status(key), 503, 5.0)
            assert (await status("of-the-settings"), await status("wrong")) == (200, 401)
            assert await status("the-root-key", PATH) == 503
            server.restart()
            await until_equal(lambda: status(key), 200, 10.0)
    finally:
        server.stop()


async def test_without_a_root_key_there_are_no_stored_keys(fleet):
    async with fleet.gateway(gateway={"api_keys": ("asks",)}) as gateway:
        answer = await gateway.client.get(PATH, headers=bearer("asks"))
        assert answer.status_code == 403
        assert "VLM_GATEWAY__ROOT_KEY" in answer.text


async def test_the_store_has_every_state_and_no_plaintext_key(
    team: Team, tmp_path, redis, redis_prefix
):
    keys = [await team.create(), (await team.admin("POST", "/alice:rotate")).json()["key"]]
    await team.admin("DELETE", "/alice")
    store = open_store(f"file://{tmp_path}/store")
    paths = sorted(store.list("keys"))
    assert [path.rpartition("/")[2] for path in paths] == [f"{n:08d}.json" for n in (1, 2, 3)]
    stored = b"".join(store.get(path) or b"" for path in paths)
    stored += b"".join((await redis.hgetall(RedisKeys(redis_prefix).api_keys)).values())
    assert not any(key.encode() in stored for key in keys)
    records = KeyStore(redis, redis_prefix, store)
    found = await records.read()
    await records.close()
    assert found["alice"].is_revoked


async def test_admins_can_read_queues_workers_and_requests(team: Team):
    team.worker.script = talk_on
    user, admin = await team.create("user"), await team.create("admin", roles=["admin"])
    client, path = team.gateways[0].client, "/v1/admin/status"
    refused = await client.get(path, headers=bearer(user))
    assert code(refused)[:2] == (403, "insufficient_permissions")
    streaming = asyncio.create_task(team.chat(user, stream=True, max_tokens=4096))

    async def has_request() -> bool:
        answer = (await client.get(path, headers=bearer(admin))).json()
        return answer["num_open"] == answer["models"][0]["num_open"] == 1

    await until(has_request, 5.0)
    found = (await client.get(path, headers=ROOT)).json()
    [model], [worker] = found["models"], found["workers"]
    assert (found["state"], model["id"], model["num_workers"]) == ("ready", MODEL, 1)
    assert (worker["model"], worker["state"]) == (MODEL, "ready")

    async def has_tokens() -> dict[str, Any]:
        answer = await team.gateways[1].client.get("/v1/admin/requests", headers=ROOT)
        [request] = answer.json()["data"]
        return request if request["num_tokens"] and request["key"] == "user" else {}

    request = await until(has_tokens)
    assert (request["model"], request["worker"]) == (MODEL, worker["id"])
    for query in ("requests?limit=0", "requests?limit=1001", "requests?key=a", "audit?after=a"):
        wrong = await client.get(f"/v1/admin/{query}", headers=ROOT)
        name = query.partition("?")[2].partition("=")[0]
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, name)
    assert (await client.get("/v1/admin/requests", headers=bearer(user))).status_code == 403
    streaming.cancel()


async def test_one_of_two_concurrent_changes_is_refused_or_overwritten(team: Team):
    await team.create()
    rotations = [team.admin("POST", "/alice:rotate", number=number) for number in (0, 1)]
    answers = await asyncio.gather(*rotations)
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses in ([200, 200], [200, 409])
    keys = [answer.json()["key"] for answer in answers if answer.status_code == 200]

    async def one_works() -> bool:
        return [await team.status(key) for key in keys].count(200) == 1

    await until(one_works, 2.0)
