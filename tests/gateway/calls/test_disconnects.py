"""A client that leaves frees its place, whatever it was waiting for; one that does not read is let go."""

import asyncio
import contextlib

import httpx
import pytest

from shared.protocol import ErrorCode
from tests.factories_gateway import CHAT, Answer, make_body, say_nothing, talk_on


async def wait_for(condition, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def is_idle(gateway) -> bool:
    return gateway.services.admission.num_open == 0 and gateway.services.dispatcher.num_open == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [talk_on, say_nothing])
async def test_a_client_that_leaves_cancels_its_request(gateway, worker, stream, script):
    worker.script = script
    chat = asyncio.create_task(gateway.chat(make_body(stream=stream)))
    await wait_for(lambda: worker.requests)
    chat.cancel()
    async with asyncio.timeout(5):
        await worker.cancelled.wait()
    await wait_for(lambda: is_idle(gateway))
    text = (await gateway.client.get("/metrics")).text
    assert 'vlm_requests_total{model="tiny",outcome="cancelled"} 1.0' in text


async def test_a_client_that_leaves_before_any_event_cancels_its_request(gateway, worker):
    worker.script = lambda answer: asyncio.sleep(0)
    with pytest.raises(httpx.TimeoutException):
        await gateway.chat(make_body(stream=True), timeout=0.3)
    await wait_for(lambda: is_idle(gateway) and worker.requests)
    [request] = worker.requests

    async def is_cancelled() -> bool:
        state = await gateway.services.queue.state("tiny", request.id)
        return state is not None and state.state == "cancelled"

    async with asyncio.timeout(5):
        while not await is_cancelled():
            await asyncio.sleep(0.01)


async def test_a_client_that_leaves_in_the_body_is_forgotten(gateway, worker):
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b'content-length: 1000\r\n\r\n{"model"'
    )
    await writer.drain()
    await wait_for(lambda: gateway.services.admission.num_open == 1)
    writer.close()
    await writer.wait_closed()
    await wait_for(lambda: gateway.services.admission.num_open == 0)
    assert worker.answers == []


@pytest.mark.parametrize("changes", [{"gateway": {"body_timeout_s": 0.2}}])
async def test_a_body_that_does_not_come_is_not_waited_for(gateway, worker, changes):
    async def slow():
        yield b'{"model": '
        await asyncio.sleep(1)
        yield b'"tiny"}'

    response = await gateway.client.post(
        CHAT, content=slow(), headers={"content-type": "application/json"}
    )
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "timeout"


@pytest.mark.parametrize("changes", [{"gateway": {"send_timeout_s": 0.3}}])
async def test_a_client_that_does_not_read_is_let_go(gateway, worker, changes):
    async def flood(answer: Answer) -> None:
        await answer.start()
        while answer.refused is None:
            await answer.say("x" * 200_000)

    worker.script = flood
    body = httpx.Request("POST", gateway.url, json=make_body(stream=True)).content
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port, limit=1024)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    await writer.drain()
    async with asyncio.timeout(20):
        await worker.cancelled.wait()
    await wait_for(lambda: is_idle(gateway) and not gateway.server.server_state.tasks)
    text = (await gateway.client.get("/metrics")).text
    assert 'vlm_requests_total{model="tiny",outcome="cancelled"} 1.0' in text
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@pytest.mark.parametrize("changes", [{"gateway": {"send_timeout_s": 0.6}}])
async def test_a_client_that_reads_slowly_gets_its_whole_answer(gateway, worker, changes):
    """However often it is waited for, if each time it reads within its time."""

    async def flood(answer: Answer) -> None:
        await answer.start()
        for _ in range(40):
            await answer.say("x" * 200_000)
        await answer.finish()

    worker.script = flood
    num_bytes = 0
    async with gateway.client.stream("POST", CHAT, json=make_body(stream=True)) as response:
        async for data in response.aiter_raw(2_000_000):
            num_bytes += len(data)
            await asyncio.sleep(0.2)
    assert num_bytes > 40 * 200_000


async def test_one_failed_choice_ends_the_others(gateway, worker):
    async def script(answer: Answer) -> None:
        if answer.choice == 1:
            await answer.fail(ErrorCode.ENGINE_FAILURE)
        else:
            await talk_on(answer)

    worker.script = script
    response = await gateway.chat(make_body(n=3))
    assert response.status_code == 500
    await wait_for(lambda: [answer.refused for answer in worker.answers].count("cancelled") == 2)
    assert is_idle(gateway)
