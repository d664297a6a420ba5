"""Resumable answers: any gateway continues them, each event once and in order, for their own tenant only."""

import asyncio
import json
from contextlib import asynccontextmanager, contextmanager

import httpx
import pytest

from gateway.calls.resume import BEGINS_WITHIN_S
from shared.protocol import ErrorCode
from shared.queue.api import QueueRefused, QueueUnavailable, Submitted
from shared.queue.gateway import RedisGatewayQueue
from shared.queue.keys import BLOB_LINGER_S, RedisKeys
from tests.factories_gateway import (
    CHAT,
    Answer,
    make_body,
    make_settings,
    run_gateway_on_socket,
    say_hello,
)
from tests.factories_images import data_url, image_part
from tests.faults.proxy import run_proxy
from tests.rounds import in_one_round
from tests.waiting import until

RESUMABLE = {"x-vlm-resumable": "true"}
WORDS = ["one ", "two ", "three ", "four ", "five"]


@pytest.fixture
async def other(redis_server, redis_prefix, worker, changes):
    """A second gateway of the same fleet."""
    settings = make_settings(redis_server, redis_prefix, **changes)
    async with run_gateway_on_socket(settings) as gateway:
        yield gateway


class Paced:
    """A script that says a word at a time, when told."""

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
    """The ids and data of a stream's events."""
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
async def begun(gateway, body=None, headers=RESUMABLE):
    """An open stream, event by event; left when the block ends."""
    body = {**(body or make_body()), "stream": True}
    async with gateway.client.stream("POST", CHAT, json=body, headers=headers) as response:
        assert response.status_code == 200

        async def events():
            block = ""
            async for text in response.aiter_text():
                block += text
                *whole, block = block.split("\n\n")
                for event in whole:
                    for parsed in parse(event + "\n\n"):
                        yield parsed

        yield response, events()


async def take_up(gateway, response, last_id: int | None, **options) -> httpx.Response:
    headers = {} if last_id is None else {"last-event-id": str(last_id)}
    headers |= options.pop("headers", {})
    return await gateway.client.get(response.headers["x-vlm-stream"], headers=headers, **options)


async def read_until(events, last_id: int) -> list[tuple[int, str]]:
    seen = []
    async with asyncio.timeout(20):
        async for event in events:
            seen.append(event)
            if event[0] >= last_id:
                return seen
    raise AssertionError(seen)


@pytest.mark.parametrize("num_seen", [1, 3, 5])
async def test_another_gateway_goes_on_exactly_where_the_first_was_left(
    gateway, other, worker, num_seen
):
    script = Paced(worker)
    body = make_body(stream_options={"include_usage": True})
    async with begun(gateway, body) as (response, events):
        script.go(num_seen)
        seen = await read_until(events, num_seen)
    script.go(len(WORDS) + 1)

    rest = parse((await take_up(other, response, seen[-1][0])).text)

    ids = [event_id for event_id, _ in seen + rest]
    assert ids == sorted(set(ids))
    assert content(seen + rest) == "".join(WORDS)
    assert rest[-1][1] == "[DONE]"
    usage = json.loads(rest[-2][1])["usage"]
    assert usage["completion_tokens"] == len(WORDS)
    heads = [json.loads(data) for _, data in seen + rest if data != "[DONE]"]
    assert len({(head["id"], head["created"]) for head in heads}) == 1


async def test_an_ended_stream_is_told_again_from_any_event(gateway, other, worker):
    script = Paced(worker)
    script.go(6)
    body = make_body(stream_options={"include_usage": True})
    async with begun(gateway, body) as (response, events):
        whole = await read_until(events, 8)
    for place in (None, 0, 1, -3, -2):
        last_id = None if place is None else whole[place][0]

        again = parse((await take_up(other, response, last_id)).text)

        known = -1 if last_id is None else last_id
        assert again[-1] == whole[-1] == (8, "[DONE]")
        assert content(again) == content([event for event in whole if event[0] > known])
        assert min(event_id for event_id, _ in again) > known


async def test_a_stream_that_does_not_ask_for_it_has_no_ids_and_ends_with_its_client(
    gateway, worker
):
    text = await gateway.stream()
    assert "id: " not in text.replace('"id": ', "")
    assert not any(line.startswith("id:") for line in text.splitlines())


async def test_an_unknown_stream_is_a_404(gateway):
    for name in ("nothing", "chatcmpl-" + "0" * 32, "..%2f"):
        response = await gateway.client.get(f"/v1/streams/{name}")
        assert response.status_code == 404, name


