"""Functions that a model may call, by OpenAI's own client."""

from typing import Any

import msgspec
import pytest

from shared.protocol import CallPiece, FinishReason, Function, Tools
from tests.factories_gateway import CARD, CHAT, MODEL, Answer, make_body

ABLE = msgspec.structs.replace(CARD, supports_grammars=True)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
WEATHER = Function(
    "get_weather", '{"type":"object","properties":{"city":{"type":"string"}}}', "The weather."
)
OTHER = {"type": "function", "function": {"name": "other"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
MESSAGES: list[Any] = [{"role": "user", "content": "Weather?"}]

pytestmark = pytest.mark.parametrize("card", [ABLE])


async def test_what_the_model_may_call(gateway, worker):
    for fields, expected in (
        ({"tools": [TOOL]}, Tools((WEATHER,))),
        ({"tools": [TOOL], "tool_choice": "auto"}, Tools((WEATHER,))),
        ({"tools": [TOOL], "parallel_tool_calls": False}, Tools((WEATHER,), False, False)),
        ({"tools": [TOOL], "tool_choice": "none"}, None),
        ({"tools": [], "tool_choice": "auto"}, None),
        ({"tools": [{"type": "web_search"}]}, None),
        ({"tools": [OTHER, TOOL], "tool_choice": NAMED}, Tools((WEATHER,), True)),
        (
            {"tools": [OTHER, TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {
                "mode": "required", "tools": [NAMED]}}},
            Tools((WEATHER,), True),
        ),
    ):  # fmt: skip
        response = await gateway.client.post(CHAT, json=make_body(**fields))
        assert response.status_code == 200, response.text
        assert worker.requests[-1].task.tools == expected


DEEP = '{"x": ' + "[" * 2000


async def test_arguments_that_are_whole_are_told_whatever_they_are(gateway, worker):
    async def call(answer: Answer) -> None:
        await answer.start()
        [event] = answer.deltas("")
        piece = CallPiece(0, "get_weather", arguments)
        await answer.publish(msgspec.structs.replace(event, calls=(piece,)))
        await answer.finish(reason=FinishReason.TOOL_CALLS if is_whole else FinishReason.LENGTH)

    worker.script = call
    for arguments, is_whole in (
        (DEEP + "]" * 2000 + "}", True),
        ('{"x": ' + "9" * 5000 + ', "y": 1e999}', True),
        ('{"x": "]}', False),
        (DEEP, False),
        (DEEP + '"' + "]" * 2000 + "}", False),
    ):
        for path in ("/v1/messages", "/api/chat"):
            body = {"model": MODEL, "messages": MESSAGES, "stream": False, "tools": [TOOL]}
            if path == "/v1/messages":
                tool = {"name": "get_weather", "input_schema": {"type": "object"}}
                body |= {"max_tokens": 9, "tools": [tool]}
            response = await gateway.client.post(path, json=body)
            assert response.status_code == 200
            name = "input" if path == "/v1/messages" else "arguments"
            assert f'"{name}":{arguments if is_whole else {}}' in response.text
