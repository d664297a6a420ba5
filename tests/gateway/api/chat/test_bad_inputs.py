"""Refused inputs: each row is an input, and the status, code and field of the error.

After every row: the error has OpenAI's shape, is small, echoes no input, and nothing reached the worker.
"""

import base64
import json
import struct
import zlib
from typing import Any

import pytest
import pytest_asyncio

from tests.factories_gateway import (
    CHAT,
    make_body,
    make_settings,
    run_gateway_on_socket,
    run_worker,
)
from tests.factories_images import data_url, encoded

pytestmark = pytest.mark.asyncio(loop_scope="module")

CANARY = "cAnArY7"
JSON_TYPE = {"content-type": "application/json"}
LIMITS = {
    "max_body_bytes": 200_000, "max_messages": 8, "max_text_chars": 1000, "max_images": 2,
    "max_image_bytes": 50_000, "max_image_pixels": 1_000_000, "max_image_side": 4096,
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(redis_server):
    """One gateway and one worker for all rows."""
    settings = make_settings(redis_server, "bad-inputs", limits=LIMITS)
    async with (
        run_worker(redis_server, "bad-inputs") as worker,
        run_gateway_on_socket(settings) as gateway,
    ):
        yield gateway, worker


def png(width: int, height: int) -> str:
    """A PNG that is all header."""
    return as_url(b"\x89PNG\r\n\x1a\n" + png_header(width, height))


def png_header(width: int, height: int) -> bytes:
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))


def png_of_two_sizes() -> str:
    """A PNG whose second header, after the pixels, says another size than the first."""
    data = encoded()
    end = data.rindex(b"IEND") - 4
    return as_url(data[:end] + png_header(1, 100_000) + data[end:])


def as_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def with_image(url: Any) -> dict[str, Any]:
    return with_parts({"type": "image_url", "image_url": url})


def with_parts(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(parts)}, {"role": "user", "content": "?"}]}


