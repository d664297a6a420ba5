"""The HTTP server: bounds on headers, probes, drain, overload, Redis outages, and the list of models."""

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import socket
import time
from collections.abc import AsyncIterator
from itertools import product

import pytest
from msgspec.structs import replace

from gateway.main import raise_file_limit
from shared.protocol import AdapterCard, ModelCard, SamplingDefaults
from shared.queue.registry import WorkerRecord
from tests.factories_gateway import (
    CARD,
    CHAT,
    CHAT_HEAD,
    MODEL,
    chat_over_http,
    make_body,
    make_settings,
    openai_client,
    run_gateway_on_socket,
    says,
)
from tests.factories_images import data_url, image_part
from tests.factories_keys import code
from tests.gateway.api.chat.test_streams import read_events
from tests.rounds import in_one_round
from tests.waiting import until


@contextlib.asynccontextmanager
async def connected(gateway):
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port, limit=1024)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def talk(gateway, *pieces: bytes) -> bytes:
    """Sends raw bytes; returns all bytes received until the server closes the connection."""
    async with connected(gateway) as (reader, writer), asyncio.timeout(10):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await reader.read()


JSON_TYPE = {"content-type": "application/json"}
CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
)
START = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"


async def test_invalid_http_is_refused_and_the_connection_closed(gateway):
    for pieces in (
        (START, b"a: " + b"b" * 40_000, b"\r\n\r\n"),
        (START + b"a: " + b"b" * 40_000 + b"\r\n\r\n",),
        (START + b"".join(b"h%d: x\r\n" % i for i in range(200)) + b"\r\n",),
        (b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\n\r\n",),
        (b"nonsense\r\n\r\n",),
        (b"GET / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",),
        (b"POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",),
        (b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",),
        (b"POST / HTTP/1.1\r\ntransfer-encoding : chunked\r\n\r\n",),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\n folded\r\n\r\n",),
        (b"GET /healthz HTTP/2.0\r\nhost: localhost\r\n\r\n",),
        (b"GET /healthz HTTP/0.9\r\n\r\n",),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n",),
        (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",),
        (CHUNKED, b"0\r\n" + b"a: b\r\n" * 200),
        (CHUNKED, b"0\r\n", *[b"a: " + b"b" * 9000 + b"\r\n"] * 5),
    ):  # fmt: skip
        answer = await talk(gateway, *pieces)
        assert answer.startswith(b"HTTP/1.1 400 "), (pieces[0][:99], answer)
        assert b'"code":"invalid_http"' in answer


async def test_endless_trailers_close_the_connection(gateway):
    starts = (b"0\r\n", b"0\r\na: ", b"1;")  # many trailers, a long one, and a chunk extension
    for path, start in product((b"/healthz", CHAT.encode()), starts):
        async with connected(gateway) as (reader, writer):
            writer.write(CHUNKED.replace(CHAT.encode(), path) + start)
            piece = (b"a: b\r\n" if start == b"0\r\n" else b"bbbbbb") * 10_000
            with pytest.raises(ConnectionError):  # noqa: PT012
                for _ in range(100):
                    writer.write(piece)
                    await writer.drain()
        assert reader.at_eof() or reader.exception()


@pytest.mark.parametrize("changes", [{"gateway": {"api_keys": ("sk-one",)}}])
async def test_a_trailer_is_not_used_as_a_header(gateway, worker, changes):
    body = json.dumps(make_body()).encode()
    trailers = b"authorization: Bearer sk-one\r\nx-request-id: trailer\r\n"
    chunks = b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailers)
    answer = await talk(gateway, CHUNKED + chunks)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"x-request-id: trailer" not in answer
    with_key = CHUNKED.replace(
        b"host: localhost", b"host: localhost\r\nauthorization: Bearer sk-one"
    )
    answer = await talk(gateway, with_key + chunks)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"x-request-id: trailer" not in answer


POST = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 9\r\n%b\r\n%b"


@pytest.mark.parametrize("changes", [{"gateway": {"header_timeout_s": 0.2, "body_timeout_s": 0.2}}])
async def test_headers_and_bodies_that_do_not_arrive_time_out(gateway, changes):
    assert await talk(gateway) == b""
    assert await talk(gateway, START) == b""
    kinds = product((b"", b"expect: 100-continue\r\n"), (b"", b"{"))
    requests = [POST % (CHAT.encode(), header, sent) for header, sent in kinds]
    unread = talk(gateway, POST % (b"/nowhere", b"", b"{"))
    *answers, unread = await asyncio.gather(*(talk(gateway, each) for each in requests), unread)
    for answer in answers:
        answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 408 "), answer
        assert b'"code":"timeout"' in answer
    assert unread.startswith(b"HTTP/1.1 404 "), unread


@pytest.mark.parametrize("changes", [{"gateway": {"send_timeout_s": 0.2}}])
async def test_a_client_that_reads_no_response_is_disconnected(gateway, changes):
    requests = [
        b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % path * 400
        for path in (b"/metrics", b"/page/style.css", b"/v1/models", b"/nowhere")
    ]
    last = b"GET /page/main.js HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    for request in (*requests, last):
        with asks_without_reading(gateway, request):
            await until(lambda: gateway.server.server_state.connections)
            await until(lambda: not gateway.server.server_state.connections)
            await until(lambda: not gateway.server.server_state.tasks)


@contextlib.contextmanager
def asks_without_reading(gateway, requests: bytes):
    """A client that sends requests and reads no responses; the socket buffers hold only a few bytes."""
    gateway.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        client.connect(("127.0.0.1", gateway.server.port))
        client.settimeout(5)
        client.sendall(requests)
        yield


@pytest.mark.parametrize("num_left", [0, 4])
async def test_connections_to_the_last_file_descriptors_are_refused_and_counted(
    gateway, worker, monkeypatch, caplog, num_left
):
    """Some descriptors are reserved for Redis, so that existing connections are served."""
    assert (await gateway.client.get("/healthz")).status_code == 200  # this connection stays open
    next_file = os.dup(0)
    os.close(next_file)
    limit = next_file + num_left
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    for _ in range(3):
        with contextlib.suppress(ConnectionError):
            assert await talk(gateway, START + b"\r\n") == b""
    assert (await gateway.chat()).status_code == 200
    text = (await gateway.client.get("/metrics")).text
    assert 'vlm_admission_rejections_total{reason="connections"} 3.0' in text
    assert [record.name for record in caplog.records].count("gateway.http.server") == 1


def test_a_gateway_raises_its_file_limit_and_warns_if_it_is_too_low(monkeypatch, caplog):
    set_limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 200))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_limits.append(limits))
    for num_needed in (200, 201):
        raise_file_limit(num_needed)
    assert set_limits == [(200, 200)] * 2
    assert [record.args for record in caplog.records] == [(200, 201)]


