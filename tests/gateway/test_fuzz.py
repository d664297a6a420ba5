"""The whole OpenAPI document as a source of requests, good and bad: no 5xx, no status that it does not name.

`make fuzz` sends many more (`FUZZ_EXAMPLES` of each kind to each operation, the chat route ten times as many).
"""

import asyncio
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.factories_gateway import CHAT, MODEL, RunningGateway
from tests.factories_images import data_url
from tests.fuzzing import FUZZ_EXAMPLES, IS_LONG, SHARE, num_examples, takes_its_time

pytestmark = [pytest.mark.filterwarnings("ignore"), takes_its_time]


def check(response: Any, documented: set[str]) -> None:
    """The promises to every request, whatever it holds."""
    assert response.status_code < 500, response.text
    assert str(response.status_code) in documented | {"400"}, response.text  # 400: what is not HTTP
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert len(response.content) < 4096


def send(url: str, operation: Any, mode: GenerationMode, count: int) -> int:
    """Make requests to one operation; how many were sent."""
    documented = set(operation.responses.status_codes)
    num_sent = 0

    @settings(
        max_examples=count, deadline=None, database=None, derandomize=not IS_LONG,
        phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(operation.as_strategy(generation_mode=mode), st.booleans())
    def call(case: Any, names_model: bool) -> None:
        nonlocal num_sent
        num_sent += 1
        if names_model and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = MODEL
        with requests.Session() as session:
            session.trust_env = False
            check(case.call(base_url=url, session=session, timeout=30), documented)

    call()
    return num_sent


async def test_no_request_of_the_document_is_too_much(gateway: RunningGateway, worker):
    document = (await gateway.client.get("/openapi.json")).json()
    operations = [
        found.ok() for found in schemathesis.openapi.from_dict(document).get_all_operations()
    ]
    assert CHAT in {operation.path for operation in operations}
    num_sent = 0
    for operation in operations:
        count = FUZZ_EXAMPLES * (SHARE if operation.path == CHAT else 1)
        modes = list(GenerationMode) if operation.path == CHAT else [GenerationMode.POSITIVE]
        for mode in modes:  # the other routes have nothing that could be wrong
            num_sent += await asyncio.to_thread(send, gateway.url, operation, mode, count)
    print(f"{num_sent} requests")  # shown by pytest -s
    assert num_sent >= FUZZ_EXAMPLES * SHARE * len(GenerationMode)  # 5,000 in `make fuzz`
    assert (await gateway.chat()).status_code == 200


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
async def test_no_image_is_too_much(gateway: RunningGateway, worker, form):
    """Changed bytes and changed base64, through the whole door."""
    url = data_url(format=form)
    start = url.index(",") + 1

    @settings(
        max_examples=num_examples(SHARE), deadline=None, database=None, derandomize=not IS_LONG,
    )  # fmt: skip
    @given(
        st.lists(
            st.tuples(st.integers(0, 200), st.characters(codec="ascii")), min_size=1, max_size=4
        )
    )
    def call(edits: list[tuple[int, str]]) -> None:
        text = list(url)
        for place, character in edits:
            text[start + place % (len(text) - start)] = character
        content = [{"type": "image_url", "image_url": {"url": "".join(text)}}]
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
        with requests.Session() as session:
            session.trust_env = False
            check(session.post(gateway.url + CHAT, json=body, timeout=30), {"200", "400"})

    await asyncio.to_thread(call)
