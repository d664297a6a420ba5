"""Runs batches. The gateway that holds the lease of a batch runs it, several lines at a time.

Each line is a request to the batch's endpoint, with batch priority. Results are stored in parts every few seconds. If
the gateway dies, another gateway runs the lines that have no stored result.
"""

import asyncio
import logging
import random
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass

import msgspec
from starlette.types import Message

from gateway.batches.records import (
    Batches,
    BatchLine,
    BatchRecord,
    BatchView,
    LineError,
    LineResult,
    check_lines,
    read_line,
    split_lines,
    to_result,
)
from gateway.calls.lifecycle import Lifecycle
from gateway.calls.surface import Surface
from gateway.http.exchange import Exchange, RequestContext
from shared.packages.store import StoreError
from shared.queue.api import QueueUnavailable
from shared.queue.resume import Leases
from shared.telemetry.logs import request_id

#: Maximum concurrent lines of a batch, and concurrent batches of a gateway.
MAX_OPEN_LINES = 64
MAX_RUNNING = 4
LEASE_S = 15.0
_SWEEP_PAUSE_S = 3600.0
_PART_RESULTS = 256
_MAX_PAUSE_S = 30.0
#: Maximum attempts of a line whose request was accepted, but failed.
_MAX_TRIES = 5
#: Errors of requests that were not accepted; they do not count as attempts.
_NOT_TAKEN = frozenset(
    {"no_worker", "server_overloaded", "service_unavailable", "unsupported_version"}
)

logger = logging.getLogger(__name__)


class LineAnswer(msgspec.Struct, frozen=True):
    status: int
    headers: Mapping[bytes, bytes]
    request_id: str
    body: bytes


#: Calls an endpoint for a tenant: tenant, endpoint, body.
Ask = Callable[[str, str, bytes], Awaitable[LineAnswer]]


