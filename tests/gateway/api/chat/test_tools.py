"""Functions that a model may call, by OpenAI's own client."""

from typing import Any

import msgspec
import pytest

from shared.protocol import CallPiece, FinishReason, Function, ToolCall, Tools
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


async def call_twice(answer: Answer) -> None:
    """Words and two calls, their arguments in pieces."""
    await answer.start()
    pieces = [
        ("Well.", ()),
        ("", (CallPiece(0, "get_weather"), CallPiece(0, "", '{"city"'))),
        ("", (CallPiece(0, "", ': "Oslo"}'),)),
        ("", (CallPiece(1, "get_weather", "{}"),)),
    ]
    for text, calls in pieces:
        [event] = answer.deltas(text)
        await answer.publish(msgspec.structs.replace(event, calls=calls))
    await answer.finish(reason=FinishReason.TOOL_CALLS)


async def test_calls_of_a_whole_answer(client, worker):
    worker.script = call_twice
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[TOOL])
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Well."
    calls = choice.message.tool_calls
    assert [(c.type, c.function.name, c.function.arguments) for c in calls] == [
        ("function", "get_weather", '{"city": "Oslo"}'),
        ("function", "get_weather", "{}"),
    ]
    assert len({call.id for call in calls}) == 2
    result = {"role": "tool", "tool_call_id": calls[0].id, "content": "rain"}
    history = [*MESSAGES, choice.message.model_dump(), result]
    await client.chat.completions.create(model=MODEL, messages=history, tools=[TOOL])
    _, called, returned = worker.requests[1].task.messages
    assert called.tool_calls[0] == ToolCall(calls[0].id, "get_weather", '{"city": "Oslo"}')
    assert (returned.role, returned.tool_call_id) == ("tool", calls[0].id)


async def test_calls_of_a_stream(client, worker):
    worker.script = call_twice
    asked = {"model": MODEL, "messages": MESSAGES, "tools": [TOOL], "stream": True}
    chunks = [chunk async for chunk in await client.chat.completions.create(**asked)]
    pieces = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    assert [piece.index for piece in pieces if piece.id] == [0, 1]
    assert [piece.function.name for piece in pieces if piece.function.name] == ["get_weather"] * 2
    arguments = "".join(piece.function.arguments for piece in pieces if piece.index == 0)
    assert arguments == '{"city": "Oslo"}'
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
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
    ],
)  # fmt: skip
async def test_what_the_model_may_call(gateway, worker, fields, expected):
    response = await gateway.client.post(CHAT, json=make_body(**fields))
    assert response.status_code == 200, response.text
    assert worker.requests[0].task.tools == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools.[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.[0].function.name"),
        ({"tools": [{"type": "function"}]}, "tools.[0].function"),
        ({"tools": [OTHER] * 513}, "tools"),
        ({"tools": [TOOL], "min_tokens": 3}, "min_tokens"),
        ({"tools": [{"type": "function", "function": {
            "name": "f", "strict": True, "parameters": {"not": {}}}}]},
         "tools.[0].function.parameters/not"),
    ],
)  # fmt: skip
async def test_tools_that_cannot_be_meant(gateway, worker, fields, param):
    response = await gateway.client.post(CHAT, json=make_body(**fields))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


DEEP = '{"x": ' + "[" * 2000


@pytest.mark.parametrize(
    ("arguments", "is_whole"),
    [
        (DEEP + "]" * 2000 + "}", True),
        ('{"x": ' + "9" * 5000 + ', "y": 1e999}', True),
        ('{"x": "]}', False),
        (DEEP, False),
        (DEEP + '"' + "]" * 2000 + "}", False),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat"])
async def test_arguments_that_are_whole_are_told_whatever_they_are(
    gateway, worker, path, arguments, is_whole
):
    async def call(answer: Answer) -> None:
        await answer.start()
        [event] = answer.deltas("")
        piece = CallPiece(0, "get_weather", arguments)
        await answer.publish(msgspec.structs.replace(event, calls=(piece,)))
        await answer.finish(reason=FinishReason.TOOL_CALLS if is_whole else FinishReason.LENGTH)

    worker.script = call
    body = {"model": MODEL, "messages": MESSAGES, "stream": False, "tools": [TOOL]}
    if path == "/v1/messages":
        tool = {"name": "get_weather", "input_schema": {"type": "object"}}
        body |= {"max_tokens": 9, "tools": [tool]}
    response = await gateway.client.post(path, json=body)
    assert response.status_code == 200
    name = "input" if path == "/v1/messages" else "arguments"
    assert f'"{name}":{arguments if is_whole else {}}' in response.text