async def test_a_stream_that_another_version_began_is_a_404(gateway, redis, redis_prefix):
    request_id = "a" * 32
    await redis.set(RedisKeys(redis_prefix).stream(request_id), b'{"model": "tiny"}', ex=60)
    response = await gateway.client.get(f"/v1/streams/chatcmpl-{request_id}")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "stream_not_found")


async def test_what_cannot_be_taken_up_again_is_refused_by_name(gateway):
    for headers, body, param in (
        (RESUMABLE, {"n": 2, "stream": True}, "n"),
        ({"idempotency-key": "two words"}, {}, "Idempotency-Key"),
        ({"idempotency-key": "k" * 257}, {}, "Idempotency-Key"),
        ({**RESUMABLE, "last-event-id": "x"}, {"stream": True}, "Last-Event-ID"),
    ):
        response = await gateway.chat(make_body(**body), headers=headers)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (param, "invalid_value")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_with_the_same_key_joins_the_running_request(gateway, other, worker, stream):
    script = Paced(worker)
    key = {"idempotency-key": "order-66"}
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
        assert {content(parse(answer.text)) for answer in answers} == {"".join(WORDS)}
    else:
        texts = {a.json()["choices"][0]["message"]["content"] for a in answers}
        assert texts == {"".join(WORDS)}
        assert len({answer.json()["id"] for answer in answers}) == 1
    assert len(worker.answers) == 1


async def test_a_request_that_was_refused_leaves_its_key_free(gateway, worker):
    key = {"idempotency-key": "order-68"}
    bad = make_body(temperature=9)
    assert (await gateway.chat(bad, headers=key)).status_code == 400
    assert (await gateway.chat(make_body(), headers=key)).status_code == 200


async def test_a_log_that_cannot_be_read_ends_its_followers(gateway, worker, redis, redis_prefix):
    key = {"idempotency-key": "order-70"}
    assert (await gateway.chat(headers=key)).status_code == 200
    async for name in redis.scan_iter(match=f"{redis_prefix}:*:log:*"):
        await redis.rpush(name, b"no JSON")

    response = await gateway.chat(headers=key)

    assert response.status_code == 503
    assert response.json()["error"]["code"] == "worker_lost"


async def test_a_retry_whose_request_was_lost_begins_anew(gateway, worker, redis, redis_prefix):
    key = {"idempotency-key": "order-69"}
    assert (await gateway.chat(headers=key)).status_code == 200
    for kind in ("request", "log"):
        async for name in redis.scan_iter(match=f"{redis_prefix}:*:{kind}:*"):
            await redis.delete(name)

    assert (await gateway.chat(headers=key)).status_code == 200
    assert len(worker.answers) == 2


async def test_readers_of_a_lost_request_are_told(
    gateway, worker, redis, redis_prefix, monkeypatch
):
    monkeypatch.setattr("gateway.calls.resume.BEGINS_WITHIN_S", 0.1)
    Paced(worker).go(6)
    async with begun(gateway) as (response, events):
        await read_until(events, 1)
    for kind in ("request", "log"):
        async for name in redis.scan_iter(match=f"{redis_prefix}:*:{kind}:*"):
            await redis.delete(name)

    lost = await take_up(gateway, response, None)

    assert lost.status_code == 503
    assert lost.json()["error"]["code"] == "worker_lost"


@contextmanager
def unavailable(queue: RedisGatewayQueue, *, is_queued: bool):
    """Redis fails as a request is queued: before it was, or just after."""
    submit = queue.submit

    async def fail(*arguments, **options) -> None:
        if is_queued:
            await submit(*arguments, **options)
        raise QueueUnavailable("no reply")

    queue.submit = fail
    yield
    queue.submit = submit


async def test_a_retry_joins_what_was_queued_though_nobody_knew(gateway, other, worker):
    """And only a retry: the key stands for that request."""
    script = Paced(worker)
    key = {"idempotency-key": "order-71"}
    with unavailable(gateway.services.queue, is_queued=True):
        assert (await gateway.chat(headers=key)).status_code == 503
    assert (await other.chat(make_body("something else"), headers=key)).status_code == 422
    script.go(6)
    retry = await other.chat(headers=key)
    assert retry.json()["choices"][0]["message"]["content"] == "".join(WORDS)
    assert len(worker.answers) == 1


async def test_a_retry_does_not_wait_for_what_was_never_queued(gateway, other, worker):
    key = {"idempotency-key": "order-72"}
    with unavailable(gateway.services.queue, is_queued=False):
        assert (await gateway.chat(headers=key)).status_code == 503
    assert (await other.chat(headers=key, timeout=5)).status_code == 200


