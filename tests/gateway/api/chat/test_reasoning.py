"""Reasoning models: responses, streams, the history, and the template's switches, up to a real worker."""

from typing import Any

import pytest
from msgspec.structs import replace

from shared.protocol import Finished, FinishReason, Tokens, Usage
from tests.factories_gateway import CARD, Answer, make_body
from tests.gateway.api.chat.test_streams import read_events

SWITCHED = replace(CARD, reasoning="think", template_options=("add_dates", "enable_thinking"))
DEEPSEEK = replace(CARD, reasoning="think", template_options=("thinking",))
EFFORTS = replace(CARD, reasoning="harmony", template_options=("reasoning_effort",))
ALWAYS = replace(CARD, reasoning="think", always_thinks=True)


async def think(answer: Answer) -> None:
    """Publishes two reasoning tokens, one that ends the reasoning, and one of the answer."""
    request_id, attempt = answer.request.id, answer.claim.attempt
    pieces = [("so ", ""), ("it is", ""), (".", "Yes "), ("", f"{answer.choice}!"), ("", "")]
    await answer.start()
    for index, (thought, text) in enumerate(pieces):
        await answer.publish(Tokens(request_id, attempt, index, (index,), text, reasoning=thought))
    usage = Usage(7, len(pieces), num_reasoning_tokens=3)
    await answer.publish(Finished(request_id, attempt, FinishReason.STOP, usage))


async def test_a_response_has_the_reasoning_beside_the_content(gateway, worker):
    plain = (await gateway.chat()).json()
    assert "reasoning_content" not in plain["choices"][0]["message"]
    assert "completion_tokens_details" not in plain["usage"]
    worker.script = think
    answer = (await gateway.chat()).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("so it is.", "Yes 0!")
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    body = make_body(include_reasoning=False)
    whole = await gateway.chat(body)
    assert whole.json()["choices"][0]["message"]["content"] == "Yes 0!"
    assert "reasoning_content" not in whole.text
    assert "reasoning_content" not in await gateway.stream(body)


async def test_a_stream_has_reasoning_deltas_before_content_deltas(gateway, worker):
    """Chunks of the two choices are interleaved."""
    worker.script = think
    body = make_body(n=2, stream_options={"include_usage": True})
    *chunks, usage, _ = read_events(await gateway.stream(body))
    for index in range(2):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        deltas = [choice["delta"] for choice in choices]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "so it is."
        assert "".join(delta.get("content", "") for delta in deltas) == f"Yes {index}!"
        assert (deltas[-1], choices[-1]["finish_reason"]) == ({}, "stop")
    assert usage["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}


async def test_reasoning_of_earlier_turns_reaches_the_worker(gateway, worker):
    turns = [("reasoning_content", "a"), ("reasoning", "b"), ("reasoning", {"c": 1}), (None, "")]
    messages: list[dict[str, Any]] = []
    for name, value in turns:
        messages.append({"role": "user", "content": "?"})
        messages.append({"role": "assistant", "content": "!", **({name: value} if name else {})})
    messages.append({"role": "user", "content": "?", "reasoning_content": "mine"})
    response = await gateway.chat(make_body(messages=messages))
    assert response.status_code == 200, response.text
    told = [message.reasoning for message in worker.requests[0].task.messages]
    assert told == ["", "a", "", "b", "", "", "", "", ""]


@pytest.mark.parametrize(
    ("card", "cases"),
    [
        (SWITCHED, [
            ({"enable_thinking": False}, {"enable_thinking": False}),
            ({"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
            ({"chat_template_kwargs": {"add_dates": "no"}}, {"add_dates": "no"}),
            ({"chat_template_kwargs": {"thinking": False}}, {"enable_thinking": False}),
            ({"reasoning_effort": "none"}, {"enable_thinking": False}),
            ({"reasoning_effort": "high"}, {"enable_thinking": True}),
            ({"reasoning_effort": None, "chat_template_kwargs": None}, {}),
        ]),
        (DEEPSEEK, [({"enable_thinking": True}, {"thinking": True})]),
        (EFFORTS, [({"reasoning_effort": "low"}, {"reasoning_effort": "low"})]),
        (ALWAYS, [({"enable_thinking": True}, {}), ({"reasoning_effort": "low"}, {})]),
        (CARD, [({"reasoning_effort": "none"}, {}), ({"chat_template_kwargs": {}}, {})]),
    ],
)  # fmt: skip
async def test_reasoning_options_are_renamed_to_those_of_the_template(gateway, worker, card, cases):
    for asked, options in cases:
        response = await gateway.chat(make_body(**asked))
        assert response.status_code == 200, response.text
        assert worker.requests[-1].task.template_options == options
