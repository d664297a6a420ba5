"""Store and run batches: files of requests that are answered within a day, at lower priority.

The state of a batch is a folder of records, in a directory or a bucket:

    record       the request for the batch
    beginning    the number of requests; written after the input file was validated
    cancel       the client cancelled the batch
    parts/       results, several in each part
    finalizing   the final status, and the parts that the output contains; no more requests are run
    ending       the ids of the output files, and the final counts

The first writer of a record wins, and a record depends only on earlier records. So any gateway can write a record, and
concurrent writes are harmless. All methods of `Batches` and `BatchFiles` block and raise StoreError.

The gateway that holds the lease of a batch runs it, several lines at a time. Each line is a request to the batch's
endpoint, with batch priority. If the gateway dies, another gateway runs the lines that have no stored result.

Source: OpenAI API reference, "The request input object", "The request output object".
"""

import asyncio
import hashlib
import logging
import random
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from io import BytesIO
from itertools import islice
from tempfile import TemporaryFile
from typing import IO, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw
from starlette.types import Message

from gateway.calls.lifecycle import Lifecycle
from gateway.calls.surface import Surface
from gateway.http.exchange import Exchange, RequestContext
from shared.packages.store import PIECE_BYTES, PackageStore, StoreError
from shared.process import cancel, wait_for
from shared.queue.api import QueueUnavailable
from shared.queue.resume import Leases
from shared.telemetry.logs import request_id

#: Maximum number of reported errors of a file.
MAX_ERRORS = 100
_MAX_CUSTOM_ID_CHARS = 512
#: Prefix of the file ids. Files of vector stores have another prefix.
FILE_ID = "file-batch-"
_FILE_ID = re.compile(FILE_ID + "[0-9a-f]{32}")
_FOLDER = "files"
_TIME_DIGITS = 11
BATCH_ID = "batch_"
_BATCH_ID = re.compile(BATCH_ID + "[0-9a-f]{32}")
WINDOW_S = 24 * 3600.0
_BATCHES, _OPEN, _CANCELLED = "batches", "open", "cancelled"
#: Age at which the marker of an open batch without a record is deleted. Markers are written before records.
_ORPHAN_S = 600.0
Final = Literal["completed", "cancelled", "expired", "failed"]
T = TypeVar("T", bound=msgspec.Struct)


