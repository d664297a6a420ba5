"""Complete chat responses: fields, usage, choices, logprobs, headers, timings."""

import asyncio
import base64
import gc
import re

import pytest
from msgspec.structs import replace

from gateway.http.errors import ApiError
from shared.protocol import (
    CallPiece,
    FinishReason,
    Function,
    OutputLogprob,
    SamplingDefaults,
    TokenLogprob,
    Tools,
)
from shared.telemetry.metrics import STAGES
from tests.factories_gateway import CARD, CHAT, HELLO, MODEL, Answer, make_body
from tests.factories_images import data_url, encoded
from tests.factories_keys import code


@pytest.mark.parametrize("card", [replace(CARD, max_image_pixels=5000, supports_video=True)])
async def test_images_are_scaled_to_the_request_within_the_models_limit(gateway, worker):
    part = {"type": "image_url", "image_url": {"url": data_url(1)}}
    clip = base64.b64encode(b"\0\0\0\x18ftypisom" + bytes(64)).decode()
    video = {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{clip}"}}
    file = {"type": "file", "file": {"file_data": data_url(1), "filename": "a.png"}}
    content = [
        part,
        {**part, "max_pixels": 2000},
        {**part, "min_pixels": 100, "max_pixels": 9000},
        {**part, "image_url": data_url(1), "min_pixels": None},
        file,
        video,
    ]
    asked = {"min_pixels": 50, "max_pixels": 4000}
    response = await gateway.chat(make_body(content, mm_processor_kwargs=asked))
    assert response.status_code == 200, response.text
    images = worker.requests[0].task.images
    limits = [(image.min_pixels, image.max_pixels) for image in images]
    assert limits == [(50, 4000), (50, 2000), (100, 5000), *[(50, 4000)] * 3]
    assert images[-1].video is not None
    assert (await gateway.chat(make_body([video]))).status_code == 200
    [image] = worker.requests[-1].task.images
    assert (image.min_pixels, image.max_pixels) == (0, 5000)
    asked = {"min_pixels": 50, "max_pixels": 40}
    refused = await gateway.chat(make_body([video], mm_processor_kwargs=asked))
    assert code(refused)[::2] == (400, "mm_processor_kwargs.min_pixels")


async def test_an_answer_has_every_field_of_the_contract(gateway, worker):
    response = await gateway.chat()
    answer = response.json()
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", answer.pop("id"))
    assert answer.pop("created") > 1_700_000_000
    assert answer.pop("system_fingerprint").startswith("vlm-fleet-")
    assert answer == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello you", "refusal": None},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "total_tokens": 10,
            "prompt_tokens_details": {
                "cached_tokens": 2,
                "audio_tokens": 0,
                "image_tokens": 0,
                "text_tokens": 7,
            },
        },
    }


async def test_choices_are_ordered_by_index_and_the_prompt_counts_once(gateway, worker):
    async def script(answer: Answer) -> None:
        await answer.start()
        reason = FinishReason.LENGTH if answer.choice == 1 else FinishReason.STOP
        await answer.finish(f"choice {answer.choice}", "!", reason=reason)

    worker.script = script
    answer = (await gateway.chat(make_body(n=3))).json()
    told = [(c["index"], c["message"]["content"], c["finish_reason"]) for c in answer["choices"]]
    assert told == [(0, "choice 0!", "stop"), (1, "choice 1!", "length"), (2, "choice 2!", "stop")]
    assert answer["usage"]["prompt_tokens"] == 7
    assert answer["usage"]["completion_tokens"] == 6


async def test_each_choice_is_sampled_with_its_own_seed(gateway, worker):
    await gateway.chat(make_body(n=3, seed=5))
    await gateway.chat(make_body(n=3, seed=5))
    seeds = {answer.choice: [] for answer in worker.answers}
    for answer in worker.answers:
        seeds[answer.choice].append(answer.request.task.sampling.seed)
    assert seeds[0] == [5, 5]
    assert seeds[1][0] == seeds[1][1] != seeds[2][0] == seeds[2][1]
    worker.answers.clear()
    for seed in (-1, 2**63 - 1, -(2**63), 0, None, None):
        await gateway.chat(make_body(seed=seed))
    assert len({answer.request.task.sampling.seed for answer in worker.answers}) == 6


async def test_logprobs_have_tokens_bytes_and_alternatives(gateway, worker):
    chosen = TokenLogprob("Hé", -0.5)
    entry = OutputLogprob(chosen, (chosen, TokenLogprob("Ha", -1.5)))

    async def script(answer: Answer) -> None:
        await answer.publish(*answer.deltas("Hé", logprobs=(entry,)), answer.finished())

    worker.script = script
    answer = (await gateway.chat(make_body(logprobs=True, top_logprobs=2))).json()
    assert worker.requests[0].task.sampling.num_logprobs == 2
    told = {"token": "Hé", "logprob": -0.5, "bytes": [72, 195, 169]}
    rival = {"token": "Ha", "logprob": -1.5, "bytes": [72, 97]}
    content = [{**told, "top_logprobs": [told, rival]}]
    assert answer["choices"][0]["logprobs"] == {"refusal": None, "content": content}