async def test_http_1_0_gets_its_answer_without_chunks_and_a_closed_connection(gateway, worker):
    """This includes clients that ask for keep-alive, because only the end of the connection ends a stream."""
    old, said = b" HTTP/1.0\r\nconnection: keep-alive\r\n", []
    for stream in (False, True):
        request = chat_over_http(stream=stream)
        answer = await talk(gateway, request.replace(b" HTTP/1.1\r\n", old, 1))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b" 200 OK" in head
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        said.append(body)
    assert json.loads(said[0])["choices"][0]["message"]["content"] == "Hello you"
    assert said[1].startswith(b"data: {")
    assert said[1].endswith(b"data: [DONE]\n\n")


async def test_a_large_request_is_answered_if_its_last_packet_has_the_next_one(gateway):
    first = chat_over_http(content="x" * 60_000)
    second = START + b"\r\n"
    async with connected(gateway) as (reader, writer):
        writer.write(first + second[:40])
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.write(second[40:])
        assert b"HTTP/1.1 200 OK" in await reader.read()


@in_one_round
async def test_colliding_token_ids_do_not_block_the_event_loop(gateway):
    """Multiples of 2**61 - 1 have the same hash as Python integers, so a dict of them fills in quadratic time."""
    bias = ",".join(f'"{i * (2**61 - 1)}":1' for i in range(19_900)).join("{}")
    body = json.dumps(make_body(logit_bias="?")).replace('"?"', bias).encode()
    hostile = asyncio.ensure_future(gateway.client.post(CHAT, content=body, headers=JSON_TYPE))
    longest_s = 0.0
    while not hostile.done():
        began_at = time.perf_counter()
        assert (await gateway.client.get("/healthz")).status_code == 200
        longest_s = max(longest_s, time.perf_counter() - began_at)
    assert (await hostile).json()["error"]["param"] == "logit_bias"
    assert longest_s < 5.0  # 8 to 10 s if the keys are converted to integers first


async def test_a_body_of_too_many_values_is_refused_before_it_ends(gateway):
    limit = gateway.services.settings.limits.max_commas
    start = b'{"tools":[' + b"1.5," * (limit + 1)
    head = b"POST %b HTTP/1.1\r\nconnection: close\r\n%b31000000\r\n\r\n" % (
        CHAT.encode(),
        CHAT_HEAD,
    )
    answer = await talk(gateway, head, start)
    assert answer.startswith(b"HTTP/1.1 413 "), answer
    assert b'"code":"request_too_large"' in answer


