"""Batch work beside interactive work in one worker: real Redis, real loops, a mock engine that takes its time."""

import asyncio

from shared.protocol import Call, Finished, Priority, SamplingParams
from shared.queue.worker import OVERTAKES_PER_AGED
from tests.factories_queue import make_request
from tests.factories_worker import Answers, run_worker, token_ids

SLOW = {"decode_s": 0.01, "num_output_tokens": 200}


def asking(num_tokens: int, priority: Priority = Priority.INTERACTIVE) -> Call:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return make_request(sampling=sampling, priority=priority)


def batch(num_tokens: int) -> Call:
    return asking(num_tokens, Priority.BATCH)


def ended(answers: Answers) -> list[str]:
    return [event.request_id for event in answers.order if isinstance(event, Finished)]


async def test_batch_work_makes_way_for_interactive_work_and_goes_on_where_it_was(ends, answers):
    async with run_worker(ends, max_num_seqs=2, mock=SLOW) as running:
        long = [await ends.enqueue(batch(120)) for _ in range(2)]
        for request in long:
            await answers.tokens(request, 3)
        short = [await ends.enqueue(asking(5)) for _ in range(2)]
        for request in short:
            await answers.end(request)
        assert ended(answers) == [request.id for request in short]
        assert running.engine.stats().num_preemptions >= 2
        for request in long:
            assert len(token_ids(await answers.end(request))) == 120


async def test_slots_that_batch_work_frees_are_taken_by_batch_work_at_once(ends, answers):
    """Although the worker waits for interactive work all the time."""
    async with run_worker(ends, max_num_seqs=2, mock={"num_output_tokens": 4}):
        requests = [await ends.enqueue(batch(4)) for _ in range(30)]
        # one timed-out read of Redis per batch request would take longer
        async with asyncio.timeout(1.9):
            for request in requests:
                await answers.end(request)


async def test_batch_work_is_not_overtaken_for_ever(ends, answers):
    """Ten clients keep one slot busy; the batch request gets it after enough of their requests have overtaken it."""
    waiting = await ends.enqueue(batch(2))

    async def ask_on() -> None:
        while waiting.id not in ended(answers):
            await answers.end(await ends.enqueue(asking(2)))

    async with (
        run_worker(ends, max_num_seqs=1, batch_age_s=0.05, mock={"decode_s": 0.002}),
        asyncio.timeout(20),
        asyncio.TaskGroup() as clients,
    ):
        for _ in range(10):
            clients.create_task(ask_on())
    assert ended(answers).index(waiting.id) >= OVERTAKES_PER_AGED
