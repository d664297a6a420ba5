"""The audit log of two gateways, with a real Redis and a store."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.factories_keys import ROOT, Team, bearer, run_command, run_team


@pytest.fixture
async def team(redis_server, redis_prefix, tmp_path) -> AsyncIterator[Team]:
    async with run_team(redis_server, redis_prefix, f"file://{tmp_path}/store") as team:
        yield team


async def entries(team: Team, number: int = 0, query: str = "") -> list[dict]:
    client = team.gateways[number].client
    answer = await client.get(f"/v1/admin/audit{query}", headers=ROOT)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


async def test_changes_are_listed_on_every_gateway_newest_first(team: Team, tmp_path: Path):
    boss = await team.create("boss", roles=["admin", "adapters"])
    client = team.gateways[0].client
    made = await client.post("/v1/admin/keys", json={"name": "bob"}, headers=bearer(boss))
    assert made.status_code == 200
    await client.delete("/v1/admin/keys/bob", headers=bearer(boss))
    adapter = {"lora_name": "poems"}
    unknown = await client.post("/v1/unload_lora_adapter", json=adapter, headers=bearer(boss))
    assert unknown.status_code == 404
    found = await entries(team, number=1)
    assert [(each["action"], each["name"]) for each in found] == [
        ("unload_lora_adapter", "poems"), ("revoke_key", "bob"), ("create_key", "bob"), ("create_key", "boss"),
    ]  # fmt: skip
    assert [each["key"] for each in found[:3]] == ["boss"] * 3
    assert found[3]["key"] not in ("", "boss")
    assert await entries(team, query="?limit=1") == found[:1]
    stored = [json.loads(path.read_bytes()) for path in tmp_path.glob("store/**/audit/*/*.json")]
    assert sorted(stored, key=lambda each: -each["at"]) == found


async def test_the_command_lists_entries_newest_first(team: Team):
    for name in ("alice", "bob"):
        await team.create(name)
    shown = await run_command(team.gateways[0], "audit", "--limit", "1")
    assert shown.exit_code == 0, shown.output
    assert "create_key" in shown.output
    assert ("bob" in shown.output, "alice" in shown.output) == (True, False)


async def test_what_only_reads_is_not_listed_and_secrets_never_are(team: Team):
    key = await team.create("alice")
    await team.admin("GET")
    await team.chat(key)
    await team.admin("POST", "/alice:rotate")
    found = await entries(team)
    assert [each["action"] for each in found] == ["rotate_key", "create_key"]
    assert key not in json.dumps(found)


async def test_no_change_without_its_entry(team: Team, tmp_path: Path):
    key = await team.create("alice")
    folder = next(tmp_path.glob("store/**/audit"))
    for file in sorted(folder.rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    folder.rmdir()
    folder.write_text("")  # no folder can be made here
    refused = await team.admin("DELETE", "/alice")
    assert refused.status_code == 503, refused.text
    assert await team.status(key) == 200


async def test_only_the_role_admin_reads_it_and_limits_are_checked(team: Team):
    client = team.gateways[0].client
    key = await team.create("alice")
    assert (await client.get("/v1/admin/audit", headers=bearer(key))).status_code == 403
    wrong = await client.get("/v1/admin/audit?limit=0", headers=ROOT)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "limit")
