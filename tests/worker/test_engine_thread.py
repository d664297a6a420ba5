"""The engine thread: one thread for all calls, no polling, one wakeup per step, and a watchdog for a hung step."""

import asyncio
import math
import threading

import pytest

from engines.base import EngineOutput
from engines.core.sequence import EngineRequest
from shared.protocol import SamplingParams
from tests.factories_worker import StoppableEngine, load_mock
from worker.engine_thread import Added, EngineEvent, EngineThread, Rejected


class Listener:
    """Collects the events of an engine thread."""

    def __init__(self) -> None:
        self.batches: list[list[EngineEvent]] = []
        self.threads: set[int] = set()
        self._arrived = asyncio.Event()

    def on_events(self, events: list[EngineEvent]) -> None:
        self.batches.append(events)
        self.threads.add(threading.get_ident())
        self._arrived.set()

    @property
    def events(self) -> list[EngineEvent]:
        return [item for batch in self.batches for item in batch]

    async def until_finished(self) -> None:
        async with asyncio.timeout(10):
            while not any(isinstance(n, EngineOutput) and n.finish_reason for n in self.events):
                self._arrived.clear()
                await self._arrived.wait()


def make_engine_request(request_id: str = "a", **sampling) -> EngineRequest:
    return EngineRequest(
        request_id, [1, 2, 3], SamplingParams(**{"max_tokens": 5, "ignore_eos": True, **sampling})
    )


@pytest.fixture
async def bridge():
    listener = Listener()
    thread = EngineThread(load_mock)
    thread.on_events = listener.on_events
    loaded = await thread.start()
    assert isinstance(loaded.engine, StoppableEngine)
    yield thread, listener, loaded.engine
    loaded.engine.gate.set()
    await thread.close()


async def test_one_thread_makes_all_calls_and_events_arrive_on_the_loop(bridge):
    thread, listener, engine = bridge
    thread.add(make_engine_request())
    await listener.until_finished()
    thread.abort("a")
    await thread.close()

    assert len(engine.threads) == 1
    assert listener.threads == {threading.get_ident()}
    assert not engine.threads & listener.threads


async def test_a_request_is_accepted_before_its_output_or_refused(bridge):
    thread, listener, _ = bridge
    thread.add(make_engine_request("bad", logit_bias={10**9: 1.0}))
    thread.add(make_engine_request("good"))
    await listener.until_finished()

    by_id = {name: [n for n in listener.events if n.request_id == name] for name in ("bad", "good")}
    assert [type(item) for item in by_id["bad"]] == [Rejected]
    assert type(by_id["good"][0]) is Added
    assert all(type(item) is EngineOutput for item in by_id["good"][1:])


async def test_only_the_end_of_a_request_without_a_stream_wakes_the_loop(bridge, monkeypatch):
    monkeypatch.setattr("worker.engine_thread.HOLD_S", math.inf)
    thread, listener, _ = bridge
    thread.add(make_engine_request(max_tokens=50), is_patient=True)
    await listener.until_finished()

    assert len(listener.batches) == 1
    tokens = [t for n in listener.events if isinstance(n, EngineOutput) for t in n.token_ids]
    assert len(tokens) == 50
