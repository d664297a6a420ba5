"""`/v1/messages` with Anthropic's client: complete responses, streams, images, stop sequences, errors."""

from functools import partial
from importlib import import_module
from itertools import groupby
from operator import methodcaller

import pytest

from shared.protocol import ErrorCode, Finished, FinishReason, Usage
from tests.factories_gateway import CARD, HELLO, MODEL, Answer, fail_halfway, think
from tests.factories_images import data_url

#: Takes seconds, so only the process that runs these tests imports it.
anthropic = partial(import_module, "anthropic")


@pytest.fixture
async def client(gateway):
    http = anthropic().DefaultAsyncHttpxClient(trust_env=False, verify=False)
    async with anthropic().AsyncAnthropic(
        base_url=gateway.url,
        api_key="sk-right",
        max_retries=0,
        http_client=http,
        _strict_response_validation=True,
    ) as client:
        yield client


async def test_a_message_with_system_and_an_image(client, worker):
    data = data_url().partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    image = {"type": "image", "source": source}
    content = [image, {"type": "text", "text": "what?", "cache_control": {"type": "ephemeral"}}]
    answer = await client.messages.create(
        model=MODEL,
        max_tokens=9,
        system=[{"type": "text", "text": "be short"}],
        messages=[{"role": "user", "content": content}],
        tools=[{"name": "f", "input_schema": {"type": "object"}}],
    )
    assert answer.id.startswith("msg_")
    assert answer._request_id.startswith("req_")
    assert answer.content[0].text == "Hello you"
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (5, 2)
    assert answer.usage.output_tokens == 3
    [request] = worker.requests
    assert [message.role for message in request.task.messages] == ["system", "user"]
    assert len(request.task.images) == 1
    assert request.task.sampling.max_tokens == 9
    turns = [*HELLO, answer.to_param(), {"role": "user", "content": "more"}]
    await client.messages.create(model=MODEL, max_tokens=9, messages=turns)
    roles = [message.role for message in worker.requests[1].task.messages]
    assert roles == ["user", "assistant", "user"]


async def test_a_stream_has_its_events_in_order(client, worker, gateway):
    async with client.messages.stream(model=MODEL, max_tokens=9, messages=HELLO) as stream:
        assert "".join([text async for text in stream.text_stream]) == "Hello you"
        final = await stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 3)
    body = {"model": MODEL, "max_tokens": 9, "messages": HELLO, "stream": True}
    text = (await gateway.client.post("/v1/messages", json=body)).text
    names = [line.removeprefix("event: ") for line in text.splitlines() if "event: " in line]
    assert [name for name, _ in groupby(names)] == [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",  # one event per token or several tokens joined
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


async def test_the_stop_reason_names_a_stop_sequence_or_a_limit(client, worker):
    async def script(answer: Answer) -> None:
        name = (answer.request.id, answer.claim.attempt)
        stop = answer.request.task.sampling.stop
        reason = FinishReason.STOP if stop else FinishReason.LENGTH
        await answer.start()
        await answer.say("one")
        await answer.publish_raw(Finished(*name, reason, Usage(7, 1), stopped_by="".join(stop)))

    worker.script = script
    wish = {"model": MODEL, "max_tokens": 9, "messages": HELLO}
    for stops, reason, sequence in ((["END"], "stop_sequence", "END"), ([], "max_tokens", None)):
        whole = await client.messages.create(**wish, stop_sequences=stops)
        async with client.messages.stream(**wish, stop_sequences=stops) as stream:
            streamed = await stream.get_final_message()
        for answer in (whole, streamed):
            assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)


async def test_reasoning_is_a_thinking_block_if_requested(client, worker):
    worker.script = think
    wish = {"model": MODEL, "max_tokens": 9, "messages": HELLO}
    async with client.messages.stream(**wish, thinking={"type": "adaptive"}) as stream:
        final = await stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert (final.content[0].thinking, final.content[1].text) == ("hmm well", "yes")
    final = await client.messages.create(**wish)
    assert [block.type for block in final.content] == ["text"]


@pytest.mark.parametrize("changes", [{"gateway": {"api_keys": ["sk-right"]}}])
async def test_the_key_can_be_in_the_header_of_anthropics_clients(client, gateway):
    answer = await client.messages.create(model=MODEL, max_tokens=9, messages=HELLO)
    assert answer.content[0].text == "Hello you"
    with pytest.raises(anthropic().AuthenticationError) as refused:
        await client.with_options(api_key="sk-wrong").messages.create(
            model=MODEL, max_tokens=9, messages=HELLO
        )
    assert refused.value.body["error"]["type"] == "authentication_error"
    unknown = {"model": "nobody", "max_tokens": 9, "messages": HELLO}
    for key, status in (("sk-right", 404), ("sk-wrong", 401), ("", 401)):
        for more in ({}, {"x-request-id": "mine-1"}):
            response = await gateway.client.post(
                "/v1/messages", json=unknown, headers={"x-api-key": key, **more}
            )
            assert response.status_code == status
            assert response.json()["request_id"] == response.headers["x-request-id"]


async def test_an_error_within_a_stream_names_its_request_too(client, worker):
    worker.script = fail_halfway
    with pytest.raises(anthropic().APIStatusError) as broken:
        async with client.messages.stream(model=MODEL, max_tokens=9, messages=HELLO) as stream:
            await stream.until_done()
    assert broken.value.body["type"] == "error"
    assert broken.value.body["request_id"] == broken.value.response.headers["x-request-id"]
    worker.script = methodcaller("fail", ErrorCode.WORKER_LOST)
    with pytest.raises(anthropic().InternalServerError) as refused:
        await client.messages.create(model=MODEL, max_tokens=9, messages=HELLO)
    assert refused.value.status_code == 529
    assert refused.value.body["error"]["type"] == "overloaded_error"
    assert refused.value.response.headers["retry-after"]


async def test_models_are_listed_in_anthropics_shape(client):
    [listed] = (await client.models.list(limit=1)).data
    assert (listed.id, listed.type, listed.lifecycle) == (MODEL, "model", "active")
    assert listed.max_input_tokens == CARD.max_model_len
    assert await client.models.retrieve(MODEL) == listed
    with pytest.raises(anthropic().NotFoundError, match="does not exist"):
        await client.models.retrieve("else")
