"""The search process: killed during writes, restarted, and queried for what it acknowledged."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path

import httpx
import msgspec
import pytest
from msgspec.structs import replace

import shared.search as wire
from search.server import NUM_THREADS, SearchApp
from search.server import run_search as run_server
from search.stores import chunk_ids
from shared.settings import SettingsError
from shared.settings.tree import Settings
from tests.factories_search import make_items, run_search
from tests.search.postgres_server import postgres
from tests.waiting import until, wait_for

CREATE = wire.CreateStore(tenant="t", name="store", model="m", digest="d", dimensions=8)


@pytest.fixture(scope="module", params=["lance", "postgres"])
def process(tmp_path_factory, request):
    settings = {"index": postgres().new_database()} if request.param == "postgres" else {}
    with run_search(tmp_path_factory.mktemp("search") / "data", **settings) as process:
        yield process


def test_acknowledged_writes_survive_kill_9(process):
    """A batch, or the chunks of a file, are stored as a whole or not at all; acknowledged ones are stored."""
    store, other = process.ask(CREATE, wire.StoreRecord), process.ask(CREATE, wire.StoreRecord)
    upload = wire.PutFile(tenant="t", filename="a.txt", purpose="assistants", data=b"text")
    file = process.ask(upload, wire.FileRecord).id
    chunks = [
        replace(item, id=key, file_id=file)
        for key, item in zip(chunk_ids(file, 0, 2000), make_items(2000), strict=True)
    ]
    attach = wire.AttachFile(
        tenant="t", store=other.id, file=file, digest="d", items=chunks, max_chunk_tokens=800,
        chunk_overlap_tokens=400,
    )  # fmt: skip
    listing = wire.ListStoreFiles(tenant="t", store=other.id, page=wire.Page())
    acknowledged: list[int] = []
    attached: list[wire.StoreFile] = []

    def write() -> None:
        for number in range(1000):
            items = [replace(item, id=f"{number} {item.id}") for item in make_items(50)]
            put = wire.PutItems(tenant="t", store=store.id, digest="d", items=items)
            process.ask(put, wire.StoreRecord)
            acknowledged.append(number)

    def go_on(step: Callable[[], object]) -> None:
        with suppress(httpx.HTTPError, AssertionError):  # until the kill
            step()

    with ThreadPoolExecutor(2) as threads:
        threads.submit(go_on, write)
        wait_for(lambda: len(acknowledged) > 2)
        threads.submit(go_on, lambda: attached.append(process.ask(attach, wire.StoreFile)))
        # As soon as the catalog contains the file; the response can precede the kill.
        while not (attached or process.ask(listing, list[wire.StoreFile])):
            pass
        process.kill()
    process.start()

    def read_all() -> list[wire.Item]:
        read = wire.ReadItems(tenant="t", store=store.id, page=wire.Page(limit=100_000))
        return process.ask(read, list[wire.Item])

    while len(stored := read_all()) != len(read_all()):
        pass  # PostgreSQL commits statements that it received before the kill
    batches = {int(item.id.partition(" ")[0]) for item in stored}
    assert set(acknowledged) <= batches
    assert len(stored) == 50 * len(batches)
    files = process.ask(listing, list[wire.StoreFile])
    found = process.ask(wire.ReadStore(tenant="t", store=other.id), wire.StoreRecord)
    assert {each.status for each in files} <= {"completed"}
    assert found.num_items == 2000 * len(files)
    assert files or not attached


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("unix:///nowhere/s", "another search process uses"),
        ("unix:///no/such/place", "cannot listen"),
        ("http://0.0.0.0:8200", "VLM_SEARCH__TOKEN"),
    ],
)
def test_the_error_of_a_failed_start_has_the_reason(tmp_path, url, says):
    search = {"url": url, "data_dir": str(tmp_path)}
    with (
        run_search(tmp_path) if "another" in says else nullcontext(),
        pytest.raises(SettingsError, match=says),
    ):
        run_server(Settings(search=search))  # type: ignore[arg-type]


def test_vectors_of_another_model_are_refused(process):
    store = process.ask(CREATE, wire.StoreRecord)
    [item] = items = make_items(1)
    put = wire.PutItems(tenant="t", store=store.id, digest="other", items=items)
    query = wire.Query(tenant="t", store=store.id, digest="other", vectors=[item.vector], k=1)
    for request in (put, query):
        with pytest.raises(wire.SearchError) as refused:
            process.ask(request, wire.StoreRecord)
        assert refused.value.fault.code == "conflict"


def test_other_users_cannot_open_its_socket(process):
    mode = Path(process.url.removeprefix("unix://")).stat().st_mode
    assert mode & 0o007 == 0


async def test_a_search_does_not_wait_for_uploads():
    """A search is answered while more uploads than the process has threads are written."""
    is_written, begun = threading.Event(), list[wire.Request]()

    def answer(request: wire.Request) -> object:
        if isinstance(request, wire.Query):
            return []
        begun.append(request)
        return is_written.wait(30)

    app = SearchApp(answer, "", 1_000_000)
    upload = wire.PutFile(tenant="t", filename="f", purpose="assistants", data=b"a file")
    query = wire.Query(tenant="t", store="s", digest="d", vectors=[bytes(4)], k=1)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://search") as client:

        async def ask(request: wire.Request) -> object:
            answer = await client.post("/", content=msgspec.msgpack.encode(request))
            return msgspec.msgpack.decode(answer.content)

        uploads = [asyncio.create_task(ask(upload)) for _ in range(3 * NUM_THREADS)]
        await until(lambda: len(begun) == NUM_THREADS)
        try:
            assert await asyncio.wait_for(ask(query), 10) == []
            assert not any(upload.done() for upload in uploads)
        finally:
            is_written.set()
        assert await asyncio.gather(*uploads) == [True] * len(uploads)
    app.close()


def test_a_process_ends_cleanly_when_stopped(process):
    assert process.stop() == 0
