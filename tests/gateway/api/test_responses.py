"""`/v1/responses` with OpenAI's client: complete responses, streams, images, and refusals."""

import asyncio
from functools import partial
from itertools import groupby

import openai
import pytest
from msgspec.structs import replace

from gateway.api.responses import ResponseAnswer, ResponseObject, ResponseOptions
from gateway.calls.surface import AnswerHead
from shared.protocol import CallPiece, FinishReason, TextPart, Tokenize, Tokenized, Tokens, ToolCall
from tests.factories_gateway import CARD, MODEL, Answer, fail_halfway, openai_client, says, think
from tests.factories_images import data_url

CONTENT = [
    {"type": "input_text", "text": "what is it?"},
    {"type": "input_image", "image_url": data_url(), "detail": "auto"},
]
ITEMS = [{"role": "user", "content": CONTENT}]


@pytest.fixture
async def client(gateway):
    async with openai_client(gateway, is_strict=True) as client:
        yield client


async def test_input_and_instructions_become_a_conversation(client, worker):
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
    said = [(m.role, m.parts[0].text) for m in request.task.messages]
    assert said == [("system", "be short"), ("user", "hello")]
    assert (request.task.sampling.max_tokens, request.task.sampling.temperature) == (9, 0)


async def test_a_stream_has_its_events_in_order(client, worker):
    events = [e async for e in await client.responses.create(model=MODEL, input="hi", stream=True)]
    # Consecutive deltas count as one, because tokens can be joined.
    assert [kind.removeprefix("response.") for kind, _ in groupby(e.type for e in events)] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers))  # numbers of joined tokens are skipped
    assert [e.text for e in events if e.type == "response.output_text.done"] == ["Hello you"]
    assert events[-1].response.usage.total_tokens == 10
    async with client.responses.stream(model=MODEL, input="hi") as stream:
        final = await stream.get_final_response()  # the client accumulates the events
    assert final.output_text == "Hello you"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_truncated_response_is_incomplete(client, worker, stream):
    worker.script = says("half", reason=FinishReason.LENGTH)
    answer = await client.responses.create(model=MODEL, input="hi", stream=stream)
    if stream:
        last = [event async for event in answer][-1]
        assert last.type == "response.incomplete"
        answer = last.response
    assert (answer.status, answer.output[0].status) == ("incomplete", "incomplete")
    assert answer.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_an_item_before_the_message(client, worker, stream):
    worker.script = think
    answer = await client.responses.create(model=MODEL, input="hi", stream=stream)
    if stream:
        events = [event async for event in answer]
        deltas = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == "hmm well"
        assert [e.output_index for e in events if e.type == "response.output_item.added"] == [0, 1]
        answer = events[-1].response
    thought, message = answer.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hmm well")
    assert message.content[0].text == "yes"


def test_sequence_numbers_do_not_depend_on_joined_tokens():
    both, call = {"reasoning": "b", "text": "c"}, {"text": "d", "calls": (CallPiece(0, "f", "{"),)}
    pieces = ({"reasoning": "a"}, both, call, {"text": "e"})
    tokens = [(0, Tokens("r", 0, n, (n,), **piece)) for n, piece in enumerate(pieces)]

    def frames(num_joined):
        options = ResponseOptions(response=ResponseObject())
        answer = ResponseAnswer(options, AnswerHead("resp_0", 0, "m"))
        begun = answer.frames(tokens[:num_joined], None)
        return begun + [f for each in tokens[num_joined:] for f in answer.frames([each], None)]

    for num_joined in range(4):
        assert frames(num_joined)[-1] == frames(1)[-1]  # including its sequence numbers


async def test_a_failed_stream_ends_with_response_failed(client, worker):
    worker.script = fail_halfway
    events = [e async for e in await client.responses.create(model=MODEL, input="hi", stream=True)]
    failed, error = events[-2:]
    assert error.sequence_number == failed.sequence_number + 1
    assert (failed.type, failed.response.status) == ("response.failed", "failed")
    assert (error.type, error.code) == ("error", "engine_failure")


@pytest.mark.parametrize("card", [replace(CARD, tasks=("generate", "tokenize"))])
async def test_the_tokens_of_an_input_are_counted(client, worker):
    async def script(answer: Answer) -> None:
        made = Tokenized(answer.request.id, answer.claim.attempt, 41)
        await answer.publish(made, answer.finished())

    worker.script = script
    told = await client.responses.input_tokens.count(model=MODEL, input=ITEMS)
    assert told.input_tokens == 41
    [request] = worker.requests
    assert isinstance(request.task, Tokenize)
    assert not request.task.with_ids
    assert len(request.task.images) == 1


# Stored responses