class LineError(msgspec.Struct, frozen=True):
    """An error of a batch. `line`: the line of the input file, from 1; None for the whole file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class _Line(msgspec.Struct, frozen=True):
    custom_id: Annotated[str, Meta(min_length=1, max_length=_MAX_CUSTOM_ID_CHARS)]
    method: str
    url: str
    body: Raw


class _Streams(msgspec.Struct, frozen=True):
    stream: bool | None = None


class _Response(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: Raw


class _Error(msgspec.Struct, frozen=True):
    code: str
    message: str


_EXPIRED = _Error(
    "batch_expired", "This request could not be executed before the completion window expired."
)


class _Result(msgspec.Struct, frozen=True):
    id: str
    custom_id: str
    response: _Response | None
    error: _Error | None


class BatchLine(msgspec.Struct, frozen=True):
    """A request of a batch. `number`: its index, from 0. `body`: JSON."""

    number: int
    custom_id: str
    body: bytes


_decoder = msgspec.json.Decoder(_Line)
_streams_decoder = msgspec.json.Decoder(_Streams)


def split_lines(data: bytes) -> list[memoryview]:
    """Split a file into its non-blank lines, without copying them."""
    view, lines, start = memoryview(data), [], 0
    while start < len(data):
        end = data.find(b"\n", start)
        end = len(data) if end < 0 else end
        if data[start:end].strip():
            lines.append(view[start:end])
        start = end + 1
    return lines


def read_line(line: memoryview, number: int) -> BatchLine:
    found = _decoder.decode(line)
    return BatchLine(number, found.custom_id, bytes(found.body))


def check_lines(data: bytes, endpoint: str, max_lines: int) -> tuple[int, list[LineError]]:
    lines = split_lines(data)
    if not lines:
        return 0, [LineError("empty_file", "The file is empty: send one JSON object per line.")]
    if len(lines) > max_lines:
        message = f"The file has {len(lines)} requests: send at most {max_lines} in a batch."
        return len(lines), [LineError("too_many_requests", message)]
    seen: set[str] = set()
    numbers = (number for number, line in enumerate(BytesIO(data), 1) if line.strip())
    found = (_check_line(line, next(numbers), endpoint, seen) for line in lines)
    return len(lines), list(islice(filter(None, found), MAX_ERRORS))


def _check_line(line: memoryview, number: int, endpoint: str, seen: set[str]) -> LineError | None:
    try:
        str(line, "utf-8")
        found = _decoder.decode(line)
    except msgspec.ValidationError:
        message = "Send custom_id (1 to 512 characters), method, url and body in each line."
        return LineError("invalid_request", message, line=number)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return LineError("invalid_json_line", "The line is not valid JSON in UTF-8.", line=number)
    if found.custom_id in seen:
        message = "Another line has this custom_id: send a unique custom_id in each line."
        return LineError("duplicate_custom_id", message, "custom_id", number)
    seen.add(found.custom_id)
    if found.method != "POST":
        return LineError("invalid_method", "Send POST as method.", "method", number)
    if found.url != endpoint:
        message = f"The url is not the batch's endpoint: send {endpoint}."
        return LineError("invalid_url", message, "url", number)
    return _check_body(found.body, number)


def _check_body(body: Raw, number: int) -> LineError | None:
    try:
        if _streams_decoder.decode(body).stream:
            message = "Batches do not support streaming: omit stream."
            return LineError("invalid_request", message, "body.stream", number)
    except msgspec.ValidationError:  # the endpoint reports a wrong type of `stream`
        if not bytes(body).lstrip().startswith(b"{"):
            return LineError("invalid_request", "Send an object as body.", "body", number)
    return None


def to_output(batch_id: str, line: BatchLine, result: _Response | _Error) -> bytes:
    """Encode a line of an output file. Its id is a hash of the batch id and the line's number."""
    digest = hashlib.sha256(f"{batch_id} {line.number}".encode()).hexdigest()
    response, error = (result, None) if isinstance(result, _Response) else (None, result)
    return msgspec.json.encode(_Result("batch_req_" + digest[:32], line.custom_id, response, error))


class LineResult(msgspec.Struct, frozen=True):
    """The result of a request. `number`: index of the request; `data`: the encoded line of an output file."""

    number: int
    is_completed: bool
    data: bytes


class BatchFile(msgspec.Struct, frozen=True):
    """An input or output file. `created_at`: epoch seconds."""

    id: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int


def make_id(beginning: str, now_s: float, name: str = "") -> str:
    """Make an id that sorts by time. It ends in a hash of `name`, or in random digits if `name` is empty."""
    tail = hashlib.sha256(name.encode()).hexdigest()[:21] if name else secrets.token_hex(11)[:21]
    return f"{beginning}{int(now_s * 1000):0{_TIME_DIGITS}x}{tail}"


def time_of(id_: str, beginning: str) -> float:
    """The creation time of an id that `make_id` made, in epoch seconds; 0 for other ids."""
    digits = id_.removeprefix(beginning)[:_TIME_DIGITS]
    try:
        return int(digits, 16) / 1000
    except ValueError:
        return 0.0


