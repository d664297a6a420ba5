"""Usage and budgets of keys on two gateways, with a real Redis and a store."""

import asyncio
import csv
import io
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from gateway.keys import usage
from shared.queue.keys import RedisKeys
from shared.redis.client import create_redis
from shared.redis.embedded import EmbeddedRedis
from tests.factories_gateway import (
    CARD,
    MODEL,
    make_body,
    make_settings,
    run_gateway_on_socket,
    run_worker,
    say_nothing,
    says,
    talk_on,
)
from tests.factories_keys import KEYS, PATH, ROOT, Team, bearer, code, run_command, run_team
from tests.waiting import until, until_equal

#: Each request of the scripted worker has 7 prompt tokens, 2 of them cached, and 3 output tokens.
PRICES = {MODEL: {"input": 10.0, "cached_input": 1.0, "output": 100.0, "image": 0.01}}
COST = (5 * 10 + 2 * 1 + 3 * 100) / 1e6


@pytest.fixture
def store(tmp_path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture
async def team(redis_server, redis_prefix, store) -> AsyncIterator[Team]:
    async with run_team(redis_server, redis_prefix, store, prices=PRICES) as team:
        yield team


async def ask(team: Team, query: str = "", key: str = "", number: int = 0) -> httpx.Response:
    headers = bearer(key) if key else ROOT
    return await team.gateways[number].client.get(f"/v1/usage{query}", headers=headers)


async def rows(team: Team, query: str = "", key: str = "") -> list[dict[str, Any]]:
    answer = await ask(team, query, key)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


async def test_usage_is_listed_by_day_key_and_model(team: Team):
    alice, bob = await team.create("alice", tag="blue"), await team.create("bob", tag="blue")
    for key in (alice, alice, bob):
        assert await team.status(key) == 200
    found = await rows(team)
    assert [(each["key"], each["model"], each["requests"]) for each in found] == [
        ("alice", MODEL, 2), ("bob", MODEL, 1),
    ]  # fmt: skip
    [row] = await rows(team, "?by=tag")
    assert row == {
        "tag": "blue", "requests": 3, "input_tokens": 21, "cached_input_tokens": 6, "output_tokens": 9,
        "images": 0, "cost": pytest.approx(3 * COST),
    }  # fmt: skip
    assert [each["key"] for each in await rows(team, "?by=key", bob)] == ["bob"]
    other_days = await rows(team, "?from=2020-01-01&to=2020-02-01")
    assert other_days == []
    monitor = await team.create("monitor", roles=["adapters"])
    text = (await team.gateways[0].client.get("/metrics", headers=bearer(monitor))).text
    for kind, count in (("input", 14), ("output", 6)):
        assert f'vlm_key_tokens_total{{key="alice",type="{kind}"}} {count}.0' in text
    shown = await run_command(team.gateways[0], "usage")
    assert (shown.exit_code, "alice" in shown.output) == (0, True), shown.output
    text = await run_command(team.gateways[0], "usage", "--by", "key", "--csv", key=bob)
    [row] = csv.DictReader(io.StringIO(text.stdout))
    assert (row["key"], row["output_tokens"], float(row["cost"])) == ("bob", "3", COST)


async def test_csv_cells_cannot_be_formulas(team: Team):
    tags = ("=1+1", "\t=1+1", "\r=1+1")
    for number, tag in enumerate(tags):
        await team.status(await team.create(f"key{number}", tag=tag))
    text = (await ask(team, "?by=key,tag&format=csv")).text
    found = csv.DictReader(io.StringIO(text, newline=""))
    assert {row["key"]: row["tag"] for row in found} == {
        f"key{number}": f"'{tag}" for number, tag in enumerate(tags)
    }


async def test_usage_counts_prompts_choices_versions_and_published_tokens(team: Team, fleet):
    gateway, key = team.gateways[0], await team.create(budget=5)
    body = {"model": MODEL, "prompt": ["a", "b", "c"], "n": 2}
    answer = await gateway.client.post("/v1/completions", json=body, headers=bearer(key))
    assert answer.json()["usage"]["prompt_tokens"] == 21
    [row] = await rows(team, key=key)
    assert (row["requests"], row["input_tokens"], row["output_tokens"]) == (1, 21, 18)

    key = await team.create("bob")
    for version in ("a", "b"):  # two versions of a deployment count as one model with one price
        card = replace(CARD, name=f"{MODEL}@{version}")
        async with fleet.worker(card):
            await gateway.services.models.refresh()
            assert (await team.chat(key, model=card.name)).status_code == 200
    [row] = await rows(team, key=key)
    assert (row["model"], row["requests"], row["cost"]) == (MODEL, 2, pytest.approx(2 * COST))

    team.worker.script, key = talk_on, await team.create("carol")
    task = asyncio.create_task(team.chat(key, stream=True, max_tokens=4096))
    answer = await until(lambda: next((a for a in team.worker.answers if a.num_tokens > 9), None))
    task.cancel()
    await until(lambda: answer.refused == "cancelled")
    [row] = await rows(team, key=key)
    published = answer.num_tokens - 1  # the publication of the last token was refused
    assert (row["requests"], row["input_tokens"], row["output_tokens"]) == (1, 7, published)


async def test_a_spent_budget_refuses_until_the_next_month(team: Team):
    key = await team.create(budget=2.5 * COST)
    await team.refresh()
    for _ in range(3):  # the last one exceeds it
        assert await team.status(key) == 200
    refused = await team.chat(key, 1)
    assert code(refused) == (429, "insufficient_quota", None)
    assert 0 < int(refused.headers["retry-after"]) <= 31 * 86400
    assert refused.headers["x-should-retry"] == "false"
    shown = (await team.admin("GET", "/alice")).json()
    assert (shown["budget"], shown["period"]) == (2.5 * COST, "month")


async def test_concurrent_requests_overspend_by_at_most_one_request(team: Team):
    """Each request reserves its maximum cost of 64 output tokens."""
    most = (30 * 10 + 64 * 100) / 1e6
    key = await team.create(budget=8 * most)
    await team.refresh()
    team.worker.script = says(*["a"] * 64)
    answers = await asyncio.gather(*(team.chat(key, n % 2, max_tokens=64) for n in range(64)))
    others = [each.text for each in answers if each.status_code not in (200, 429)]
    assert not others
    assert 429 in {each.status_code for each in answers}
    [row] = await rows(team)
    assert 0 < row["cost"] <= 9 * most
    # A prompt reserves one token per byte, the most of any tokenizer: three per character of this text.
    text = "\u5b57" * 120
    bob = await team.create("bob", budget=2 * 360 * 10 / 1e6)
    await team.refresh()
    team.worker.script = say_nothing
    asked = [asyncio.create_task(team.chat(bob, n % 2, text, max_tokens=1)) for n in range(8)]
    await until(lambda: sum(each.done() for each in asked) >= 5)
    assert {each.result().status_code for each in asked if each.done()} == {429}
    for each in asked:
        each.cancel()


async def test_the_unused_part_of_a_reservation_is_released(team: Team):
    key = await team.create(budget=20 * COST)
    for _ in range(15):  # each one reserves more than a fifth of the budget
        assert await team.status(key) == 200


async def test_usage_and_budgets_outlive_redis(
    team: Team, redis, redis_prefix, redis_server, store
):
    key = await team.create(budget=1.5 * COST)
    for _ in range(2):
        assert await team.status(key) == 200
    before = await rows(team)
    # A gateway saves the counts of Redis when it starts.
    async with run_team(redis_server, redis_prefix, store, 1, prices=PRICES) as other:
        await until(lambda: has_saved(store, 2))
        names = RedisKeys(redis_prefix)
        for pattern in (names.spent + "*", names.budget("*", "*")):
            await redis.delete(*[each async for each in redis.scan_iter(pattern)])
        assert await rows(other) == before
        assert code(await other.chat(key)) == (429, "insufficient_quota", None)
    bob = await team.create("bob")
    assert await team.status(bob) == 200  # counted in a new hash
    totals = await rows(team, "?by=day")
    assert [each["requests"] for each in totals] == [3]


async def test_a_redis_restored_from_an_older_copy_continues_from_the_saved_usage(
    redis_prefix, store, tmp_path, monkeypatch
):
    monkeypatch.setattr(usage, "_SAVE_S", 0.05)
    monkeypatch.setattr(usage, "_LONGEST_PAUSE_S", 0.5)
    folder, copy, names = tmp_path / "redis", tmp_path / "copy", RedisKeys(redis_prefix)
    server = EmbeddedRedis(folder)
    url = server.start()

    async def talk(key: str, times: int) -> None:
        async with run_worker(url, redis_prefix) as worker:  # the worker must stop before its Redis
            for _ in range(times):
                await until_equal(lambda: Team([gateway], worker).status(key), 200)

    def restart() -> None:
        server.stop()
        if copy.exists():
            shutil.rmtree(folder)
            shutil.copytree(copy, folder)
        else:
            shutil.copytree(folder, copy)
        server.start()

    gateway = KEYS | {"prices": PRICES}
    settings = make_settings(url, redis_prefix, gateway=gateway, deploy={"store": store})
    try:
        async with (
            run_gateway_on_socket(settings) as gateway,
            create_redis(settings.redis) as redis,
        ):
            body = {"name": "alice", "budget": 3.5 * COST}
            key = (await gateway.client.post(PATH, json=body, headers=ROOT)).json()["key"]
            await talk(key, 1)
            await until(lambda: has_saved(store, 1))
            # Redis is restored from a copy of yesterday.
            await redis.delete(*[each async for each in redis.scan_iter(names.spent + "*")])
            restart()
            await talk(key, 2)
            await until(lambda: has_saved(store, 3))
            restart()
            [budget] = [each async for each in redis.scan_iter(names.budget("*", "*"))]

            async def is_restored() -> bool:
                return int(await redis.hget(budget, "spent") or 0) == round(3 * COST * usage.NANO)

            await until(is_restored)
            await talk(key, 1)
            [row] = (await gateway.client.get("/v1/usage", headers=ROOT)).json()["data"]
            refused = await gateway.chat(make_body(), headers=bearer(key))
            assert (row["requests"], code(refused)) == (4, (429, "insufficient_quota", None))
    finally:
        server.stop()


def has_saved(store: str, num_requests: int) -> bool:
    """Returns whether the store has the usage of this many requests."""
    paths = Path(store.removeprefix("file://")).rglob("usage/*/*.json")
    sums = [json.loads(path.read_bytes()) for path in paths]
    found = [count for each in sums for name, count in each.items() if name.startswith("requests ")]
    return sum(found) >= num_requests


BAD_QUERIES = (
    ("by=color", "by"), ("by=", "by"), ("from=yesterday", "from"), ("from=2026-02-30", "from"),
    ("from=2020-01-01&to=2024-01-01", "from"), ("from=2024-01-02&to=2024-01-01", "from"),
    ("to=2999-01-01", "to"), ("format=xml", "format"), ("key=bob", "key"),
)  # fmt: skip


async def test_a_bad_query_names_its_field(team: Team):
    for query, param in BAD_QUERIES:
        answer = await ask(team, f"?{query}")
        assert code(answer)[::2] == (400, param), answer.text
    for by in ("color", ""):
        wrong = await run_command(team.gateways[0], "usage", "--by", by)
        assert (wrong.exit_code, "day, key, tag, model" in wrong.stderr) == (4, True)


async def test_a_budget_needs_prices(redis_server, redis_prefix, store):
    async with run_team(redis_server, redis_prefix, store, 1) as team:
        answer = await team.admin("POST", name="alice", budget=5)
        assert code(answer)[::2] == (400, "budget")
        await team.status("of-the-settings")
        [row] = await rows(team, key="of-the-settings")
        assert (row["requests"], row["cost"]) == (1, None)


async def test_lines_of_a_batch_fail_once_the_budget_is_spent(
    redis_server, redis_prefix, store, tmp_path
):
    files = {"prices": PRICES, "files": f"file://{tmp_path}/files"}
    async with run_team(redis_server, redis_prefix, store, 1, **files) as team:
        client = team.gateways[0].client
        headers = bearer(await team.create(budget=1.5 * COST))
        batch = await team.gateways[0].begin_batch(headers, *[make_body()] * 20)

        async def counts() -> dict[str, int]:
            shown = (await client.get(f"/v1/batches/{batch['id']}", headers=headers)).json()
            return shown["request_counts"] if shown["status"] == "completed" else {}

        found = await until(counts)
    assert found["completed"] + found["failed"] == found["total"] == 20
    assert 0 < found["failed"] < 20