@pytest.mark.parametrize("card", [replace(CARD, supports_grammars=True)])
async def test_a_request_continues_a_stored_tool_call_with_its_output(client, worker):
    async def script(answer: Answer) -> None:
        await answer.start()
        [event] = answer.deltas("")
        call = (CallPiece(0, "look"), CallPiece(0, "", "{}"))
        await answer.publish(replace(event, calls=call))
        await answer.finish(reason=FinishReason.TOOL_CALLS)

    worker.script = script
    tool = {"type": "function", "name": "look", "parameters": None, "strict": None}
    ask = partial(client.responses.create, model=MODEL, tools=[tool])
    first = await ask(input="hello")
    [call] = first.output
    assert (call.type, call.name, call.arguments) == ("function_call", "look", "{}")
    assert first.tools[0].name == "look"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    again = await ask(input=[result], previous_response_id=first.id)
    _, called, told = worker.requests[1].task.messages
    assert called.tool_calls == (ToolCall(call.call_id, "look", "{}"),)
    assert (told.role, told.tool_call_id, told.parts) == ("tool", call.call_id, (TextPart("rain"),))
    page = await client.responses.input_items.list(again.id, order="asc")
    kinds = [item.type for item in page.data]
    assert kinds == ["message", "function_call", "function_call_output"]


async def test_a_request_continues_a_stored_response_with_its_image(client, worker):
    ask = partial(client.responses.create, model=MODEL)
    begun = {"role": "assistant", "content": "Well. "}  # the model continues this message
    first = await ask(input=[*ITEMS, begun], instructions="be short")
    again = await ask(input="and now?", previous_response_id=first.id)
    assert again.previous_response_id == first.id
    third = await ask(input="and then?", previous_response_id=again.id, stream=True)
    assert [event async for event in third][-1].response.output_text == "Hello you"
    tasks = [request.task for request in worker.requests]
    said = [[(m.role, len(m.parts)) for m in task.messages] for task in tasks]
    assert said[1] == [("user", 2), ("assistant", 1), ("user", 1)]
    assert said[2] == [*said[1], ("assistant", 1), ("user", 1)]
    assert tasks[2].messages[1].parts == (TextPart("Well. Hello you"),)
    assert [task.images[0].sha256 for task in tasks] == [tasks[0].images[0].sha256] * 3
    assert await worker.blobs.get(tasks[2].images[0]) is not None
    with pytest.raises(openai.NotFoundError) as refused:
        await ask(input="x", previous_response_id="resp_none")
    assert refused.value.param == "previous_response_id"


async def test_a_stored_response_is_retrieved_listed_and_deleted(client, worker):
    key = {"idempotency-key": "once"}
    ask = partial(client.responses.create, model=MODEL, input=ITEMS, extra_headers=key)
    made = await ask()
    assert (await client.responses.retrieve(made.id)).output_text == "Hello you"
    page = await client.responses.input_items.list(made.id, order="asc")
    assert [part.type for part in page.data[0].content] == ["input_text", "input_image"]
    for field in ("after", "before", "include[]"):  # an unknown ID is refused as a cursor
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.input_items.list(made.id, extra_query={field: "none"})
        assert refused.value.param == field
    for query, named in ({"stream": True}, "send false"), ({"starting_after": 3}, "starting_after"):
        with pytest.raises(openai.BadRequestError, match=named):
            await client.responses.retrieve(made.id, extra_query=query)
    await client.responses.delete(made.id)
    assert (await ask()).id == made.id  # the retry does not store the response again
    for gone in (client.responses.retrieve(made.id), client.responses.delete(made.id)):
        with pytest.raises(openai.NotFoundError):
            await gone


async def test_a_response_completed_by_another_reader_is_stored_with_its_images(
    gateway, worker, client
):
    go_on = asyncio.Event()
    worker.script = says("lo", begins="Hel", after=go_on)
    body = {"model": MODEL, "input": ITEMS, "stream": True}
    headers = {"x-vlm-resumable": "true"}
    async with gateway.client.stream("POST", "/v1/responses", json=body, headers=headers) as cut:
        async for text in cut.aiter_text():
            if "Hel" in text:
                break
    go_on.set()
    path = cut.headers["x-vlm-stream"]
    assert "response.completed" in (await gateway.client.get(path)).text
    response_id = path.rpartition("/")[2]
    assert (await client.responses.retrieve(response_id)).output_text == "Hello"
    await client.responses.create(model=MODEL, input="x", previous_response_id=response_id)
    first, second = ([image.sha256 for image in call.task.images] for call in worker.requests)
    assert second == first != []


@pytest.mark.parametrize(
    "changes", [{"gateway": {"api_keys": ["sk-a", "sk-b"]}, "limits": {"max_key_responses": 2}}]
)
async def test_the_oldest_responses_are_evicted_and_other_keys_see_none(client, worker):
    mine, theirs = (client.with_options(api_key=key) for key in ("sk-a", "sk-b"))
    made = [await mine.responses.create(model=MODEL, input="hello") for _ in range(3)]
    forgotten = await mine.responses.create(model=MODEL, input="hello", store=False)
    assert not forgotten.store
    for gone in (
        mine.responses.retrieve(made[0].id),
        mine.responses.retrieve(forgotten.id),
        theirs.responses.retrieve(made[1].id),
        theirs.responses.create(model=MODEL, input="x", previous_response_id=made[1].id),
    ):
        with pytest.raises(openai.NotFoundError):
            await gone
    for each in made[1:]:
        assert (await mine.responses.retrieve(each.id)).id == each.id
