"""Vectors and scores over HTTP, through the queue and a worker: correct, in order, isolated, and without leaks."""

import asyncio
import base64

import msgspec
import pytest

from gateway.api.pooling import Embeddings, rows_of
from gateway.http.exchange import RequestContext
from shared.settings.limits import LimitSettings
from tests.factories_gateway import CARD, make_settings, run_gateway_on_socket
from tests.factories_images import encoded
from tests.factories_keys import code
from tests.factories_numbers import (
    EMBEDDINGS,
    RERANK,
    SCORE,
    read_vectors,
    run_fleet,
    score_of,
    vector_of,
)
from tests.factories_queue import MODEL
from tests.waiting import until, until_equal

TEXTS = ["a client for redis", "how to bake bread", "ein Gedicht über Köln"]


KEYS = {"gateway": {"api_keys": ("sk-one", "sk-two")}}


@pytest.fixture
def changes():
    return {}


@pytest.fixture
async def fleet(ends, redis_server, changes):
    async with run_fleet(ends, redis_server, **changes) as fleet:
        yield fleet


@pytest.fixture
def gateway(fleet):
    return fleet[0]


async def embed(gateway, given, **options):
    headers = options.pop("headers", None)
    body = {"model": MODEL, "input": given, **options}
    return await gateway.client.post(EMBEDDINGS, json=body, headers=headers)


# Responses


async def test_the_official_client_gets_a_vector_for_each_input(client):
    for given in ("a text", TEXTS, [5, 6, 7], [[5, 6], [7]], ["one", {"text": "two"}]):
        answer = await client.embeddings.create(model=MODEL, input=given)
        items = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        texts = [item["text"] if isinstance(item, dict) else item for item in items]
        assert [entry.embedding for entry in answer.data] == [vector_of(text) for text in texts]
        assert [entry.index for entry in answer.data] == list(range(len(items)))
        assert answer.model == MODEL
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0


async def test_options_reach_the_model(gateway):
    long = " ".join(map(str, range(600)))
    three = "one two three"
    prompted = {"prompt_name": "query"}
    for text, options, expected in (
        ("a text", {"dimensions": 16}, vector_of("a text", dimensions=16)),
        ("a text", {"normalized": False}, vector_of("a text", is_normalized=False)),
        ("a text", prompted, vector_of("a text", **prompted)),
        ("a text", {"input_type": "search_query"}, vector_of("a text", **prompted)),
        (long, {"truncate": True}, vector_of(long, truncate="end")),
        (long, {"truncate": "START"}, vector_of(long, truncate="start")),
        (long, {"truncate_prompt_tokens": -1}, vector_of(long, truncate="end")),
        (three, {"truncate_prompt_tokens": 2}, vector_of("one two")),
        (three, {"truncate_prompt_tokens": 2, "truncate": "START"}, vector_of("two three")),
    ):
        response = await embed(gateway, text, **options)
        assert response.status_code == 200, response.text
        assert read_vectors(response.json()) == [expected]


# Refusals


async def test_an_input_that_is_too_long_is_named_where_the_client_put_it(fleet):
    """One input that is too long fails the whole request."""
    gateway, [worker] = fleet
    worker.engine.gate.clear()
    long = "w " * 513
    for given, param in (
        (long, "input"),
        (["a", long], "input.[1]"),
        (["a"] * 999 + [long], "input.[999]"),
    ):
        response = await embed(gateway, given)
        assert code(response) == (400, "context_length_exceeded", param)
    worker.engine.gate.set()
    await until(lambda: not worker.engine.has_work())


# Large requests


async def test_no_response_has_vectors_of_another_request(gateway):
    async def ask(number: int) -> None:
        mine = [
            f"text {number} {index} " + "word " * (number % 7) for index in range(number % 9 + 1)
        ]
        response = await embed(gateway, mine)
        assert read_vectors(response.json()) == [vector_of(text) for text in mine]

    await asyncio.gather(*map(ask, range(60)))


