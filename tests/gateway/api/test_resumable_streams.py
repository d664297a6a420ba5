"""Resumable streams: any gateway continues them, with each event once and in order, for the same tenant only."""

import asyncio
import json
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from unittest.mock import AsyncMock

import httpx
import msgspec
import pytest

from gateway.calls import resume
from gateway.calls.resume import StreamRecord
from shared.blobs.api import BlobsUnavailable
from shared.protocol import ErrorCode, encode
from shared.queue.api import QueueUnavailable
from shared.queue.gateway import RedisGatewayQueue
from shared.queue.keys import RedisKeys
from tests.factories_gateway import (
    CHAT,
    MODEL,
    Answer,
    make_body,
    make_settings,
    run_gateway_on_socket,
    say_hello,
)
from tests.factories_images import data_url, image_part
from tests.factories_keys import code
from tests.faults.proxy import run_proxy
from tests.rounds import in_one_round
from tests.waiting import until

RESUMABLE = {"x-vlm-resumable": "true"}
WORDS = ["one ", "two ", "three ", "four ", "five"]


@pytest.fixture
async def other(fleet, worker, changes):
    """A second gateway of the same fleet."""
    async with fleet.gateway(**changes) as gateway:
        yield gateway


class Paced:
    """A worker script that emits one word each time the test allows it."""

    def __init__(self, worker) -> None:
        self.turns = asyncio.Semaphore(0)
        worker.script = self.play

    def go(self, count: int) -> None:
        for _ in range(count):
            self.turns.release()

    async def play(self, answer: Answer) -> None:
        await answer.start()
        for word in WORDS:
            await self.turns.acquire()
            await answer.say(word)
        await self.turns.acquire()
        await answer.finish()


def parse(text: str) -> list[tuple[int, str]]:
    """Returns the id and the data of each event of a stream."""
    events = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "data" in lines:
            events.append((int(lines.get("id", -1)), lines["data"]))
    return events


def content(events: list[tuple[int, str]]) -> str:
    chunks = [json.loads(data) for _, data in events if data != "[DONE]"]
    return "".join(c["delta"].get("content") or "" for k in chunks for c in k["choices"])


@asynccontextmanager
async def begun(gateway, body=None):
    """Opens a stream and yields its events; closes it when the block ends."""
    body = {**(body or make_body()), "stream": True}
    async with gateway.client.stream("POST", CHAT, json=body, headers=RESUMABLE) as response:
        assert response.status_code == 200

        async def events():
            event_id = -1
            async for line in response.aiter_lines():
                name, _, value = line.partition(": ")
                if name == "data":
                    yield event_id, value
                event_id = int(value) if name == "id" else event_id

        yield response, events()


async def take_up(gateway, response, last_id: int | None) -> httpx.Response:
    headers = {} if last_id is None else {"last-event-id": str(last_id)}
    return await gateway.client.get(response.headers["x-vlm-stream"], headers=headers)


async def forget(redis, redis_prefix) -> None:
    """Deletes all requests and logs, as if Redis had lost them."""
    for kind in ("request", "log"):
        async for name in redis.scan_iter(match=f"{redis_prefix}:*:{kind}:*"):
            await redis.delete(name)


async def read_until(events, last_id: int) -> list[tuple[int, str]]:
    seen = []
    async with asyncio.timeout(20):
        async for event in events:
            seen.append(event)
            if event[0] >= last_id:
                return seen
    raise AssertionError(seen)