@dataclass
class BatchRunner:
    """Runs open batches that no other gateway runs."""

    _batches: Batches
    _leases: Leases
    _ask: Ask
    _may_ask: Callable[[str, str], bool]  #: whether the key of a tenant or guest is valid
    _: KW_ONLY
    max_lines: int
    max_open_lines: int = MAX_OPEN_LINES  #: of a batch
    keep_s: float  #: age at which files and batches are deleted
    look_s: float = 3.0
    flush_s: float = 2.0  #: interval of storing results
    lease_s: float = LEASE_S

    def __post_init__(self) -> None:
        self.holder = secrets.token_hex(8)
        self._running: dict[str, tuple[str, asyncio.Task[None]]] = {}  # owner and task, by id
        self._computing: set[_Computing] = set()
        self._changed = asyncio.Event()
        self._sweep_at = time.monotonic() + random.random() * _SWEEP_PAUSE_S
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop = asyncio.create_task(self._look_for_ever(), name="batches")

    async def stop(self) -> None:
        """Stop; open batches continue on other gateways."""
        tasks = [task for _, task in self._running.values()]
        if self._loop is not None:
            tasks.append(self._loop)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def look(self) -> None:
        self._changed.set()
        for computing in self._computing:
            computing.wake()

    async def _look_for_ever(self) -> None:
        while True:
            try:
                await self._look_once()
            except (StoreError, QueueUnavailable) as error:
                logger.warning("cannot look for batches, retrying: %s", error)
            except Exception:
                logger.exception("cannot look for batches, retrying")
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.look_s * random.uniform(0.75, 1.25)):
                    await self._changed.wait()

    async def _look_once(self) -> None:
        if time.monotonic() > self._sweep_at:
            self._sweep_at = time.monotonic() + _SWEEP_PAUSE_S
            before_s = time.time() - self.keep_s  # noqa: TID251
            await asyncio.to_thread(self._batches.files.sweep, before_s)
            await asyncio.to_thread(self._batches.sweep, before_s)
        waiting = await asyncio.to_thread(self._batches.open_ids)
        waiting = [each for each in waiting if each[1] not in self._running]
        cancelled = await asyncio.to_thread(self._batches.cancelled_ids) if waiting else set()
        for owner, id_ in [each for each in waiting if each[1] in cancelled]:
            waiting.remove((owner, id_))  # only has to be finished, MAX_RUNNING does not apply
            await self._take(owner, id_)
        while waiting and len(self._running) < MAX_RUNNING:
            # The oldest batch of the owner with the fewest running ones.
            num_running = Counter(owner for owner, _ in self._running.values())
            owner, id_ = min(waiting, key=lambda each: (num_running[each[0]], each[1]))
            waiting.remove((owner, id_))
            await self._take(owner, id_)

    async def _take(self, owner: str, id_: str) -> None:
        """Run a batch, unless another gateway runs it."""
        if await self._leases.hold(id_, self.holder, self.lease_s):
            task = asyncio.create_task(self._run(owner, id_), name=id_)
            self._running[id_] = owner, task

    async def _run(self, owner: str, id_: str) -> None:
        """Run a batch while this gateway holds its lease."""
        work = asyncio.ensure_future(self._work(owner, id_))
        hold = asyncio.ensure_future(self._hold(id_))
        try:
            await asyncio.wait({work, hold}, return_when=asyncio.FIRST_COMPLETED)
            if work.done() and (error := work.exception()) is not None:
                if not isinstance(error, StoreError | QueueUnavailable):
                    logger.error("a batch was interrupted; it will be continued", exc_info=error)
                await asyncio.sleep(self.look_s)
        finally:
            for task in (work, hold):
                task.cancel()
            await asyncio.gather(work, hold, return_exceptions=True)
            with suppress(QueueUnavailable):
                await self._leases.drop(id_, self.holder)
            del self._running[id_]
            self._changed.set()

    async def _hold(self, id_: str) -> None:
        """Renew the lease. Returns when the lease is lost, or may be lost."""
        held_at = time.monotonic()
        while time.monotonic() < held_at + self.lease_s * 0.7:
            await asyncio.sleep(self.lease_s / 5)
            with suppress(QueueUnavailable):
                asked_at = time.monotonic()
                if not await self._leases.hold(id_, self.holder, self.lease_s):
                    return
                held_at = asked_at

    async def _work(self, owner: str, id_: str) -> None:
        view = await asyncio.to_thread(self._batches.get, owner, id_)
        if view is None:
            await asyncio.to_thread(self._batches.forget_orphan, owner, id_)
            await asyncio.sleep(self.look_s)
            return
        record = view.record
        if view.finalizing is None:
            await self._compute(view)
        await asyncio.to_thread(self._batches.end, record)

    async def _compute(self, view: BatchView) -> None:
        record, batches = view.record, self._batches
        if view.cancel is not None:
            await asyncio.to_thread(batches.finalize, record, "cancelled")
            return
        if not self._may_ask(record.tenant, record.guest):
            removed = LineError("invalid_api_key", "The API key of this batch was removed.")
            await asyncio.to_thread(batches.finalize, record, "failed", [removed])
            return
        data = await asyncio.to_thread(batches.read_input, record)
        if data is None:
            gone = LineError("input_file_not_found", "The input file was deleted.")
            await asyncio.to_thread(batches.finalize, record, "failed", [gone])
            return
        if view.beginning is None:
            total, errors = await asyncio.to_thread(
                check_lines, data, record.endpoint, self.max_lines
            )
            if errors:
                await asyncio.to_thread(batches.finalize, record, "failed", errors)
                return
            await asyncio.to_thread(batches.begin, record, total)
        numbers = await asyncio.to_thread(
            lambda: {result.number for result in batches.results(record, view.parts)}
        )
        lines = split_lines(data)
        todo = (number for number in range(len(lines)) if number not in numbers)
        computing = _Computing(self, record, lines, todo)
        status = "completed"
        self._computing.add(computing)
        try:
            async with asyncio.timeout(max(0.0, record.expires_at - time.time())):  # noqa: TID251
                if not await computing.run():
                    status = "cancelled"
        except TimeoutError:
            status = "expired"
        finally:
            self._computing.discard(computing)
            await computing.flush()
        await asyncio.to_thread(batches.finalize, record, status)

    # Used by `_Computing`

    async def answer(self, record: BatchRecord, line: BatchLine) -> LineResult:
        """Run a line. Retries while the queue is full."""
        num_tries, num_refusals = 0, 0
        while True:
            answer = await self._ask(record.tenant, record.endpoint, line.body)
            pause_s = _find_pause(answer)
            if pause_s is None:
                break
            if _was_taken(answer):
                num_tries += 1
                if num_tries == _MAX_TRIES:
                    break
            num_refusals += 1
            pause_s = min(_MAX_PAUSE_S, max(pause_s, 0.1 * 2 ** min(num_refusals, 10)))
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        data = to_result(record.id, line, answer.status, answer.request_id, answer.body)
        return LineResult(line.number, answer.status == 200, data)

    async def keep(self, record: BatchRecord, results: list[LineResult]) -> None:
        await asyncio.to_thread(self._batches.add_part, record, self.holder, results)

    async def is_cancelled(self, record: BatchRecord) -> bool:
        """Whether the batch is cancelled, or its key revoked. Raises: StoreError."""
        return not self._may_ask(record.tenant, record.guest) or await asyncio.to_thread(
            self._batches.is_cancelled, record
        )