@pytest.mark.parametrize("changes", [{"num_workers": 2, "engine": {"max_calls": 2}}])
async def test_a_large_request_is_split_among_workers_and_stays_in_order(fleet, ends):
    """The results bypass the request's log and the mailbox."""
    gateway, workers = fleet
    texts = [f"text {index} " + "word " * (index % 40) for index in range(2048)]
    response = await embed(gateway, texts)
    assert read_vectors(response.json()) == list(map(vector_of, texts))
    usage = response.json()["usage"]
    assert usage["prompt_tokens"] == sum(len(text.split()) for text in texts)
    assert all(worker.engine.added for worker in workers)
    keys = [key async for key in ends.redis.scan_iter(f"{ends.prefix}:*")]
    assert not [key for key in keys if b":result:" in key]
    for key in keys:
        size = await ends.redis.memory_usage(key)
        assert size is None or size < 32_000, key
    assert [key for key in keys if b":log:" in key]


async def test_other_requests_continue_while_a_large_response_is_encoded(gateway, monkeypatch):
    loop = asyncio.get_running_loop()

    def with_other(events):
        other = asyncio.run_coroutine_threadsafe(gateway.client.get("/healthz"), loop)
        return rows_of(events) if other.result(10).status_code == 200 else ()

    monkeypatch.setattr("gateway.api.pooling.rows_of", with_other)
    assert read_vectors((await embed(gateway, ["a"] * 2000)).json()) == [vector_of("a")] * 2000


async def test_a_disconnected_client_frees_all_parts(fleet, ends):
    gateway, [worker] = fleet
    worker.engine.gate.clear()
    asking = asyncio.create_task(embed(gateway, ["some words"] * 2000))
    await until(lambda: worker.engine.added)
    asking.cancel()
    await until_equal(ends.num_open, 0)
    worker.engine.gate.set()
    await until(lambda: not worker.engine.has_work())
    assert not gateway.services.dispatcher.has_open(MODEL)


# Prompts


def test_documents_need_no_prompt():
    """If a model has a prompt for queries only, documents are embedded without a prompt."""
    card = msgspec.structs.replace(CARD, tasks=("embed",), prompts=("query",))
    surface, context = Embeddings(LimitSettings()), RequestContext("", {}, 0.0)
    for use in ("search_document", "document", "passage"):
        body = {"model": "m", "input": "a text", "input_type": use}
        request = surface.read(msgspec.json.encode(body), context)
        [task] = surface.plan(request, context, card).tasks
        assert task.prompt_name is None


# Equal inputs are computed once, also across gateways, but never shared between tenants


@pytest.mark.parametrize("changes", [KEYS])
async def test_two_gateways_share_a_computation_and_two_tenants_do_not(fleet, ends, redis_server):
    gateway, [worker] = fleet

    async def cached(gateway, *texts, key="sk-one"):
        headers = {"authorization": f"Bearer {key}"}
        response = await embed(gateway, list(texts), headers=headers)
        assert read_vectors(response.json()) == [vector_of(text) for text in texts]
        return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    async with run_gateway_on_socket(make_settings(redis_server, ends.prefix, **KEYS)) as other:
        worker.engine.gate.clear()
        held = asyncio.create_task(cached(gateway, "held up"))
        await until(lambda: worker.engine.added)
        asking = [
            asyncio.create_task(cached(each, "the same", "the same", key=key))
            for each in (gateway, other)
            for key in ("sk-one", "sk-two")
        ]
        await until(lambda: worker.engine.num_prepared == 5)
        worker.engine.gate.set()
        assert sorted(await asyncio.gather(held, *asking)) == [0, 2, 2, 4, 4]
        stats = worker.engine.stats()
        assert (stats.num_result_queries, stats.num_result_hits) == (9, 6)
        assert await cached(other, "the same") == 2
        assert await cached(other, "the same", key="sk-two") == 2
        assert await cached(other, "not yet") == 0


# Images


def as_base64(seed: int) -> str:
    return base64.b64encode(encoded(seed)).decode()