async def test_another_gateway_continues_after_the_last_event_id(gateway, other, worker):
    script = Paced(worker)
    body = make_body(stream_options={"include_usage": True})
    for num_seen in (1, 3, 5):
        async with begun(gateway, body) as (response, events):
            script.go(num_seen)
            seen = await read_until(events, num_seen)
        script.go(len(WORDS) + 1 - num_seen)

        whole = seen + parse((await take_up(other, response, seen[-1][0])).text)

        ids = [event_id for event_id, _ in whole]
        assert ids == sorted(set(ids))
        assert content(whole) == "".join(WORDS)
        assert whole[-1] == (8, "[DONE]")
        usage = json.loads(whole[-2][1])["usage"]
        assert usage["completion_tokens"] == len(WORDS)
        heads = [json.loads(data) for _, data in whole if data != "[DONE]"]
        assert len({(head["id"], head["created"]) for head in heads}) == 1
    for last_id in (None, 0, 1, 5, 7):  # the stream has ended
        again = parse((await take_up(other, response, last_id)).text)
        known = -1 if last_id is None else last_id
        assert again[-1] == whole[-1]
        assert content(again) == "".join(WORDS[max(0, known) :])
        assert min(event_id for event_id, _ in again) > known
    script.go(6)
    assert "\nid:" not in "\n" + await gateway.stream(body)  # without `x-vlm-resumable`


async def test_an_unknown_stream_is_a_404(gateway, redis, redis_prefix):
    record = StreamRecord("chat", MODEL, "", "", 0, False, msgspec.Raw(b"5"), MODEL)
    of_other_versions = {"a" * 32: b'{"model": "tiny"}', "b" * 32: encode(record)}
    for name, data in of_other_versions.items():
        await redis.set(RedisKeys(redis_prefix).stream(name), data, ex=60)
    for name in ("nothing", "chatcmpl-" + "0" * 32, "..%2f", *of_other_versions):
        response = await gateway.client.get(f"/v1/streams/{name}")
        status, found, _ = code(response)
        assert (status, found.endswith("not_found")) == (404, True), name
    assert not gateway.services.dispatcher.has_open(MODEL)


async def test_if_images_cannot_be_stored_nothing_is_queued_and_a_retry_stores_them(
    gateway, worker, monkeypatch
):
    content = [{"type": "input_image", "image_url": data_url()}]
    body = {"model": MODEL, "input": [{"role": "user", "content": content}]}

    async def ask(**fields) -> httpx.Response:
        headers = {"idempotency-key": f"k{len(fields)}"}
        return await gateway.client.post("/v1/responses", json=body | fields, headers=headers)

    with monkeypatch.context() as broken:
        hold = AsyncMock(side_effect=BlobsUnavailable("full"))
        broken.setattr(gateway.services.lifecycle.kept, "hold", hold)
        assert (await ask()).status_code == 503
    await until(lambda: not gateway.services.dispatcher.has_open(MODEL))
    await ask(input="and now?", previous_response_id=(await ask()).json()["id"])
    first, second = [[each.sha256 for each in call.task.images] for call in worker.requests]
    assert second == first != []


async def test_a_retry_runs_when_the_lease_of_a_dead_gateway_expires(gateway, other, monkeypatch):
    monkeypatch.setattr(resume, "_LEASE_S", 2.0)
    submit = AsyncMock(side_effect=partial(asyncio.sleep, 60))
    hold = AsyncMock(wraps=gateway.services.leases.hold)
    monkeypatch.setattr(gateway.services.queue, "submit", submit)
    monkeypatch.setattr(gateway.services.leases, "hold", hold)
    first = asyncio.create_task(gateway.chat(headers={"idempotency-key": "lease"}))
    await until(lambda: submit.called)
    retry = asyncio.create_task(other.chat(headers={"idempotency-key": "lease"}))
    await until(lambda: hold.await_count > 6)  # the first gateway renews the lease
    assert not retry.done()
    hold.side_effect = QueueUnavailable
    assert (await asyncio.wait_for(retry, 20)).status_code == 200
    first.cancel()


async def test_a_reader_that_disconnects_does_not_release_the_key(
    gateway, other, worker, monkeypatch
):
    monkeypatch.setattr("gateway.calls.resume.BEGINS_WITHIN_S", 0.0)
    worker.script = lambda answer: asyncio.sleep(0)  # the request does not begin
    key = {"idempotency-key": "order-84"}
    first = asyncio.create_task(gateway.chat(headers=key))
    await until(lambda: worker.answers)
    retry = asyncio.create_task(other.chat(headers=key))
    await until(lambda: other.services.dispatcher.has_open(MODEL))
    other.services.dispatcher.fail_all("The server is shutting down.")
    assert (await retry).json()["error"]["code"] == "cancelled"
    assert (await other.chat(make_body("something else"), headers=key)).status_code == 422
    first.cancel()


