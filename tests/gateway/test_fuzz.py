"""Valid and invalid requests generated from the OpenAPI document: no 5xx and no undocumented status.

`make fuzz` sends many more (`FUZZ_EXAMPLES` of each kind to each operation, ten times as many to the chat route).
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.factories_gateway import CHAT, MODEL, RunningGateway
from tests.factories_numbers import run_fleet
from tests.factories_search import serve_search
from tests.fuzzing import FUZZ_EXAMPLES, IS_LONG, SHARE, takes_its_time

pytestmark = [pytest.mark.filterwarnings("ignore"), takes_its_time]

STORES = "/v1/vector_stores"
OF_VECTORS = (STORES, "/v1/files", "/v1/embeddings", "/v1/rerank", "/v1/score", "/similar")
KNOWN = {"model": MODEL, "embedding_model": MODEL}


def check(response: Any, documented: set[str]) -> None:
    """Checks the promises that hold for every request."""
    assert response.status_code < 500, response.text
    assert str(response.status_code) in documented | {"400"}, response.text  # 400: invalid HTTP
    if response.status_code >= 400 and response.request.method != "HEAD":
        error = response.json()["error"]
        if isinstance(error, str):  # Ollama's error format
            error = response.json()
            assert set(error) == {"error", "param", "code"}
        else:
            assert set(error) == {"message", "type", "param", "code"}
        assert len(response.content) < 4096


def send(url: str, operation: Any, mode: GenerationMode, count: int, known: dict[str, str]) -> None:
    """Sends requests to one operation, half of them with names that exist (`known`)."""
    documented = set(operation.responses.status_codes)

    @settings(
        max_examples=count, database=None, derandomize=not IS_LONG,
        phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(operation.as_strategy(generation_mode=mode), st.booleans())
    def call(case: Any, is_known: bool) -> None:
        for fields in (case.body, case.path_parameters) if is_known else ():
            if isinstance(fields, dict):
                fields.update({name: known[name] for name in fields.keys() & known.keys()})
        with requests.Session() as session:
            session.trust_env = False
            check(case.call(base_url=url, session=session, timeout=30), documented)

    call()


async def send_all(
    gateway: RunningGateway, is_meant: Callable[[str], bool], known: dict[str, str]
) -> None:
    """Sends requests to all operations whose path `is_meant` accepts."""
    document = (await gateway.client.get("/openapi.json")).json()
    operations = [
        found.ok() for found in schemathesis.openapi.from_dict(document).get_all_operations()
    ]
    meant = [operation for operation in operations if is_meant(operation.path)]
    assert meant
    for operation in meant:
        count = FUZZ_EXAMPLES * (SHARE if operation.path == CHAT else 1)
        has_input = operation.path == CHAT or (IS_LONG and (operation.body or operation.query))
        modes = list(GenerationMode) if has_input else [GenerationMode.POSITIVE]
        for mode in modes:
            await asyncio.to_thread(send, gateway.url, operation, mode, count, known)


async def test_generated_requests_have_documented_responses(gateway: RunningGateway, worker):
    await send_all(gateway, lambda path: not path.startswith(OF_VECTORS), KNOWN)
    assert (await gateway.chat()).status_code == 200


async def test_generated_requests_about_vectors_have_documented_responses(
    ends, redis_server, tmp_path
):
    """The fleet has a worker for embeddings, a search process, a store with an item, and a file."""
    async with (
        serve_search(tmp_path / "search") as search,
        run_fleet(ends, redis_server, search=dict(search)) as (gateway, _),
    ):
        made = (await gateway.client.post(STORES, json={"name": "mine"})).json()
        items = {"items": [{"id": "a", "text": "words"}]}
        form = {"file": ("a.txt", b"words")}
        files = await gateway.client.post("/v1/files", files=form, data={"purpose": "assistants"})
        known = KNOWN | {
            "vector_store_id": made["id"], "file_id": files.json()["id"], "item_id": "a",
        }  # fmt: skip
        assert (await gateway.client.put(f"{STORES}/{made['id']}/items", json=items)).is_success
        await send_all(gateway, lambda path: path.startswith(OF_VECTORS), known)
        again = (await gateway.client.post(STORES, json={"name": "again"})).json()["id"]
        assert (await gateway.client.put(f"{STORES}/{again}/items", json=items)).is_success
