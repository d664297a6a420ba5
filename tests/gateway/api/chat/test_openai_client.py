"""The official client works unchanged: with images, and its errors."""

import asyncio

import openai
import pytest

from shared.protocol import ErrorCode
from tests.factories_gateway import HELLO, MODEL, Answer
from tests.factories_images import data_url

IMAGE = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "what is it?"},
            {"type": "image_url", "image_url": {"url": data_url(), "detail": "high"}},
        ],
    }
]


async def test_an_answer_about_an_image_and_the_turn_after_it(client, worker):
    answer = await client.chat.completions.create(model=MODEL, messages=IMAGE)
    echoed = answer.choices[0].message.model_dump()
    again = [*IMAGE, echoed, {"role": "user", "content": "and now?"}]
    await client.chat.completions.create(model=MODEL, messages=again)
    assert [len(request.task.images) for request in worker.requests] == [1, 1]
    assert [message.role for message in worker.requests[1].task.messages] == [
        "user",
        "assistant",
        "user",
    ]


async def test_errors_become_the_clients_own(client, worker):
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="nobody", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=MODEL, messages=HELLO, n=1000)
    assert (bad.value.param, bad.value.type) == ("n", "invalid_request_error")
    assert bad.value.request_id


async def test_an_error_in_mid_stream_is_raised(client, worker):
    async def script(answer: Answer) -> None:
        await answer.start()
        await answer.say("half")
        await has_read.wait()
        await answer.fail(ErrorCode.WORKER_LOST, "The worker was lost.")

    has_read = asyncio.Event()
    worker.script = script
    stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    texts: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content or "")
            if texts[-1]:
                has_read.set()

    with pytest.raises(openai.APIError, match=r"The worker was lost\."):
        await read()
    assert "".join(texts) == "half"