@dataclass(eq=False)
class _Computing:
    _runner: BatchRunner
    _record: BatchRecord
    _lines: Sequence[memoryview]
    _todo: Iterator[int]

    def __post_init__(self) -> None:
        self._results: list[LineResult] = []
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_woken = asyncio.Event()
        self._writing = asyncio.Lock()

    async def run(self) -> bool:
        """Run all lines, unless the batch is cancelled; returns whether all are complete."""
        count = self._runner.max_open_lines
        answering = [asyncio.create_task(self._answer_lines()) for _ in range(count)]
        keeping = asyncio.create_task(self._keep_results())
        all_answered = asyncio.gather(*answering)
        try:
            done, _ = await asyncio.wait(
                {all_answered, keeping}, return_when=asyncio.FIRST_COMPLETED
            )
            for each in done:
                each.result()
            return all_answered in done
        finally:
            for task in (*answering, all_answered, keeping):
                task.cancel()
            await asyncio.gather(*answering, keeping, return_exceptions=True)

    def wake(self) -> None:
        """Check for a cancellation now, and store the results."""
        self._is_woken.set()

    async def _answer_lines(self) -> None:
        for number in self._todo:
            line = read_line(self._lines[number], number)
            result = await self._runner.answer(self._record, line)
            self._results.append(result)
            if len(self._results) >= _PART_RESULTS:
                self._has_room.clear()
                self.wake()
                await self._has_room.wait()

    async def _keep_results(self) -> None:
        """Store results periodically; returns when the batch is cancelled."""
        while True:
            self._is_woken.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._runner.flush_s):
                    await self._is_woken.wait()
            try:
                await self.flush()
                if await self._runner.is_cancelled(self._record):
                    return
            except StoreError as error:  # full disk: no further lines are run meanwhile
                logger.warning("cannot store results of a batch, retrying: %s", error)

    async def flush(self) -> None:
        """Store all results that are not stored yet. Raises: StoreError."""
        await asyncio.shield(self._write())

    async def _write(self) -> None:
        async with self._writing:
            results = list(self._results)
            if results:
                await self._runner.keep(self._record, results)
                del self._results[: len(results)]
            if len(self._results) < _PART_RESULTS:
                self._has_room.set()


def _find_pause(answer: LineAnswer) -> float | None:
    """Seconds until a line is retried. None: the response is final."""
    if answer.status == 504:  # its deadline has passed
        return 1.0
    if answer.status == 429 and b'"insufficient_quota"' in answer.body:
        return None
    if answer.status != 429 and answer.headers.get(b"x-should-retry") != b"true":
        return None
    seconds = answer.headers.get(b"retry-after", b"1")
    return float(seconds) if seconds.isdigit() else 1.0


def _was_taken(answer: LineAnswer) -> bool:
    """Whether the request was accepted before it failed."""
    if answer.status == 429:
        return False
    try:
        code = msgspec.json.decode(answer.body)["error"]["code"]
    except (msgspec.DecodeError, LookupError, TypeError):
        return True
    return code not in _NOT_TAKEN


_HEADERS = {b"content-type": b"application/json", b"x-vlm-priority": b"batch"}


async def ask_endpoint(
    lifecycle: Lifecycle, surfaces: Mapping[str, Surface], tenant: str, path: str, body: bytes
) -> LineAnswer:
    """The response of the endpoint; cancelling the call cancels the request."""
    context = RequestContext(
        secrets.token_hex(16),
        dict(_HEADERS),
        time.perf_counter(),
        tenant=tenant,
        refuses_unknown_fields=lifecycle.settings.unknown_fields == "refuse",
    )
    request_id.set(context.id)
    client = _InProcess(body)
    exchange = Exchange(context, client.receive, client.send)
    await lifecycle.serve(surfaces[path], exchange)
    return LineAnswer(client.status, client.headers, context.shown_id, bytes(client.body))


class _InProcess:
    """An in-process client: sends one body, stays connected, and reads the whole response."""

    def __init__(self, body: bytes) -> None:
        self._messages: list[Message] = [{"type": "http.request", "body": body}]
        self.status = 500
        self.headers: dict[bytes, bytes] = {}
        self.body = bytearray()

    async def receive(self) -> Message:
        if not self._messages:
            await asyncio.get_running_loop().create_future()
        return self._messages.pop()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.body += message.get("body", b"")
