"""Refusals of each API: a change of a valid request, and the code and field of the error.

What the lifecycle refuses for all of them is in tests/contract/test_surface.py, what chat refuses whatever the
model in tests/gateway/api/chat/test_bad_inputs.py.
"""

import re
from base64 import b64encode
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace

from tests.contract.test_surface import DIALECTS
from tests.factories_gateway import (
    CARD,
    MODEL,
    make_settings,
    run_gateway_on_socket,
    run_worker,
)
from tests.factories_images import data_url
from tests.factories_numbers import load

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUMBERS, ABLE, THINKS = "numbers", "able", "thinks"
OTHERS = [
    replace(load().card, name=NUMBERS),
    replace(CARD, name=ABLE, supports_grammars=True),
    replace(
        CARD, name=THINKS, reasoning="think", template_options=("add_dates", "enable_thinking")
    ),
]
PNG = data_url().partition(",")[2]
JPEG = data_url(format="JPEG").partition(",")[2]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, OLLAMA, EMBEDDINGS = "/v1/messages", "/api/chat", "/v1/embeddings"
GENERATE = "/api/generate"
RERANK, SCORE = "/v1/rerank", "/v1/score"
SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "get_weather"}}
OTHER = {"type": "function", "function": {"name": "other"}}
PART = {"type": "image_url", "image_url": {"url": data_url()}}


def user(*parts: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(parts)}]


