"""A client that disconnects frees its slot in any state; a client that does not read is disconnected."""

import asyncio
import socket

import pytest

from shared.protocol import ErrorCode
from tests.factories_gateway import MODEL, Answer, chat_over_http, make_body, talk_on
from tests.gateway.http.test_server import connected
from tests.waiting import until


def is_idle(gateway) -> bool:
    services = gateway.services
    return services.admission.num_open == 0 and not services.dispatcher.has_open(MODEL)


async def test_a_client_that_disconnects_within_the_body_frees_its_slot(gateway, worker):
    async with connected(gateway) as (_, writer):
        writer.write(chat_over_http()[:-9])
        await until(lambda: gateway.services.admission.num_open == 1)
    await until(lambda: gateway.services.admission.num_open == 0)
    assert worker.answers == []


@pytest.mark.parametrize("changes", [{"gateway": {"send_timeout_s": 0.3}}])
async def test_a_client_that_does_not_read_is_disconnected(gateway, worker, changes):
    async def flood(answer: Answer) -> None:
        await answer.start()
        while answer.refused is None:
            await answer.say("x" * 200_000)

    worker.script = flood
    async with connected(gateway) as (_, writer):
        writer.write(chat_over_http(stream=True))
        await until(worker.cancelled.is_set)
        await until(lambda: is_idle(gateway) and not gateway.server.server_state.tasks)
        text = (await gateway.client.get("/metrics")).text
        assert 'vlm_requests_total{model="tiny",outcome="cancelled"} 1.0' in text


async def test_one_failed_choice_ends_the_others(gateway, worker):
    async def script(answer: Answer) -> None:
        if answer.choice == 1:
            await answer.fail(ErrorCode.ENGINE_FAILURE)
        else:
            await talk_on(answer)

    worker.script = script
    response = await gateway.chat(make_body(n=3))
    assert response.status_code == 500
    await until(lambda: [answer.refused for answer in worker.answers].count("cancelled") == 2)
    assert is_idle(gateway)


@pytest.mark.parametrize("changes", [{"gateway": {"send_timeout_s": 1.0}}])
async def test_a_client_that_reads_slowly_gets_its_whole_answer(gateway, worker, changes):
    """The limit applies to each pause, not to their sum."""
    piece, num_pieces, pause_s = "~" * 60_000, 12, 0.15
    wanted = asyncio.Semaphore(0)

    async def script(answer: Answer) -> None:
        await answer.start()
        for _ in range(num_pieces):
            await wanted.acquire()
            await answer.say(piece)
        await answer.finish()

    worker.script = script
    gateway.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    with socket.socket() as client:  # small socket buffers make the gateway wait after each piece
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", gateway.server.port))
        await loop.sock_sendall(client, chat_over_http(stream=True))
        num_read, data = 0, b""
        for number in range(1, num_pieces + 1):
            wanted.release()
            await asyncio.sleep(pause_s)
            while num_read < number * len(piece):
                data = await loop.sock_recv(client, 65536)
                assert data, "hung up"
                num_read += data.count(b"~")
        async with asyncio.timeout(10):
            while b"[DONE]" not in data:
                data = data[-8:] + await loop.sock_recv(client, 65536)