async def test_invalid_resumable_requests_are_refused_by_field(gateway):
    key = {"idempotency-key": "order-68"}
    for headers, body, param in (
        (RESUMABLE, {"n": 2, "stream": True}, "n"),
        ({"idempotency-key": "two words"}, {}, "Idempotency-Key"),
        ({"idempotency-key": "k" * 257}, {}, "Idempotency-Key"),
        ({**RESUMABLE, "last-event-id": "x"}, {"stream": True}, "Last-Event-ID"),
        (key, {"temperature": 9}, "temperature"),
    ):
        response = await gateway.chat(make_body(**body), headers=headers)
        assert code(response) == (400, "invalid_value", param)
    assert (await gateway.chat(headers=key)).status_code == 200  # a refusal releases the key


async def test_a_retry_with_the_same_key_joins_the_running_request(gateway, other, worker):
    script = Paced(worker)
    for stream in (False, True):
        key = {"idempotency-key": f"order-66-{stream}"}
        body = make_body(stream=stream)
        first = asyncio.create_task(gateway.chat(body, headers=key))
        await until(lambda: worker.answers)
        script.go(2)
        retry = asyncio.create_task(other.chat(body, headers=key))
        here = asyncio.create_task(gateway.chat(body, headers=key))
        script.go(4)

        answers = await asyncio.gather(first, retry, here)

        assert [answer.status_code for answer in answers] == [200, 200, 200]
        if stream:
            texts = {content(parse(answer.text)) for answer in answers}
        else:
            texts = {a.json()["choices"][0]["message"]["content"] for a in answers}
            assert len({answer.json()["id"] for answer in answers}) == 1
        assert texts == {"".join(WORDS)}
        assert len(worker.answers) == 1
        worker.answers.clear()


async def test_readers_of_a_lost_request_get_an_error(
    gateway, worker, redis, redis_prefix, monkeypatch
):
    monkeypatch.setattr("gateway.calls.resume.BEGINS_WITHIN_S", 0.1)
    script = Paced(worker)
    script.go(12)
    key = {"idempotency-key": "order-69"}
    first = await gateway.chat(make_body(stream=True), headers=key)
    async for name in redis.scan_iter(match=f"{redis_prefix}:*:log:*"):
        await redis.rpush(name, b"no JSON")
    unreadable = await gateway.chat(make_body(stream=True), headers=key)
    await forget(redis, redis_prefix)
    lost = await take_up(gateway, first, None)
    for told in (unreadable, lost):
        assert code(told)[:2] == (503, "worker_lost")
    again = await gateway.chat(make_body(stream=True), headers=key)  # a retry runs it again
    assert content(parse(again.text)) == "".join(WORDS)
    assert len(worker.answers) == 2


@contextmanager
def unavailable(queue: RedisGatewayQueue, *, is_queued: bool):
    """Redis fails while a request is queued: before the write, or after it."""
    submit = queue.submit

    async def fail(*arguments, **options) -> None:
        if is_queued:
            await submit(*arguments, **options)
        raise QueueUnavailable("no reply")

    queue.submit = fail
    yield
    queue.submit = submit


async def test_a_retry_joins_a_request_that_was_queued_without_a_reply(
    gateway, other, worker, redis, redis_prefix
):
    """Only a retry joins it: the key identifies the request. A request that was possibly queued keeps its images."""
    script = Paced(worker)
    key = {"idempotency-key": "order-71"}
    body = make_body([image_part(data_url())])
    with unavailable(gateway.services.queue, is_queued=True):
        assert (await gateway.chat(body, headers=key)).status_code == 503
    [image] = [name async for name in redis.scan_iter(match=f"{redis_prefix}:blob:*}}")]
    assert await redis.pttl(image) > 60_000
    assert (await other.chat(make_body("something else"), headers=key)).status_code == 422
    script.go(6)
    retry = await other.chat(body, headers=key)
    assert retry.json()["choices"][0]["message"]["content"] == "".join(WORDS)
    assert len(worker.answers) == 1
    key = {"idempotency-key": "order-72"}
    with unavailable(gateway.services.queue, is_queued=False):
        assert (await gateway.chat(headers=key)).status_code == 503
    script.go(6)
    assert (await other.chat(headers=key, timeout=5)).status_code == 200