async def test_chat_only_parameters_reach_the_worker(gateway, worker):
    """Parameters of several APIs are tested in tests/gateway/api/test_recorded_requests.py."""
    own = {"max_completion_tokens": 9, "seed": -1, "stop": ["a", "b"], "metadata": {"k": "v"}}
    await gateway.chat(make_body(repetition_penalty=1.5, **own))
    [sampling] = [request.task.sampling for request in worker.requests]
    assert (sampling.max_tokens, sampling.seed) == (9, 2**64 - 1)
    assert (sampling.stop, sampling.repetition_penalty) == (("a", "b"), 1.5)
    for name in ("max_tokens", "max_completion_tokens"):  # larger than the context length
        await gateway.chat(make_body(temperature=1e-45, **{name: 30_000}))
        sampling = worker.requests[-1].task.sampling
        assert (sampling.max_tokens, sampling.temperature) == (30_000, 0.0)


SUGGESTED = SamplingDefaults(0.25, 0.5, 7, 0.125, 1.5, 9)


@pytest.mark.parametrize("card", [replace(CARD, sampling=SUGGESTED)])
async def test_omitted_sampling_fields_have_the_defaults_of_the_model_card(gateway, worker, card):
    for body in (make_body(), make_body(temperature=None, top_k=None, max_tokens=None)):
        await gateway.chat(body)
        sampling = worker.requests[-1].task.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.5, 7)
        assert (sampling.min_p, sampling.repetition_penalty) == (0.125, 1.5)
        assert sampling.max_tokens == 9
    own = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    for fields, changed in (
        ({"min_tokens": 12}, {"min_tokens": 12, "max_tokens": 12}),
        ({"top_k": -1}, {"top_k": 0}),
        (own, own),
        ({"max_tokens": 99}, {"max_tokens": 99}),
    ):
        await gateway.chat(make_body(**fields))
        found = worker.requests[-1].task.sampling
        assert found == replace(sampling, seed=found.seed, **changed)


async def test_the_error_of_an_unknown_path_names_the_right_path(gateway):
    for path, near in (
        *((path, "serves /v1/chat/completions;") for path in (
            "/chat/completions", "/v1/v1/chat/completions", "/v1/chat/completions/")),
        ("/embeddings", "serves /v1/embeddings;"),
        ("/models", "serves /v1/models;"),
        ("/v1/assistants", "GET /docs lists all paths."),
        ("/v1/responces", "the nearest path is /v1/responses;"),
        ("/qqq", "Not Found: GET /docs lists all paths."),
    ):  # fmt: skip
        error = (await gateway.client.post(path, json=make_body())).json()["error"]
        assert near in error["message"]
        assert error["code"] == "not_found"


async def test_a_conversation_with_images_keeps_its_order(gateway, worker):
    first = [
        {"type": "image_url", "image_url": {"url": data_url(1), "detail": "low"}},
        {"type": "text", "text": "one"},
        {"type": "image_url", "image_url": data_url(2, format="JPEG")},
    ]
    second = [
        {"type": "input_text", "text": "three"},
        {"type": "input_image", "image_url": data_url(3, format="WebP")},
    ]
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": first},
        {"role": "assistant", "content": "two", "refusal": None, "annotations": []},
        {"role": "user", "content": second},
    ]
    response = await gateway.chat(make_body(messages=messages))
    assert response.status_code == 200, response.text
    [request] = worker.requests
    shape = [(m.role, [getattr(p, "text", getattr(p, "image", None)) for p in m.parts])
             for m in request.task.messages]  # fmt: skip
    first, second = ("user", [0, "one", 1]), ("user", ["three", 2])
    assert shape == [("system", ["Be short."]), first, ("assistant", ["two"]), second]
    media = [(image.media_type, image.width, image.height) for image in request.task.images]
    assert media == [("image/png", 64, 48), ("image/jpeg", 64, 48), ("image/webp", 64, 48)]
    assert await worker.blobs.get(request.task.images[0]) == encoded(1)
    assert response.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 12


