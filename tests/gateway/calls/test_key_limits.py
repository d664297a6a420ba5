"""Limits of a key and of the fleet: who is refused, with which status, and until when. Redis's part: `test_bounds`."""

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
def test_tokens_are_those_of_text_images_and_the_longest_answer(per_image, counted):
    card = ModelCard("m", 1, max_model_len=4096, vocab_size=9, image_tokens=per_image)
    images = (make_image("a"), make_image("b"))
    request = make_request("x" * 40, images=images, sampling=SamplingParams(max_tokens=10))
    assert possible_tokens(request.task, card) == PossibleTokens(10 + 2 * counted, 10)


def test_audio_in_segments_is_billed_as_one_file_and_finding_them_as_none():
    card = ModelCard("m", 1, max_model_len=4096, vocab_size=9)
    limits, _ = make_limits()
    parts = [replace(make_image("a"), start_s=start, end_s=start + 20) for start in (0.0, 20.0)]
    calls = [make_request("", images=(part,)) for part in parts]
    assert limits.charge(calls, card, num_prompts=2).num_images == (1, 0)
    finding = replace(calls[0], task=Tokenize(calls[0].task, finds_segments=True))
    charge = limits.charge([finding], card)
    assert (charge.num_images, charge.counts) == ((0,), "output")


def test_a_request_never_comes_to_more_than_the_model_holds():
    card = ModelCard("m", 1, max_model_len=100, vocab_size=9)

    def possible(text: str, max_tokens: int) -> PossibleTokens:
        call = make_request(text, sampling=SamplingParams(max_tokens=max_tokens))
        return possible_tokens(call.task, card)

    assert possible("what?", 500).total == 100
    assert possible("x" * 1000, 500) == PossibleTokens(99, 1)
    assert possible("", 1).total == 1


def test_a_call_costs_at_most_what_the_dearer_tokens_fill_of_the_context():
    card = ModelCard("m", 1, max_model_len=1000, vocab_size=9)
    # Of any length, so the answer may take the prompt's place.
    call = make_request("x" * 900, sampling=SamplingParams())
    for prices in ((1.0, 0.5, 4.0, 0.0), (4.0, 0.5, 1.0, 0.0), (1.0, 4.0, 1.0, 0.0)):
        assert most_nano_dollars(call, card, prices) == 1000 * 4
    # Each pair of a query and a document costs both.
    task = Rerank(("q" * 1000,), ("d",) * 50)
    call = replace(make_request(), task=task)
    assert most_nano_dollars(call, CARD, (1.0, 0.0, 0.0, 0.0)) >= 50 * 1001


def test_batch_work_leaves_half_of_the_tokens_and_has_a_queue_of_its_own():
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


def test_a_key_that_has_to_wait_is_not_asked_about_again_until_then():
    limits, time = make_limits(max_key_requests_per_minute=3)
    for reason in ("key_open", "key_tokens"):  # may be free at any moment
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
async def test_a_key_is_told_what_is_left_of_its_limits_and_when_to_come_back(gateway, worker):
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


MUCH = ["on "] * 3000  #: three minutes' worth


async def refunded(gateway: RunningGateway) -> None:
    await until(lambda: not gateway.services.refunds.open)


@few_tokens
async def test_a_key_pays_for_an_answer_that_became_longer_than_anybody_said(gateway, worker):
    """Else it would get many times its tokens of each minute, for ever."""
    worker.script = says(*MUCH)
    assert (await gateway.chat(make_body(n=2))).status_code == 200
    await refunded(gateway)
    refused = await gateway.chat()
    assert refused.status_code == 429
    assert 60 * 5 - 5 < int(refused.headers["retry-after"]) <= 60 * 5 + 1


@few_tokens
async def test_a_key_gets_back_what_an_answer_did_not_take(gateway, worker):
    for _ in range(3):
        assert (await gateway.chat(make_body(max_tokens=900))).status_code == 200
        await refunded(gateway)
    usual, worker.script = worker.script, say_nothing
    body = make_body(stream=True, max_tokens=5000)
    async with gateway.client.stream("POST", CHAT, json=body):
        pass  # it leaves, and pays for what was said until then
    await worker.cancelled.wait()
    await refunded(gateway)
    worker.script = usual
    assert (await gateway.chat()).status_code == 200


@few_tokens
async def test_a_key_pays_for_an_answer_that_goes_on_without_its_client(gateway, worker):
    is_left = asyncio.Event()
    worker.script = says(*MUCH, after=is_left)
    body, headers = make_body(stream=True, max_tokens=10), {"x-vlm-resumable": "1"}
    async with gateway.client.stream("POST", CHAT, json=body, headers=headers):
        pass
    await until(lambda: gateway.services.refunds.open)
    is_left.set()
    await refunded(gateway)
    assert (await gateway.chat()).status_code == 429
