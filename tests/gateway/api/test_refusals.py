"""Refusals of each API: a change to a valid request, with the expected code and field of the error.

Refusals that are the same for all APIs are in tests/contract/test_surface.py. After every refusal of chat, the error
has OpenAI's shape, is small and echoes no input. No refused request reaches a worker.
"""

import base64
import re
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio
from msgspec.structs import replace

from tests.contract.test_surface import DIALECTS, TASK_OF
from tests.factories_gateway import (
    CARD,
    MODEL,
    RunningGateway,
    ScriptedWorker,
    make_body,
    make_settings,
    run_gateway_on_socket,
    run_worker,
)
from tests.factories_images import data_url
from tests.factories_numbers import load

pytestmark = pytest.mark.asyncio(loop_scope="module")

CANARY = "cAnArY7"
JSON_TYPE = {"content-type": "application/json"}

NUMBERS, ABLE, THINKS = "numbers", "able", "thinks"
OTHERS = [
    replace(load().card, name=NUMBERS),
    replace(CARD, name=ABLE, supports_grammars=True),
    replace(
        CARD, name=THINKS, reasoning="think", template_options=("add_dates", "enable_thinking")
    ),
]
PNG = data_url().partition(",")[2]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, OLLAMA, EMBEDDINGS = "/v1/messages", "/api/chat", "/v1/embeddings"
RERANK, SCORE = "/v1/rerank", "/v1/score"
SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "get_weather"}}
PART = {"type": "image_url", "image_url": {"url": data_url()}}


def user(*parts: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(parts)}]


