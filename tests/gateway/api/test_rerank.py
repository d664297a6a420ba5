"""Scores over HTTP, through the queue and a worker."""

import pytest

from tests.factories_numbers import RERANK, SCORE, run_fleet, score_of
from tests.factories_queue import MODEL

QUERY = "which is a planet?"
DOCUMENTS = ["a stone", "Venus", "a red star", "Mars is one"]


@pytest.fixture
async def gateway(ends, redis_server):
    async with run_fleet(ends, redis_server) as (gateway, _):
        yield gateway


async def rerank(gateway, documents=DOCUMENTS, **options):
    body = {"model": MODEL, "query": QUERY, "documents": documents, **options}
    return await gateway.client.post(RERANK, json=body)


async def score(gateway, first, second):
    body = {"model": MODEL, "text_1": first, "text_2": second}
    return await gateway.client.post(SCORE, json=body)


async def test_the_best_documents_come_first(gateway):
    answer = (await rerank(gateway)).json()
    scores = {index: score_of(QUERY, text) for index, text in enumerate(DOCUMENTS)}
    best = sorted(scores, key=lambda index: -scores[index])
    assert [result["index"] for result in answer["results"]] == best
    assert {r["index"]: r["relevance_score"] for r in answer["results"]} == scores
    assert answer["meta"] == {"scorer": "cross_encoder"}
    assert answer["usage"]["total_tokens"] > 0
    assert "document" not in answer["results"][0]


@pytest.mark.parametrize("path", ["/v2/rerank", "/rerank"])
async def test_clients_know_it_by_other_paths_too(gateway, path):
    body = {"model": MODEL, "query": QUERY, "documents": DOCUMENTS}
    answer = (await gateway.client.post(path, json=body)).json()
    assert answer["results"] == (await rerank(gateway)).json()["results"]
    long = await gateway.client.post(path, json=body | {"documents": ["x", "w " * 600]})
    error = long.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "documents.[1]")


async def test_options(gateway):
    answer = (await rerank(gateway, top_n=2, return_documents=True)).json()
    assert len(answer["results"]) == 2
    for result in answer["results"]:
        assert result["document"]["text"] == DOCUMENTS[result["index"]]
    raw = (await rerank(gateway, ["x"], raw_scores=True)).json()["results"][0]
    assert raw["relevance_score"] == score_of(QUERY, "x", is_raw=True)
    cut = (await rerank(gateway, [{"text": "x y z"}], max_tokens_per_doc=1)).json()["results"][0]
    assert cut["relevance_score"] == score_of(QUERY, "x")


async def test_many_documents_are_several_calls_and_one_ranking(gateway):
    documents = [f"document {index}" for index in range(1000)]
    answer = (await rerank(gateway, documents)).json()
    for result in answer["results"]:
        assert result["relevance_score"] == score_of(QUERY, documents[result["index"]])
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True)


async def test_equal_documents_keep_their_order(gateway):
    answer = (await rerank(gateway, ["same"] * 5)).json()
    assert [result["index"] for result in answer["results"]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("a", "b", [("a", "b")]),
        ("a", ["b", "c"], [("a", "b"), ("a", "c")]),
        (["a", "b"], ["c", "d"], [("a", "c"), ("b", "d")]),
    ],
)
async def test_pairs_are_scored_in_their_order(gateway, first, second, pairs):
    answer = (await score(gateway, first, second)).json()
    assert [entry["score"] for entry in answer["data"]] == [score_of(*pair) for pair in pairs]
    assert [entry["index"] for entry in answer["data"]] == list(range(len(pairs)))


async def test_many_pairs_keep_their_partners(gateway):
    first, second = ([f"{name} {index}" for index in range(600)] for name in ("one", "two"))
    answer = (await score(gateway, first, second)).json()
    expected = [score_of(*pair) for pair in zip(first, second, strict=True)]
    assert [entry["score"] for entry in answer["data"]] == expected
