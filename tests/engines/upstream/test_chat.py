"""The engine for any server with OpenAI's API: messages in, text out."""

import json
from base64 import b64decode
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import pytest
from msgspec.structs import replace
from PIL import Image

from engines.base import (
    EngineCall,
    EngineLoadFailed,
    EngineStartError,
    InvalidRequest,
    LoadedEngine,
    PreparedImage,
    can_decode_video,
)
from engines.registry import create_engine
from shared.protocol import (
    CallPiece,
    ChatMessage,
    ErrorCode,
    FinishReason,
    Function,
    Generate,
    Grammar,
    SamplingParams,
    TextPart,
    TokensPart,
    Tools,
    join_calls,
)
from tests.engines.upstream import asking
from tests.engines.upstream.asking import Clip, Tone, make_call
from tests.engines.upstream.stand_in import StandIn

TOOLS = Tools((Function("look", "{}", is_strict=True),), is_parallel=False)


@pytest.fixture
def loaded(server: StandIn) -> Iterator[LoadedEngine]:
    loaded = create_engine({"kind": "openai", "url": server.url, "takes_images": True})
    yield loaded
    loaded.engine.close()


def answer(loaded: LoadedEngine, call: EngineCall, *images: PreparedImage) -> list[Any]:
    return asking.answer(loaded.engine, call, *images)


def test_an_image_is_sent_as_a_new_file_and_a_schema_unchanged(
    loaded: LoadedEngine, server: StandIn
):
    grammar = Grammar("json", '{"type": "integer"}', "response_format")
    answer(loaded, make_call(num_images=1, grammar=grammar), asking.prepare_image(loaded.engine))
    form = server.bodies[-1]["response_format"]
    assert form["json_schema"]["schema"] == {"type": "integer"}
    picture, words = server.bodies[-1]["messages"][0]["content"]
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")
    assert words == {"type": "text", "text": "hello"}


@pytest.mark.skipif(not can_decode_video(), reason="needs PyAV: pip install '.[video]'")
def test_a_video_is_sent_as_its_sampled_frames(server: StandIn):
    loaded = create_engine({"kind": "openai", "url": server.url, "takes_videos": True})
    assert loaded.card.supports_video
    content = loaded.engine.prepare_video(Clip())
    answer(loaded, make_call(num_images=1), PreparedImage("hash", content))
    loaded.engine.close()
    part, _ = server.bodies[-1]["messages"][0]["content"]
    head, *frames = part["video_url"]["url"].split(",")
    assert (part["type"], head) == ("video_url", "data:video/jpeg;base64")
    shades = [Image.open(BytesIO(b64decode(frame))).getpixel((0, 0)) for frame in frames]
    assert shades == [(0, 0, 0), (14, 14, 14), (29, 29, 29)]  # gray levels of frames 0, 14 and 29


def test_audio_is_sent_as_a_wav_file(server: StandIn):
    av: Any = pytest.importorskip("av")
    loaded = create_engine({"kind": "openai", "url": server.url, "takes_audio": True})
    assert loaded.card.supports_audio
    content = loaded.engine.prepare_audio(Tone())
    answer(loaded, make_call(num_images=1), PreparedImage("hash", content))
    loaded.engine.close()
    part, words = server.bodies[-1]["messages"][0]["content"]
    assert (part["type"], part["input_audio"]["format"]) == ("input_audio", "wav")
    with av.open(BytesIO(b64decode(part["input_audio"]["data"]))) as file:
        frames = list(file.decode(audio=0))
    first = frames[0]
    assert (first.format.name, first.layout.nb_channels, first.sample_rate) == ("flt", 1, 16_000)
    assert sum(frame.samples for frame in frames) == 8000
    assert words == {"type": "text", "text": "hello"}


def test_tool_calls_and_usage_are_those_of_the_server(loaded: LoadedEngine, server: StandIn):
    call, earlier = make_call(tools=TOOLS), ChatMessage("assistant", (), reasoning="because")
    task = replace(call.task, messages=(earlier, *call.task.messages))
    server.refuse_with = (400, "property 'reasoning_content' is unsupported")  # the error of Groq
    outputs = answer(loaded, replace(call, task=task))
    sent = [message for body in server.bodies[-2:] for message in body["messages"]]
    assert [each.get("reasoning_content") for each in sent] == ["because", None, None, None]
    pieces = [piece for output in outputs for piece in output.calls]
    assert [(piece.name, piece.arguments) for piece in pieces] == [("look", ""), ("", "{}")]
    function = {"name": "look", "parameters": {}, "strict": True}
    assert server.bodies[-1]["tools"] == [{"type": "function", "function": function}]
    assert server.bodies[-1]["parallel_tool_calls"] is False
    assert outputs[-1].usage.num_output_tokens == sum(each.num_without_id for each in outputs) == 8


@pytest.mark.parametrize(("num_told", "num_sends"), [(0, 2), (3, 1)])
def test_a_broken_stream_is_sent_again_before_its_first_token_only(
    loaded: LoadedEngine, server: StandIn, num_told: int, num_sends: int
):
    call = make_call()
    assert not loaded.engine.can_continue(call.task)
    server.break_after = [num_told]
    outputs = answer(loaded, call)
    assert len(server.bodies) == num_sends
    assert (outputs[-1].error is None) == (num_told == 0)


