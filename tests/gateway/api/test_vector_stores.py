"""Vector stores over HTTP: OpenAI's client, items as an extension, tenant isolation, and errors that name the field."""

import asyncio
import base64
from array import array

import openai
import pytest

from gateway.api.vector_stores import cut_chunks
from gateway.search import Outage
from tests.doc_examples import Examples
from tests.factories_gateway import make_settings, run_gateway_on_socket
from tests.factories_images import data_url
from tests.factories_keys import code
from tests.factories_numbers import load, run_fleet, score_of, vector_of
from tests.factories_queue import MODEL
from tests.factories_search import serve_search
from tests.factories_worker import run_worker

STORES = "/v1/vector_stores"
KEYS = ["key-one", "key-two"]
AS_ONE, AS_TWO = ({"authorization": f"Bearer {key}"} for key in KEYS)
TEXTS = ["a client for redis", "how to bake bread", "ein Gedicht über Köln"]


@pytest.fixture
def limits():
    return {}


@pytest.fixture
async def search(tmp_path, limits):
    async with serve_search(tmp_path / "search", limits=limits) as search:
        yield search


@pytest.fixture
async def gateway(ends, redis_server, search, limits):
    changes = {"gateway": {"api_keys": KEYS}, "search": dict(search), "limits": limits}
    async with run_fleet(ends, redis_server, **changes) as (gateway, _):
        gateway.client.headers.update(AS_ONE)
        yield gateway


@pytest.fixture
def api_key() -> str:
    return KEYS[0]


@pytest.fixture
async def store(gateway):
    return (await gateway.client.post(STORES, json={"name": "mine"})).json()["id"]


async def put(gateway, store, items, **options):
    return await gateway.client.put(f"{STORES}/{store}/items", json={"items": items}, **options)


async def find(gateway, store, query, **options):
    body = {"query": query, **options}
    return await gateway.client.post(f"{STORES}/{store}/search", json=body)


# Responses