async def test_a_gateway_without_workers_is_ready_unless_the_probe_asks_for_workers(fleet):
    async with fleet.gateway() as gateway:
        assert (await gateway.client.get("/healthz")).json() == {"status": "ok"}
        for path in ("/readyz", "/health"):
            assert (await gateway.client.get(path)).json() == {"status": "ready"}
        strict = "/readyz?workers=1"
        response = await gateway.client.get(strict)
        assert (response.status_code, response.json()) == (503, {"status": "no worker"})
        assert (await gateway.client.get("/readyz?workers=x")).status_code == 400
        async with fleet.worker():
            await gateway.services.models.refresh()
            assert (await gateway.client.get(strict)).status_code == 200
            assert (await gateway.client.get("/readyz?workers=2")).status_code == 503
            metrics = (await gateway.client.get("/metrics")).text
        assert 'vlm_ready_workers{model="tiny"} 1.0' in metrics


async def test_models_are_listed_and_shown_as_their_workers_describe_them(fleet):
    card = replace(
        CARD, supports_images=False, sampling=SamplingDefaults(0.6, top_k=20), dtype="bfloat16",
        quantization="gptq", format="safetensors", adapters=(AdapterCard("poet", "0a"),),
    )  # fmt: skip
    expected = {
        "id": "tiny", "object": "model", "created": 1_700_000_000, "owned_by": "vlm-fleet", "max_model_len": 512,
        "supports_images": False, "num_workers": 1, "tasks": ["generate"], "input_modalities": ["text"],
        "output_modalities": ["text"], "limits": {"max_output_tokens": 511, "max_text_chars": 200_000},
        "reasoning": False, "supports_grammars": False, "template_options": [], "adapters": ["tiny:poet"],
        "default_sampling": {"temperature": 0.6, "top_k": 20}, "dtype": "bfloat16", "quantization": "gptq",
        "format": "safetensors", "parent": None, "root": "tiny",
    }  # fmt: skip
    async with (
        fleet.worker(card) as worker,
        fleet.gateway() as gateway,
        openai_client(gateway) as client,
    ):
        listed, adapter = (await client.models.list()).data
        assert listed.model_dump(exclude_unset=True) == expected
        assert await client.models.retrieve("tiny") == listed
        found = {"id": "tiny:poet", "parent": "tiny", "root": "tiny"}
        assert adapter.model_dump().items() >= found.items()
        await worker.registry.announce(WorkerRecord("scripted", CARD, "mock"), ttl_s=60)
        await gateway.services.models.refresh()
        shown = (await client.models.retrieve("tiny")).model_dump()
    assert shown["input_modalities"] == ["text", "image"]
    assert shown["limits"] == expected["limits"] | {
        "max_images": 8, "max_image_bytes": 16 * 1024 * 1024, "max_image_pixels": 32_000_000,
    }  # fmt: skip


async def test_requests_carry_the_smallest_pixel_limit_of_the_models_workers(fleet):
    large = replace(CARD, max_image_pixels=5000, image_tokens=50, supports_video=True)
    small = replace(CARD, created_at=CARD.created_at - 1, max_image_pixels=1000, image_tokens=10)
    async with fleet.worker(large) as worker, fleet.gateway() as gateway:
        await worker.registry.announce(WorkerRecord("second", small, "mock"), ttl_s=60)
        models = gateway.services.models
        await until(lambda: models.cards["tiny"].max_image_pixels == 1000)
        limits = (await gateway.client.get("/v1/models/tiny")).json()["limits"]
        assert (limits["scaled_image_pixels"], limits["max_image_tokens"]) == (1000, 10)
        response = await gateway.chat(make_body([image_part(data_url(1))]))
        assert response.status_code == 200, response.text
        [request] = worker.requests
        assert [image.max_pixels for image in request.task.images] == [1000]
        part = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
        refused = await gateway.chat(make_body([part]))  # too large for one of the two
        assert refused.json()["error"]["code"] == "unsupported_image"


async def test_models_with_a_worker_are_listed_first_and_newest_first(fleet):
    now = CARD.created_at
    gone, old, new = (
        ModelCard(name, created_at, 512, 1000)
        for name, created_at in (("a-gone", now + 9), ("org/b-old", now), ("c-new", now + 1))
    )
    async with fleet.worker(gone) as worker:
        await worker.registry.withdraw("scripted")
    async with fleet.worker(old) as worker:
        await worker.registry.announce(WorkerRecord("second", new, "mock"), ttl_s=60)
        async with fleet.gateway() as gateway:
            listing = (await gateway.client.get("/v1/models")).json()["data"]
            assert (await gateway.client.get("/v1/models/org/b-old")).json() == listing[1]
            assert (await gateway.chat(make_body(model="org/b-old"))).status_code == 200
    found = [(model["id"], model["num_workers"]) for model in listing]
    assert found == [("c-new", 1), ("org/b-old", 1), ("a-gone", 0)]