async def test_headers_have_the_request_id_and_stage_times(gateway, worker):
    response = await gateway.chat(headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert int(response.headers["openai-processing-ms"]) >= 0
    names = [entry.split(";")[0] for entry in response.headers["server-timing"].split(", ")]
    assert names == [*STAGES, "total"]
    asked = {"x-vlm-timings": "true"}
    timings = (await gateway.chat(headers=asked)).json()["timings"]
    assert list(timings) == [f"{stage}_s" for stage in STAGES] + ["e2e_s"]
    for sent in ("", "a b", "x" * 200, 'a"b'):
        response = await gateway.chat(headers={"x-request-id": sent})
        assert re.fullmatch(r"req_[0-9a-f]{32}", response.headers["x-request-id"])


async def test_refusals_are_counted_under_known_model_names_only(gateway):
    """Model names that clients invent are not used as label values."""
    bad = ({"best_of": 2}, {"temperature": ""}, {"messages": []}, {"n": 0}, {"service_tier": "x"})
    for model, label in (("tiny", "tiny"), ("unheard-of", "other"), ("evil\n", "other")):
        for changes in (*bad, {} if label == "other" else {"n": -1}):
            response = await gateway.chat({**make_body(), "model": model, **changes})
            assert response.is_error
    text = (await gateway.client.get("/metrics")).text
    of_tiny = {"unsupported_parameter": 1, "invalid_value": 5}
    others = {"unsupported_parameter": 2, "invalid_value": 8, "model_not_found": 2}
    for label, counts in (("tiny", of_tiny), ("other", others)):
        for outcome, count in counts.items():
            assert f'vlm_requests_total{{model="{label}",outcome="{outcome}"}} {count}.0' in text
    assert "unheard-of" not in text
    assert "evil" not in text


# Tools


ABLE = replace(CARD, supports_grammars=True)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
WEATHER = Function(
    "get_weather", '{"type":"object","properties":{"city":{"type":"string"}}}', "The weather."
)
OTHER = {"type": "function", "function": {"name": "other"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("card", [ABLE])
async def test_tools_and_tool_choice_reach_the_worker(gateway, worker):
    for fields, expected in (
        ({"tools": [TOOL]}, Tools((WEATHER,))),
        ({"tools": [TOOL], "tool_choice": "auto"}, Tools((WEATHER,))),
        ({"tools": [TOOL], "parallel_tool_calls": False}, Tools((WEATHER,), False, False)),
        ({"tools": [TOOL], "tool_choice": "none"}, None),
        ({"tools": [], "tool_choice": "auto"}, None),
        ({"tools": [{"type": "web_search"}]}, None),
        ({"tools": [OTHER, TOOL], "tool_choice": NAMED}, Tools((WEATHER,), True)),
        (
            {"tools": [OTHER, TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {
                "mode": "required", "tools": [NAMED]}}},
            Tools((WEATHER,), True),
        ),
    ):  # fmt: skip
        response = await gateway.client.post(CHAT, json=make_body(**fields))
        assert response.status_code == 200, response.text
        assert worker.requests[-1].task.tools == expected


DEEP = '{"x": ' + "[" * 2000


@pytest.mark.parametrize("card", [ABLE])
async def test_complete_tool_arguments_are_returned_and_truncated_ones_not(gateway, worker):
    async def call(answer: Answer) -> None:
        await answer.start()
        [event] = answer.deltas("")
        piece = CallPiece(0, "get_weather", arguments)
        await answer.publish(replace(event, calls=(piece,)))
        await answer.finish(reason=FinishReason.TOOL_CALLS if is_whole else FinishReason.LENGTH)

    worker.script = call
    for arguments, is_whole in (
        (DEEP + "]" * 2000 + "}", True),
        ('{"x": ' + "9" * 5000 + ', "y": 1e999}', True),
        ('{"x": "]}', False),
        ("", False),
        (DEEP, False),
        (DEEP + '"' + "]" * 2000 + "}", False),
    ):
        for path, stream in (("/v1/messages", False), ("/api/chat", False), ("/api/chat", True)):
            body = {"model": MODEL, "messages": HELLO, "stream": stream, "tools": [TOOL]}
            if path == "/v1/messages":
                tool = {"name": "get_weather", "input_schema": {"type": "object"}}
                body |= {"max_tokens": 9, "tools": [tool]}
            response = await gateway.client.post(path, json=body)
            assert response.status_code == 200
            name = "input" if path == "/v1/messages" else "arguments"
            expected = f'"{name}":{arguments if is_whole else {}}'
            assert (expected in response.text) is (is_whole or path == "/v1/messages")


async def test_a_refusal_leaves_no_reference_cycle(gateway):
    """A frame refers to its request's body, so a reference cycle would retain bodies until the next collection."""
    await gateway.client.get("/healthz")  # opens the connection
    gc.collect()
    gc.disable()
    try:
        response = await gateway.chat(make_body(max_tokens=-1))
        assert response.status_code == 400
        async with asyncio.timeout(10):
            # `isinstance` could run code of `o`.
            while [o for o in gc.get_objects() if issubclass(type(o), ApiError)]:
                await asyncio.sleep(0)
    finally:
        gc.enable()