async def test_what_may_be_queued_keeps_its_images(gateway, worker, redis, redis_prefix):
    key = {"idempotency-key": "order-73"}
    body = make_body([image_part(data_url())])
    with unavailable(gateway.services.queue, is_queued=True):
        assert (await gateway.chat(body, headers=key)).status_code == 503
    [image] = [name async for name in redis.scan_iter(match=f"{redis_prefix}:blob:*}}")]
    assert await redis.pttl(image) > 60_000


async def test_a_detached_request_keeps_its_images_when_its_client_leaves(
    gateway, worker, redis, redis_prefix
):
    script = Paced(worker)
    body = make_body([image_part(data_url(seed=77)), {"type": "text", "text": "?"}])
    async with begun_later(gateway, body):
        await until(lambda: worker.answers)
        [answer] = worker.answers
    [image] = answer.request.task.images
    left_ms = await redis.pttl(RedisKeys(redis_prefix).blob(image.sha256))
    script.go(6)
    assert left_ms > 60_000


@asynccontextmanager
async def begun_later(gateway, body):
    """A stream whose client leaves when the block ends, whatever it has seen."""
    task = asyncio.create_task(gateway.chat({**body, "stream": True}, headers=RESUMABLE))
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not gateway.services.admission.num_open)


async def test_a_retry_before_the_first_is_queued_does_not_disturb_it(gateway, worker):
    script = Paced(worker)
    script.go(6)
    queue = gateway.services.queue
    submit, may_queue, num_waiting = queue.submit, asyncio.Event(), 0

    async def wait_and_submit(*arguments, **options) -> Submitted:
        nonlocal num_waiting
        num_waiting += 1
        await may_queue.wait()
        return await submit(*arguments, **options)

    queue.submit = wait_and_submit
    key = {"idempotency-key": "order-74"}
    first = asyncio.create_task(gateway.chat(headers=key))
    await until(lambda: num_waiting)
    retry = asyncio.create_task(gateway.chat(headers=key))
    await until(lambda: gateway.services.admission.num_open >= 2)
    await asyncio.wait([retry], timeout=0.2)  # it is refused, follows, or waits to be queued
    may_queue.set()

    async with asyncio.timeout(10):
        answers = await asyncio.gather(first, retry)
    texts = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
    assert texts == ["".join(WORDS)] * 2
    assert len(worker.answers) == 1
    assert gateway.services.admission.num_open == 0
    assert gateway.services.dispatcher.num_open == 0


def metric(text: str, name: str) -> float:
    """The sum of a metric's series whose labels begin so."""
    return sum(
        float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)
    )


async def test_an_answer_that_is_told_again_is_counted_once(gateway, worker):
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


async def num_calls(redis) -> int:
    """Commands that the server has been sent, without those that scripts call."""
    stats = await redis.info("commandstats")
    scripts = sum(stats[name]["calls"] for name in ("cmdstat_evalsha",) if name in stats)
    reads = ("cmdstat_lrange", "cmdstat_xread", "cmdstat_get", "cmdstat_pttl", "cmdstat_hmget")
    return scripts + sum(stats[name]["calls"] for name in reads if name in stats)


@pytest.mark.parametrize("changes", [{"gateway": {"silence_timeout_s": 10.0}}])
async def test_followers_that_wait_ask_redis_for_nothing(gateway, other, worker, redis, changes):
    script = Paced(worker)
    async with begun(gateway) as (response, events):
        script.go(1)
        await read_until(events, 1)
        followers = [asyncio.create_task(take_up(other, response, None)) for _ in range(100)]
        await until(lambda: other.services.dispatcher.num_open)
        await until(lambda: other.services.admission.num_open >= 100)
        # gateways and a worker that are idle look up models and block on reads; followers that
        # poll would never come below it
        async with asyncio.timeout(30):
            num_new = 1000
            while num_new >= 20:
                before = await num_calls(redis)
                await asyncio.sleep(1.0)
                num_new = await num_calls(redis) - before
        script.go(5)
        texts = {content(parse((await follower).text)) for follower in followers}
    assert texts == {"".join(WORDS)}


@pytest.mark.parametrize("changes", [{"gateway": {"request_timeout_s": 2.0}}])
@in_one_round
async def test_a_follower_ends_at_its_deadline_while_redis_is_away(
    gateway, worker, redis_server, redis_prefix, changes
):
    Paced(worker).go(1)
    async with run_proxy(redis_server.removeprefix("unix://")) as proxy:
        settings = make_settings(proxy.url, redis_prefix, **changes)
        async with (
            run_gateway_on_socket(settings) as other,
            begun(gateway) as (response, events),
        ):
            await read_until(events, 1)
            path = response.headers["x-vlm-stream"]
            async with other.client.stream("GET", path) as followed:
                proxy.freeze()
                text = "".join([piece async for piece in followed.aiter_text()])
                proxy.thaw()
    assert json.loads(parse(text)[-1][1])["error"]["code"] == "deadline_exceeded"