def with_tools(*tools: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Of the model that can be held to functions."""
    return {"model": ABLE, "tools": list(tools), **changes}


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": fields}


def thinking(**changes: Any) -> dict[str, Any]:
    return {"model": THINKS, **changes}


def template(**options: Any) -> dict[str, Any]:
    return thinking(chat_template_kwargs=options)


def with_file(media_type: str, data: bytes) -> dict[str, Any]:
    url = f"data:{media_type};base64,{b64encode(data).decode()}"
    return {"messages": user({"type": "file", "file": {"filename": "x", "file_data": url}})}


def source(data: str, media_type: str) -> dict[str, Any]:
    image = {"type": "base64", "media_type": media_type, "data": data}
    return {"messages": user({"type": "image", "source": image})}


IMAGE = "messages.[0].content.[0].source"
FILE = "messages.[0].content.[0].file.file_data"
TEXT = {"type": "text", "text": "a"}
#: path, change of the body, code, param
ROWS: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"response_format": SCHEMA}, "unsupported_parameter", "response_format.json_schema.schema"),
    (CHAT, {"messages": user({"type": "image", "image": data_url()})}, "invalid_value", "messages.[0].content.[0].type"),
    (CHAT, {"messages": user({"type": "image_url", "image_url": {"url": PNG}})}, "invalid_image_url", "messages.[0].content.[0].image_url"),
    (CHAT, {"messages": user({**PART, "min_pixels": 100}), "mm_processor_kwargs": {"max_pixels": 50}}, "invalid_value", "messages.[0].content.[0].min_pixels"),
    (CHAT, with_file("application/pdf", b"%PDF"), "invalid_value", FILE),
    (CHAT, with_file("text/plain", b"\xff"), "invalid_value", FILE),
    (CHAT, with_tools(tool_choice="required"), "invalid_value", "tool_choice"),
    (CHAT, with_tools(TOOL, tool_choice=function(name="x")), "invalid_value", "tool_choice"),
    (CHAT, with_tools(TOOL, TOOL), "invalid_value", "tools.[1].function.name"),
    (CHAT, with_tools(function(name="a b")), "invalid_value", "tools.[0].function.name"),
    (CHAT, with_tools({"type": "function"}), "missing_field", "tools.[0].function"),
    (CHAT, with_tools(*[OTHER] * 513), "invalid_value", "tools"),
    (CHAT, with_tools(TOOL, min_tokens=3), "invalid_value", "min_tokens"),
    (CHAT, with_tools(function(name="f", strict=True, parameters={"not": {}})), "invalid_grammar", "tools.[0].function.parameters/not"),
    (CHAT, template(add_dates="x" * 257), "invalid_value", "chat_template_kwargs"),
    (CHAT, template(add_dates=[1]), "invalid_value", "chat_template_kwargs"),
    (CHAT, template(**{str(i): 1 for i in range(17)}), "invalid_value", "chat_template_kwargs"),
    (CHAT, thinking(reasoning_effort="hard"), "invalid_value", "reasoning_effort"),
    (CHAT, thinking(enable_thinking="yes"), "invalid_value", "enable_thinking"),
    (COMPLETIONS, {"suffix": "end"}, "unsupported_parameter", "suffix"),
    (COMPLETIONS, {"best_of": 3}, "unsupported_parameter", "best_of"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 65}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "invalid_value", "prompt_logprobs"),
    (COMPLETIONS, {"prompt_logprobs": 21}, "invalid_value", "prompt_logprobs"),
    (COMPLETIONS, {"max_tokens": 0}, "invalid_value", "max_tokens"),
    (COMPLETIONS, {"logprobs": 21}, "invalid_value", "logprobs"),
    (COMPLETIONS, {"logit_bias": {"x": 1}}, "invalid_value", "logit_bias"),
    (COMPLETIONS, {"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
    (RESPONSES, {"background": True}, "unsupported_parameter", "background"),
    (RESPONSES, {"conversation": "conv_1"}, "unsupported_parameter", "conversation"),
    (RESPONSES, {"tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "unsupported_parameter", "text.format"),
    (RESPONSES, {"input": []}, "invalid_value", "input"),
    (RESPONSES, {"input": [{"content": "who?"}]}, "invalid_value", "input.[0].role"),
    (RESPONSES, {"input": [{"type": "function_call", "name": "f"}]}, "missing_field", "input.[0].call_id"),
    (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "c"}]}, "missing_field", "input.[0].output"),
    (RESPONSES, {"input": [{"type": "nothing_known"}]}, "invalid_value", "input.[0].type"),
    (RESPONSES, {"input": [{"type": "local_shell_call_output", "output": "ok"}]}, "missing_field", "input.[0].call_id"),
    (RESPONSES, {"stop": [""]}, "invalid_value", "stop"),
    (RESPONSES, {"tools": [{"type": "function"}]}, "missing_field", "tools.[0].name"),
    (RESPONSES, {"top_logprobs": 21}, "invalid_value", "top_logprobs"),
    (RESPONSES, {"max_output_tokens": 10**6}, "invalid_value", "max_output_tokens"),
    (RESPONSES, {"previous_response_id": "r" * 65}, "invalid_value", "previous_response_id"),
    (MESSAGES, {"tool_choice": {"type": "any"}}, "unsupported_parameter", "tool_choice"),
    (MESSAGES, {"tool_choice": {"type": "tool"}}, "missing_field", "tool_choice.name"),
    (MESSAGES, {"stop_sequences": ["x"] * 17}, "invalid_value", "stop_sequences"),
    (MESSAGES, {"stop_sequences": [""]}, "invalid_value", "stop_sequences"),
    (MESSAGES, {"messages": user({"type": "container_upload", "file_id": "f"})}, "invalid_value", "messages.[0].content.[0].type"),
    (MESSAGES, {"messages": user({"type": "tool_use", "id": "x", "name": "f", "input": {}})}, "invalid_value", "messages.[0].content.[0].type"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "unsupported_parameter", "output_config.format.schema"),
    (MESSAGES, source("bm8gaW1hZ2U=", "image/png"), "unsupported_image", f"{IMAGE}.data"),  # "no image"
    (MESSAGES, source("no base64", "image/png"), "unsupported_image", f"{IMAGE}.data"),
    (MESSAGES, source("", "image/png"), "unsupported_image", f"{IMAGE}.data"),
    (MESSAGES, source(PNG[:16], "image/png"), "invalid_image", f"{IMAGE}.data"),  # its signature alone
    (MESSAGES, source(PNG, "image/webp"), "invalid_value", f"{IMAGE}.media_type"),
    (MESSAGES, source(JPEG, "image/png"), "invalid_value", f"{IMAGE}.media_type"),
    (OLLAMA, {"format": "xml"}, "invalid_grammar", "format"),
    (OLLAMA, {"options": {"mirostat": 2}}, "unsupported_parameter", "options.mirostat"),
    (OLLAMA, {"options": {"num_predict": 10**6}}, "invalid_value", "options.num_predict"),
    (OLLAMA, {"messages": [{"role": "user", "content": "x", "images": ["!"]}]}, "invalid_image", "messages.[0].images.[0]"),
    (OLLAMA, {"messages": [{"role": "developer", "content": "1"}]}, "invalid_value", "messages.[0].role"),
    (OLLAMA, {"messages": [{"role": "user", "images": [{"type": "Buffer", "data": [1]}]}]}, "invalid_value", "messages.[0].images.[0]"),
    (GENERATE, {"suffix": "x"}, "unsupported_parameter", "suffix"),
    (GENERATE, {"top_logprobs": 2}, "invalid_value", "top_logprobs"),
    (EMBEDDINGS, {"input": [{"image": PNG}] * 65}, "too_many_images", "input"),
    (EMBEDDINGS, {"input": None}, "missing_field", "input"),
    (EMBEDDINGS, {"messages": [], "input": []}, "invalid_value", "messages"),
    (EMBEDDINGS, {"messages": user(PART)}, "invalid_value", "input"),
    (EMBEDDINGS, {"messages": user(PART, TEXT), "input": None}, "invalid_value", "messages.[0].content"),
    (EMBEDDINGS, {"messages": user(PART, PART), "input": None}, "invalid_value", "messages.[0].content"),
    (EMBEDDINGS, {"messages": user({"type": "text", "text": ""}), "input": None}, "invalid_value", "messages.[0].content"),
    (EMBEDDINGS, {"messages": user({"type": "image_url", "image_url": {"url": "data:,x"}}), "input": None}, "invalid_image_url",
     "messages.[0].content.[0].image_url"),
    (EMBEDDINGS, {"messages": user(PART) * 2, "input": None}, "invalid_value", "messages"),
    (EMBEDDINGS, {"messages": user(PART, role="assistant"), "input": None}, "invalid_value", "messages.[0].role"),
    (EMBEDDINGS, {"input": ""}, "invalid_value", "input"),
    (EMBEDDINGS, {"input": []}, "invalid_value", "input"),
    (EMBEDDINGS, {"input": ["a", ""]}, "invalid_value", "input.[1]"),
    (EMBEDDINGS, {"input": [[5], []]}, "invalid_value", "input.[1]"),
    (EMBEDDINGS, {"input": [5, "a"]}, "invalid_value", "input"),
    (EMBEDDINGS, {"input": [[5], "a"]}, "invalid_value", "input"),
    (EMBEDDINGS, {"input": [5, -1]}, "invalid_value", "input.[1]"),
    (EMBEDDINGS, {"input": [[5], [65_536]]}, "invalid_value", "input.[1]"),
    (EMBEDDINGS, {"input": [{}]}, "invalid_value", "input.[0]"),
    (EMBEDDINGS, {"input": [{"text": "a", "image": "b"}]}, "invalid_value", "input.[0]"),
    (EMBEDDINGS, {"input": [{"image": "not base64!"}]}, "invalid_image", "input.[0].image"),
    (EMBEDDINGS, {"input": ["x"] * 2049}, "too_many_inputs", "input"),
    (EMBEDDINGS, {"input": [[5] * 500] * 601}, "too_many_tokens", "input"),
    (EMBEDDINGS, {"dimensions": 63}, "invalid_value", "dimensions"),
    (EMBEDDINGS, {"encoding_format": "int8"}, "invalid_value", "encoding_format"),
    (EMBEDDINGS, {"prompt_name": "nobody"}, "invalid_value", "prompt_name"),
    (EMBEDDINGS, {"input_type": "clustering"}, "invalid_value", "input_type"),
    (EMBEDDINGS, {"truncate": "MIDDLE"}, "invalid_value", "truncate"),
    (EMBEDDINGS, {"truncate_prompt_tokens": 0}, "invalid_value", "truncate_prompt_tokens"),
    (EMBEDDINGS, {"truncate_prompt_tokens": 2, "truncate": False}, "invalid_value", "truncate"),
    (RERANK, {"query": ""}, "invalid_value", "query"),
    (RERANK, {"documents": []}, "invalid_value", "documents"),
    (RERANK, {"documents": ["x"] * 1001}, "too_many_inputs", "documents"),
    (RERANK, {"documents": [{"image": "x"}]}, "missing_field", "documents.[0].text"),
    (RERANK, {"top_n": 0}, "invalid_value", "top_n"),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["c"]}, "invalid_value", "text_1"),
]  # fmt: skip
#: path, change of the body, param, and some of the values that the refusal tells
CLOSED_SETS: list[tuple[str, dict[str, Any], str, set[str]]] = [
    (CHAT, {"service_tier": "?"}, "service_tier", {"auto", "flex"}),
    (CHAT, {"reasoning_effort": "?"}, "reasoning_effort", {"none", "xhigh"}),
    (CHAT, {"tool_choice": "?"}, "tool_choice", {"auto", "required"}),
    (CHAT, {"response_format": {"type": "?"}}, "response_format.type", {"json_schema"}),
    (COMPLETIONS, {"service_tier": "?"}, "service_tier", {"auto", "flex"}),
    (RESPONSES, {"reasoning": {"effort": "?"}}, "reasoning.effort", {"none", "xhigh"}),
    (MESSAGES, {"service_tier": "?"}, "service_tier", {"auto", "standard_only"}),
    (EMBEDDINGS, {"messages": [{"role": "?", "content": "x"}]}, "messages.[0].role", {"user"}),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ask(redis_server):
    """Send a request with a change; its answer, after a look that no worker has had it."""
    settings = make_settings(redis_server, "refusals")
    async with AsyncExitStack() as stack:
        running = [run_worker(redis_server, "refusals", card) for card in (CARD, *OTHERS)]
        workers = [await stack.enter_async_context(worker) for worker in running]
        gateway = await stack.enter_async_context(run_gateway_on_socket(settings))

        async def ask(path: str, change: dict[str, Any]):
            dialect = DIALECTS[path]
            model = NUMBERS if dialect.task in ("embed", "rerank") else MODEL
            body = {"model": model, **dialect.body, **dialect.extra, **change}
            response = await gateway.client.post(path, json=body)
            assert not any(worker.answers for worker in workers)
            return response

        yield ask


@pytest.mark.parametrize(
    ("path", "change", "code", "param"), ROWS, ids=lambda value: str(value)[:40]
)
async def test_what_cannot_be_honoured_is_refused_by_name(ask, path, change, code, param):
    response = await ask(path, change)
    assert response.status_code == 400, response.text
    assert DIALECTS[path].error_of(response.json()) == (code, param)


async def test_texts_that_are_too_long_together_are_a_413(ask):
    response = await ask(EMBEDDINGS, {"input": ["x" * 1_000_000] * 2 + ["y"]})
    assert response.status_code == 413
    assert DIALECTS[EMBEDDINGS].error_of(response.json())[1] == "input"


@pytest.mark.parametrize(("path", "change", "param", "values"), CLOSED_SETS)
async def test_a_value_outside_a_closed_set_is_told_the_set(ask, path, change, param, values):
    response = await ask(path, change)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert values <= set(re.findall(r"\w+", error["message"]))
    assert "?" not in error["message"]