async def test_the_official_client_makes_lists_changes_and_deletes_stores(client):
    made = [await client.vector_stores.create(name=f"store {n}") for n in range(3)]
    first = made[0]
    assert (first.object, first.status, first.file_counts.total) == ("vector_store", "completed", 0)
    assert first.model_extra["embedding_model"] == MODEL
    listed = [store.id async for store in client.vector_stores.list(limit=2)]
    assert listed == [store.id for store in reversed(made)]
    ascending = [store.id async for store in client.vector_stores.list(limit=2, order="asc")]
    assert ascending == listed[::-1]
    before = await client.vector_stores.list(before=made[0].id, limit=1)
    assert [store.id for store in before.data] == [made[1].id]
    changed = await client.vector_stores.update(first.id, name="other", metadata={"a": "b"})
    read = await client.vector_stores.retrieve(first.id)
    assert changed.name == read.name == "other"
    assert read.metadata == {"a": "b"}
    assert (await client.vector_stores.delete(first.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.vector_stores.retrieve(first.id)


async def test_items_are_stored_replaced_found_read_and_deleted(gateway, store):
    items = [
        {"id": f"text {n}", "text": text, "attributes": {"n": n, "long": len(text) > 18}}
        for n, text in enumerate(TEXTS)
    ]
    answer = (await put(gateway, store, items)).json()
    assert (answer["num_items"], answer["store"]["num_items"]) == (3, 3)
    answer = (await put(gateway, store, items[:1])).json()
    assert answer["store"]["num_items"] == 3

    page = (await find(gateway, store, "passage: " + TEXTS[1])).json()
    # The mock engine has no notion of similarity: vectors are equal only if the prompt and the words are.
    assert (page["object"], page["has_more"]) == ("vector_store.search_results.page", False)
    assert len(page["data"]) == 3
    by_vector = await find(
        gateway, store, {"embedding": vector_of(TEXTS[1], prompt_name="document")}
    )
    best = by_vector.json()["data"][0]
    assert best["id"] == best["file_id"] == "text 1"
    assert best["score"] == pytest.approx(1, abs=1e-5)
    assert best["content"] == [{"type": "text", "text": TEXTS[1]}]
    assert best["attributes"] == {"n": 1, "long": False}

    url = f"{STORES}/{store}/items"
    one = (await gateway.client.get(f"{url}/text 2", params={"include": "embedding"})).json()
    stored = array("f", base64.b64decode(one["embedding"])).tolist()
    assert stored == pytest.approx(vector_of(TEXTS[2], prompt_name="document"), abs=1e-6)
    listed = (await gateway.client.get(url, params={"limit": 2})).json()
    assert [item["id"] for item in listed["data"]] == ["text 0", "text 1"]
    assert listed["has_more"]
    rest = (await gateway.client.get(url, params={"after": listed["last_id"]})).json()
    assert [item["id"] for item in rest["data"]] == ["text 2"]

    async def delete(**body):
        response = await gateway.client.request("DELETE", url, json=body)
        return response.json()["num_deleted"]

    assert await delete(ids=["text 0", "nobody"]) == 1
    assert await delete(filters={"type": "gt", "key": "n", "value": 1}) == 1
    left = (await gateway.client.get(url)).json()["data"]
    assert [item["id"] for item in left] == ["text 1"]


async def test_queries_are_embedded_with_the_models_prompt_and_joined(gateway, store):
    vectors = {text: vector_of(text, prompt_name="query") for text in TEXTS}
    items = [{"id": text, "text": text, "embedding": vectors[text]} for text in TEXTS]
    await put(gateway, store, items)
    page = (await find(gateway, store, TEXTS[:2], max_num_results=2)).json()
    assert page["search_query"] == TEXTS[:2]
    assert {hit["id"] for hit in page["data"]} == set(TEXTS[:2])
    assert [hit["score"] for hit in page["data"]] == pytest.approx([1, 1], abs=1e-5)
    few = (await find(gateway, store, TEXTS[0], ranking_options={"score_threshold": 0.99})).json()
    assert [hit["id"] for hit in few["data"]] == [TEXTS[0]]
    ranked = (await find(gateway, store, "words", ranking_options={"ranker": MODEL})).json()
    scores = {text: score_of("words", text) for text in TEXTS}
    assert [hit["id"] for hit in ranked["data"]] == sorted(TEXTS, key=lambda text: -scores[text])
    assert ranked["data"][0]["score"] == pytest.approx(max(scores.values()))
    red, blue = data_url(1), data_url(2)
    stored = await put(gateway, store, [{"id": "red", "image": red}, {"id": "blue", "image": blue}])
    assert stored.status_code == 200, stored.text
    best = (await find(gateway, store, {"image": blue})).json()["data"][0]
    assert (best["id"], best["score"]) == ("blue", pytest.approx(1, abs=1e-5))


async def test_the_official_client_uploads_attaches_and_searches_files(client, gateway):
    text = "\n\n".join(f"Paragraph {n}: " + "word " * 60 for n in range(20))
    store = await client.vector_stores.create(name="files")
    file = await client.files.create(file=("notes.txt", text.encode()), purpose="assistants")
    assert (file.bytes, file.filename, file.purpose) == (len(text), "notes.txt", "assistants")
    assert (await client.files.content(file.id)).content == text.encode()
    attached = await client.vector_stores.files.create_and_poll(
        file.id,
        vector_store_id=store.id,
        attributes={"lang": "en"},
        chunking_strategy={
            "type": "static",
            "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 20},
        },
    )
    assert (attached.status, attached.attributes) == ("completed", {"lang": "en"})
    content = await client.vector_stores.files.content(file.id, vector_store_id=store.id)
    chunks = [piece.text async for piece in content]
    assert len(chunks) > 10
    assert all(len(chunk) <= 400 for chunk in chunks)
    assert all(f"Paragraph {n}: " in " ".join(chunks) for n in range(20))
    found = await client.vector_stores.search(
        store.id, query="anything", filters={"type": "eq", "key": "lang", "value": "en"}
    )
    assert {(hit.file_id, hit.filename) for hit in found.data} == {(file.id, "notes.txt")}
    again = await client.vector_stores.files.create(store.id, file_id=file.id)
    assert again.chunking_strategy.static.max_chunk_size_tokens == 384
    content = await client.vector_stores.files.content(file.id, vector_store_id=store.id)
    fewer = [piece.text async for piece in content]
    assert len(fewer) < len(chunks)
    store = await client.vector_stores.retrieve(store.id)
    assert (store.file_counts.completed, store.model_extra["num_items"]) == (1, len(fewer))
    assert [f.id async for f in client.vector_stores.files.list(store.id)] == [file.id]
    await client.vector_stores.files.delete(file.id, vector_store_id=store.id)
    store = await client.vector_stores.retrieve(store.id)
    assert (store.file_counts.total, store.model_extra["num_items"]) == (0, 0)
    assert [f.id async for f in client.files.list()] == [file.id]
    assert (await client.files.delete(file.id)).deleted


async def test_the_official_client_attaches_batches_of_files(client):
    names = ["one", "two", "three"]
    files = [
        (await client.files.create(file=(f"{n}.txt", n.encode()), purpose="assistants")).id
        for n in names
    ]
    binary = await client.files.create(file=("x.bin", b"\xff\0"), purpose="assistants")
    store = await client.vector_stores.create(file_ids=[files[0], binary.id])
    counts = store.file_counts
    assert (counts.total, counts.completed, counts.failed) == (2, 1, 1)
    batches = client.vector_stores.file_batches
    batch = await batches.create_and_poll(
        store.id, file_ids=[*files[1:], binary.id], attributes={"lang": "en"}
    )
    counts = batch.file_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 3, 2, 1)
    assert await batches.retrieve(batch.id, vector_store_id=store.id) == batch
    assert await batches.cancel(batch.id, vector_store_id=store.id) == batch
    listed = batches.list_files(batch.id, vector_store_id=store.id, limit=2, order="asc")
    found = [file async for file in listed]
    assert [file.id for file in found] == [*files[1:], binary.id]
    assert [file.status for file in found] == ["completed", "completed", "failed"]
    assert found[0].attributes == {"lang": "en"}
    assert found[2].last_error.code == "unsupported_file"
    failed = batches.list_files(batch.id, vector_store_id=store.id, filter="failed")
    assert [file.id async for file in failed] == [binary.id]
    crossed = {"after": files[2], "before": files[1], "order": "asc"}
    none = batches.list_files(batch.id, vector_store_id=store.id, **crossed)
    assert [file async for file in none] == []
    attached = client.vector_stores.files.list(store.id)
    assert {file.id async for file in attached} == set(files)
    each = [{"file_id": files[0], "attributes": {"n": 1.0}}, {"file_id": files[1]}]
    batch = await batches.create(store.id, extra_body={"files": each})
    changed = await client.vector_stores.files.retrieve(files[0], vector_store_id=store.id)
    assert (batch.file_counts.completed, changed.attributes) == (2, {"n": 1.0})
    with pytest.raises(openai.NotFoundError, match="no such file batch"):
        await batches.retrieve("vsfb_none", vector_store_id=store.id)


async def test_the_expiry_of_a_store_is_shown_and_changed(client):
    week = {"anchor": "last_active_at", "days": 7}
    store = await client.vector_stores.create(expires_after=week)
    assert store.expires_at == store.last_active_at + 7 * 86_400
    assert store.expires_after.days == 7
    renamed = await client.vector_stores.update(store.id, name="b")
    assert renamed.expires_after.days == 7
    kept = await client.vector_stores.update(store.id, expires_after=None)
    assert (kept.expires_after, kept.expires_at) == (None, None)


async def test_attributes_of_a_file_in_a_store_are_changed(client):
    file = await client.files.create(file=("a.txt", b"word"), purpose="assistants")
    store = await client.vector_stores.create(file_ids=[file.id])
    files, german = client.vector_stores.files, {"lang": "de"}
    changed = await files.update(file.id, vector_store_id=store.id, attributes=german)
    assert changed.attributes == german
    where = {"type": "eq", "key": "lang", "value": "de"}
    found = await client.vector_stores.search(store.id, query="word", filters=where)
    assert [(hit.file_id, hit.attributes) for hit in found.data] == [(file.id, german)]
    assert await files.retrieve(file.id, vector_store_id=store.id) == changed


def test_chunks_cover_a_text_and_end_between_words():
    text = " ".join(f"word{n}" for n in range(2000))
    chunks = cut_chunks(text, 100, 25)
    assert all(len(chunk) <= 400 for chunk in chunks)
    assert {word for chunk in chunks for word in chunk.split()[1:]} >= {
        f"word{n}" for n in range(1, 2000)
    }
    assert cut_chunks("x" * 1000, 100, 0) == ["x" * 400, "x" * 400, "x" * 200]


# Refusals


VECTOR = [1.0] * 64
NO_NUMBERS = [
    base64.b64encode(array("f", [float(number)] * 64).tobytes()).decode()
    for number in ("nan", "inf")
]
BAD_ITEMS = [
    ([], (400, "invalid_value", "items")),
    ([{"id": str(n), "text": "x"} for n in range(2049)], (400, "too_many_inputs", "items")),
    ([{"id": "a", "text": "x" * 10_000_000}], (413, "text_too_long", "items.[0].text")),
    ([{"id": "a", "text": ""}], (400, "invalid_value", "items.[0].text")),
    ([{"id": "a"}], (400, "invalid_value", "items.[0]")),
    *[([{"id": id_, "text": "x"}], (400, "invalid_value", "items.[0].id")) for id_ in ("", "a\0", "a" * 257)],
    ([{"id": str(n), "text": "x" * 100_000, "embedding": VECTOR} for n in range(21)], (413, "text_too_long", "items")),
    ([{"id": "a", "image": "https://a/".ljust(2049, "a"), "embedding": VECTOR}], (400, "invalid_value", "items.[0].image")),
    ([{"id": "a", "text": "x"}] * 2, (400, "invalid_value", "items.[1].id")),
    ([{"id": "a", "text": "word " * 600}], (400, "context_length_exceeded", "items.[0].text")),
    ([{"id": "a", "image": "?"}], (400, "invalid_image", "items.[0].image")),
    *[([{"id": "a", "embedding": vector}], (400, "invalid_value", "items.[0].embedding"))
      for vector in ([1.0] * 63, [0.0] * 64, [1e39] * 64, "AAA", *NO_NUMBERS)],
    *[([{"id": "a", "text": "x", "attributes": attributes}], (400, "invalid_value", "items.[0].attributes"))
      for attributes in ({"k": "v" * 513}, {str(n): n for n in range(17)}, {"k": [1]})],
    ([{"id": "a", "text": "x", "vector": []}], (400, "unsupported_parameter", "items.[0].vector")),
    ([{"id": "fine", "text": "fine"}, {"id": "a", "embedding": [0.0] * 64}], (400, "invalid_value", "items.[1].embedding")),
]  # fmt: skip


SHORT = {"type": "eq", "key": "k", "value": "v"}
DEEP = SHORT
for _ in range(9):
    DEEP = {"type": "and", "filters": [DEEP]}
WIDE = {"type": "or", "filters": [DEEP["filters"][0]["filters"][0]] * 30}
BAD_SEARCHES = [
    *[({"query": query}, "query") for query in (
        "", [], ["a", ""], ["a"] * 17, {}, {"text": "a", "embedding": [1]}, "word " * 600,
    )],
    ({"query": {"image": "?"}}, "query.image"),
    ({"query": {"embedding": [1.0]}}, "query.embedding"),
    *[({"query": {"embedding": encoded}}, "query.embedding") for encoded in NO_NUMBERS],
    ({"query": ["a", "word " * 600]}, "query.[1]"),
    ({"rewrite_query": True}, "rewrite_query"),
    ({"max_num_results": 51}, "max_num_results"),
    ({"ranking_options": {"score_threshold": 2}}, "ranking_options.score_threshold"),
    ({"filters": {**SHORT, "type": "like"}}, "filters.type"),
    *[({"filters": {"type": kind, "key": "k", "value": value}}, "filters.value") for kind, value in (
        ("eq", ["v"]), ("in", "v"), ("in", ["v"] * 129), ("lt", "v"),
    )],
    ({"filters": {"type": "or", "filters": [{**SHORT, "key": ""}]}}, "filters.filters.[0].key"),
    *[({"filters": filters}, "filters") for filters in (DEEP, WIDE)],
]  # fmt: skip


async def test_another_tenants_ids_do_not_exist(gateway, client, store):
    await put(gateway, store, [{"id": "secret", "text": "secret"}])
    file = await client.files.create(file=("a.txt", b"secret"), purpose="user_data")
    await client.vector_stores.files.create(store, file_id=file.id)
    theirs = (await gateway.client.post(STORES, json={}, headers=AS_TWO)).json()["id"]
    item = {"items": [{"id": "a", "text": "x"}]}
    for method, path, body in (
        *(("GET", path, None) for path in (
            "", "/items", "/items/secret", "/files", f"/files/{file.id}", f"/files/{file.id}/content")),
        *(("DELETE", path, None) for path in ("", f"/files/{file.id}")),
        ("POST", "", {"name": "theirs"}),
        ("POST", "/search", {"query": "secret"}),
        ("PUT", "/items", item),
        ("DELETE", "/items", {"ids": ["secret"]}),
        ("POST", "/files", {"file_id": file.id}),
    ):  # fmt: skip
        response, missing = [
            await gateway.client.request(method, f"{STORES}/{id_}{path}", json=body, headers=AS_TWO)
            for id_ in (store, "vs_" + "0" * 32)
        ]
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found"), path
        assert response.content == missing.content
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        url = f"/v1/files/{file.id}{path}"
        response = await gateway.client.request(method, url, headers=AS_TWO)
        assert response.status_code == 404
    attach = {"file_id": file.id}
    url = f"{STORES}/{theirs}/files"
    response = await gateway.client.post(url, json=attach, headers=AS_TWO)
    assert code(response) == (404, "not_found", "file_id")
    listed = (await gateway.client.get(STORES, headers=AS_TWO)).json()["data"]
    assert [entry["id"] for entry in listed] == [theirs]
    assert (await gateway.client.get("/v1/files", headers=AS_TWO)).json()["data"] == []
    assert (await gateway.client.get(f"{STORES}/{store}")).json()["num_items"] == 2


#: Fields of a vector store.
BAD_FIELDS = [
    ({"embedding_model": "nobody"}, (404, "model_not_found", "embedding_model")),
    *[({name: value}, (400, "invalid_value", name)) for name, value in (
        ("dimensions", 63), ("prompt", "nobody"), ("name", "x" * 257), ("name", "a\nb"), ("metadata", {"a\nb": ""}),
        ("metadata", {"a": "\x1b"}), ("metadata", {str(n): "" for n in range(17)}), ("file_ids", ["f"] * 501),
    )],
    ({"chunking_strategy": {"type": "static"}}, (400, "invalid_value", "chunking_strategy")),
    ({"chunking_strategy": {"type": "static", "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 51}}},
     (400, "invalid_value", "chunking_strategy.static")),
    ({"expires_after": {"anchor": "created_at", "days": 1}}, (400, "invalid_value", "expires_after.anchor")),
    ({"expires_after": {"anchor": "last_active_at", "days": 366}}, (400, "invalid_value", "expires_after.days")),
]  # fmt: skip


async def test_bad_items_searches_and_stores_are_named_and_nothing_is_stored(gateway, store):
    rows = [("PUT", f"/{store}/items", {"items": items}, expected) for items, expected in BAD_ITEMS]
    rows += [
        ("POST", f"/{store}/search", {"query": "a", **body}, (400, "invalid_value", param))
        for body, param in BAD_SEARCHES
    ]
    rows += [("POST", "", body, expected) for body, expected in BAD_FIELDS]
    batch = {"files": [{"file_id": "f", "chunking_strategy": {"type": "static"}}]}
    rows += [
        ("POST", f"/{store}", {"metadata": {"a": "\0"}}, (400, "invalid_value", "metadata")),
        ("POST", f"/{store}/file_batches", batch,
         (400, "invalid_value", "files.[0].chunking_strategy")),
    ]  # fmt: skip
    for method, path, body, expected in rows:
        response = await gateway.client.request(method, f"{STORES}{path}", json=body)
        status, found, param = code(response)
        assert 400 <= status < 500, response.text
        assert param == expected[2], response.text
        assert path.endswith("search") or (status, found) == expected[:2]
        assert len(response.content) < 1000
    body = b'{"items": [{"id": "a", "embedding": [NaN]}]}'
    headers = {"content-type": "application/json"}
    answer = await gateway.client.put(f"{STORES}/{store}/items", content=body, headers=headers)
    assert code(answer) == (400, "invalid_json", None)
    assert (await gateway.client.get(f"{STORES}/{store}")).json()["num_items"] == 0


FORM = b'--b\r\ncontent-disposition: form-data; name="file"; %b\r\n\r\nx\r\n--b--'


def form_of(head, boundary="; boundary=b"):
    return {"content": FORM % head, "headers": {"content-type": f"multipart/form-data{boundary}"}}


def upload(data=b"x", name="a.txt", **fields):
    return {"files": {"file": (name, data)}, "data": fields or {"purpose": "assistants"}}


BAD_UPLOADS = [
    *[(form_of(head), (400, "invalid_form", None)) for head in (
        b"filename*1=b; filename*=b", b"filename*=x''y; filename*0*=b", b"filename*0=b; filename*=a''b",
    )],
    (form_of(b"filename=b", "; boundary*1=b; boundary*=b"), (400, "invalid_form", None)),
    ({**upload(), "files": [("file", ("a.txt", b"x"))] * 2}, (400, "invalid_form", "file")),
    (upload(name="a" * 257), (400, "invalid_value", "file")),
    (upload(b"x" * 10_000_000), (413, "text_too_long", "file")),
    ({"files": {"file": ("a.txt", b"x")}}, (400, "missing_field", "purpose")),
    ({**upload(), "files": {"other": ("a.txt", b"x")}}, (400, "unsupported_parameter", "other")),
    ({"files": {"x" * 1000: ("a.txt", b"x")}}, (400, "unsupported_parameter", None)),
    (form_of(b"", ""), (415, "unsupported_media_type", None)),
]  # fmt: skip


async def test_bad_files_and_queries_are_named_and_not_repeated(client, gateway, store):
    for form, expected in BAD_UPLOADS:
        assert code(await gateway.client.post("/v1/files", **form)) == expected
    assert (await gateway.client.post("/v1/files", **upload(name="a" * 256))).status_code == 200
    for data in (b"\xff\xfe\x00x", b"", b"  \n", b"%PDF\0"):  # not UTF-8, empty, blank, PDF
        file = await client.files.create(file=("a.txt", data), purpose="assistants")
        response = await gateway.client.post(f"{STORES}/{store}/files", json={"file_id": file.id})
        assert (response.status_code, code(response)[2]) == (400, "file_id")
    for path, query, param in (
        *[("", f"limit={value}", "limit") for value in ("0", "101", "VALUE")],
        ("", "order=VALUE", "order"),
        ("", f"after={'VALUE' * 60}", "after"),
        ("", "a=VALUE", "a"),
        ("", f"{'VALUE' * 60}=a", "?"),
        (f"/{store}/items", "include=VALUE", "include"),
        (f"/{store}/items/a", "include=VALUE", "include"),
    ):
        response = await gateway.client.get(f"{STORES}{path}?{query}")
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert "VALUE" not in response.text


async def test_a_short_page_continues_at_its_cursor(gateway, store):
    for first in (0, 20):
        items = [
            {"id": f"{n:02}", "text": "\1" * 100_000, "embedding": [1.0] * 64}
            for n in range(first, min(first + 20, 23))
        ]
        assert (await put(gateway, store, items)).status_code == 200
    listed, after = [], ""
    while True:
        query = {"limit": 100, **({"after": after} if after else {})}
        answer = await gateway.client.get(f"{STORES}/{store}/items", params=query)
        assert len(answer.content) < 4 * 2**20 + 1000
        page = answer.json()
        listed += [item["id"] for item in page["data"]]
        if not page["has_more"]:
            break
        after = page["last_id"]
    assert listed == [f"{n:02}" for n in range(23)]


@pytest.mark.parametrize(
    "limits",
    [{"max_stores": 1, "max_files": 1, "max_store_items": 25, "max_key_search_bytes": 40_000}],
)
async def test_stores_files_and_items_of_a_key_are_limited(gateway, client, store):
    assert code(await gateway.client.post(STORES, json={})) == (413, "store_full", None)
    assert (await gateway.client.post(STORES, json={}, headers=AS_TWO)).status_code == 200
    vector = [1.0] * 64
    for field in (
        {"text": "x" * 50_000},
        {"attributes": {f"{n}".ljust(64, "k"): "v" * 512 for n in range(16)}},
        {"image": "https://a/".ljust(2048, "a")},
    ):
        items = [{"id": str(n), "embedding": vector, **field} for n in range(20)]
        assert code(await put(gateway, store, items)) == (413, "store_full", None), field
    with pytest.raises(openai.APIStatusError, match="40000 bytes"):
        await client.files.create(file=("a.txt", b"x" * 40_001), purpose="assistants")
    assert (await gateway.client.get(f"{STORES}/{store}")).json()["num_items"] == 0
    items = [{"id": str(n), "embedding": vector} for n in range(26)]
    assert (await put(gateway, store, items[:25])).status_code == 200
    assert (await put(gateway, store, items[1:25])).status_code == 200
    assert code(await put(gateway, store, items[24:])) == (413, "store_full", None)
    await client.files.create(file=("a.txt", b"x"), purpose="assistants")
    with pytest.raises(openai.APIStatusError, match="This key has 1 files"):
        await client.files.create(file=("a.txt", b"x"), purpose="assistants")


async def test_without_a_search_process_the_error_explains_how_to_start_one(
    ends, redis_server, tmp_path
):
    async with run_fleet(ends, redis_server) as (gateway, _):
        response = await gateway.client.post(STORES, json={})
        assert code(response)[:2] == (404, "search_not_served")
        assert "VLM_SEARCH__URL" in response.text
    settings = make_settings(redis_server, ends.prefix, search={"url": f"unix://{tmp_path}/nobody"})
    async with run_gateway_on_socket(settings) as gateway:  # the search process is down
        response = await gateway.client.get(STORES)
        assert code(response)[:2] == (503, "service_unavailable")
        assert response.headers["retry-after"] == "5"  # the expected start time of a search process


def test_the_next_outage_is_expected_to_take_as_long_as_the_last():
    outage = Outage()
    assert [outage.begin(at) for at in (100, 103, 106)] == [5, 2, 6]
    outage.end(108)
    assert [outage.begin(at) for at in (200, 205.5)] == [8, 3]
    outage.end(206)
    outage.end(300)
    assert outage.begin(400) == 6


@pytest.mark.parametrize("page", ["embeddings.md", "search.md"])
async def test_the_examples_of_the_docs_page_print_its_output(
    ends, redis_server, search, monkeypatch, page
):
    monkeypatch.setenv("NO_PROXY", "*")
    examples = Examples(page)
    async with run_worker(ends, load=lambda: load(served_name="mock-embeddings")):
        settings = make_settings(redis_server, ends.prefix, search=dict(search))
        async with run_gateway_on_socket(settings) as gateway:
            assert await asyncio.to_thread(examples.run, gateway.url) == examples.shown
    assert len(examples.shown) >= 3
