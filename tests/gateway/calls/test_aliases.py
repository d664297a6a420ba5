"""Aliases: a model under another name in every API, and default sampling fields per model."""

import pytest
from msgspec.structs import replace

from tests.factories_gateway import CARD, MODEL, TEXT_BODIES, answer_any, make_body
from tests.factories_keys import bearer
from tests.gateway.api.test_batches import begin, read, to_line, until_ended

ALIAS = "gpt-4o"
TASKS = ("generate", "embed", "rerank", "tokenize", "run")
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def card():
    return replace(CARD, tasks=TASKS)


@pytest.fixture
def changes(tmp_path):
    return {"gateway": {"aliases": {ALIAS: MODEL}, "files": f"file://{tmp_path}"}}


async def test_an_alias_is_served_by_its_model_under_its_own_name(gateway, worker, client):
    worker.script = answer_any
    for path, body in (
        *TEXT_BODIES.items(),
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/rerank", {"query": "q", "documents": ["d"]}),
        (f"/v1/applications/{ALIAS}/run", {"input": 1}),
    ):
        answer = await gateway.client.post(path, json={"model": ALIAS, **body})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model" if "run" not in path else "application"] == ALIAS
        assert {request.model for request in worker.requests} == {MODEL}
    metrics = (await gateway.client.get("/metrics")).text
    assert f'vlm_requests_total{{model="{MODEL}",outcome="ok"}} 9.0' in metrics
    assert ALIAS not in metrics
    assert f'"model":"{ALIAS}"' in await gateway.stream(make_body(model=ALIAS))
    batch = await until_ended(client, await begin(client, [to_line("a", model=ALIAS)]))
    [line] = (await read(client, batch.output_file_id)).values()
    assert line["response"]["body"]["model"] == ALIAS
    made = await gateway.client.post(f"/v1/applications/{ALIAS}/sessions", json={})
    assert made.status_code == 200, made.text
    path = f"/v1/sessions/{made.json()['id']}/tasks"
    sent = await gateway.client.post(path, json={"tasks": [{"input": 1}]})
    assert sent.status_code == 200, sent.text


@pytest.mark.parametrize("changes", [{"gateway": {"aliases": {ALIAS: MODEL, "lost": "nowhere"}}}])
async def test_aliases_are_listed_last_with_their_model(gateway):
    models = (await gateway.client.get("/v1/models")).json()["data"]
    assert [(model["id"], model["root"], model["parent"]) for model in models] == [
        (MODEL, MODEL, None),
        (ALIAS, MODEL, MODEL),
    ]
    assert (await gateway.client.get(f"/v1/models/{ALIAS}")).json() == models[1]
    tags = (await gateway.client.get("/api/tags")).json()["models"]
    assert {ALIAS, f"{ALIAS}:latest"} & {model["name"] for model in tags}
    lost = await gateway.chat(make_body(model="lost"))
    assert lost.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("changes", [{"gateway": {"aliases": {MODEL: "other"}}}])
async def test_a_served_model_takes_precedence_over_an_alias(gateway):
    assert (await gateway.chat()).json()["model"] == MODEL


async def test_a_key_needs_permission_for_the_alias(fleet, worker):
    """The name of the alias's model is not checked: the operator chose the model of the alias."""
    gateway = {"root_key": "root", "aliases": {ALIAS: MODEL}}
    async with fleet.gateway(gateway=gateway) as g:
        found = {}
        for pattern in ("gpt-*", MODEL):
            body = {"name": pattern.strip("-*"), "models": [pattern]}
            made = await g.client.post("/v1/admin/keys", json=body, headers=bearer("root"))
            headers = bearer(made.json()["key"])
            asked = [await g.chat(make_body(model=n), headers=headers) for n in (ALIAS, MODEL)]
            listed = (await g.client.get("/v1/models", headers=headers)).json()["data"]
            found[pattern] = [a.status_code for a in asked], [each["id"] for each in listed]
    assert found == {"gpt-*": ([200, 403], [ALIAS]), MODEL: ([403, 200], [MODEL])}


DEFAULTS = {
    MODEL: {"temperature": 0.25, "max_tokens": 9},
    ALIAS: {"temperature": 0.75, "top_p": 0.5},
}


@pytest.mark.parametrize(
    "changes", [{"gateway": {"aliases": {ALIAS: MODEL}, "model_defaults": DEFAULTS}}]
)
async def test_defaults_of_a_model_apply_to_fields_that_a_request_leaves_out(gateway, worker):
    message = {"messages": MESSAGES, "model": MODEL}
    for path, body in (
        ("/v1/chat/completions", message),
        ("/v1/chat/completions", message | {"temperature": 1, "max_tokens": 3}),
        ("/v1/chat/completions", message | {"model": ALIAS}),
        ("/v1/completions", {"prompt": "hi", "model": MODEL}),
        ("/v1/responses", {"input": "hi", "model": MODEL}),
        ("/v1/messages", message | {"max_tokens": 3}),
        ("/api/chat", message | {"stream": False}),
    ):
        answer = await gateway.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
    sampled = [request.task.sampling for request in worker.requests]
    assert [(s.temperature, s.top_p, s.max_tokens) for s in sampled] == [
        (0.25, 1.0, 9), (1.0, 1.0, 3), (0.75, 0.5, 9), (0.25, 1.0, 16), (0.25, 1.0, 9),
        (0.25, 1.0, 3), (0.25, 1.0, 9),
    ]  # fmt: skip
    model, alias = (await gateway.client.get("/v1/models")).json()["data"]
    assert model["default_sampling"] == DEFAULTS[MODEL]
    assert alias["default_sampling"] == {"temperature": 0.75, "top_p": 0.5, "max_tokens": 9}
