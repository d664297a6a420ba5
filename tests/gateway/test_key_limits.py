"""Limits of a key and shares between keys: who is refused, with which status, and until when."""

import pytest

from gateway.errors import Overloaded
from gateway.key_limits import TOKENS_PER_IMAGE, KeyLimitExceeded, KeyLimits, possible_tokens
from shared.limits import LimitSettings
from shared.protocol import SamplingParams
from tests.factories_gateway import make_body, say_nothing
from tests.factories_queue import make_image, make_request


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_limits(**limits) -> tuple[KeyLimits, Time]:
    time = Time()
    return KeyLimits(LimitSettings(**limits), lambda: 7, time), time


def asking(tenant: str, num_tokens: int):
    """A request that may come to so many tokens."""
    sampling = SamplingParams(max_tokens=num_tokens)
    return [make_request("", cache_salt=tenant, sampling=sampling)]


def test_tokens_are_those_of_text_pictures_and_the_longest_answer():
    sampling = SamplingParams(max_tokens=10)
    request = make_request("x" * 40, images=(make_image("a"),), sampling=sampling)
    assert possible_tokens(request) == 10 + TOKENS_PER_IMAGE + 10


def test_requests_a_minute_come_back_with_time_and_are_each_keys_own():
    limits, time = make_limits(max_key_requests_per_minute=2)
    for _ in range(2):
        with limits.request("a"):
            pass
    with pytest.raises(KeyLimitExceeded) as refused, limits.request("a"):
        pass
    assert refused.value.status == 429
    assert refused.value.retry_after_s == 30
    with limits.request("b"):
        pass
    time.now += refused.value.retry_after_s
    with limits.request("a"):
        pass


def test_tokens_a_minute_may_be_taken_in_advance_and_are_waited_for():
    limits, time = make_limits(max_key_tokens_per_minute=60)
    limits.hold_tokens(asking("a", 90))()
    with pytest.raises(KeyLimitExceeded) as refused:
        limits.hold_tokens(asking("a", 1))
    assert refused.value.retry_after_s == 31
    time.now += 31
    limits.hold_tokens(asking("a", 1))


def test_open_requests_of_a_key_are_bounded():
    limits, _ = make_limits(max_key_open_requests=1)
    with limits.request("a"):
        with pytest.raises(KeyLimitExceeded), limits.request("a"):
            pass
        with limits.request("b"):
            pass
    with limits.request("a"):
        pass


def test_tokens_of_all_keys_are_bounded_for_the_fleet():
    limits, _ = make_limits(max_open_tokens=100)
    let_go = limits.hold_tokens(asking("a", 150))  # alone it is never too much
    with pytest.raises(Overloaded) as refused:
        limits.hold_tokens(asking("b", 1))
    assert (refused.value.status, refused.value.retry_after_s) == (503, 7)
    let_go()
    limits.hold_tokens(asking("b", 1))


def test_no_key_gets_more_than_its_share_when_tokens_are_scarce():
    limits, _ = make_limits(max_open_tokens=100)
    for _ in range(4):
        limits.hold_tokens(asking("greedy", 10))
    limits.hold_tokens(asking("modest", 5))
    limits.hold_tokens(asking("greedy", 10))
    with pytest.raises(KeyLimitExceeded) as refused:
        limits.hold_tokens(asking("greedy", 10))
    assert refused.value.status == 429
    limits.hold_tokens(asking("modest", 40))


@pytest.mark.parametrize("changes", [{"limits": {"max_key_requests_per_minute": 1}}])
async def test_a_key_beyond_its_limit_gets_429_and_when_to_come_back(gateway, worker, changes):
    assert (await gateway.chat()).status_code == 200
    refused = await gateway.chat()
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    text = (await gateway.client.get("/metrics")).text
    assert (
        'vlm_rejected_requests_total{reason="key_requests"} 1.0' in text or "key_requests" in text
    )


@pytest.mark.parametrize("changes", [{"limits": {"max_open_tokens": 100}}])
async def test_a_gateway_whose_tokens_are_held_gets_503_until_they_are_let_go(
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