async def test_retries_at_once_under_overload_are_never_told_of_streams(gateway, other, worker):
    """Refused tries forget their record while others look for it."""

    async def refuse(*arguments, **options) -> None:
        await asyncio.sleep(0)
        raise QueueRefused("queue_full", 0.0)

    for each in (gateway, other):
        each.services.queue.submit = refuse
    for number in range(20):
        key = {"idempotency-key": f"order-76-{number}"}
        tries = [each.chat(headers=key) for _ in range(4) for each in (gateway, other)]
        answers = await asyncio.gather(*tries)
        assert {answer.status_code for answer in answers} == {503}
        assert all("retry-after" in answer.headers for answer in answers)


async def test_a_reader_of_a_request_that_was_refused_after_all_is_told_at_once(
    gateway, other, redis, redis_prefix, worker
):
    headers, may_refuse, is_asked = (
        {"idempotency-key": "order-77"},
        asyncio.Event(),
        asyncio.Event(),
    )

    async def refuse(*arguments, **options) -> None:
        is_asked.set()
        await may_refuse.wait()
        raise QueueRefused("queue_full", 0.0)

    gateway.services.queue.submit = refuse
    first = asyncio.create_task(gateway.chat(headers=headers))
    await is_asked.wait()
    [record] = [name async for name in redis.scan_iter(match=f"{redis_prefix}:stream:*")]
    request_id = record.decode().rpartition(":")[2]
    reader = asyncio.create_task(other.client.get(f"/v1/streams/chatcmpl-{request_id}"))
    await until(lambda: other.services.dispatcher.num_open)
    may_refuse.set()
    async with asyncio.timeout(BEGINS_WITHIN_S / 2):
        assert (await first).status_code == (await reader).status_code == 503


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_post_beside_another_versions_record_is_served_or_told_when_to_come_back(
    gateway, worker, redis, redis_prefix, is_open
):
    key = {"idempotency-key": "order-78"}
    assert (await gateway.chat(headers=key)).status_code == 200
    [record] = [name async for name in redis.scan_iter(match=f"{redis_prefix}:stream:*")]
    await redis.set(record, b'{"model": "tiny"}', ex=60)
    if not is_open:
        for kind in ("request", "log"):
            async for name in redis.scan_iter(match=f"{redis_prefix}:*:{kind}:*"):
                await redis.delete(name)
    response = await gateway.chat(headers=key)
    assert response.status_code == (503 if is_open else 200)
    assert ("retry-after" in response.headers) == is_open


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_that_a_failure_asked_for_runs_the_request_again(
    gateway, other, worker, stream
):
    async def lose_first(answer: Answer) -> None:
        if len(worker.answers) == 1:
            await answer.fail(ErrorCode.IMAGE_UNAVAILABLE)
        else:
            await say_hello(answer)

    worker.script = lose_first
    key, body = {"idempotency-key": "order-79"}, make_body(stream=stream)
    failed = await gateway.chat(body, headers=key)
    assert (failed.status_code, failed.headers["x-should-retry"]) == (503, "true")

    retries = [each.chat(body, headers=key) for each in (gateway, other, gateway, other)]
    answers = await asyncio.gather(*retries)

    assert [answer.status_code for answer in answers] == [200] * 4
    assert len(worker.answers) == 2


async def test_a_failure_that_is_final_is_told_again(gateway, worker):
    async def fail(answer: Answer) -> None:
        await answer.fail(ErrorCode.ENGINE_FAILURE)

    worker.script = fail
    key = {"idempotency-key": "order-80"}
    answers = [await gateway.chat(headers=key) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [500, 500]
    assert len(worker.answers) == 1


async def until_it_goes(redis, redis_prefix, sha256: str) -> None:
    """Wait until nobody holds an image."""
    async with asyncio.timeout(10):
        while await redis.pttl(RedisKeys(redis_prefix).blob(sha256)) > BLOB_LINGER_S * 1000:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("leaves", [False, True])
async def test_the_images_of_a_request_that_ended_go_soon(
    gateway, worker, redis, redis_prefix, leaves
):
    script = Paced(worker)
    body = make_body([image_part(data_url(seed=78 + leaves))])
    if leaves:
        async with begun_later(gateway, body):
            await until(lambda: worker.answers)
        script.go(6)
    else:
        script.go(6)
        key = {"idempotency-key": "order-81"}
        assert (await gateway.chat(body, headers=key)).status_code == 200
    [image] = worker.answers[0].request.task.images
    await until_it_goes(redis, redis_prefix, image.sha256)
    await until(lambda: not gateway.services.dispatcher.num_open)
