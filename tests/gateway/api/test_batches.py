"""Batches over HTTP: OpenAI's client works unchanged, and each line is answered once, even if a gateway stops."""

import asyncio
import contextlib
import json
import shutil
from collections import Counter
from functools import partial
from unittest.mock import AsyncMock

import msgspec
import openai
import pytest

from gateway.batches import Batches, BatchFiles, BatchRunner, LineAnswer, LineResult, check_lines
from shared.packages.store import FileStore
from shared.protocol import ErrorCode, Priority
from tests.factories_gateway import CARD, CHAT, answer_any, openai_client, say_hello, say_nothing
from tests.gateway.api.test_image_files import PNG
from tests.waiting import until

KEYS = ["key-one", "key-two"]


@pytest.fixture
def card():
    return msgspec.structs.replace(CARD, tasks=("generate", "embed"))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Results are stored, and stopped gateways detected, at short intervals."""
    runner = partial(BatchRunner, flush_s=0.1, look_s=0.3)
    monkeypatch.setattr("gateway.services.BatchRunner", runner)


@pytest.fixture
def limits():
    return {}


@pytest.fixture
def changes(tmp_path, limits):
    return {"gateway": {"files": f"file://{tmp_path}", "api_keys": KEYS}, "limits": limits}


@pytest.fixture
def api_key() -> str:
    return KEYS[0]


@pytest.fixture
def served(fleet, changes):
    """Starts a gateway; returns a client of it."""

    @contextlib.asynccontextmanager
    async def run():
        async with fleet.gateway(**changes) as gateway, openai_client(gateway, KEYS[0]) as client:
            yield client

    return run


def to_line(name, endpoint=CHAT, **body):
    given = {
        CHAT: {"messages": [{"role": "user", "content": name}]},
        "/v1/completions": {"prompt": name},
        "/v1/responses": {"input": name},
        "/v1/embeddings": {"input": name},
    }[endpoint]
    body = {"model": CARD.name, **given, **body}
    return {"custom_id": name, "method": "POST", "url": endpoint, "body": body}


def to_file(lines):
    return "\n".join(json.dumps(line) for line in lines).encode()


async def begin(client, lines, endpoint=CHAT, **options):
    file = await client.files.create(file=("in.jsonl", to_file(lines)), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options
    )


async def until_batch(client, batch, is_there):
    """Waits until the batch satisfies `is_there`; returns it."""

    async def look():
        found = await client.batches.retrieve(batch.id)
        return found if is_there(found) else None

    return await until(look, 30)


async def until_ended(client, batch):
    ended = ("completed", "failed", "expired", "cancelled")
    return await until_batch(client, batch, lambda found: found.status in ended)


async def read(client, file_id):
    lines = [json.loads(line) for line in (await client.files.content(file_id)).text.splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


async def test_the_official_client_gets_each_answer_once(client, worker):
    worker.script = answer_any
    for endpoint in (CHAT, "/v1/completions", "/v1/responses", "/v1/embeddings"):
        good = [to_line(f"line {i}", endpoint) for i in range(70 if endpoint == CHAT else 5)]
        bad = to_line("bad", endpoint, model="unknown")
        batch = await begin(client, [*good, bad], endpoint, metadata={"of": "mine"})
        assert batch.status == "validating"
        batch = await until_ended(client, batch)
        assert (batch.status, batch.metadata) == ("completed", {"of": "mine"})
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (len(good) + 1, len(good), 1)
        output = await read(client, batch.output_file_id)
        assert output.keys() == {line["custom_id"] for line in good}
        assert {line["response"]["status_code"] for line in output.values()} == {200}
        if endpoint == CHAT:
            body = output["line 3"]["response"]["body"]
            assert body["choices"][0]["message"]["content"] == "Hello you"
            assert body["id"] == "chatcmpl-" + output["line 3"]["response"]["request_id"][4:]
        [error] = (await read(client, batch.error_file_id)).values()
        assert error["response"]["status_code"] == 404
        assert error["response"]["body"]["error"]["code"] == "model_not_found"
    assert {request.priority for request in worker.requests} == {Priority.BATCH}
    file = await client.files.retrieve(batch.output_file_id)
    assert file.purpose == "batch_output"


async def test_lists_continue_after_an_id_and_show_only_the_keys_own(client, gateway):
    batches = [await begin(client, [to_line(str(i))]) for i in range(3)]
    for batch in batches:
        await until_ended(client, batch)
    ids = [batch.id for batch in reversed(batches)]
    assert [batch.id async for batch in client.batches.list(limit=2)] == ids
    image = await client.files.create(file=("image.png", PNG), purpose="vision")
    files = [file async for file in client.files.list(limit=2)]
    assert Counter(file.purpose for file in files[:-1]) == {"batch": 3, "batch_output": 3}
    assert files[-1] == image
    with pytest.raises(openai.BadRequestError, match=r"before.*purpose"):
        await client.files.list(extra_query={"before": image.id})
    gone, output, _ = [file.id async for file in client.files.list(purpose="batch_output")]
    await client.files.delete(gone)
    with pytest.raises(openai.NotFoundError):
        await client.files.content(gone)
    async with openai_client(gateway, KEYS[1]) as other:
        assert (await other.batches.list()).data == (await other.files.list()).data == []
        for ask in (
            other.batches.retrieve(ids[0]),
            other.batches.cancel(ids[0]),
            other.files.content(output),
            other.files.delete(output),
            other.batches.retrieve("batch_../../../etc"),
            other.files.retrieve("file-batch-" + "." * 32),
        ):
            with pytest.raises(openai.NotFoundError):
                await ask


LINE = to_line("a")
BAD_FILES = [
    (b"\n \n", "empty_file", None),
    (b"\n \r\n{\n\n", "invalid_json_line", 3),
    (b'{"custom_id": "\xff"}', "invalid_json_line", 1),
    (b"[]", "invalid_request", 1),
    (to_file([{**LINE, "url": "/v1/embeddings"}]), "invalid_url", 1),
    (to_file([{**LINE, "method": "GET"}]), "invalid_method", 1),
    (to_file([{**LINE, "body": 5}]), "invalid_request", 1),
    (to_file([{**LINE, "body": {**LINE["body"], "stream": True}}]), "invalid_request", 1),
    (to_file([{**LINE, "custom_id": ""}]), "invalid_request", 1),
    (to_file([to_line(str(i)) for i in range(4)]), "too_many_requests", None),
]


async def test_errors_of_an_invalid_file_name_the_line(client, worker):
    for data, code, line in BAD_FILES:
        _, [error] = check_lines(data, CHAT, 3)
        assert (error.code, error.line) == (code, line)
    batch = await until_ended(client, await begin(client, [LINE, LINE]))
    assert batch.status == "failed"
    [error] = batch.errors.data
    assert (error.code, error.line) == ("duplicate_custom_id", 2)
    assert worker.requests == []


@pytest.mark.parametrize("limits", [{"max_open_batches": 1, "max_key_batch_bytes": 2000}])
async def test_invalid_batches_are_refused_by_field(client, worker, fleet):
    worker.script = say_nothing
    batch = await begin(client, [LINE])
    good = {"input_file_id": batch.input_file_id, "endpoint": CHAT, "completion_window": "24h"}
    for changes, param, status in (
        ({"input_file_id": "file-batch-" + "0" * 32}, "input_file_id", 400),
        ({"input_file_id": "file-1"}, "input_file_id", 400),
        ({"endpoint": "/v1/moderations"}, "endpoint", 400),
        ({"completion_window": "1h"}, "completion_window", 400),
        ({"metadata": {"k": "v" * 513}}, "metadata", 400),
        ({}, None, 429),
    ):
        with pytest.raises(openai.APIStatusError) as raised:
            await client.batches.create(**{**good, **changes})
        assert raised.value.status_code == status
        assert (raised.value.param or "").startswith(param or "")
    async with fleet.gateway() as gateway, openai_client(gateway) as without:
        for asked, expected in (
            (client.files.create(file=("in", b"x" * 2000), purpose="batch"), (413, "store_full")),
            (client.files.retrieve("nothing"), (404, "not_found")),  # without a search process
            (client.files.content("nothing"), (404, "not_found")),
            (client.files.delete("nothing"), (404, "not_found")),
            (without.batches.list(), (404, "batches_not_served")),
            (without.files.create(file=("a", b"x"), purpose="batch"), (404, "batches_not_served")),
        ):
            with pytest.raises(openai.APIStatusError) as raised:
                await asked
            assert (raised.value.status_code, raised.value.code) == expected


@pytest.fixture
async def others(served):
    """Clients of two more gateways."""
    async with served() as one, served() as other:
        yield one, other


async def statuses(asked):
    """Counts the status of each request; an object that was returned counts as 200."""
    answers = await asyncio.gather(*asked, return_exceptions=True)
    return Counter(getattr(answer, "status_code", 200) for answer in answers)


@pytest.mark.parametrize("limits", [{"max_open_batches": 4, "max_key_batch_bytes": 2000}])
async def test_concurrent_batches_and_files_do_not_exceed_the_limits(client, others, worker):
    """One gateway reaches the limit exactly; several gateways, which share no state, do not exceed it."""
    worker.script = say_nothing
    batch = await begin(client, [LINE])
    body = {"input_file_id": batch.input_file_id, "endpoint": CHAT, "completion_window": "24h"}
    clients = [client, *others]
    taken = await statuses(c.batches.create(**body) for c in clients * 4)
    assert taken[200] <= 3
    assert taken[200] + taken[429] == 12
    await statuses(client.batches.create(**body) for _ in range(8))
    page = await client.batches.list()
    assert [b.status not in ("completed", "failed") for b in page.data] == [True] * 4
    kept = await statuses(
        c.files.create(file=("in", b"x" * 600), purpose="batch") for c in clients * 4
    )
    assert kept[200] + kept[413] == 12
    assert kept[200] + 1 == len((await client.files.list()).data) <= 4


async def test_a_cancelled_batch_keeps_its_results(client, worker, caplog):
    async def some(answer):
        slow = "slow" in answer.request.task.messages[0].parts[0].text
        await (say_nothing if slow else say_hello)(answer)

    worker.script = some
    batch = await begin(client, [to_line("quick"), to_line("slow")])
    await until(lambda: len(worker.answers) == 2)
    await until_batch(client, batch, lambda found: found.request_counts.completed)
    assert (await client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
    batch = await until_ended(client, batch)
    assert batch.status == "cancelled"
    assert list(await read(client, batch.output_file_id)) == ["quick"]
    assert batch.error_file_id is None
    async with asyncio.timeout(20):
        await worker.cancelled.wait()
    assert "never retrieved" not in caplog.text


async def test_lines_that_expired_are_errors_in_the_result(client, worker, monkeypatch):
    monkeypatch.setattr("gateway.batches.WINDOW_S", 1)
    worker.script = say_nothing
    batch = await until_ended(client, await begin(client, [to_line("a"), to_line("b")]))
    assert batch.status == "expired"
    errors = await read(client, batch.error_file_id)
    codes = {name: line["error"]["code"] for name, line in errors.items()}
    assert codes == {"a": "batch_expired", "b": "batch_expired"}


@pytest.mark.parametrize("limits", [{"max_batch_queue_depth": 1, "max_key_open_requests": 8}])
async def test_a_batch_waits_while_the_queue_is_full(client, worker):
    """No line fails because the queue is full, and a line whose request was lost is submitted again."""
    lost = set()

    async def lose_once(answer):
        name = answer.request.task.messages[0].parts[0].text
        if name not in lost:
            lost.add(name)
            await answer.fail(ErrorCode.WORKER_LOST)
        else:
            await say_hello(answer)

    worker.script = lose_once
    batch = await until_ended(client, await begin(client, [to_line(str(i)) for i in range(6)]))
    assert batch.request_counts.completed == 6


async def test_another_gateway_continues_the_batch_of_a_stopped_one(served, worker):
    lines = [to_line(str(i)) for i in range(100)]
    is_stopped = asyncio.Event()

    async def half(answer):
        if worker.answers.index(answer) >= 50 and not is_stopped.is_set():
            await say_nothing(answer)
        else:
            await say_hello(answer)

    worker.script = half
    async with served() as client:
        batch = await begin(client, lines)
        await until_batch(client, batch, lambda found: found.request_counts.completed >= 30)
    is_stopped.set()
    async with served() as client:
        batch = await until_ended(client, batch)
        assert len(await read(client, batch.output_file_id)) == 100
    texts = Counter(request.task.messages[0].parts[0].text for request in worker.requests)
    assert max(texts.values()) <= 2
    assert sum(texts.values()) < 170


async def test_a_key_that_is_removed_ends_its_batches(served, fleet, worker, changes):
    worker.script = say_nothing
    async with served() as client:
        batch = await begin(client, [to_line("a")])
        await until(lambda: worker.requests)
    worker.script = say_hello
    async with fleet.gateway(gateway={**changes["gateway"], "api_keys": KEYS[1:]}) as second:
        await until(lambda: not second.services.batches.open_ids())
    async with served() as client:
        batch = await client.batches.retrieve(batch.id)
    assert (batch.status, batch.output_file_id) == ("failed", None)
    assert [error.code for error in batch.errors.data] == ["invalid_api_key"]


async def test_a_key_that_is_revoked_cancels_its_batch_and_fails_no_line(batches):
    async def ask(*_):
        keys.clear()
        return LineAnswer(401, {}, "r", b"{}")

    record, keys = make_batch(batches, [LINE]), {"tenant"}
    may_ask = lambda each: each.tenant in keys  # noqa: E731
    runner = BatchRunner(batches, None, ask, may_ask, max_lines=9, keep_s=9)
    assert await runner._compute(batches.get("owner", record.id)) == ("cancelled", [])
    assert batches.get("owner", record.id).parts == []


async def test_a_store_that_does_not_answer_fails_no_line(batches, monkeypatch):
    monkeypatch.setattr("gateway.batches._MAX_PAUSE_S", 0.0)
    error = b'{"error": {"code": "store_unavailable"}}'
    away = LineAnswer(503, {b"x-should-retry": b"true"}, "r", error)
    record, ask = make_batch(batches, [LINE]), AsyncMock()
    ask.side_effect = [*[away] * 9, LineAnswer(200, {}, "r", b"{}")]
    runner = BatchRunner(batches, None, ask, lambda _: True, max_lines=9, keep_s=9)
    assert await runner._compute(batches.get("owner", record.id)) == ("completed", [])
    assert batches.get("owner", record.id).counts == (1, 0)


# Records


@pytest.fixture
def batches(tmp_path):
    store = FileStore(tmp_path)
    return Batches(store, BatchFiles(store))


def make_batch(batches, lines):
    data = to_file(lines)
    file = batches.files.put("owner", "in", "batch", [data], len(data))
    asked = {"tenant": "tenant", "endpoint": CHAT, "input_file_id": file.id}
    record = batches.create("owner", 100, **asked)
    batches.begin(record, len(lines))
    return record


def result(number, by):
    data = json.dumps({"custom_id": str(number), "by": by}).encode()
    return LineResult(number, True, data)


def read_output(batches, record):
    ending = batches.get("owner", record.id).ending
    file = batches.files.get("owner", ending.output_file_id)
    return b"".join(batches.files.read("owner", file)).splitlines()


def test_results_of_two_gateways_count_once(batches):
    """One gateway was considered dead but stores its results."""
    record = make_batch(batches, [to_line(str(i)) for i in range(4)])
    batches.add_part(record, "one", [result(0, 1), result(1, 1)])
    batches.add_part(record, "two", [result(1, 2), result(2, 2), result(3, 2)])
    batches.finalize(record, "completed")
    batches.add_part(record, "one", [result(2, 1), result(3, 1)])
    batches.finalize(record, "cancelled")  # the batch has ended already
    batches.end(record)
    view = batches.get("owner", record.id)
    assert view.status == "completed"
    assert view.counts == (4, 0)
    names = [json.loads(line)["custom_id"] for line in read_output(batches, record)]
    assert sorted(names) == ["0", "1", "2", "3"]
    batches.end(record)
    assert batches.open_ids() == []


class Dying(FileStore):
    """A store whose process dies at a write."""

    left = 0


def dying(name):
    def method(self, *arguments):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return getattr(FileStore, name)(self, *arguments)

    return method


@pytest.mark.parametrize("num_writes", range(8))
def test_an_interrupted_finalization_is_repeated(batches, tmp_path, monkeypatch, num_writes):
    """The result is the same wherever the first attempt stopped."""
    record = make_batch(batches, [to_line(str(i)) for i in range(3)])
    batches.add_part(record, "one", [result(0, 1), result(2, 1)])
    batches.finalize(record, "expired")
    for name in ("write", "put_if_absent", "delete"):
        monkeypatch.setattr(Dying, name, dying(name))
    store = Dying(tmp_path)
    store.left = num_writes
    with contextlib.suppress(KeyboardInterrupt):
        Batches(store, BatchFiles(store)).end(record)
    batches.end(record)
    view = batches.get("owner", record.id)
    assert (view.status, view.counts, view.parts) == ("expired", (2, 1), [])
    assert len(read_output(batches, record)) == 2
    assert len(batches.files.ids("owner")) == 3
    assert batches.open_ids() == []


def test_old_batches_are_deleted_unless_they_are_open(batches):
    ended, still_open = (make_batch(batches, [LINE]) for _ in range(2))
    batches.finalize(ended, "cancelled")
    batches.end(ended)
    later = ended.created_at + 10
    batches.sweep(later)
    batches.files.sweep(later)
    assert batches.ids("owner") == [still_open.id]
    assert batches.files.ids("owner") == []
    assert batches.read_input(still_open) is None  # its input file was deleted


async def test_missing_contents_of_a_file_are_a_503(client, tmp_path):
    """The same happens if the file is deleted during its download, or if the store cannot be written."""
    file = await client.files.create(file=("a.jsonl", b"all of it"), purpose="batch")
    [kept] = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size == 9]
    kept.unlink()
    with pytest.raises(openai.InternalServerError) as unread:
        await client.files.content(file.id)
    shutil.rmtree(tmp_path / "uploads")
    (tmp_path / "uploads").write_text("no folder")
    with pytest.raises(openai.InternalServerError) as unwritten:
        await client.files.create(file=("a", b"x"), purpose="batch")
    assert [each.value.status_code for each in (unread, unwritten)] == [503, 503]
    assert "retry-after" in unwritten.value.response.headers
