"""Vectors over HTTP, through the queue and a worker: right, in order, nobody else's, and nothing left behind."""

import asyncio
import base64
import json
import logging

import msgspec
import pytest

from gateway.api.pooling import Embeddings
from gateway.http.exchange import RequestContext
from shared.settings.limits import LimitSettings
from shared.telemetry.metrics import STAGES
from tests.factories_gateway import CARD
from tests.factories_numbers import (
    EMBEDDINGS,
    as_floats,
    read_vectors,
    run_fleet,
    vector_of,
)
from tests.factories_queue import MODEL
from tests.waiting import until, until_equal

TEXTS = ["a client for redis", "how to bake bread", "ein Gedicht über Köln"]


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
    body = {"model": MODEL, "input": given, **options}
    return await gateway.client.post(EMBEDDINGS, json=body, headers=options.pop("headers", None))


# What is answered


@pytest.mark.parametrize("given", ["a text", TEXTS, [5, 6, 7], [[5, 6], [7]]])
async def test_the_official_client_gets_a_vector_for_each_input(client, given):
    answer = await client.embeddings.create(model=MODEL, input=given)
    items = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    assert [entry.embedding for entry in answer.data] == [vector_of(item) for item in items]
    assert [entry.index for entry in answer.data] == list(range(len(items)))
    assert answer.model == MODEL
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0


async def test_numbers_and_base64_are_the_same_bits(gateway):
    as_numbers = (await embed(gateway, TEXTS)).json()
    as_text = (await embed(gateway, TEXTS, encoding_format="base64")).json()
    decoded = [as_floats(base64.b64decode(text)) for text in read_vectors(as_text)]
    assert read_vectors(as_numbers) == decoded == [vector_of(text) for text in TEXTS]


async def test_options_reach_the_model(gateway):
    async def one(**options):
        response = await embed(gateway, "a text", **options)
        assert response.status_code == 200, response.text
        return read_vectors(response.json())[0]

    assert await one(dimensions=16) == vector_of("a text", dimensions=16)
    assert await one(normalized=False) == vector_of("a text", is_normalized=False)
    prompted = vector_of("a text", prompt_name="query")
    assert await one(prompt_name="query") == prompted == await one(input_type="search_query")
    long = " ".join(map(str, range(600)))
    cut = await embed(gateway, long, truncate=True)
    assert read_vectors(cut.json())[0] == vector_of(long, truncate="end")
    cut = await embed(gateway, long, truncate="START")
    assert read_vectors(cut.json())[0] == vector_of(long, truncate="start")
    cut = await embed(gateway, long, truncate_prompt_tokens=-1)
    assert read_vectors(cut.json())[0] == vector_of(long, truncate="end")
    cut = await embed(gateway, "one two three", truncate_prompt_tokens=2)
    assert read_vectors(cut.json())[0] == vector_of("one two")
    cut = await embed(gateway, "one two three", truncate_prompt_tokens=2, truncate="START")
    assert read_vectors(cut.json())[0] == vector_of("two three")


async def test_jinas_objects_are_texts_too(gateway):
    answer = (await embed(gateway, ["one", {"text": "two"}])).json()
    assert read_vectors(answer) == [vector_of("one"), vector_of("two")]


async def test_the_model_says_what_it_offers(gateway):
    model = (await gateway.client.get(f"/v1/models/{MODEL}")).json()
    assert model["tasks"] == ["embed", "rerank", "tokenize"]
    assert model["dimensions"] == 64


# What is refused


@pytest.mark.parametrize(
    ("given", "param"),
    [("w " * 513, "input"), (["a", "w " * 513], "input.[1]"), (["a"] * 300 + ["w " * 513], "input.[300]")],
)  # fmt: skip
async def test_an_input_that_is_too_long_is_named_where_the_client_put_it(gateway, given, param):
    response = await embed(gateway, given)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


# Many


async def test_no_answer_holds_anothers_vectors(gateway):
    async def ask(number: int) -> None:
        mine = [
            f"text {number} {index} " + "word " * (number % 7) for index in range(number % 9 + 1)
        ]
        response = await embed(gateway, mine)
        assert read_vectors(response.json()) == [vector_of(text) for text in mine]

    await asyncio.gather(*map(ask, range(60)))