class BatchFiles:
    """Input and output files, by owner. The record of a file is written after its bytes."""

    def __init__(self, store: PackageStore) -> None:
        self._store = store

    def put(
        self, owner: str, filename: str, purpose: str, pieces: Iterable[bytes], num_bytes: int
    ) -> BatchFile:
        now = time.time()  # noqa: TID251
        file = BatchFile(make_id(FILE_ID, now), filename, purpose, num_bytes, int(now))
        self.keep(owner, file, pieces)
        return file

    def keep(self, owner: str, file: BatchFile, pieces: Iterable[bytes]) -> None:
        """Store a file. Idempotent."""
        self._store.write(_data(owner, file), pieces)
        self._store.put_if_absent(_record(owner, file.id), msgspec.json.encode(file))

    def get(self, owner: str, id_: str) -> BatchFile | None:
        if not _FILE_ID.fullmatch(id_):
            return None
        data = self._store.get(_record(owner, id_))
        return None if data is None else msgspec.json.decode(data, type=BatchFile)

    def read(self, owner: str, file: BatchFile) -> Iterator[bytes]:
        return self._store.stream(_data(owner, file))

    def delete(self, owner: str, file: BatchFile) -> None:
        self._store.delete(_record(owner, file.id))
        self._store.delete(_data(owner, file))

    def ids(self, owner: str) -> list[str]:
        keys = (key.rpartition("/")[2] for key in self._store.list(f"{_FOLDER}/{owner}"))
        return sorted(name.removesuffix(".json") for name in keys if name.endswith(".json"))

    def usage(self, owner: str) -> tuple[int, int]:
        names = [key.rpartition(".")[2] for key in self._store.list(f"{_FOLDER}/{owner}")]
        return names.count("json"), sum(int(name) for name in names if name.isdigit())

    def sweep(self, before_s: float) -> None:
        """Delete files that are older than `before_s`, and leftovers of interrupted writes."""
        self._store.delete_parts(before_s)
        for key in self._store.list(_FOLDER):
            if time_of(key.rpartition("/")[2], FILE_ID) < before_s:
                self._store.delete(key)


def _record(owner: str, id_: str) -> str:
    return f"{_FOLDER}/{owner}/{id_}.json"


def _data(owner: str, file: BatchFile) -> str:
    """The key contains the size, so that listing an owner's keys gives its usage."""
    return f"{_FOLDER}/{owner}/{file.id}.{file.num_bytes}"


class BatchRecord(msgspec.Struct, frozen=True):
    """The request that created a batch. `tenant`: the tenant of its requests. Units: epoch seconds."""

    id: str
    owner: str
    tenant: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    guest: str = ""  #: see `gateway.keys.directory.KeyDirectory.guest`


class Beginning(msgspec.Struct, frozen=True):
    """Written after the input file was validated. `at`: epoch seconds; `total`: number of requests."""

    at: int
    total: int


class Cancel(msgspec.Struct, frozen=True):
    at: int


class Finalizing(msgspec.Struct, frozen=True):
    """Written when no more requests are run. `parts`: names of the parts that the output contains, in order."""

    at: int
    status: Final
    parts: list[str] = []
    errors: list[LineError] = []


class Ending(msgspec.Struct, frozen=True):
    at: int
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None


class BatchView(msgspec.Struct, frozen=True):
    record: BatchRecord
    beginning: Beginning | None
    cancel: Cancel | None
    finalizing: Finalizing | None
    ending: Ending | None
    parts: list[str]

    @property
    def counts(self) -> tuple[int, int]:
        if self.ending is not None:
            return self.ending.completed, self.ending.failed
        counts = [name.split("-")[-2:] for name in self.parts]
        return sum(int(good) for good, _ in counts), sum(int(bad) for _, bad in counts)

    @property
    def status(self) -> str:
        """The status in OpenAI's terms."""
        if self.ending is not None:
            assert self.finalizing is not None
            return self.finalizing.status
        if self.cancel is not None:
            return "cancelling"
        if self.finalizing is not None:
            return "finalizing"
        return "validating" if self.beginning is None else "in_progress"


