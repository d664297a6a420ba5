"""Limits of a key and of the fleet: refusals, their status, and `retry-after`. The part in Redis: `test_bounds`."""

import asyncio
from datetime import datetime
from types import SimpleNamespace
from typing import get_args

import pytest
from msgspec.structs import replace

from gateway.calls.key_limits import (
    TOKENS_PER_IMAGE,
    KeyLimits,
    PossibleTokens,
    most_nano_dollars,
    possible_tokens,
    to_quota,
)
from gateway.http.errors import Overloaded, RateLimited
from shared.protocol import ModelCard, Priority, Rerank, SamplingParams, Tokenize
from shared.queue.api import QueueRefused, Reason
from shared.settings.limits import LimitSettings
from tests.factories_gateway import CARD, CHAT, RunningGateway, make_body, say_nothing, says
from tests.factories_keys import code
from tests.factories_queue import make_image, make_request
from tests.waiting import until


def make_limits(**limits) -> tuple[KeyLimits, SimpleNamespace]:
    def overloaded(reason: str) -> Overloaded:
        return Overloaded(reason, "", code="server_overloaded", retry_after_s=7)

    time = SimpleNamespace(now=0.0)
    return KeyLimits(LimitSettings(**limits), overloaded, lambda: time.now), time


@pytest.mark.parametrize(("per_image", "counted"), [(144, 144), (0, TOKENS_PER_IMAGE)])
def test_tokens_of_a_request_include_text_images_and_the_longest_answer(per_image, counted):
    card = ModelCard("m", 1, max_model_len=4096, vocab_size=9, image_tokens=per_image)
    images = (make_image("a"), make_image("b"))
    request = make_request("x" * 40, images=images, sampling=SamplingParams(max_tokens=10))
    assert possible_tokens(request.task, card) == PossibleTokens(10 + 2 * counted, 10)


def test_segmented_audio_is_billed_as_one_file_and_segmentation_is_free():
    card = ModelCard("m", 1, max_model_len=4096, vocab_size=9)
    limits, _ = make_limits()
    parts = [replace(make_image("a"), start_s=start, end_s=start + 20) for start in (0.0, 20.0)]
    calls = [make_request("", images=(part,)) for part in parts]
    assert limits.charge(calls, card, num_prompts=2).num_images == (1, 0)
    finding = replace(calls[0], task=Tokenize(calls[0].task, finds_segments=True))
    charge = limits.charge([finding], card)
    assert (charge.num_images, charge.counts) == ((0,), "output")


def test_a_request_is_charged_at_most_the_context_length():
    card = ModelCard("m", 1, max_model_len=100, vocab_size=9)

    def possible(text: str, max_tokens: int) -> PossibleTokens:
        call = make_request(text, sampling=SamplingParams(max_tokens=max_tokens))
        return possible_tokens(call.task, card)

    assert possible("what?", 500).total == 100
    assert possible("x" * 1000, 500) == PossibleTokens(99, 1)
    assert possible("", 1).total == 1


def test_the_maximum_cost_is_a_context_of_the_dearer_tokens():
    card = ModelCard("m", 1, max_model_len=1000, vocab_size=9)
    # Without a length limit, the answer can be longer at the expense of the prompt.
    call = make_request("x" * 900, sampling=SamplingParams())
    for prices in ((1.0, 0.5, 4.0, 0.0), (4.0, 0.5, 1.0, 0.0), (1.0, 4.0, 1.0, 0.0)):
        assert most_nano_dollars(call, card, prices) == 1000 * 4
    # Each pair of a query and a document is charged for both.
    task = Rerank(("q" * 1000,), ("d",) * 50)
    call = replace(make_request(), task=task)
    assert most_nano_dollars(call, CARD, (1.0, 0.0, 0.0, 0.0)) >= 50 * 1001


def test_batch_requests_use_half_of_the_tokens_and_their_own_queue():
    limits = LimitSettings(max_open_tokens=100)
    assert [to_quota(limits, priority).max_tokens for priority in Priority] == [100, 50]
    key_limits, _ = make_limits(max_queue_depth=5, max_batch_queue_depth=7)
    assert [key_limits.max_waiting(priority) for priority in Priority] == [5, 7]


@pytest.mark.parametrize("reason", get_args(Reason))
def test_a_key_beyond_its_limit_gets_429_and_a_fleet_beyond_its_own_503(reason):
    limits, _ = make_limits(max_key_requests_per_minute=3)
    error = limits.to_error(QueueRefused(reason, 0.0), "m", "a")
    assert error.status == (429 if reason.startswith("key_") else 503)
    assert (error.reason, error.retry_after_s) == (reason, 7)


