"""Workers in this process with a mock engine and defaults."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from engines.base import Engine, EngineCall, EngineInput, EngineOutput, LoadedEngine, PreparedImage
from engines.registry import create_engine
from shared.blobs.object_store import UrlBlobReader
from shared.blobs.redis_store import RedisBlobStore
from shared.protocol import Call, CallEvent, Failed, Finished, Tokens
from shared.queue.registry import Registry
from shared.settings.limits import LimitSettings
from shared.settings.tree import WorkerSettings
from tests.factories_engine import make_mock
from tests.factories_queue import MODEL, Ends
from tests.factories_settings import make_group
from worker.adapters import WorkerAdapters
from worker.engine_thread import EngineBroken, EngineThread
from worker.prepare.preparer import Preprocessor
from worker.worker import Worker


class StoppableEngine:
    """Wraps an engine, so that its steps can be paused or made to raise."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.gate = threading.Event()
        self.gate.set()
        self.steps_left: int | None = None  #: steps until the gate closes; None: it stays open
        self.counts_empty_steps = True
        self.error: Exception | None = None
        self.num_prepared = 0
        self.added: list[EngineInput] = []
        self.company: list[int] = []  #: number of other requests when each one was added
        self.aborted: list[str] = []
        self.threads: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def prepare(self, call: EngineCall, images: Sequence[PreparedImage]) -> EngineInput:
        prepared = self.engine.prepare(call, images)
        self.num_prepared += 1
        return prepared

    def add(self, request: EngineInput) -> None:
        self.threads.add(threading.get_ident())
        stats = self.engine.stats()
        self.engine.add(request)
        self.company.append(stats.num_running + stats.num_waiting)
        self.added.append(request)

    def abort(self, request_id: str) -> None:
        self.threads.add(threading.get_ident())
        self.aborted.append(request_id)
        self.engine.abort(request_id)

    def step(self) -> list[EngineOutput]:
        self.threads.add(threading.get_ident())
        self.gate.wait()
        if self.error is not None:
            raise self.error
        outputs = self.engine.step()
        if self.steps_left is not None and (outputs or self.counts_empty_steps):
            self.steps_left -= 1
            if self.steps_left == 0:
                self.gate.clear()
        return outputs

    def wake(self) -> None:
        """Does not shorten a step, because tests count steps."""

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.engine.close()


def load_mock(max_num_seqs: int = 8, **mock: Any) -> LoadedEngine:
    """Returns a mock engine that the test controls, serving `MODEL`."""
    loaded = create_engine(
        {
            "kind": "mock",
            "served_name": MODEL,
            "max_num_seqs": max_num_seqs,
            "mock": make_mock(**mock),
        }
    )
    return stoppable(loaded)


def stoppable(loaded: LoadedEngine) -> LoadedEngine:
    """Wraps an engine, so that the test controls it."""
    engine: Any = StoppableEngine(loaded.engine)
    return LoadedEngine(engine, loaded.card)


class RunningWorker:
    """A worker that serves in this process."""

    def __init__(self, worker: Worker, engine: StoppableEngine, thread: EngineThread) -> None:
        self.worker, self.engine, self.thread = worker, engine, thread
        self.task = asyncio.create_task(worker.run())

    async def stop(self) -> None:
        self.worker.stop()
        await self.task

    async def vanish(self) -> None:
        """Ends as if the process had been killed, without releasing requests."""
        self.task.cancel()

        async def say_nothing(*args: object, **options: object) -> int:
            return 0

        self.worker.queues[""].release = say_nothing  # type: ignore[method-assign]
        self.worker.queues[""].leave = say_nothing  # type: ignore[method-assign, assignment]
        with suppress(asyncio.CancelledError):
            await self.task


