"""What is put off after an answer: order, errors, and that nobody sees its absence."""

import asyncio
import logging

from gateway.http.deferred import DeferredTasks
from shared.telemetry.logs import request_id
from tests.factories_gateway import make_body


async def test_calls_wait_for_a_run_and_are_made_once_in_their_order():
    deferred_tasks, calls = DeferredTasks(), []
    deferred_tasks.add(lambda: calls.append(1))
    deferred_tasks.add(lambda: calls.append(2))
    assert calls == []
    deferred_tasks.run()
    deferred_tasks.run()
    assert calls == [1, 2]


async def test_without_a_run_they_are_made_soon():
    deferred_tasks, done = DeferredTasks(), asyncio.Event()
    deferred_tasks.add(done.set)
    await asyncio.wait_for(done.wait(), 5)


async def test_one_that_fails_keeps_no_other_from_being_made(caplog):
    deferred_tasks, calls = DeferredTasks(), []

    def fail() -> None:
        raise ValueError("broken")

    deferred_tasks.add(fail)
    deferred_tasks.add(lambda: calls.append(1))
    with caplog.at_level(logging.ERROR):
        deferred_tasks.run()
    assert calls == [1]
    assert "broken" in caplog.text


async def test_a_call_has_the_context_of_the_request_that_left_it():
    deferred_tasks, seen = DeferredTasks(), []
    request_id.set("one")
    deferred_tasks.add(lambda: seen.append(request_id.get()))
    request_id.set("another")
    deferred_tasks.run()
    assert seen == ["one"]


async def test_whoever_reads_the_metrics_sees_every_answer(gateway, worker):
    for count in range(1, 4):
        await gateway.chat(make_body())
        shown = (await gateway.client.get("/metrics")).text
        assert f'vlm_time_to_first_token_seconds_count{{model="tiny"}} {count}.0' in shown
