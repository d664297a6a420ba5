"""Unknown request fields are ignored and listed; integral floats are accepted as integers."""

import logging
import re

import pytest

from tests.factories_gateway import HELLO, make_body


def ignored(response) -> set[str]:
    assert response.status_code == 200, response.text
    return set(filter(None, response.headers.get("x-vlm-ignored", "").split(", ")))


async def test_fields_of_nested_objects_are_listed_by_path(gateway):
    part = {"type": "text", "text": "Hi", "uuid": "7"}
    image = {"type": "image_url", "image_url": {"url": "data:,", "hint": 1}, "uuid": "8"}
    tool = {"type": "function", "function": {"name": "f", "x": 1}, "y": 2}
    body = make_body(messages=[{"role": "user", "content": [part], "z": 3}], tools=[tool, tool])
    assert ignored(await gateway.chat(body)) == {
        "messages.z", "messages.content.uuid", "tools.y", "tools.function.x",
    }  # fmt: skip
    body = make_body(messages=[{"role": "user", "content": [part, image]}])
    refused = await gateway.chat(body)  # an error names the path within the request
    assert refused.json()["error"]["param"] == "messages.[0].content.[1].image_url"
    assert refused.headers["x-vlm-ignored"]


async def test_the_header_is_bounded_and_contains_only_names(gateway, caplog):
    """Many requests with unknown fields are logged in one line."""
    caplog.set_level(logging.INFO)
    names = {"x" * 4000, "a\r\nset-cookie: b", "é", *(f"field-{i}" for i in range(40))}
    for _ in range(20):
        response = await gateway.chat(make_body(**dict.fromkeys(names, "secret")))
    header = response.headers["x-vlm-ignored"]
    assert response.status_code == 200
    assert len(header) <= 512
    assert len(header.split(", ")) <= 10
    assert re.fullmatch(r"[A-Za-z0-9_.-]+(, [A-Za-z0-9_.-]+)*", header)
    assert "set-cookie" not in response.headers
    lines = [each for each in caplog.records if "ignored unknown fields" in each.getMessage()]
    assert len(lines) <= 1


async def test_a_float_that_is_whole_is_an_integer(gateway, worker):
    body = make_body(seed=7.0, top_k=5.00, max_tokens=4.0, whatever=None, tools=None)
    assert ignored(await gateway.chat(body)) == set()
    sampling = worker.requests[0].task.sampling
    assert (sampling.seed, sampling.top_k, sampling.max_tokens) == (7, 5, 4)
    options = {"include_usage": None}
    assert ignored(await gateway.chat(make_body(stream_options=options, stream=True))) == set()


@pytest.mark.parametrize("changes", [{"gateway": {"unknown_fields": "refuse"}}])
async def test_unknown_fields_of_echoed_responses_are_not_refused(gateway):
    part = {"type": "text", "text": "Hi", "x": 1}
    refused = await gateway.chat(make_body(messages=[{"role": "user", "content": [part]}]))
    assert refused.json()["error"]["param"] == "messages.[0].content.[0].x"
    echoed = [*HELLO, {"role": "assistant", "content": "Hi", "x": 1}, *HELLO]
    assert ignored(await gateway.chat(make_body(messages=echoed))) == set()