@pytest.mark.parametrize(
    "changes", [{"limits": {"max_open_body_bytes": 100_000, "max_open_requests": 2}}]
)
async def test_requests_and_bodies_beyond_the_limits_are_refused(gateway, worker, changes):
    go_on = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        body = json.dumps(make_body("x" * 90_000)).encode()
        yield body[:-1]
        await go_on.wait()
        yield body[-1:]

    worker.script = says("Hello you", after=go_on)
    headers = {"content-type": "application/json"}
    first = asyncio.ensure_future(gateway.client.post(CHAT, content=slow(), headers=headers))
    await until(lambda: gateway.services.admission.num_body_bytes > 90_000)
    too_large = await gateway.chat(make_body("x" * 20_000))
    second = asyncio.ensure_future(gateway.chat())
    await until(lambda: worker.answers)
    too_many = await gateway.chat()
    for refused in (too_large, too_many):
        assert code(refused)[:2] == (503, "server_overloaded")
        assert 1 <= int(refused.headers["retry-after"]) <= 30
    go_on.set()
    assert [(await request).status_code for request in (first, second)] == [200, 200]
    assert (await gateway.chat(make_body("x" * 150_000))).status_code == 200  # alone, it passes
    assert gateway.services.admission.num_body_bytes == 0
    text = (await gateway.client.get("/metrics")).text
    for reason in ("body_bytes", "open_requests"):
        assert f'vlm_admission_rejections_total{{reason="{reason}"}} 1.0' in text
    assert 'vlm_requests_total{model="other",outcome="rejected"} 2.0' in text


async def test_a_full_queue_refuses_requests_and_serves_the_accepted_ones(fleet):
    async with fleet.worker():
        pass  # the model is known now and has no worker
    async with fleet.gateway(limits={"max_queue_depth": 2}) as gateway:
        accepted = asyncio.ensure_future(gateway.chat())
        await until(lambda: gateway.services.dispatcher.has_open(MODEL))
        response = await gateway.chat(make_body(n=2))
        assert code(response)[:2] == (503, "server_overloaded")
        assert response.headers["retry-after"]
        text = (await gateway.client.get("/metrics")).text
        assert 'vlm_admission_rejections_total{reason="queue_full"} 1.0' in text
        [age] = re.findall(r'vlm_queue_age_seconds\{model="tiny"\} (\S+)', text)
        assert 0 < float(age) < 20
        async with fleet.worker():
            assert (await accepted).status_code == 200


async def test_an_outage_of_redis_is_reported_quickly(redis_prefix):
    settings = make_settings("unix:///nonexistent/redis.sock", redis_prefix)
    async with run_gateway_on_socket(settings, refresh=False) as gateway:
        async with asyncio.timeout(8):
            response = await gateway.chat()
        assert code(response)[:2] == (503, "service_unavailable")
        assert response.headers["retry-after"] == "1"
        assert (await gateway.client.get("/readyz")).json() == {"status": "no redis"}
        assert (await gateway.client.get("/healthz")).status_code == 200


async def open_and_stop(gateway, worker, script) -> asyncio.Future[str]:
    """Opens a stream and signals the gateway to stop."""
    worker.script = script
    open_request = asyncio.ensure_future(gateway.stream())
    await until(lambda: len(worker.answers) == 1)
    gateway.server.handle_exit(signal.SIGTERM, None)
    return open_request


async def test_open_requests_are_finished_before_the_end(gateway, worker):
    go_on = asyncio.Event()
    open_request = await open_and_stop(gateway, worker, says("done", after=go_on))
    assert (await gateway.client.get("/readyz")).json() == {"status": "draining"}
    refused = await gateway.chat()
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    go_on.set()
    *_, done = read_events(await open_request)
    assert done == "[DONE]"
    await until(lambda: gateway.server.should_exit)


@pytest.mark.parametrize("changes", [{"gateway": {"drain_s": 0.2}}])
async def test_requests_that_outlast_the_drain_end_with_an_error(gateway, worker, changes):
    script = says(begins="half", after=asyncio.Event())
    *_, last = read_events(await (await open_and_stop(gateway, worker, script)))
    assert last["error"]["code"] == "cancelled"
