"""Limits of a key and of the fleet: who is refused, with which status, and until when. Redis's part: `test_bounds`."""

import asyncio

import pytest

from gateway.errors import Overloaded
from gateway.key_limits import (
    TOKENS_PER_IMAGE,
    KeyLimitExceeded,
    KeyLimits,
    possible_tokens,
    to_bounds,
)
from shared.limits import LimitSettings
from shared.protocol import ModelCard, Priority, SamplingParams
from shared.request_queue import REASONS, QueueRefused
from tests.factories_gateway import (
    make_body,
    make_settings,
    run_gateway_on_socket,
    run_worker,
    say_nothing,
)
from tests.factories_queue import make_image, make_request


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_limits(**limits) -> tuple[KeyLimits, Time]:
    def overloaded(reason: str) -> Overloaded:
        return Overloaded(reason, "", code="server_overloaded", retry_after_s=7)

    time = Time()
    return KeyLimits(LimitSettings(**limits), overloaded, time), time


@pytest.mark.parametrize(("per_image", "counted"), [(144, 144), (0, TOKENS_PER_IMAGE)])
def test_tokens_are_those_of_text_pictures_and_the_longest_answer(per_image, counted):
    card = ModelCard("m", 1, max_model_len=4096, vocab_size=9, tokens_per_image=per_image)
    images = (make_image("a"), make_image("b"))
    request = make_request("x" * 40, images=images, sampling=SamplingParams(max_tokens=10))
    assert possible_tokens(request, card) == 10 + 2 * counted + 10


def test_a_request_never_comes_to_more_than_the_model_holds():
    card = ModelCard("m", 1, max_model_len=100, vocab_size=9)
    assert possible_tokens(make_request(sampling=SamplingParams(max_tokens=500)), card) == 100
    assert possible_tokens(make_request("", sampling=SamplingParams(max_tokens=1)), card) == 1


def test_batch_work_leaves_half_of_the_tokens_and_has_a_queue_of_its_own():
    limits = LimitSettings(max_open_tokens=100, max_queue_depth=5, max_batch_queue_depth=7)
    interactive, batch = (to_bounds(limits, priority) for priority in Priority)
    assert (interactive.max_tokens, interactive.max_waiting) == (100, 5)
    assert (batch.max_tokens, batch.max_waiting) == (50, 7)


@pytest.mark.parametrize("reason", REASONS)
def test_a_key_beyond_its_limit_gets_429_and_a_fleet_beyond_its_own_503(reason):
    limits, _ = make_limits(max_key_requests_per_minute=3)
    error = limits.to_error(QueueRefused(reason, 0.0), "m", "a")
    assert error.status == (429 if reason.startswith("key_") else 503)
    assert (error.reason, error.retry_after_s) == (reason, 7)


def test_a_key_that_has_to_wait_is_not_asked_about_again_until_then():
    limits, time = make_limits(max_key_requests_per_minute=3)
    told = limits.to_error(QueueRefused("key_requests", 11.2), "m", "a")
    assert told.retry_after_s == 12
    time.now = 10.0
    with pytest.raises(KeyLimitExceeded, match="3 requests per minute") as refused:
        limits.check("m", "a")
    assert refused.value.retry_after_s == 2
    limits.check("m", "b")
    limits.check("other", "a")
    time.now = 11.3
    limits.check("m", "a")


def test_places_that_may_be_free_at_any_moment_are_asked_about_again():
    limits, _ = make_limits(max_key_open_requests=1)
    limits.to_error(QueueRefused("key_open", 0.0), "m", "a")
    limits.check("m", "a")


@pytest.mark.parametrize("changes", [{"limits": {"max_key_requests_per_minute": 1}}])
async def test_a_key_is_told_when_to_come_back(gateway, worker, changes):
    assert (await gateway.chat()).status_code == 200
    for _ in range(2):
        refused = await gateway.chat()
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 50 <= int(refused.headers["retry-after"]) <= 60
    text = (await gateway.client.get("/metrics")).text
    assert 'vlm_admission_rejections_total{reason="key_requests"} 2.0' in text


@pytest.mark.parametrize("changes", [{"limits": {"max_open_tokens": 100}}])
async def test_a_fleet_whose_tokens_are_held_gets_503_until_they_are_let_go(
    gateway, worker, changes
):
    usual, worker.script = worker.script, say_nothing
    async with gateway.client.stream(
        "POST", "/v1/chat/completions", json=make_body(stream=True, max_tokens=90)
    ):
        refused = await gateway.chat(make_body(max_tokens=20))
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
    await worker.cancelled.wait()
    worker.script = usual
    assert (await gateway.chat(make_body(max_tokens=90))).status_code == 200


async def test_two_gateways_let_a_key_keep_as_many_open_as_one(redis_server, redis_prefix):
    """And what it closes at one gateway is free at the other."""
    settings = make_settings(redis_server, redis_prefix, limits={"max_key_open_requests": 2})
    async with (
        run_worker(redis_server, redis_prefix) as worker,
        run_gateway_on_socket(settings) as one,
        run_gateway_on_socket(settings) as two,
    ):
        usual, worker.script = worker.script, say_nothing
        asking = [asyncio.ensure_future(gateway.chat()) for gateway in (one, two)]
        while len(worker.answers) < 2:
            await asyncio.sleep(0.005)
        refused = [await gateway.chat() for gateway in (one, two)]
        assert [answer.status_code for answer in refused] == [429, 429]
        assert all("retry-after" in answer.headers for answer in refused)
        asking[0].cancel()
        await worker.cancelled.wait()
        worker.script = usual
        assert (await two.chat()).status_code == 200
        asking[1].cancel()