def with_tools(*tools: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Returns a request to the model that supports required tool calls."""
    return {"model": ABLE, "tools": list(tools), **changes}


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": fields}


def thinking(**changes: Any) -> dict[str, Any]:
    return {"model": THINKS, **changes}


def with_file(media_type: str, data: bytes) -> dict[str, Any]:
    url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
    return {"messages": user({"type": "file", "file": {"filename": "x", "file_data": url}})}


def source(data: str, media_type: str) -> dict[str, Any]:
    image = {"type": "base64", "media_type": media_type, "data": data}
    return {"messages": user({"type": "image", "source": image})}


IMAGE = "messages.[0].content.[0].source"
FILE = "messages.[0].content.[0].file.file_data"
TEXT = {"type": "text", "text": "a"}


def with_image(url: Any) -> dict[str, Any]:
    return with_parts({"type": "image_url", "image_url": url})


def with_parts(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [*user(*parts, role=role), {"role": "user", "content": "?"}]}


def message(**changes: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x", **changes}]}


def video(**fields: Any) -> dict[str, Any]:
    return message(content=[{"type": "video_url", "video_url": {"url": CANARY, **fields}}])


PLACE = "messages.[0].content.[0]"
AS_IMAGE = f"{PLACE}.image_url"
VALUES = [
    *[("n", value) for value in (0, -1, 10**30, 1.5, "1", True)],
    *[("max_tokens", value) for value in (0, -1, 2**31, 1.5, "9")],
    *[("max_completion_tokens", value) for value in (0, 2**63)],
    *[("min_tokens", value) for value in (-1, 32769, 1.5)],
    *[("seed", value) for value in (2**63, -(2**63) - 1, 1.5, "7")],
    *[("temperature", value) for value in (-0.1, 2.1, "hot", [1])],
    *[("top_k", value) for value in (-2, 2**31, 1.5)],
    *[(f"{kind}_penalty", value) for kind in ("presence", "frequency") for value in (-2.1, 2.1)],
    *[("logit_bias", value) for value in (
        {"1000": 1}, {"-1": 1}, {"1e3": 1}, {CANARY: 1}, {"1": 101}, {"1": -1e9}, {"1": "x"}, [1],
    )],
    *[("stop_token_ids", value) for value in ([1000], "1")],
    *[("allowed_token_ids", value) for value in ([], [1000])],
    ("include_stop_str_in_output", "yes"),
    *[("top_logprobs", value) for value in (-1, 5, 1.5)],
    ("logprobs", "yes"),
    *[("stop", value) for value in ("", [""], 7)],
    *[("stream", value) for value in ("yes", 1)],
    *[("stream_options", value) for value in ({}, {"include_usage": True}, 5)],
    ("user", CANARY * 100_0),
    *[("metadata", value) for value in ({CANARY: CANARY * 100}, {"k": 5}, CANARY)],
    ("timings", "yes"),
    *[("model", value) for value in (5, "", CANARY * 100)],
    *[("messages", value) for value in ([], CANARY, None)],
]  # fmt: skip
#: Chat: name, changes to the body, status, code, param. Fields refused with any value are in `UNSUPPORTED`.
FIELDS: list[tuple[str, dict[str, Any], int, str, str | None]] = [
    *[(f"unsupported {name}", {name: value}, 400, "unsupported_parameter", name) for name, value in (
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": CANARY}}),
        ("response_format", {"type": "json_object"}),
        *[("best_of", value) for value in (2, True, "1", 10**400)],
    )],
    *[(f"{name} {str(value)[:20]}", {name: value}, 400, "invalid_value", name) for name, value in VALUES],
    ("least over most", {"max_tokens": 4, "min_tokens": 5}, 400, "invalid_value", "min_tokens"),
    ("two lengths", {"max_tokens": 1, "max_completion_tokens": 2}, 400, "invalid_value", "max_tokens"),
    ("fps and num_frames", video(fps=1, num_frames=8), 400, "invalid_value", f"{PLACE}.video_url.fps"),
    ("fps and num_frames of all", {**video(), "media_io_kwargs": {"video": {"fps": 1, "num_frames": 8}}}, 400,
     "invalid_value", "media_io_kwargs.video.fps"),
    ("end before start", video(start_s=3, end_s=2), 400, "invalid_value", f"{PLACE}.video_url.end_s"),
    *[(f"{kind} of a model without", message(content=[{"type": kind, kind: {name: CANARY}}]), 400, "unsupported_image",
       f"{PLACE}.{kind}") for kind, name in (("video_url", "url"), ("audio_url", "url"), ("input_audio", "data"))],
    ("unknown model", {"model": CANARY}, 404, "model_not_found", "model"),
    ("role root", message(role="root"), 400, "invalid_value", "messages.[0].role"),
    ("no role", {"messages": [{"content": "x"}]}, 400, "missing_field", "messages.[0].role"),
    ("no content", {"messages": [{"role": "user"}]}, 400, "missing_field", "messages.[0].content"),
    ("nested content", message(content=[["x"]]), 400, "invalid_value", PLACE),
    ("part 1 of 2", message(content=[{"type": "text", "text": "x"}, {"type": "text", "text": 5}]), 400,
     "invalid_value", "messages.[0].content.[1].text"),
    ("message 1 of 2", {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": 5}]}, 400,
     "invalid_value", "messages.[1].content"),
    *[(f"{kind} part", message(content=[{"type": kind, kind: {"url": CANARY}}]), 400, "invalid_value", f"{PLACE}.type")
      for kind in ("video", "audio", "image", "sound")],
    ("part without type", message(content=[{"text": "x"}]), 400, "missing_field", f"{PLACE}.type"),
    ("tool calls", message(role="assistant", tool_calls=[{"id": CANARY}]), 400, "missing_field",
     "messages.[0].tool_calls.[0].function"),
    ("nothing to continue", {"continue_final_message": True}, 400, "invalid_value", "continue_final_message"),
    ("image without url", with_image({"detail": "low"}), 400, "missing_field", f"{AS_IMAGE}.url"),
    ("image detail", with_image({"url": "x", "detail": CANARY}), 400, "invalid_value", f"{AS_IMAGE}.detail"),
    ("file id", with_parts({"type": "input_image", "file_id": CANARY}), 400, "missing_field", AS_IMAGE),
    *[(f"image of {role}", with_parts(PART, role=role), 400, "invalid_value", AS_IMAGE) for role in ("system", "assistant")],
    ("second image", with_parts(PART, {"type": "image_url", "image_url": "data:image/png;base64,eA=="}), 400,
     "unsupported_image", "messages.[0].content.[1].image_url"),
    ("base64 junk", with_image(f"data:image/png;base64,{CANARY}!"), 400, "invalid_image", AS_IMAGE),
    *[(f"url {url[:20]}", with_image(url), 400, "invalid_image_url", AS_IMAGE) for url in (
        "data:image/png,hello", "data:image/png;base64", "http://127.0.0.1:6379/", "HTTPS://example.com/x.png",
        "file:///etc/passwd", "javascript:alert(1)", "//host/x.png", "",
    )],
]  # fmt: skip
#: path, change to the body, code, param
ROWS: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"response_format": SCHEMA}, "unsupported_parameter", "response_format.json_schema.schema"),
    (CHAT, {"messages": user({"type": "image_url", "image_url": {"url": PNG}})}, "invalid_image_url", "messages.[0].content.[0].image_url"),
    (CHAT, {"messages": user({**PART, "min_pixels": 100}), "mm_processor_kwargs": {"max_pixels": 50}}, "invalid_value", "messages.[0].content.[0].min_pixels"),
    (CHAT, with_file("application/pdf", b"%PDF"), "invalid_value", FILE),
    (CHAT, with_file("text/plain", b"\xff"), "invalid_value", FILE),
    (CHAT, with_tools(tool_choice="required"), "invalid_value", "tool_choice"),
    (CHAT, with_tools(TOOL, tool_choice=function(name="x")), "invalid_value", "tool_choice"),
    (CHAT, with_tools(TOOL, TOOL), "invalid_value", "tools.[1].function.name"),
    (CHAT, with_tools(function(name="a b")), "invalid_value", "tools.[0].function.name"),
    (CHAT, with_tools(TOOL, min_tokens=3), "invalid_value", "min_tokens"),
    (CHAT, with_tools(function(name="f", strict=True, parameters={"not": {}})), "invalid_grammar", "tools.[0].function.parameters/not"),
    *[(CHAT, thinking(chat_template_kwargs=options), "invalid_value", "chat_template_kwargs")
      for options in ({"add_dates": "x" * 257}, {"add_dates": [1]}, {str(i): 1 for i in range(17)})],
    (CHAT, thinking(reasoning_effort="hard"), "invalid_value", "reasoning_effort"),
    *[(COMPLETIONS, {"prompt": value}, "invalid_value", "prompt") for value in ([1, "a"], [[]], ["a"] * 65)],
    (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "invalid_value", "prompt_logprobs"),
    (COMPLETIONS, {"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
    (RESPONSES, {"tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "unsupported_parameter", "text.format"),
    (RESPONSES, {"input": [{"type": "function_call", "name": "f"}]}, "missing_field", "input.[0].call_id"),
    (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "c"}]}, "missing_field", "input.[0].output"),
    *[(RESPONSES, {"input": [{"type": f"{kind}_output", "call_id": "c", "output": "x"}]}, "invalid_value", "input.[0].call_id")
      for kind in ("function_call", "custom_tool_call")],  # no call has this ID
    (RESPONSES, {"input": [{"type": "local_shell_call_output", "output": "ok"}]}, "missing_field", "input.[0].call_id"),
    (RESPONSES, {"input": user({"type": "input_image", "file_id": "file-5"})}, "file_not_found", "input.[0].content.[0].file_id"),
    (RESPONSES, {"tools": [{"type": "function"}]}, "missing_field", "tools.[0].name"),
    (MESSAGES, {"tools": [{"input_schema": {}}]}, "missing_field", "tools.[0].name"),
    (CHAT, {"tools": [function(parameters={})]}, "missing_field", "tools.[0].function.name"),
    (RESPONSES, {"max_output_tokens": 10**6}, "invalid_value", "max_output_tokens"),
    (MESSAGES, {"tool_choice": {"type": "any"}}, "unsupported_parameter", "tool_choice"),
    *[(MESSAGES, {"tool_choice": {"type": "tool", **named}}, "missing_field", "tool_choice.name") for named in ({}, {"name": ""})],
    *[(MESSAGES, {"stop_sequences": value}, "invalid_value", "stop_sequences") for value in (["x"] * 17, [""])],
    (MESSAGES, {"messages": user({"type": "container_upload", "file_id": "f"})}, "invalid_value", "messages.[0].content.[0].type"),
    (MESSAGES, {"messages": user({"type": "tool_use", "id": "x", "name": "f", "input": {}})}, "invalid_value", "messages.[0].content.[0].type"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "unsupported_parameter", "output_config.format.schema"),
    *[(MESSAGES, source(data, "image/png"), "unsupported_image", f"{IMAGE}.data")
      for data in ("bm8gaW1hZ2U=", "no base64")],  # the first decodes to "no image"
    *[(MESSAGES, source(data, "image/png"), "invalid_image", f"{IMAGE}.data") for data in (PNG[:16], "")],
    (OLLAMA, {"format": "xml"}, "invalid_grammar", "format"),
    *[(OLLAMA, {"options": {name: value}}, "invalid_value", f"options.{name}") for name, value in (
        ("num_predict", 10**6), ("min_tokens", 10**6), ("stop", [""]), ("stop", ["x"] * 17), ("logit_bias", {"a": 1}), ("logit_bias", {"9" * 9: 1}),
        ("logit_bias", {str(n): 1 for n in range(301)}), ("allowed_token_ids", []), ("stop_token_ids", [*range(65)]))],
    (OLLAMA, {"messages": [{"role": "user", "content": "x", "images": ["!"]}]}, "invalid_image", "messages.[0].images.[0]"),
    (OLLAMA, {"messages": [{"role": "user", "images": [{"type": "Buffer", "data": [1]}]}]}, "invalid_value", "messages.[0].images.[0]"),
    *[(path, message(role="assistant", tool_calls=[{"id": "c", **function(name="f", arguments="[" * 101 + "]" * 101)}]),
       "invalid_value", "messages.[0].tool_calls.[0].function.arguments") for path in (CHAT, OLLAMA)],
    (EMBEDDINGS, {"input": [{"image": PNG}] * 65}, "too_many_images", "input"),
    (EMBEDDINGS, {"input": None}, "missing_field", "input"),
    (EMBEDDINGS, {"messages": user(PART)}, "invalid_value", "input"),
    *[(EMBEDDINGS, {"messages": user(*parts), "input": None}, "invalid_value", "messages.[0].content")
      for parts in ([PART, TEXT], [PART, PART], [{"type": "text", "text": ""}])],
    (EMBEDDINGS, {"messages": user({"type": "image_url", "image_url": {"url": "data:,x"}}), "input": None}, "invalid_image_url",
     "messages.[0].content.[0].image_url"),
    (EMBEDDINGS, {"messages": user({**PART, "max_pixels": 9}), "input": None}, "unsupported_parameter", "messages.[0].content.[0].max_pixels"),
    (EMBEDDINGS, {"messages": user(PART, role="assistant"), "input": None}, "invalid_value", "messages.[0].role"),
    *[(EMBEDDINGS, {"input": value}, "invalid_value", "input") for value in ("", [], [5, "a"], [[5], "a"])],
    *[(EMBEDDINGS, {"input": value}, "invalid_value", "input.[1]")
      for value in (["a", ""], [[5], []], [5, -1], [[5], [65_536]])],
    *[(EMBEDDINGS, {"input": [value]}, "invalid_value", "input.[0]") for value in ({}, {"text": "a", "image": "b"})],
    (EMBEDDINGS, {"input": [{"image": "not base64!"}]}, "invalid_image", "input.[0].image"),
    (EMBEDDINGS, {"input": ["x"] * 2049}, "too_many_inputs", "input"),
    (EMBEDDINGS, {"input": [[5] * 500] * 601}, "too_many_tokens", "input"),
    (EMBEDDINGS, {"dimensions": 63}, "invalid_value", "dimensions"),
    (EMBEDDINGS, {"prompt_name": "nobody"}, "invalid_value", "prompt_name"),
    (EMBEDDINGS, {"truncate_prompt_tokens": 2, "truncate": False}, "invalid_value", "truncate"),
    (RERANK, {"documents": []}, "invalid_value", "documents"),
    (RERANK, {"documents": ["x"] * 1001}, "too_many_inputs", "documents"),
    (RERANK, {"documents": [{"image": "x"}]}, "missing_field", "documents.[0].text"),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["c"]}, "invalid_value", "text_1"),
]  # fmt: skip
#: path, change to the body, param, and some of the values that the error lists
CLOSED_SETS: list[tuple[str, dict[str, Any], str, set[str]]] = [
    (CHAT, {"service_tier": "?"}, "service_tier", {"auto", "flex"}),
    (CHAT, {"reasoning_effort": "?"}, "reasoning_effort", {"none", "xhigh"}),
    (CHAT, {"tool_choice": "?"}, "tool_choice", {"auto", "required"}),
    (CHAT, {"response_format": {"type": "?"}}, "response_format.type", {"json_schema"}),
    (CHAT, {"thinking": {"type": "?"}}, "thinking.type", {"enabled", "disabled", "adaptive"}),
    (CHAT, with_parts({"type": "?"}), f"{PLACE}.type", {"text", "input_audio", "file"}),
    (RESPONSES, {"tool_choice": {"type": "?"}}, "tool_choice.type", {"function", "allowed_tools"}),
    (RESPONSES, {"input": [{"type": "?"}]}, "input.[0].type", {"message", "function_call"}),
    (MESSAGES, message(content=[{"type": "?"}]), f"{PLACE}.type", {"image", "tool_result"}),
    (
        MESSAGES,
        message(content=[{"type": "document", "source": {"type": "base64"}}]),
        f"{PLACE}.source.type",
        {"document", "text"},
    ),
    (MESSAGES, {"service_tier": "?"}, "service_tier", {"auto", "standard_only"}),
    (MESSAGES, source("", "image/bmp"), f"{IMAGE}.media_type", {"png", "webp"}),
    (EMBEDDINGS, {"messages": [{"role": "?", "content": "x"}]}, "messages.[0].role", {"user"}),
]


@dataclass
class Fleet:
    gateway: RunningGateway
    workers: list[ScriptedWorker]

    async def ask(self, path: str, change: dict[str, Any]) -> httpx.Response:
        """Sends a valid request with a change."""
        dialect = DIALECTS[path]
        model = NUMBERS if TASK_OF[path] in ("embed", "rerank") else MODEL
        body = {"model": model, **dialect.body, **dialect.extra, **change}
        return await self.gateway.client.post(path, json=body)

    async def send(self, content: Any) -> httpx.Response:
        """Sends a raw body to chat."""
        return await self.gateway.client.post(CHAT, content=content, headers=JSON_TYPE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def everything(redis_server):
    settings = make_settings(redis_server, "refusals", limits={"max_body_bytes": 3_000_000})
    async with AsyncExitStack() as stack:
        running = [run_worker(redis_server, "refusals", card) for card in (CARD, *OTHERS)]
        workers = [await stack.enter_async_context(worker) for worker in running]
        yield Fleet(await stack.enter_async_context(run_gateway_on_socket(settings)), workers)


@pytest.fixture
def fleet(everything):
    """Checks that no refused request reached a worker."""
    yield everything
    assert not any(worker.answers for worker in everything.workers)


@pytest.fixture
def answering(everything):
    """The fleet, and the worker of the default model."""
    yield everything, everything.workers[0]
    everything.workers[0].answers.clear()


def check_error(response: httpx.Response, status: int, code: str, param: str | None) -> None:
    assert response.status_code == status, response.text
    assert len(response.content) < 4096
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert error["type"] == "invalid_request_error"
    assert CANARY not in response.text
    assert "0x" not in error["message"]


@pytest.mark.parametrize(
    ("path", "change", "code", "param"), ROWS, ids=lambda value: str(value)[:40]
)
async def test_unsupported_values_are_refused_by_field(fleet, path, change, code, param):
    response = await fleet.ask(path, change)
    assert response.status_code == 400, response.text
    assert DIALECTS[path].error_of(response.json()) == (code, param)


@pytest.mark.parametrize(
    ("changes", "status", "code", "param"),
    [row[1:] for row in FIELDS],
    ids=[row[0] for row in FIELDS],
)
async def test_a_bad_field_is_refused_by_name(fleet, changes, status, code, param):
    check_error(await fleet.ask(CHAT, changes), status, code, param)


async def test_texts_that_are_too_long_in_total_are_a_413(fleet):
    response = await fleet.ask(EMBEDDINGS, {"input": ["x" * 1_000_000] * 2 + ["y"]})
    assert response.status_code == 413
    assert DIALECTS[EMBEDDINGS].error_of(response.json())[1] == "input"


@pytest.mark.parametrize(("path", "change", "param", "values"), CLOSED_SETS)
async def test_the_error_of_an_unknown_enum_value_lists_the_known_ones(
    fleet, path, change, param, values
):
    response = await fleet.ask(path, change)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert values <= set(re.findall(r"\w+", error["message"]))
    assert "?" not in error["message"]
    assert len(error["message"]) < 160


def raw(text: str) -> bytes:
    return f'{{"model": "tiny", "messages": [{{"role": "user", "content": "x"}}], {text}}}'.encode()


BODIES = [
    *[(body, "invalid_value", None) for body in (b'"x"', b"5")],
    (b"{}", "missing_field", "model"),
    *[(raw(text), "invalid_json", None) for text in (
        '"n": NaN', '"temperature": -Infinity', '"user": "\\ud83d"', '"store": "\\ude00"', '"stop": ["\\ud800"]',
        '"functions": [NaN]', '"functions": ["\\ud800"]', "'n': 1", '"n": 1,', '"n": 1, // comment\n"user": "x"',
    )],
    *[(raw('"n": 1') + end, "invalid_json", None) for end in (b"{}", b"x")],
    (raw('"temperature": 1e999'), "invalid_value", "temperature"),
    *[(raw(f'"n": {value}'), "invalid_value", "n")
      for value in ("1e999", "9" * 5000, '1, "n": 0', '1, "\\u006e": 0', f'"{CANARY * 20_000}"')],
    *[(raw(f'"store": {value}'), "invalid_json", "store") for value in ("[" * 100_000, "[" * 101 + "]" * 101)],
    (raw('"functions": ' + "[" * 50_000 + "]" * 50_000), "invalid_json", "functions"),
    (raw('"metadata": {"a": ' + "[" * 5000 + "]" * 5000 + "}"), "invalid_json", "metadata"),
    (raw('"prediction": "' + '\\"' * 90_000 + '"'), "unsupported_parameter", "prediction"),
    (raw('"prediction": [' + "1.5," * 15_000 + "1]"), "unsupported_parameter", "prediction"),
    (raw('"best_of": 1e999'), "unsupported_parameter", "best_of"),
    *[(body, "invalid_json", None) for body in (
        raw('"store": "') + b'\xff"}', raw('"store": "\xed\xa0\x80"').decode().encode("latin-1"),
        raw('"metadata": {"a": 5}') + b"\xff", b'{"model": "tiny", "messages": [5, \xff',
        "\ufeff".encode() + raw('"n": 1'), raw('"n": 1').decode().encode("utf-16"),
    )],
    (b'{"model": "tiny", "messages": [5], "messages": []}', "invalid_value", "messages.[0]"),
]  # fmt: skip


async def test_a_bad_body_is_refused(fleet):
    for content, code, param in BODIES:
        check_error(await fleet.send(content), 400, code, param)

    async def too_much():
        for _ in range(100):
            yield bytes(32_000)

    unknown = raw(",".join(f'"z{number}": 1' for number in range(50_000)))
    for body in (too_much(), unknown):
        check_error(await fleet.send(body), 413, "request_too_large", None)
    for headers in (
        {"content-type": "application/json; charset=latin-1"},
        {**JSON_TYPE, "content-encoding": "gzip"},
    ):
        response = await fleet.gateway.chat(headers=headers)
        check_error(response, 415, "unsupported_media_type", None)


async def test_no_op_values_are_accepted(answering):
    fleet, _ = answering
    for text in (
        '"n": 2, "n": 1',
        '"store": ' + "[" * 100 + "]" * 100,
        '"tools": [ ], "best_of": 1, "response_format": {"type" : "text"}, "audio": null',
        '"logit_bias": {"5": 1, "999": -1}',
    ):
        response = await fleet.send(raw(text))
        assert response.status_code == 200, response.text
        assert len(response.json()["choices"]) == 1
    for charset in ("utf-8", '"UTF-8"'):
        headers = {"content-type": f"application/json; charset={charset}"}
        assert (await fleet.gateway.chat(headers=headers)).status_code == 200


async def test_text_that_looks_like_json_or_a_token_stays_text(answering):
    fleet, worker = answering
    controls = "\x00\ufffe\u202e" + "e" + "\u0301" * 500
    images = ("![](http://127.0.0.1:1/x.png)", "<img src=http://127.0.0.1:1/>", data_url())
    for text in (controls, *images, "<image>", "[DONE]", "</s>"):
        assert (await fleet.gateway.chat(make_body(text))).status_code == 200
        task = worker.requests[-1].task
        assert task.images == ()
        assert task.messages[0].parts[0].text == text


async def test_wrong_paths_and_methods_have_errors_of_the_same_shape(fleet):
    for method, path, status in (
        ("GET", CHAT, 405),
        ("OPTIONS", CHAT, 405),
        ("POST", CHAT + "/", 404),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/models/nobody", 404),
        ("GET", "//v1/models", 404),
        ("GET", "/v1/../v1/models/", 404),
        ("POST", "/v1/moderations", 404),
    ):
        response = await fleet.gateway.client.request(method, path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert "access-control-allow-origin" not in response.headers
