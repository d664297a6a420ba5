"""Batches, long form (`make faults`), while gateways, workers and Redis are killed: each line is answered once, as if nothing had happened."""

import asyncio
import json
import signal

import httpx
import pytest

from tests.faults.clients import answer_to, body_of
from tests.faults.processes import WITHIN_S
from tests.long import long

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    long("faults"),
]

CHAT = "/v1/chat/completions"
NUM_LINES = 80


async def test_a_batch_goes_on_whoever_is_killed(fleet, tmp_path_factory):
    """P3, P4: a gateway, then a worker, then Redis, while lines are on their way."""
    files = {"VLM_GATEWAY__FILES": f"file://{tmp_path_factory.mktemp('files')}"}
    victim = await fleet.worker()
    first, url = await fleet.processes.gateway(**files)
    texts = [fleet.name() for _ in range(NUM_LINES)]
    async with httpx.AsyncClient(trust_env=False, timeout=WITHIN_S) as client:
        batch = await begin(client, url, texts)
        await until(client, url, batch, lambda found: found["request_counts"]["completed"] >= 10)
        await first.end()
        second, url = await fleet.processes.gateway(**files)
        await until(client, url, batch, lambda found: found["request_counts"]["completed"] >= 30)
        await fleet.worker()
        victim.signal(signal.SIGKILL)
        fleet.processes.kill_redis()
        await asyncio.to_thread(fleet.processes.server.start)
        done = await until(client, url, batch, lambda found: found["status"] == "completed")
        assert done["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        content = (await client.get(f"{url}/v1/files/{done['output_file_id']}/content")).text
    lines = [json.loads(line) for line in content.splitlines()]
    told = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in lines
    }
    assert len(lines) == len(told) == NUM_LINES
    assert told == {text: "".join(answer_to(text)).strip() for text in texts}
    await second.end()
    await fleet.at_rest()


async def begin(client, url, texts):
    lines = [
        {
            "custom_id": text,
            "method": "POST",
            "url": CHAT,
            "body": {**body_of(text), "stream": False, "logprobs": False},
        }
        for text in texts
    ]
    data = "\n".join(json.dumps(line) for line in lines).encode()
    file = await client.post(
        f"{url}/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)}
    )
    body = {"input_file_id": file.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
    return (await client.post(f"{url}/v1/batches", json=body)).json()["id"]


async def until(client, url, batch, holds):
    async with asyncio.timeout(WITHIN_S):
        while True:
            found = (await client.get(f"{url}/v1/batches/{batch}")).json()
            if "id" in found and holds(found):
                return found
            await asyncio.sleep(0.1)