def test_a_key_that_must_wait_is_refused_without_asking_redis():
    limits, time = make_limits(max_key_requests_per_minute=3)
    for reason in ("key_open", "key_tokens"):  # these can be free at any moment
        limits.to_error(QueueRefused(reason, 11.2), "m", "a")
        limits.check("m", "a")
    told = limits.to_error(QueueRefused("key_requests", 11.2), "m", "a")
    assert told.retry_after_s == 12
    time.now = 10.0
    with pytest.raises(RateLimited, match="3 requests per minute") as refused:
        limits.check("m", "a")
    assert refused.value.retry_after_s == 2
    limits.check("m", "b")
    limits.check("other", "a")
    time.now = 11.3
    limits.check("m", "a")


RATES = {"limits": {"max_key_requests_per_minute": 4, "max_key_tokens_per_minute": 10_000}}


@pytest.mark.parametrize("changes", [RATES])
async def test_headers_report_the_remaining_limits_and_when_to_retry(gateway, worker):
    first, second = [await gateway.chat(make_body(max_tokens=100)) for _ in range(2)]
    left = [int(each.headers["x-ratelimit-remaining-requests"]) for each in (first, second)]
    assert left == [3, 2]
    assert first.headers["x-ratelimit-limit-requests"] == "4"
    assert first.headers["x-ratelimit-limit-tokens"] == "10000"
    assert 9_000 < int(first.headers["x-ratelimit-remaining-tokens"]) < 10_000
    assert 14.0 < float(first.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 15.0
    headers = {"anthropic-version": "2023-06-01"}
    body = make_body(max_tokens=8)
    answer = await gateway.client.post("/v1/messages", json=body, headers=headers)
    assert answer.headers["anthropic-ratelimit-requests-limit"] == "4"
    assert answer.headers["anthropic-ratelimit-requests-remaining"] == "1"
    reset = datetime.fromisoformat(answer.headers["anthropic-ratelimit-tokens-reset"])
    assert reset.tzinfo is not None
    assert (await gateway.chat()).status_code == 200
    for _ in range(2):
        refused = await gateway.chat()
        assert code(refused)[:2] == (429, "rate_limit_exceeded")
        assert 5 <= int(refused.headers["retry-after"]) <= 15
    text = (await gateway.client.get("/metrics")).text
    assert 'vlm_admission_rejections_total{reason="key_requests"} 2.0' in text


ROOMY = replace(CARD, max_model_len=100_000)
FEW = {"limits": {"max_key_tokens_per_minute": 1000}}
few_tokens = pytest.mark.parametrize(("card", "changes"), [(ROOMY, FEW)])


MUCH = ["on "] * 3000  #: three minutes of the limit


async def refunded(gateway: RunningGateway) -> None:
    await until(lambda: not gateway.services.refunds.open)


@few_tokens
async def test_a_key_is_charged_for_an_answer_longer_than_its_reservation(gateway, worker):
    """Otherwise the key would exceed its limit in every minute."""
    worker.script = says(*MUCH)
    assert (await gateway.chat(make_body(n=2))).status_code == 200
    await refunded(gateway)
    refused = await gateway.chat()
    assert refused.status_code == 429
    assert 60 * 5 - 5 < int(refused.headers["retry-after"]) <= 60 * 5 + 1


@few_tokens
async def test_unused_tokens_of_a_reservation_are_refunded(gateway, worker):
    for _ in range(3):
        assert (await gateway.chat(make_body(max_tokens=900))).status_code == 200
        await refunded(gateway)
    usual, worker.script = worker.script, say_nothing
    body = make_body(stream=True, max_tokens=5000)
    async with gateway.client.stream("POST", CHAT, json=body):
        pass  # the client disconnects and pays for the tokens published so far
    await worker.cancelled.wait()
    await refunded(gateway)
    worker.script = usual
    assert (await gateway.chat()).status_code == 200


@few_tokens
async def test_a_key_is_charged_for_a_stream_without_its_client(gateway, worker):
    is_left = asyncio.Event()
    worker.script = says(*MUCH, after=is_left)
    body, headers = make_body(stream=True, max_tokens=10), {"x-vlm-resumable": "1"}
    async with gateway.client.stream("POST", CHAT, json=body, headers=headers):
        pass
    await until(lambda: gateway.services.refunds.open)
    is_left.set()
    await refunded(gateway)
    assert (await gateway.chat()).status_code == 429
