"""`/v1/responses` with OpenAI's client: whole, streamed, images, and what is refused."""

import openai
import pytest
from msgspec.structs import replace

from shared.protocol import (
    ErrorCode,
    FinishReason,
    ImagePart,
    TextPart,
    Tokenize,
    Tokenized,
    Tokens,
)
from tests.factories_gateway import CARD, MODEL, Answer
from tests.factories_images import data_url

ITEMS = [
    {
        "role": "user",
        "content": [
            {"type": "input_text", "text": "what is it?"},
            {"type": "input_image", "image_url": data_url(), "detail": "auto"},
        ],
    }
]


@pytest.fixture
async def client(gateway):
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=http,
        _strict_response_validation=True,
    ) as client:
        yield client


async def test_a_text_and_instructions_make_a_conversation(client, worker):
    answer = await client.responses.create(
        model=MODEL, input="hello", instructions="be short", max_output_tokens=9, temperature=0
    )
    assert answer.id.startswith("resp_")
    assert (answer.status, answer.output_text) == ("completed", "Hello you")
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (7, 3)
    assert answer.usage.input_tokens_details.cached_tokens == 2
    assert (answer.instructions, answer.max_output_tokens) == ("be short", 9)
    [request] = worker.requests
    assert [(m.role, m.parts[0].text) for m in request.task.messages] == [
        ("system", "be short"),
        ("user", "hello"),
    ]
    assert (request.task.sampling.max_tokens, request.task.sampling.temperature) == (9, 0)


async def test_items_hold_images_and_the_answer_before(client, worker):
    answer = await client.responses.create(model=MODEL, input=ITEMS)
    turn = answer.output[0].model_dump()
    again = [*ITEMS, turn, {"role": "user", "content": "and now?"}]
    await client.responses.create(model=MODEL, input=again)
    task = worker.requests[1].task
    assert [message.role for message in task.messages] == ["user", "assistant", "user"]
    assert task.messages[0].parts == (TextPart("what is it?"), ImagePart(0))
    assert task.messages[1].parts == (TextPart("Hello you"),)
    assert len(task.images) == 1


async def test_a_stream_has_its_events_in_order(client, worker):
    events = [e async for e in await client.responses.create(model=MODEL, input="hi", stream=True)]
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events[4:7]) == "Hello you"
    assert events[7].text == "Hello you"
    assert events[-1].response.output_text == "Hello you"
    assert events[-1].response.usage.total_tokens == 10


async def test_the_clients_helper_accumulates_a_stream(client, worker):
    async with client.responses.stream(model=MODEL, input="hi") as stream:
        final = await stream.get_final_response()
    assert final.output_text == "Hello you"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_was_cut_is_incomplete(client, worker, stream):
    async def script(answer: Answer) -> None:
        await answer.start()
        await answer.finish("half", reason=FinishReason.LENGTH)

    worker.script = script
    answer = await client.responses.create(model=MODEL, input="hi", stream=stream)
    if stream:
        last = [event async for event in answer][-1]
        assert last.type == "response.incomplete"
        answer = last.response
    assert (answer.status, answer.output[0].status) == ("incomplete", "incomplete")
    assert answer.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_model_thinks_is_an_item_before_the_message(client, worker, stream):
    async def script(answer: Answer) -> None:
        name = (answer.request.id, answer.claim.attempt)
        await answer.start()
        await answer.publish(Tokens(*name, 0, (1,), reasoning="hmm"))
        await answer.publish(Tokens(*name, 1, (2,), reasoning=" well"))
        await answer.finish("yes")

    worker.script = script
    answer = await client.responses.create(model=MODEL, input="hi", stream=stream)
    if stream:
        events = [event async for event in answer]
        deltas = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == "hmm well"
        assert [e.output_index for e in events if e.type == "response.output_item.added"] == [0, 1]
        numbers = [event.sequence_number for event in events]
        assert numbers == sorted(set(numbers))
        answer = events[-1].response
    thought, message = answer.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hmm well")
    assert message.content[0].text == "yes"


async def test_a_failure_in_a_stream_says_how_the_response_failed(client, worker):
    async def fail(answer: Answer) -> None:
        await answer.start()
        await answer.say("half")
        await answer.fail(ErrorCode.ENGINE_FAILURE)

    worker.script = fail
    events = [e async for e in await client.responses.create(model=MODEL, input="hi", stream=True)]
    failed, error = events[-2:]
    assert (failed.type, failed.response.status) == ("response.failed", "failed")
    assert (error.type, error.code) == ("error", "engine_failure")


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"input": []}, "input"),
        ({"input": [{"content": "who?"}]}, "input.[0].role"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.[0].type"),
        ({"input": [{"role": "assistant", "content": "so"}]}, "input"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(gateway, worker, wish, param):
    body = {"model": MODEL, "input": "hello", **wish}
    response = await gateway.client.post("/v1/responses", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert worker.requests == []


@pytest.mark.parametrize("card", [replace(CARD, tasks=("generate", "tokenize"))])
async def test_the_tokens_of_an_input_are_counted(client, worker):
    async def script(answer: Answer) -> None:
        made = Tokenized(answer.request.id, answer.claim.attempt, 41, 36)
        await answer.publish(made, answer.finished())

    worker.script = script
    told = await client.responses.input_tokens.count(model=MODEL, input=ITEMS)
    assert told.input_tokens == 41
    [request] = worker.requests
    assert isinstance(request.task, Tokenize)
    assert not request.task.with_ids
    assert len(request.task.images) == 1