@asynccontextmanager
async def run_worker(
    ends: Ends, worker_id: str = "w", *, max_num_seqs: int = 8, mock: dict[str, Any] | None = None,
    others: Sequence[str] = (), tracer: Any = None, load: Callable[[], LoadedEngine] | None = None, **settings: Any,
) -> AsyncIterator[RunningWorker]:  # fmt: skip
    """Run a worker until the block ends. `others`: further shards, without requests."""
    options: dict[str, Any] = {"heartbeat_s": 0.05, "lease_s": 10.0, "drain_s": 5.0, **settings}
    worker_settings = make_group(WorkerSettings, **options)
    async with AsyncExitStack() as stack:
        thread = EngineThread(
            lambda: stoppable(load()) if load else load_mock(max_num_seqs, **(mock or {}))
        )
        stack.push_async_callback(thread.close)
        loaded = await thread.start()
        assert isinstance(loaded.engine, StoppableEngine)
        stack.callback(loaded.engine.gate.set)
        blobs = UrlBlobReader(RedisBlobStore(ends.redis, ends.prefix))
        registry = Registry(ends.redis, ends.prefix)
        limits = LimitSettings()
        adapters = WorkerAdapters(loaded.engine, loaded.card, registry, worker_settings, limits)
        await adapters.load_own()
        preprocessor = Preprocessor(loaded.engine, blobs, limits, 2, hold_adapter=adapters.hold)
        for close in (blobs.close, registry.close):
            stack.push_async_callback(close)
        stack.callback(preprocessor.close)
        queue = ends.worker(
            worker_id, model=loaded.card.name, lease_s=worker_settings.lease_s, max_attempts=worker_settings.max_attempts,
            unknown_after_s=0.5, batch_age_s=worker_settings.batch_age_s,
        )  # fmt: skip
        queues = {"": queue} | {name: ends.worker(worker_id, model=name) for name in others}
        worker = Worker(
            worker_id, worker_settings, "mock",
            loaded, thread, queues, registry, preprocessor, tracer, adapters,
        )  # fmt: skip
        running = RunningWorker(worker, loaded.engine, thread)
        try:
            yield running
        finally:
            loaded.engine.gate.set()
            if not running.task.done():
                worker.stop()
                worker.stop()
            with suppress(EngineBroken, asyncio.CancelledError):
                await running.task


class Answers:
    """The events that a gateway receives, by request."""

    def __init__(self, ends: Ends) -> None:
        self.events: dict[str, list[CallEvent]] = {}
        self.order: list[CallEvent] = []  #: events of all requests in order
        self._arrived = asyncio.Condition()
        self._task = asyncio.create_task(self._read(ends))

    async def _read(self, ends: Ends) -> None:
        while True:
            batch = await ends.next_events()
            async with self._arrived:
                self.order += batch
                for event in batch:
                    self.events.setdefault(event.request_id, []).append(event)
                self._arrived.notify_all()

    async def wait_for(
        self, request: Call, ready: Callable[[list[CallEvent]], bool]
    ) -> list[CallEvent]:
        def arrived() -> list[CallEvent]:
            return self.events.get(request.id, [])

        async with asyncio.timeout(60), self._arrived:
            await self._arrived.wait_for(lambda: ready(arrived()))
        return arrived()

    async def end(self, request: Call) -> list[CallEvent]:
        """Waits for the end of a request; returns all its events."""
        return await self.wait_for(
            request, lambda events: any(isinstance(e, Finished | Failed) for e in events)
        )

    async def tokens(self, request: Call, count: int) -> list[CallEvent]:
        """Waits until a request has `count` output tokens; returns its events."""
        return await self.wait_for(request, lambda events: len(token_ids(events)) >= count)

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


def token_ids(events: list[CallEvent]) -> list[int]:
    """Returns the output tokens; fails on a gap or a repetition."""
    tokens: list[int] = []
    num_tokens = 0
    for event in events:
        if isinstance(event, Tokens):
            assert event.index == num_tokens
            num_tokens += event.num_tokens
            tokens += event.token_ids
    return tokens


def text(events: list[CallEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Tokens))