async def test_images_and_texts_can_be_mixed(gateway):
    image = as_base64(1)
    url = f"data:image/png;base64,{image}"
    given = ["a text", {"image": image}, {"text": "more"}, {"image": url}]
    response = await embed(gateway, given)
    assert response.status_code == 200, response.text
    first, plain, more, again = read_vectors(response.json())
    assert (first, more, again) == (vector_of("a text"), vector_of("more"), plain)
    usage = response.json()["usage"]
    assert usage["prompt_tokens_details"]["image_tokens"] == usage["prompt_tokens"] - 3 == 128
    form = {"files": {"file": ("a.png", encoded(1))}, "data": {"purpose": "vision"}}
    uploaded = await gateway.client.post("/v1/files", **form)
    texts = [{"type": "text", "text": text} for text in ("one", "two")]
    for content, options, expected in (  # each of vLLM's messages has one text or one image
        ([{"type": "image_url", "image_url": {"url": url}}], {"input": []}, plain),
        ([{"type": "image_url", "image_url": url}], {}, plain),
        ([{"type": "image_url", "image_url": uploaded.json()["id"]}], {}, plain),
        ("one", {}, vector_of("one")),
        (texts, {"dimensions": 16}, vector_of("one\ntwo", dimensions=16)),
    ):
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **options}
        response = await gateway.client.post(EMBEDDINGS, json=body)
        assert read_vectors(response.json()) == [expected]


async def test_an_image_that_cannot_be_decoded_is_named_where_the_client_put_it(gateway):
    broken = base64.b64encode(encoded(2)[:-30]).decode()
    given = ["w " * 400] * 40 + [{"image": as_base64(1)}, {"image": broken}]
    response = await embed(gateway, given)
    assert code(response) == (400, "invalid_image", "input.[41].image")


# Scores


QUERY = "which is a planet?"
DOCUMENTS = ["a stone", "Venus", "a red star", "Mars is one"]


async def rerank(gateway, documents=DOCUMENTS, path=RERANK, **options):
    body = {"model": MODEL, "query": QUERY, "documents": documents, **options}
    return (await gateway.client.post(path, json=body)).json()


async def test_the_best_documents_come_first(gateway):
    answer = await rerank(gateway)
    scores = {index: score_of(QUERY, text) for index, text in enumerate(DOCUMENTS)}
    best = sorted(scores, key=lambda index: -scores[index])
    assert [result["index"] for result in answer["results"]] == best
    assert {r["index"]: r["relevance_score"] for r in answer["results"]} == scores
    assert answer["meta"] == {"scorer": "cross_encoder"}
    assert answer["usage"]["total_tokens"] > 0
    assert "document" not in answer["results"][0]
    for path in ("/v2/rerank", "/rerank"):  # other paths that clients use
        assert (await rerank(gateway, path=path))["results"] == answer["results"]
        error = (await rerank(gateway, ["x", "w " * 600], path))["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "documents.[1]")


async def test_options_of_rerank(gateway):
    answer = await rerank(gateway, top_n=2, return_documents=True)
    assert len(answer["results"]) == 2
    for result in answer["results"]:
        assert result["document"]["text"] == DOCUMENTS[result["index"]]
    [raw] = (await rerank(gateway, ["x"], raw_scores=True))["results"]
    assert raw["relevance_score"] == score_of(QUERY, "x", is_raw=True)
    [cut] = (await rerank(gateway, [{"text": "x y z"}], max_tokens_per_doc=1))["results"]
    assert cut["relevance_score"] == score_of(QUERY, "x")
    equal = (await rerank(gateway, ["same"] * 5))["results"]
    assert [result["index"] for result in equal] == [0, 1, 2, 3, 4]


async def test_pairs_are_scored_in_their_order(gateway):
    many = [[f"{name} {index}" for index in range(600)] for name in ("one", "two")]
    for first, second, pairs in (
        ("a", "b", [("a", "b")]),
        ("a", ["b", "c"], [("a", "b"), ("a", "c")]),
        (["a", "b"], ["c", "d"], [("a", "c"), ("b", "d")]),
        (*many, zip(*many, strict=True)),
    ):
        body = {"model": MODEL, "text_1": first, "text_2": second}
        data = (await gateway.client.post(SCORE, json=body)).json()["data"]
        assert [entry["score"] for entry in data] == [score_of(*pair) for pair in pairs]
        assert [entry["index"] for entry in data] == list(range(len(data)))
