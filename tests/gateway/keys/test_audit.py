"""The audit log of two gateways, with a real Redis and a store."""

import json
from pathlib import Path

from tests.factories_keys import ROOT, Team, bearer, run_command


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
    await team.admin("GET")  # reads are not recorded
    await team.chat(boss)
    found = await entries(team, number=1)
    assert [(each["action"], each["name"]) for each in found] == [
        ("unload_lora_adapter", "poems"), ("revoke_key", "bob"), ("create_key", "bob"), ("create_key", "boss"),
    ]  # fmt: skip
    assert [each["key"] for each in found[:3]] == ["boss"] * 3
    assert found[3]["key"] not in ("", "boss")
    assert boss not in json.dumps(found)
    assert await entries(team, query="?limit=1") == found[:1]
    shown = await run_command(team.gateways[0], "audit", "--limit", "1")
    assert ("poems" in shown.output, "bob" in shown.output) == (True, False), shown.output
    stored = [json.loads(path.read_bytes()) for path in tmp_path.glob("store/**/audit/*/*.json")]
    assert sorted(stored, key=lambda each: -each["at"]) == found
    user = await team.create("user")
    assert (await client.get("/v1/admin/audit", headers=bearer(user))).status_code == 403
    wrong = await client.get("/v1/admin/audit?limit=0", headers=ROOT)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "limit")


async def test_a_change_fails_if_its_audit_entry_cannot_be_written(team: Team, tmp_path: Path):
    key = await team.create("alice")
    folder = next(tmp_path.glob("store/**/audit"))
    for file in sorted(folder.rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    folder.rmdir()
    folder.write_text("")  # a file in place of the folder makes writes fail
    refused = await team.admin("DELETE", "/alice")
    assert refused.status_code == 503, refused.text
    assert await team.status(key) == 200