def message(**changes: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x", **changes}]}


IMAGE = "messages.[0].content.[0].image_url"
UNSUPPORTED = [
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": CANARY}}),
    ("function_call", {"name": CANARY}),
    ("response_format", {"type": "json_object"}),
    ("guided_regex", CANARY),
    ("guided_choice", [CANARY]),
    *[("best_of", value) for value in (2, True, "1", 10**400)],
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": CANARY, "format": "mp3"}),
    ("prediction", {"type": "content", "content": CANARY}),
    ("web_search_options", {}),
    ("chat_template", CANARY),
    ("documents", [{}]),
    ("functions", [{}]),
    ("prompt_embeds", CANARY),
    ("guided_regex", "(a+)+b"),
    ("use_beam_search", True),
    ("bad_words", [CANARY]),
]
VALUES = [
    *[("n", value) for value in (0, -1, 17, 10**9, 10**30, 1.5, "1", True)],
    *[("max_tokens", value) for value in (0, -1, 32769, 2**31, 1.5, "9")],
    *[("max_completion_tokens", value) for value in (0, -1, 2**63)],
    *[("min_tokens", value) for value in (-1, 32769, 1.5, "9")],
    *[("seed", value) for value in (2**63, 2**64, -(2**63) - 1, 1.5, "7")],
    *[("temperature", value) for value in (-0.1, 2.1, 1e9, "hot", [1])],
    *[("top_p", value) for value in (-0.1, 1.1, "x")],
    *[("top_k", value) for value in (-2, 2**31, 1.5)],
    *[("min_p", value) for value in (-0.1, 1.1)],
    *[("presence_penalty", value) for value in (-2.1, 2.1)],
    *[("frequency_penalty", value) for value in (-2.1, 2.1, 1e9)],
    *[("repetition_penalty", value) for value in (0, -1, 1e9)],
    *[("logit_bias", value) for value in (
        {"1000": 1}, {"-1": 1}, {"1e3": 1}, {CANARY: 1}, {"1": 101}, {"1": -1e9}, {"1": "x"}, [1],
        {str(i): 1 for i in range(301)},
    )],
    *[("stop_token_ids", value) for value in ([1000], "1", list(range(65)))],
    *[("allowed_token_ids", value) for value in ([], [1000], list(range(1025)))],
    ("include_stop_str_in_output", "yes"),
    *[("top_logprobs", value) for value in (-1, 5, 1.5)],
    ("logprobs", "yes"),
    *[("stop", value) for value in ("", [""], ["a"] * 17, "x" * 65, 7)],
    *[("stream", value) for value in ("yes", 1)],
    *[("stream_options", value) for value in ({}, {"include_usage": True}, 5)],
    ("user", CANARY * 100_0),
    *[("metadata", value) for value in (
        {CANARY: CANARY * 100}, {"k" * 65: "v"}, {str(i): "v" for i in range(17)}, {"k": 5}, CANARY,
    )],
    ("timings", "yes"),
    ("model", 5),
    ("model", ""),
    ("model", CANARY * 100),
    ("messages", []),
    ("messages", CANARY),
    ("messages", None),
    ("messages", [{"role": "user", "content": "x"}] * 9),
]  # fmt: skip

#: name, changes of the body, status, code, param
ROWS: list[tuple[str, dict[str, Any], int, str, str | None]] = [
    *[(f"unsupported {name}", {name: value}, 400, "unsupported_parameter", name) for name, value in UNSUPPORTED],
    *[(f"{name} {str(value)[:20]}", {name: value}, 400, "invalid_value", name) for name, value in VALUES],
    ("top_logprobs 21", {"logprobs": True, "top_logprobs": 21}, 400, "invalid_value", "top_logprobs"),
    ("least over most", {"max_tokens": 4, "min_tokens": 5}, 400, "invalid_value", "min_tokens"),
    *[(f"{kind} part", message(content=[{"type": kind, kind: {"url": CANARY, "data": CANARY}}]), 400,
       "invalid_value", "messages.[0].content.[0].type")
      for kind in ("video", "audio", "image")],
    ("video of a model without", message(content=[{"type": "video_url", "video_url": CANARY}]), 400,
     "unsupported_image", "messages.[0].content.[0].video_url"),
    ("fps and num_frames", message(content=[{"type": "video_url", "video_url": {"url": CANARY, "fps": 1, "num_frames": 8}}]),
     400, "invalid_value", "messages.[0].content.[0].video_url.fps"),
    ("fps and num_frames of all", {"media_io_kwargs": {"video": {"fps": 1, "num_frames": 8}}} | message(content=[
     {"type": "video_url", "video_url": CANARY}]), 400, "invalid_value", "media_io_kwargs.video.fps"),
    ("end before start", message(content=[{"type": "video_url", "video_url": {"url": CANARY, "start_s": 3, "end_s": 2}}]),
     400, "invalid_value", "messages.[0].content.[0].video_url.end_s"),
    ("fps of 0", message(content=[{"type": "video_url", "video_url": {"url": CANARY, "fps": 0}}]),
     400, "invalid_value", "messages.[0].content.[0].video_url.fps"),
    ("fps of the processor", {"mm_processor_kwargs": {"fps": 2}}, 400, "unsupported_parameter", "mm_processor_kwargs.fps"),
    ("two lengths", {"max_tokens": 1, "max_completion_tokens": 2}, 400, "invalid_value", "max_tokens"),
    ("much text", message(content="x" * 1001), 400, "context_length_exceeded", "messages"),
    ("unknown model", {"model": CANARY}, 404, "model_not_found", "model"),
    ("path as model", {"model": "../../etc/passwd"}, 404, "model_not_found", "model"),
    ("line break as model", {"model": "\n"}, 404, "model_not_found", "model"),
    ("emoji as model", {"model": "🙂"}, 404, "model_not_found", "model"),
    ("role root", message(role="root"), 400, "invalid_value", "messages.[0].role"),
    ("no role", {"messages": [{"content": "x"}]}, 400, "missing_field", "messages.[0].role"),
    ("no content", {"messages": [{"role": "user"}]}, 400, "missing_field", "messages.[0].content"),
    ("null content", message(content=None), 400, "invalid_value", "messages.[0].content"),
    ("number content", message(content=5), 400, "invalid_value", "messages.[0].content"),
    ("empty content", message(content=[]), 400, "invalid_value", "messages.[0].content"),
    ("nested content", message(content=[["x"]]), 400, "invalid_value", "messages.[0].content.[0]"),
    ("part 1 of 2", message(content=[{"type": "text", "text": "x"}, {"type": "text", "text": 5}]), 400,
     "invalid_value", "messages.[0].content.[1].text"),
    ("message 1 of 2", {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": 5}]}, 400,
     "invalid_value", "messages.[1].content"),
    *[(f"{kind} of a model without", message(content=[{"type": kind, kind: {name: CANARY}}]), 400, "unsupported_image",
       f"messages.[0].content.[0].{kind}") for kind, name in (("audio_url", "url"), ("input_audio", "data"))],
    ("unknown part", message(content=[{"type": "sound", "sound": {}}]), 400, "invalid_value",
     "messages.[0].content.[0].type"),
    ("part without type", message(content=[{"text": "x"}]), 400, "missing_field", "messages.[0].content.[0].type"),
    ("tool calls", message(role="assistant", tool_calls=[{"id": CANARY}]), 400, "missing_field",
     "messages.[0].tool_calls.[0].function"),
    ("nothing to continue", {"continue_final_message": True}, 400, "invalid_value", "continue_final_message"),
    ("image without url", with_image({"detail": "low"}), 400, "missing_field", IMAGE + ".url"),
    ("image url null", with_image(None), 400, "invalid_value", IMAGE),
    ("image detail", with_image({"url": "x", "detail": CANARY}), 400, "invalid_value", IMAGE + ".detail"),
    ("file id", with_parts({"type": "input_image", "file_id": CANARY}), 400, "missing_field",
     "messages.[0].content.[0].image_url"),
    ("image of system", with_parts({"type": "image_url", "image_url": data_url()}, role="system"), 400,
     "invalid_value", IMAGE),
    ("image of assistant", with_parts({"type": "image_url", "image_url": data_url()}, role="assistant"), 400,
     "invalid_value", IMAGE),
    ("three images", with_parts(*[{"type": "image_url", "image_url": data_url()}] * 3), 400, "too_many_images",
     "messages.[0].content.[2].image_url"),
    ("second image", with_parts({"type": "image_url", "image_url": data_url()},
                                {"type": "image_url", "image_url": as_url(b"x")}), 400, "unsupported_image",
     "messages.[0].content.[1].image_url"),
    ("text as image", with_image(as_url(b"hello")), 400, "unsupported_image", IMAGE),
    ("svg", with_image(as_url(b"<svg/>", "image/svg+xml")), 400, "unsupported_image", IMAGE),
    ("html", with_image(as_url(b"<html>")), 400, "unsupported_image", IMAGE),
    ("pdf", with_image(as_url(b"%PDF-1.4")), 400, "unsupported_image", IMAGE),
    ("elf", with_image(as_url(b"\x7fELF" + bytes(60))), 400, "unsupported_image", IMAGE),
    ("tiff", with_image(as_url(encoded(format="TIFF"))), 400, "unsupported_image", IMAGE),
    ("zero bytes", with_image(as_url(b"")), 400, "invalid_image", IMAGE),
    ("png 60000x60000", with_image(png(60000, 60000)), 400, "image_too_large", IMAGE),
    ("png 1500x1500", with_image(png(1500, 1500)), 400, "image_too_large", IMAGE),
    ("png 5000x1", with_image(png(5000, 1)), 400, "image_too_large", IMAGE),
    ("png 1x2000", with_image(png(1, 2000)), 400, "invalid_image", IMAGE),
    ("png 0x0", with_image(png(0, 0)), 400, "invalid_image", IMAGE),
    ("png of two sizes", with_image(png_of_two_sizes()), 400, "invalid_image", IMAGE),
    ("png cut", with_image(as_url(encoded()[:20])), 400, "invalid_image", IMAGE),
    ("jpeg cut", with_image(as_url(encoded(format="JPEG")[:20])), 400, "invalid_image", IMAGE),
    ("jpeg without frame", with_image(as_url(b"\xff\xd8\xff\xda\x00\x02")), 400, "invalid_image", IMAGE),
    ("webp cut", with_image(as_url(encoded(format="WEBP")[:20])), 400, "invalid_image", IMAGE),
    ("many bytes", with_image(as_url(b"\x89PNG\r\n\x1a\n" + bytes(60_000))), 400, "image_too_large", IMAGE),
    ("base64 space", with_image("data:image/png;base64,aGVs bG8="), 400, "unsupported_image", IMAGE),
    ("base64 line break", with_image("data:image/png;base64,aGVs\nbG8="), 400, "unsupported_image", IMAGE),
    ("base64 url-safe", with_image("data:image/png;base64,_-_-"), 400, "invalid_image", IMAGE),
    ("base64 no padding", with_image("data:image/png;base64,aGVsbG8"), 400, "invalid_image", IMAGE),
    ("base64 percent", with_image("data:image/png;base64,aGVsbG8%3D"), 400, "invalid_image", IMAGE),
    ("base64 two ends", with_image("data:image/png;base64,aGVsbG8=aGVsbG8="), 400, "invalid_image", IMAGE),
    ("base64 junk", with_image(f"data:image/png;base64,{CANARY}!"), 400, "invalid_image", IMAGE),
    ("base64 not ASCII", with_image("data:image/png;base64,é==="), 400, "invalid_image", IMAGE),
    ("data without base64", with_image("data:image/png,hello"), 400, "invalid_image_url", IMAGE),
    ("data without comma", with_image("data:image/png;base64"), 400, "invalid_image_url", IMAGE),
    ("http url", with_image("http://127.0.0.1:6379/"), 400, "invalid_image_url", IMAGE),
    ("https url", with_image({"url": "HTTPS://example.com/x.png"}), 400, "invalid_image_url", IMAGE),
    ("file url", with_image("file:///etc/passwd"), 400, "invalid_image_url", IMAGE),
    ("ftp url", with_image("ftp://x/y"), 400, "invalid_image_url", IMAGE),
    ("gopher url", with_image("gopher://x"), 400, "invalid_image_url", IMAGE),
    ("script url", with_image("javascript:alert(1)"), 400, "invalid_image_url", IMAGE),
    ("no scheme", with_image("//host/x.png"), 400, "invalid_image_url", IMAGE),
    ("empty url", with_image(""), 400, "invalid_image_url", IMAGE),
]  # fmt: skip


def check_error(response, status: int, code: str, param: str | None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert len(response.content) < 4096
    error = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert error["type"] == "invalid_request_error"
    assert CANARY not in response.text
    assert "0x" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("changes", "status", "code", "param"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
async def test_a_bad_field_is_refused_by_name(fleet, changes, status, code, param):
    gateway, worker = fleet
    response = await gateway.chat({**make_body(), **changes})
    check_error(response, status, code, param)
    assert worker.answers == []


def raw(text: str) -> bytes:
    return f'{{"model": "tiny", "messages": [{{"role": "user", "content": "x"}}], {text}}}'.encode()


@pytest.mark.parametrize(
    ("content", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"null", "invalid_value", None),
        (b"[]", "invalid_value", None),
        (b'"x"', "invalid_value", None),
        (b"5", "invalid_value", None),
        (b"{}", "missing_field", "model"),
        (b'{"model": "tiny"}', "missing_field", "messages"),
        (raw('"n": 1') + b"{}", "invalid_json", None),
        (raw('"n": 1') + b"x", "invalid_json", None),
        (raw('"n": NaN'), "invalid_json", None),
        (raw('"temperature": NaN'), "invalid_json", None),
        (raw('"temperature": Infinity'), "invalid_json", None),
        (raw('"temperature": -Infinity'), "invalid_json", None),
        (raw('"temperature": 1e999'), "invalid_value", "temperature"),
        (raw('"n": 1e999'), "invalid_value", "n"),
        (raw('"n": ' + "9" * 5000), "invalid_value", "n"),
        (raw('"user": "\\ud83d"'), "invalid_json", None),
        (raw('"user": "\\ude00"'), "invalid_json", None),
        (raw('"stop": ["\\ud800"]'), "invalid_json", None),
        (raw('"store": "\\ud83d"'), "invalid_json", None),
        (raw('"user": "x') + b'\xff"', "invalid_json", None),
        (raw('"store": ' + "[" * 100_000), "invalid_json", "store"),
        (raw('"store": ' + "[" * 101 + "]" * 101), "invalid_json", "store"),
        (raw('"functions": ' + "[" * 50_000 + "]" * 50_000), "invalid_json", "functions"),
        (raw('"functions": ' + "[" * 100_000), "invalid_json", "functions"),
        (raw('"metadata": {"a": ' + "[" * 5000 + "]" * 5000 + "}"), "invalid_json", "metadata"),
        (raw('"n": 1, "n": 0'), "invalid_value", "n"),
        (raw('"n": 1, "\\u006e": 0'), "invalid_value", "n"),
        (raw('"prediction": "' + '\\"' * 90_000 + '"'), "unsupported_parameter", "prediction"),
        (raw('"prediction": [' + "1.5," * 15_000 + "1]"), "unsupported_parameter", "prediction"),
        (raw('"best_of": 1e999'), "unsupported_parameter", "best_of"),
        (raw('"functions": [NaN]'), "invalid_json", None),
        (raw('"functions": ["\\ud800"]'), "invalid_json", None),
        (raw('"store": "') + b'\xff"}', "invalid_json", None),
        (raw('"store": "\xed\xa0\x80"').decode().encode("latin-1"), "invalid_json", None),
        (raw('"metadata": {"a": 5}') + b"\xff", "invalid_json", None),
        (b'{"model": "tiny", "messages": [5, \xff', "invalid_json", None),
        (b'{"model": "tiny", "messages": [5], "messages": []}', "invalid_value", "messages.[0]"),
        ("\ufeff".encode() + raw('"n": 1'), "invalid_json", None),
        (raw('"n": 1').decode().encode("utf-16"), "invalid_json", None),
        (raw("'n': 1"), "invalid_json", None),
        (raw('"n": 1,'), "invalid_json", None),
        (raw('"n": 1, // comment\n"user": "x"'), "invalid_json", None),
        (raw('"n": "' + CANARY * 20_000 + '"'), "invalid_value", "n"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
async def test_a_bad_body_is_refused(fleet, content, code, param):
    gateway, worker = fleet
    response = await gateway.client.post(CHAT, content=content, headers=JSON_TYPE)
    check_error(response, 400, code, param)
    assert worker.answers == []


@pytest.mark.parametrize(
    "text",
    [
        '"n": 2, "n": 1',
        '"store": ' + "[" * 100 + "]" * 100,
        '"tools": [ ], "best_of": 1, "response_format": {"type" : "text"}, "audio": null',
        '"logit_bias": {"5": 1, "999": -1}',
    ],
)
async def test_what_asks_for_nothing_else_is_answered(fleet, text):
    gateway, worker = fleet
    response = await gateway.client.post(CHAT, content=raw(text), headers=JSON_TYPE)
    worker.answers.clear()
    assert response.status_code == 200, response.text
    assert len(response.json()["choices"]) == 1


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"content-type": "application/json; charset=latin-1"}, 415, "unsupported_media_type"),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415, "unsupported_media_type"),
    ],
)  # fmt: skip
async def test_bodies_that_are_not_plain_json_are_refused(fleet, headers, status, code):
    gateway, _ = fleet
    response = await gateway.client.post(
        CHAT, content=json.dumps(make_body()).encode(), headers=headers
    )
    check_error(response, status, code, None)


@pytest.mark.parametrize("charset", ["utf-8", '"UTF-8"'])
async def test_utf8_may_be_named(fleet, charset):
    gateway, worker = fleet
    headers = {"content-type": f"application/json; charset={charset}"}
    response = await gateway.client.post(
        CHAT, content=json.dumps(make_body()).encode(), headers=headers
    )
    worker.answers.clear()
    assert response.status_code == 200


async def test_a_body_over_the_limit_is_refused_while_it_streams(fleet):
    gateway, _ = fleet

    async def endless():
        for _ in range(100):
            yield bytes(10_000)

    response = await gateway.client.post(CHAT, content=endless(), headers=JSON_TYPE)
    check_error(response, 413, "request_too_large", None)


async def test_controls_in_text_are_text(fleet):
    gateway, worker = fleet
    text = "\x00\ufffe\u202e" + "e" + "\u0301" * 500
    assert (await gateway.chat(make_body(text))).status_code == 200
    [request] = worker.requests
    worker.answers.clear()
    assert request.task.messages[0].parts[0].text == text


@pytest.mark.parametrize(
    "text",
    ["![](http://127.0.0.1:1/x.png)", "<img src=http://127.0.0.1:1/>", data_url(), "<image>", "[DONE]", "</s>"],
    ids=lambda text: text[:20],
)  # fmt: skip
async def test_what_looks_like_an_image_or_a_token_in_text_is_text(fleet, text):
    gateway, worker = fleet
    assert (await gateway.chat(make_body(text))).status_code == 200
    [request] = worker.requests
    worker.answers.clear()
    assert request.task.images == ()
    assert request.task.messages[0].parts[0].text == text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("PUT", CHAT, 405),
        ("OPTIONS", CHAT, 405),
        ("POST", CHAT + "/", 404),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/models/nobody", 404),
        ("GET", "/nowhere", 404),
        ("GET", "//v1/models", 404),
        ("GET", "/v1/../v1/models/", 404),
        ("POST", "/v1/moderations", 404),
    ],
)
async def test_wrong_paths_and_methods_have_errors_of_the_same_shape(fleet, method, path, status):
    gateway, _ = fleet
    response = await gateway.client.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert "access-control-allow-origin" not in response.headers