def metric(text: str, name: str) -> float:
    """Returns the sum of all series that begin with `name`."""
    return sum(
        float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)
    )


async def test_metrics_count_a_repeated_response_once(gateway, worker):
    key = {"idempotency-key": "order-75"}
    body = make_body(stream=True)
    first = await gateway.chat(body, headers=key)
    counted = (
        "vlm_prompt_tokens_total{", "vlm_generation_tokens_total{", "vlm_time_to_first_token_seconds_count{",
        "vlm_request_stage_seconds_count{", "vlm_inter_token_latency_seconds_count{",
        "vlm_request_duration_seconds_count{", 'vlm_requests_total{model="tiny",outcome="ok"}',
    )  # fmt: skip
    before = (await gateway.client.get("/metrics")).text
    assert all(metric(before, name) > 0 for name in counted)

    retry = await gateway.chat(body, headers=key)
    again = await take_up(gateway, first, None)

    assert content(parse(retry.text)) == content(parse(again.text)) == content(parse(first.text))
    after = (await gateway.client.get("/metrics")).text
    assert [metric(after, name) for name in counted] == [metric(before, name) for name in counted]
    assert metric(after, 'vlm_requests_total{model="tiny",outcome="followed"}') == 1


@pytest.mark.parametrize("changes", [{"gateway": {"request_timeout_s": 2.0}}])
@in_one_round
async def test_a_follower_ends_at_its_deadline_while_redis_is_away(
    gateway, worker, redis_server, redis_prefix, changes
):
    Paced(worker).go(1)
    async with run_proxy(redis_server.removeprefix("unix://")) as proxy:
        settings = make_settings(proxy.url, redis_prefix, **changes)
        async with run_gateway_on_socket(settings) as other, begun(gateway) as (response, events):
            await read_until(events, 1)
            path = response.headers["x-vlm-stream"]
            async with other.client.stream("GET", path) as followed:
                proxy.freeze()
                text = "".join([piece async for piece in followed.aiter_text()])
                proxy.thaw()
    assert json.loads(parse(text)[-1][1])["error"]["code"] == "deadline_exceeded"


async def test_a_retry_after_a_retryable_failure_runs_the_request_again(
    gateway, other, worker, redis, redis_prefix
):
    async def fail_first(answer: Answer) -> None:
        if len(worker.answers) == 1:
            await answer.fail(failure)
        else:
            await say_hello(answer)

    worker.script = fail_first
    for stream in (False, True):
        worker.answers.clear()
        key, body = {"idempotency-key": f"order-79-{stream}"}, make_body(stream=stream)
        failure = ErrorCode.IMAGE_UNAVAILABLE
        failed = await gateway.chat(body, headers=key)
        assert (failed.status_code, failed.headers["x-should-retry"]) == (503, "true")
        record = RedisKeys(redis_prefix).stream(failed.headers["x-request-id"][4:])
        assert await redis.pexpire(record, 60_000)  # the record is an old one

        retries = [each.chat(body, headers=key) for each in (gateway, other, gateway, other)]
        answers = await asyncio.gather(*retries)

        assert [answer.status_code for answer in answers] == [200] * 4
        assert len(worker.answers) == 2
        assert await redis.pttl(record) > 60_000
    worker.answers.clear()
    key, failure = {"idempotency-key": "order-80"}, ErrorCode.ENGINE_FAILURE  # a final failure
    answers = [await gateway.chat(headers=key) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [500, 500]
    assert len(worker.answers) == 1