@pytest.mark.parametrize(
    "data",
    ['{"choices": [{"delta": {"content": "a', '{"choices": 1}', '["error"]', '{"error": ' + 9999 * "["],
)  # fmt: skip
def test_an_unreadable_event_breaks_only_its_stream(
    loaded: LoadedEngine, server: StandIn, data: str
):
    server.streams = [[f"data: {data}"]]
    assert answer(loaded, make_call())[-1].error is None
    server.streams = 3 * [[f"data: {data}"]]
    assert answer(loaded, make_call())[-1].error_code == ErrorCode.ENGINE_FAILURE


def delta(index: int, call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": index, "id": call_id, "function": function}]}


ONE, TWO = (0, "look", '{"a": "}"}'), (1, "see", '{"b": 2}')


@pytest.mark.parametrize(
    ("deltas", "calls"),
    [
        ([delta(0, "", *ONE[1:]), delta(1, "a", *TWO[1:])], [ONE, TWO]),
        ([delta(0, "a", *ONE[1:]), delta(0, "b", *TWO[1:])], [ONE, TWO]),  # same index
        ([delta(0, "a", *ONE[1:]), delta(1, "a", *TWO[1:])], [ONE, TWO]),  # same ID
        ([delta(0, "", *ONE[1:]), delta(0, "", *TWO[1:])], [ONE, TWO]),  # same index, no ID
        ([delta(0, "a", "look", "")] + [delta(0, "a", "look", each) for each in ONE[2]], [ONE]),
        ([delta(0, "a", "look", ""), delta(1, "b", "see", "{}")], [(0, "look", ""), (1, "see", "{}")]),
        ([delta(0, "a", *ONE[1:]), {"tool_calls": [{"index": 1, "function": None}]}], [ONE]),
        ([delta(0, "a", "look", ""), delta(1, "b", "see", ""),  # interleaved
          *(delta(index, "", "", each) for pair in zip(ONE[2], TWO[2].ljust(10), strict=True)
            for index, each in enumerate(pair))], [ONE, TWO]),
    ],
)  # fmt: skip
def test_tool_calls_are_separated_in_any_form_of_deltas(
    loaded: LoadedEngine, server: StandIn, deltas: list[Any], calls: list[tuple[int, str, str]]
):
    """The server omits usage and `[DONE]`, and sends null for empty fields, and parts for text."""
    parts = {"content": [{"type": "thinking", "thinking": []}, {"type": "text", "text": "hi"}]}
    events = [None, *({"choices": [{"delta": each}]} for each in (parts, *deltas))]
    events += [{"choices": None}, {"choices": [{"delta": None, "finish_reason": "stop"}]}]
    server.streams = [[f"data: {json.dumps(event) if event else ''}" for event in events]]
    outputs = answer(loaded, make_call(tools=TOOLS))
    assert ["".join(each.text for each in outputs), len(server.bodies)] == ["hi", 1]
    assert join_calls(piece for each in outputs for piece in each.calls) == tuple(
        CallPiece(*each) for each in calls
    )
    assert outputs[-1].finish_reason is FinishReason.TOOL_CALLS
    assert outputs[-1].usage.num_output_tokens == 1 + len(deltas)


@pytest.mark.parametrize("status", [307, 400, 401, 402, 405])
def test_a_refusal_has_a_client_or_server_error_code(
    loaded: LoadedEngine, server: StandIn, status: int
):
    code = ErrorCode.INVALID_REQUEST if status == 400 else ErrorCode.ENGINE_FAILURE
    server.refuse_with = (status, "no")
    (last,) = answer(loaded, make_call())
    assert (last.error, last.error_code) == ("no", code)


@pytest.mark.parametrize(
    ("task", "param"),
    [
        (Generate((), SamplingParams(), prompt=TextPart("a")), "prompt"),
        (Generate((), SamplingParams(), prompt=TokensPart((1,))), "prompt"),
        (make_call(num_logprobs=1).task, "logprobs"),
        (make_call(logit_bias={1: 1.0}).task, "logit_bias"),
        (make_call(top_k=4).task, "top_k"),
        (make_call(grammar=Grammar("regex", "a", "guided_regex")).task, "guided_regex"),
        (replace(make_call().task, template_options={"thinking": False}), "chat_template_kwargs"),
    ],
)
def test_unsupported_tasks_are_refused_by_name(loaded: LoadedEngine, task: Generate, param: str):
    with pytest.raises(InvalidRequest) as refused:
        loaded.engine.prepare(EngineCall("r", task), [PreparedImage("hash", b"")])
    assert refused.value.param == param


def test_an_unusable_server_is_refused_with_the_reason(server: StandIn):
    for given, says in (({}, "address"), ({"url": "127.0.0.1:9"}, "VLM_ENGINE__URL: .*https?")):
        with pytest.raises(EngineStartError, match=says):
            create_engine({"kind": "openai", **given})
    with pytest.raises(EngineStartError, match="serves model, not other"):
        create_engine({"kind": "openai", "url": server.url, "upstream_model": "other"})
    server.key = "secret"
    with pytest.raises(EngineStartError, match=r"API_KEY: .* refuses it \(401\)"):
        create_engine({"kind": "openai", "url": server.url})
    with pytest.raises(EngineLoadFailed, match="not ready"):
        create_engine({"kind": "openai", "url": "http://127.0.0.1:9", "start_s": 0.1})
