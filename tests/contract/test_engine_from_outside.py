"""An engine that the project does not know: registered by name, it serves calls through Redis and a worker."""

import asyncio

import pytest

from engines.registry import create_engine, engine_kinds, register
from shared.protocol import ErrorCode, Failed, Finished, SamplingParams, Tokens
from tests.contract.toys.engine import TOY
from tests.factories_queue import MODEL, make_request
from tests.factories_worker import run_worker, text
from tests.worker.conftest import answers as answers


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch):
    kinds = dict(engine_kinds())
    monkeypatch.setattr("engines.registry._kinds", kinds)
    register("toy", TOY)


def load_toy():
    return create_engine({"kind": "toy", "served_name": MODEL, "greeting": "you said:"})


async def test_an_engine_that_takes_messages_answers_calls(ends, answers):
    async with run_worker(ends, load=load_toy):
        request = await ends.enqueue(make_request(sampling=SamplingParams(max_tokens=4)))
        events = await answers.end(request)
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert text(events).startswith(" you said:")
    assert finished.usage.num_output_tokens == sum(
        e.num_tokens for e in events if isinstance(e, Tokens)
    )


async def test_an_answer_that_it_cannot_continue_fails_clearly(ends, answers):
    request = await ends.enqueue(make_request(sampling=SamplingParams(max_tokens=4)))
    async with run_worker(ends, "first", mock={"decode_s": 0.02}) as first:
        await answers.tokens(request, 1)
        first.engine.gate.clear()
        await first.vanish()
    async with run_worker(ends, "second", load=load_toy, lease_s=0.6):
        failed = (await answers.end(request))[-1]
    assert isinstance(failed, Failed)
    assert failed.code is ErrorCode.WORKER_LOST


async def test_an_answer_of_which_nothing_was_told_is_started_again(ends, answers):
    request = await ends.enqueue(make_request(sampling=SamplingParams(max_tokens=4)))
    async with run_worker(ends, "first", load=load_toy) as first:
        first.engine.gate.clear()
        async with asyncio.timeout(10):
            while not first.engine.added:
                await asyncio.sleep(0.005)
        await first.vanish()
    async with run_worker(ends, "second", load=load_toy, lease_s=0.6):
        events = await answers.end(request)
    assert isinstance(events[-1], Finished)
    assert text(events).startswith(" you said:")