@pytest.mark.parametrize("changes", [{"num_workers": 2, "engine": {"max_calls": 2}}])
async def test_a_large_request_is_shared_and_comes_back_in_order(fleet, ends):
    gateway, workers = fleet
    texts = [f"text {index} " + "word " * (index % 40) for index in range(2048)]
    response = await embed(gateway, texts)
    assert read_vectors(response.json()) == list(map(vector_of, texts))
    usage = response.json()["usage"]
    assert usage["prompt_tokens"] == sum(len(text.split()) for text in texts)
    assert all(worker.engine.added for worker in workers)
    assert not [key async for key in ends.redis.scan_iter(f"{ends.prefix}:*:result:*")]


async def test_large_results_do_not_go_through_log_or_mailbox(fleet, ends):
    gateway, _ = fleet
    response = await embed(gateway, [f"text {n}" for n in range(256)], encoding_format="base64")
    assert len(response.content) > 64 * 256
    keys = [key async for key in ends.redis.scan_iter(f"{ends.prefix}:*")]
    for key in keys:
        size = await ends.redis.memory_usage(key)
        assert size is None or size < 32_000, key
    assert len(await ends.redis.keys(f"{ends.prefix}:*:log:*")) == 1


async def test_one_bad_input_fails_the_whole_request(fleet):
    gateway, [worker] = fleet
    worker.engine.gate.clear()
    response = await embed(gateway, ["fine"] * 1000 + ["w " * 513])
    assert response.json()["error"]["param"] == "input.[1000]"
    worker.engine.gate.set()
    await until(lambda: not worker.engine.has_work())


async def test_a_client_that_leaves_frees_all_parts(fleet, ends):
    gateway, [worker] = fleet
    worker.engine.gate.clear()
    asking = asyncio.create_task(embed(gateway, ["some words"] * 2000))
    await until(lambda: worker.engine.added)
    asking.cancel()
    await until_equal(ends.num_open, 0)
    worker.engine.gate.set()
    await until(lambda: not worker.engine.has_work())
    assert gateway.services.dispatcher.num_open == 0


# What is noted


async def test_it_is_counted_and_logged_as_an_answer_without_tokens(gateway, caplog):
    caplog.set_level(logging.INFO, "gateway.calls.recorder")
    response = await embed(gateway, ["secret words", "more"], user="jane", timings=True)
    timings = response.json()["timings"]
    stages = [timings[f"{stage}_s"] for stage in STAGES]
    assert sum(stages) == pytest.approx(timings["e2e_s"], abs=1e-4)
    assert timings["prefill_s"] > 0
    assert response.headers["server-timing"].startswith("ingest;dur=")
    [line] = [vars(record) for record in caplog.records if record.name.endswith("recorder")]
    assert (line["outcome"], line["status"]) == ("ok", 200)
    assert (line["prompt_tokens"], line["output_tokens"]) == (3, 0)
    assert "secret" not in json.dumps(line, default=str)
    metrics = (await gateway.client.get("/metrics")).text
    assert f'vlm_requests_total{{model="{MODEL}",outcome="ok"}} 1.0' in metrics
    assert f'vlm_prompt_tokens_total{{model="{MODEL}"}} 3.0' in metrics
    assert f'vlm_generation_tokens_total{{model="{MODEL}"}} 0.0' in metrics
    assert f'vlm_time_to_first_token_seconds_count{{model="{MODEL}"}} 0.0' in metrics
    assert f'vlm_request_duration_seconds_count{{model="{MODEL}"}} 1.0' in metrics


@pytest.mark.parametrize("use", ["search_document", "document", "passage"])
def test_documents_need_no_prompt_of_their_own(use):
    """A model with a prompt for queries alone takes documents as they are."""
    card = msgspec.structs.replace(CARD, tasks=("embed",), prompts=("query",))
    surface, context = Embeddings(LimitSettings()), RequestContext("", {}, 0.0)
    body = {"model": "m", "input": "a text", "input_type": use}
    request = surface.read(msgspec.json.encode(body), context)
    [task] = surface.plan(request, context, card).tasks
    assert task.prompt_name is None