class Batches:
    def __init__(self, store: PackageStore, files: BatchFiles) -> None:
        self._store = store
        self.files = files

    def create(self, owner: str, max_open: int, **fields: Any) -> BatchRecord | None:
        """Create a batch with `fields` of its record. Returns None if its owner has `max_open` open batches.

        The marker of the batch is written before open batches are counted. So concurrent calls never exceed the limit,
        but may be refused just below it.
        """
        now = time.time()  # noqa: TID251
        times = {"created_at": int(now), "expires_at": int(now + WINDOW_S)}
        record = BatchRecord(make_id(BATCH_ID, now), owner, **times, **fields)
        self._store.put_if_absent(f"{_OPEN}/{owner}/{record.id}", b"")
        if len(self.open_ids(owner)) > max_open:
            self._store.delete(f"{_OPEN}/{owner}/{record.id}")
            return None
        self._write(record, "record", record)
        return record

    def get(self, owner: str, id_: str) -> BatchView | None:
        if not _BATCH_ID.fullmatch(id_):
            return None
        folder = _folder(owner, id_)
        names = {key.removeprefix(folder + "/") for key in self._store.list(folder)}

        def read(name: str, type_: type[T]) -> T | None:
            data = self._store.get(f"{folder}/{name}") if name in names else None
            return None if data is None else msgspec.json.decode(data, type=type_)

        record = read("record", BatchRecord)
        if record is None:
            return None
        return BatchView(
            record,
            read("beginning", Beginning),
            read("cancel", Cancel),
            read("finalizing", Finalizing),
            read("ending", Ending),
            sorted(name.removeprefix("parts/") for name in names if name.startswith("parts/")),
        )

    def ids(self, owner: str) -> list[str]:
        """The ids of an owner's batches, oldest first."""
        keys = (key.split("/") for key in self._store.list(f"{_BATCHES}/{owner}"))
        return sorted(names[2] for names in keys if names[3:] == ["record"])

    def open_ids(self, owner: str = "") -> list[tuple[str, str]]:
        """The owner and id of each open batch. An empty `owner` selects all owners."""
        keys = self._store.list(f"{_OPEN}/{owner}" if owner else _OPEN)
        return [(names[1], names[2]) for names in (key.split("/") for key in keys)]

    def cancel(self, record: BatchRecord) -> None:
        self._write(record, "cancel", Cancel(_now()))
        self._store.put_if_absent(f"{_CANCELLED}/{record.owner}/{record.id}", b"")

    def is_cancelled(self, record: BatchRecord) -> bool:
        return self._store.get(f"{_folder(record.owner, record.id)}/cancel") is not None

    def cancelled_ids(self) -> set[str]:
        """The ids of cancelled batches that have not ended."""
        return {key.rpartition("/")[2] for key in self._store.list(_CANCELLED)}

    def begin(self, record: BatchRecord, total: int) -> None:
        self._write(record, "beginning", Beginning(_now(), total))

    def add_part(self, record: BatchRecord, writer: str, results: list[LineResult]) -> None:
        """Store results. `writer`: a unique name of the process that computed them."""
        num_good = sum(result.is_completed for result in results)
        name = f"{writer}-{secrets.token_hex(4)}-{num_good}-{len(results) - num_good}"
        key = f"{_folder(record.owner, record.id)}/parts/{name}"
        self._store.put_if_absent(key, msgspec.msgpack.encode(results))

    def results(self, record: BatchRecord, parts: list[str]) -> Iterator[LineResult]:
        """The results in `parts`, without duplicates of a line."""
        seen: set[int] = set()
        for name in parts:
            data = self._store.get(f"{_folder(record.owner, record.id)}/parts/{name}")
            if data is None:
                raise StoreError(f"{self._store.url}: a part of {record.id} is missing")
            for result in msgspec.msgpack.decode(data, type=list[LineResult]):
                if result.number not in seen:
                    seen.add(result.number)
                    yield result

    def read_input(self, record: BatchRecord) -> bytes | None:
        """The content of the input file. None: it was deleted."""
        file = self.files.get(record.owner, record.input_file_id)
        return None if file is None else b"".join(self.files.read(record.owner, file))

    def finalize(
        self, record: BatchRecord, status: Final, errors: Sequence[LineError] = ()
    ) -> None:
        """Record the final status. Results that are stored later are ignored."""
        view = self.get(record.owner, record.id)
        parts = [] if view is None else view.parts
        self._write(record, "finalizing", Finalizing(_now(), status, parts, list(errors)))

    def end(self, record: BatchRecord) -> None:
        """Write the output files of a batch that is finalizing, and delete its parts and markers. Idempotent."""
        view = self.get(record.owner, record.id)
        if view is not None and view.finalizing is not None and view.ending is None:
            self._write(record, "ending", self._collect(view, view.finalizing))
            view = self.get(record.owner, record.id)
        if view is None or view.ending is not None:
            for name in () if view is None else view.parts:
                self._store.delete(f"{_folder(record.owner, record.id)}/parts/{name}")
            self._store.delete(f"{_CANCELLED}/{record.owner}/{record.id}")
            self._store.delete(f"{_OPEN}/{record.owner}/{record.id}")

    def forget_orphan(self, owner: str, id_: str) -> None:
        """Delete the marker of an open batch whose record was never written."""
        if time_of(id_, BATCH_ID) < time.time() - _ORPHAN_S:  # noqa: TID251
            self._store.delete(f"{_OPEN}/{owner}/{id_}")

    def cancel_all(self, owner: str) -> int:
        """Cancel an owner's open batches. Returns how many batches have not ended yet."""
        open_ids = self.open_ids(owner)
        for _, id_ in open_ids:
            if (view := self.get(owner, id_)) is not None:
                self.cancel(view.record)
        return len(open_ids)

    def forget(self, owner: str) -> int:
        """Delete an owner's batches and files. Returns the number of batches."""
        ids = self.ids(owner)
        for key in self._store.list(f"{_BATCHES}/{owner}"):
            self._store.delete(key)
        for id_ in self.files.ids(owner):
            if (file := self.files.get(owner, id_)) is not None:
                self.files.delete(owner, file)
        return len(ids)

    def sweep(self, before_s: float) -> None:
        """Delete older batches that are not open."""
        still_open = {id_ for _, id_ in self.open_ids()}
        for key in (*self._store.list(_BATCHES), *self._store.list(_CANCELLED)):
            id_ = key.split("/")[2]
            if id_ not in still_open and time_of(id_, BATCH_ID) < before_s:
                self._store.delete(key)

    def _collect(self, view: BatchView, final: Finalizing) -> Ending:
        record = view.record
        with TemporaryFile() as good, TemporaryFile() as bad:
            counts, seen = [0, 0], set()
            for result in self.results(record, final.parts):
                seen.add(result.number)
                counts[result.is_completed] += 1
                (good if result.is_completed else bad).write(result.data + b"\n")
            if final.status == "expired" and (data := self.read_input(record)) is not None:
                for number, line in enumerate(split_lines(data)):
                    if number not in seen:
                        late = to_output(record.id, read_line(line, number), _EXPIRED)
                        bad.write(late + b"\n")
                        counts[False] += 1
            output = self._keep(record, final, good, "output") if counts[True] else None
            errors = self._keep(record, final, bad, "error") if counts[False] else None
        return Ending(_now(), counts[True], counts[False], output, errors)

    def _keep(self, record: BatchRecord, final: Finalizing, data: IO[bytes], kind: str) -> str:
        num_bytes = data.tell()
        data.seek(0)
        id_ = make_id(FILE_ID, final.at, f"{record.id} {kind}")
        name = f"{record.id}_{kind}.jsonl"
        file = BatchFile(id_, name, "batch_output", num_bytes, final.at)
        self.files.keep(record.owner, file, iter(lambda: data.read(PIECE_BYTES), b""))
        return id_

    def _write(self, record: BatchRecord, name: str, value: msgspec.Struct) -> None:
        key = f"{_folder(record.owner, record.id)}/{name}"
        self._store.put_if_absent(key, msgspec.json.encode(value))


