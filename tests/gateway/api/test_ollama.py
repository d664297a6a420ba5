"""Ollama's API: chats and prompts as lines of JSON, images, options, and descriptions of models."""

import json

from shared.protocol import FinishReason, ImagePart, StageTimings, TextPart
from tests.factories_gateway import CARD, HELLO, MODEL, says, think
from tests.factories_images import data_url

PNG = data_url().partition(",")[2]


def lines_of(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


async def test_the_curl_of_ollamas_own_examples_is_answered(gateway, worker):
    form = {"content-type": "application/x-www-form-urlencoded"}  # sent by `curl -d`
    content = json.dumps({"model": MODEL})
    response = await gateway.client.post("/api/show", content=content, headers=form)
    assert response.json()["capabilities"] == ["completion", "vision"]
    headers = {**form, "origin": "null"}
    response = await gateway.client.post("/api/show", content=content, headers=headers)
    assert response.status_code == 403


async def test_a_chat_with_images_options_and_a_tag(gateway, worker):
    timings = StageTimings(vision_s=1, prefill_s=2, decode_s=3)
    worker.script = says("a cat", reason=FinishReason.LENGTH, timings=timings)
    body = {
        "model": f"{MODEL}:latest",
        "stream": False,
        "keep_alive": "5m",
        "messages": [{"role": "user", "content": "what?", "images": [PNG]}],
        "options": {"num_predict": 5, "temperature": 0, "num_ctx": 4096, "repeat_penalty": 1.5,
                    "stop": ["END"], "seed": 7},
    }  # fmt: skip
    told = (await gateway.client.post("/api/chat", json=body)).json()
    assert told["message"] == {"role": "assistant", "content": "a cat"}
    assert (told["model"], told["done_reason"]) == (MODEL, "length")
    assert (told["prompt_eval_duration"], told["eval_duration"]) == (3_000_000_000, 3_000_000_000)
    [request] = worker.requests
    assert request.task.messages[0].parts == (ImagePart(0), TextPart("what?"))
    sampling = request.task.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.repetition_penalty) == (5, 0, 1.5)
    assert (sampling.stop, sampling.seed) == (("END",), 7)


async def test_a_prompt_is_templated_unless_raw(gateway, worker):
    body = {"model": MODEL, "prompt": "hello", "system": "be short", "images": [PNG]}
    *pieces, end = lines_of((await gateway.client.post("/api/generate", json=body)).text)
    assert "".join(piece["response"] for piece in pieces) == "Hello you"
    assert not any(piece["done"] for piece in pieces)
    assert (end["done"], end["done_reason"]) == (True, "stop")
    assert (end["prompt_eval_count"], end["eval_count"]) == (7, 3)
    assert end["total_duration"] > 0
    raw = {"model": MODEL, "prompt": "hello", "raw": True}
    await gateway.client.post("/api/generate", json=raw)
    first, second = worker.requests
    assert [message.role for message in first.task.messages] == ["system", "user"]
    assert second.task.prompt == TextPart("hello")


async def test_reasoning_is_in_the_field_thinking(gateway, worker):
    worker.script = think
    assert not CARD.template_options
    body = {"model": MODEL, "messages": HELLO}
    told = lines_of((await gateway.client.post("/api/chat", json=body)).text)
    assert "".join(line["message"]["content"] for line in told) == "yes"
    assert "".join(line["message"].get("thinking", "") for line in told) == "hmm well"
    told = lines_of((await gateway.client.post("/api/chat", json={**body, "think": False})).text)
    assert not any("thinking" in line["message"] for line in told)


async def test_models_are_listed_and_shown(gateway, worker):
    client = gateway.client
    [model] = (await client.get("/api/tags")).json()["models"]
    assert (model["name"], model["model"]) == (MODEL, MODEL)
    assert model["modified_at"] == "2023-11-14T22:13:20Z"
    [running] = (await client.get("/api/ps")).json()["models"]
    assert running["context_length"] == 512
    shown = (await client.post("/api/show", json={"model": f"{MODEL}:latest"})).json()
    assert shown["capabilities"] == ["completion", "vision"]
    assert shown["model_info"]["vlm.context_length"] == 512
    missing = await client.post("/api/show", json={"model": "nobody"})
    assert missing.status_code == 404
    assert isinstance(missing.json()["error"], str)
    assert (await client.get("/api/version")).json()["version"]