def _folder(owner: str, id_: str) -> str:
    return f"{_BATCHES}/{owner}/{id_}"


def _now() -> int:
    return int(time.time())  # noqa: TID251


#: Maximum concurrent lines of a batch, and concurrent batches of a gateway.
_MAX_OPEN_LINES = 64
MAX_RUNNING = 4
_LEASE_S = 15.0
_SWEEP_PAUSE_S = 3600.0
_PART_RESULTS = 256
_MAX_PAUSE_S = 30.0
#: Maximum attempts of a line whose accepted request failed.
_MAX_TRIES = 5
#: Error codes of requests that were not accepted. Such requests do not count as attempts.
_NOT_TAKEN = frozenset((
    "no_worker", "server_overloaded", "service_unavailable", "store_unavailable", "unsupported_version",
))  # fmt: skip

logger = logging.getLogger(__name__)


class LineAnswer(msgspec.Struct, frozen=True):
    status: int
    headers: Mapping[bytes, bytes]
    request_id: str
    body: bytes


#: Calls an endpoint. Arguments: tenant, endpoint, body.
Ask = Callable[[str, str, bytes], Awaitable[LineAnswer]]


@dataclass
class BatchRunner:
    """Runs open batches that no other gateway runs."""

    _batches: Batches
    _leases: Leases
    _ask: Ask
    may_ask: Callable[[BatchRecord], bool]  #: whether the key of a batch is valid
    _: KW_ONLY
    max_lines: int
    keep_s: float  #: age at which files and batches are deleted
    look_s: float = 3.0
    flush_s: float = 2.0  #: interval at which results are stored

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
        await cancel(self._loop, *[task for _, task in self._running.values()])

    def look(self) -> None:
        self._changed.set()
        for computing in self._computing:
            computing.is_woken.set()

    async def _look_for_ever(self) -> None:
        while True:
            try:
                await self._look_once()
            except (StoreError, QueueUnavailable) as error:
                logger.warning("cannot look for batches, retrying: %s", error)
            except Exception:
                logger.exception("cannot look for batches, retrying")
            self._changed.clear()
            await wait_for(self._changed, self.look_s * random.uniform(0.75, 1.25))

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
            waiting.remove((owner, id_))  # cancelled batches run no lines: MAX_RUNNING is ignored
            await self._try_to_run(owner, id_)
        while waiting and len(self._running) < MAX_RUNNING:
            # For fairness, choose the oldest batch of the owner with the fewest running batches.
            num_running = Counter(owner for owner, _ in self._running.values())
            owner, id_ = min(waiting, key=lambda each: (num_running[each[0]], each[1]))
            waiting.remove((owner, id_))
            await self._try_to_run(owner, id_)

    async def _try_to_run(self, owner: str, id_: str) -> None:
        """Run a batch, unless another gateway runs it."""
        if await self._leases.hold(id_, self.holder, _LEASE_S):
            task = asyncio.create_task(self._run(owner, id_), name=id_)
            self._running[id_] = owner, task

    async def _run(self, owner: str, id_: str) -> None:
        """Run a batch while this gateway holds its lease."""
        work = asyncio.ensure_future(self._work(owner, id_))
        hold = asyncio.ensure_future(self._leases.renew(id_, self.holder, _LEASE_S))
        try:
            await asyncio.wait({work, hold}, return_when=asyncio.FIRST_COMPLETED)
            if work.done() and (error := work.exception()) is not None:
                if not isinstance(error, StoreError | QueueUnavailable):
                    logger.error("a batch was interrupted; it will be continued", exc_info=error)
                await asyncio.sleep(self.look_s)
        finally:
            await cancel(work, hold)
            with suppress(QueueUnavailable):
                await self._leases.drop(id_, self.holder)
            del self._running[id_]
            self._changed.set()

    async def _work(self, owner: str, id_: str) -> None:
        view = await asyncio.to_thread(self._batches.get, owner, id_)
        if view is None:
            await asyncio.to_thread(self._batches.forget_orphan, owner, id_)
            await asyncio.sleep(self.look_s)
            return
        if view.finalizing is None:
            status, errors = await self._compute(view)
            await asyncio.to_thread(self._batches.finalize, view.record, status, errors)
        await asyncio.to_thread(self._batches.end, view.record)

    async def _compute(self, view: BatchView) -> tuple[Final, list[LineError]]:
        """Run the lines that have no result. Returns the final status and the errors of the batch."""
        record, batches = view.record, self._batches
        if view.cancel is not None:
            return "cancelled", []
        if not self.may_ask(record):
            return "failed", [LineError("invalid_api_key", "The key of the batch was removed.")]
        data = await asyncio.to_thread(batches.read_input, record)
        if data is None:
            return "failed", [LineError("input_file_not_found", "The input file was deleted.")]
        if view.beginning is None:
            total, errors = await asyncio.to_thread(
                check_lines, data, record.endpoint, self.max_lines
            )
            if errors:
                return "failed", errors
            await asyncio.to_thread(batches.begin, record, total)
        numbers = await asyncio.to_thread(
            lambda: {result.number for result in batches.results(record, view.parts)}
        )
        lines = split_lines(data)
        todo = (number for number in range(len(lines)) if number not in numbers)
        computing = _Computing(self, record, lines, todo)
        self._computing.add(computing)
        try:
            async with asyncio.timeout(max(0.0, record.expires_at - time.time())):  # noqa: TID251
                is_complete = await computing.run() and self.may_ask(record)
            return "completed" if is_complete else "cancelled", []
        except TimeoutError:
            return "expired", []
        finally:
            self._computing.discard(computing)
            await computing.flush()

    # Used by `_Computing`

    async def answer(self, record: BatchRecord, line: BatchLine) -> LineResult:
        """Run a line. Retries retryable errors; requests that were not accepted are retried without limit."""
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
        response = _Response(answer.status, answer.request_id, Raw(answer.body))
        data = to_output(record.id, line, response)
        return LineResult(line.number, answer.status == 200, data)

    async def keep(self, record: BatchRecord, results: list[LineResult]) -> None:
        await asyncio.to_thread(self._batches.add_part, record, self.holder, results)

    async def is_cancelled(self, record: BatchRecord) -> bool:
        """Whether the batch is cancelled, or its key revoked. Raises: StoreError."""
        is_cancelled = self._batches.is_cancelled
        return not self.may_ask(record) or await asyncio.to_thread(is_cancelled, record)


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
        self.is_woken = asyncio.Event()  #: set to store results and look for a cancellation now
        self._writing = asyncio.Lock()

    async def run(self) -> bool:
        """Run all lines, unless the batch is cancelled; returns whether all are complete."""
        answering = [asyncio.create_task(self._answer_lines()) for _ in range(_MAX_OPEN_LINES)]
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
            await cancel(*answering, all_answered, keeping)

    async def _answer_lines(self) -> None:
        for number in self._todo:
            line = read_line(self._lines[number], number)
            result = await self._runner.answer(self._record, line)
            if not result.is_completed and not self._runner.may_ask(self._record):
                return  # the failure may be due to the key: do not store it as the line's result
            self._results.append(result)
            if len(self._results) >= _PART_RESULTS:
                self._has_room.clear()
                self.is_woken.set()
                await self._has_room.wait()

    async def _keep_results(self) -> None:
        """Store results periodically; returns when the batch is cancelled."""
        while True:
            self.is_woken.clear()
            await wait_for(self.is_woken, self._runner.flush_s)
            try:
                await self.flush()
                if await self._runner.is_cancelled(self._record):
                    return
            except StoreError as error:  # such as a full disk; at _PART_RESULTS results, lines wait
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
    if answer.status == 504:  # the deadline of the request has passed
        return 1.0
    if answer.headers.get(b"x-should-retry") != b"true":
        return None
    return float(answer.headers.get(b"retry-after", b"1"))


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
    """Call an endpoint in this process. Cancelling the coroutine cancels the request."""
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
