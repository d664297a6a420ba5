"""Engines behind HTTP: tokens, faults of the server, and refusals."""

import json
import shutil
import subprocess
import sys
import threading
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from engines.base import (
    AdapterLimits,
    AdapterUnavailable,
    BadAdapter,
    EngineCall,
    EngineLoadFailed,
    EngineOutput,
    EngineStartError,
    InvalidImage,
    InvalidRequest,
    PreparedImage,
    PromptTooLong,
    can_decode_video,
)
from engines.registry import create_engine
from engines.upstream.engine import UpstreamEngine
from shared.protocol import (
    ErrorCode,
    FinishReason,
    Function,
    Grammar,
    ImageRef,
    Tools,
    VideoOptions,
)
from tests.engines.upstream.asking import Clip, Tone, answer, make_call, prepare_image, run, text_of
from tests.engines.upstream.asking import ids_of as ids
from tests.engines.upstream.stand_in import CONTEXT, EOS_ID, FIRST_ID, StandIn, next_token
from tests.factories_tokenizers import change_json
from tests.waiting import wait_for

APIS = ("vllm", "sglang")
SCHEMA = Grammar("json", '{"type": "object"}', "response_format")
Load = Callable[..., UpstreamEngine]
PENALTIES = {"presence_penalty", "frequency_penalty"}
needs_av = pytest.mark.skipif(not can_decode_video(), reason="needs PyAV: pip install '.[video]'")


@pytest.fixture(params=APIS)
def api(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def load(checkpoint: Path, server: StandIn) -> Iterator[Load]:
    engines: list[UpstreamEngine] = []

    def load(api: str, **settings: Any) -> UpstreamEngine:
        values = {"kind": api, "model": str(checkpoint), "url": server.url, **settings}
        engine = create_engine(values).engine
        assert isinstance(engine, UpstreamEngine)
        engines.append(engine)
        return engine

    yield load
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(api: str, load: Load) -> UpstreamEngine:
    return load(api)


def start(engine: UpstreamEngine, **wanted: Any) -> None:
    """Adds a request and steps until it has a token."""
    engine.add(engine.prepare(make_call(**wanted), []))
    while not ids(engine.step()):
        pass


def ids_of(outputs: list[EngineOutput]) -> list[int]:
    assert [output.index for output in outputs] == [
        len(ids(outputs[:n])) for n in range(len(outputs))
    ]
    return ids(outputs)


def expected_ids(engine: UpstreamEngine, call: EngineCall) -> list[int]:
    prompt = engine.prepare(call, []).prompt_token_ids
    ids = list(prompt)
    for _ in range(8):
        ids.append(next_token(ids, (None, [])))
    return ids[len(prompt) :]


def test_a_broken_stream_continues_without_a_gap(engine: UpstreamEngine, server: StandIn):
    call = make_call()
    server.break_after = [3, 2]
    assert ids_of(answer(engine, call)) == expected_ids(engine, call)
    prompts = [body.get("token_ids", body.get("input_ids")) for body in server.bodies]
    assert [len(prompt) - len(prompts[0]) for prompt in prompts] == [0, 3, 5]


def test_a_stream_that_breaks_repeatedly_fails(engine: UpstreamEngine, server: StandIn):
    server.break_after = [1, 0, 0, 0]
    last = answer(engine, make_call())[-1]
    assert last.error_code is ErrorCode.ENGINE_FAILURE
    assert last.error
    assert last.usage is not None
    assert ids_of(answer(engine, make_call("next"))) == expected_ids(engine, make_call())


def test_an_inconsistent_event_breaks_only_its_stream(load: Load, server: StandIn):
    scores = {"content": [{"token_id": 70, "logprob": -1.0}]}
    event = {"choices": [{"token_ids": [70, 71], "logprobs": scores}]}
    server.streams = [[f"data: {json.dumps(event)}"]]
    assert len(ids(answer(load("vllm"), make_call(num_logprobs=0)))) == 8


@pytest.mark.parametrize(
    "changes", [{"grammar": SCHEMA}, {"presence_penalty": 1.0}, {"frequency_penalty": 1.0}]
)
def test_requests_whose_state_the_server_loses_are_not_continued(
    engine: UpstreamEngine, server: StandIn, changes: dict[str, Any]
):
    call = make_call(**changes)
    assert not engine.can_continue(call.task)
    server.break_after = [0, 3]
    outputs = answer(engine, call)
    assert outputs[-1].error_code is ErrorCode.ENGINE_FAILURE
    assert len(ids_of(outputs)) == 3
    assert len(server.bodies) == 2  # the first stream broke without a token


@pytest.fixture
def plugin_engine(load: Load, server: StandIn) -> UpstreamEngine:
    """vLLM with the logits processor installed."""
    server.has_plugin = True
    return load("vllm")


LARK = Grammar("lark", 'start: "a"', "guided_grammar")
FORCED = Tools((Function("f", "{}"),), is_required=True)


def test_an_answer_with_a_schema_can_be_a_tool_call(plugin_engine: UpstreamEngine):
    plugin_engine.processor.shows_tools = True
    call = make_call(grammar=SCHEMA, tools=replace(FORCED, is_required=False))
    assert "<tool_call>" in plugin_engine.prepare(call, []).grammar_source


@pytest.mark.parametrize(
    ("changes", "at_start", "after_break"),
    [
        ({"grammar": SCHEMA}, {"grammar"}, {"grammar"}),
        ({"grammar": LARK}, {"grammar"}, {"grammar"}),
        ({"tools": FORCED}, {"grammar"}, {"grammar"}),
        ({"presence_penalty": 1.0}, set(), PENALTIES),
        ({}, set(), set()),
    ],
)
def test_the_logits_processor_continues_grammars_and_penalties(
    plugin_engine: UpstreamEngine, server: StandIn, changes, at_start, after_break
):
    call = make_call(**changes)
    assert plugin_engine.can_continue(call.task)
    server.break_after = [3]
    assert ids_of(answer(plugin_engine, call)) == expected_ids(plugin_engine, call)
    asked = zip(server.bodies, (at_start, after_break), (0, 3), strict=True)
    for body, names, num_earlier in asked:
        sampling = body["sampling_params"]
        assert "structured_outputs" not in sampling
        found = sampling.get("extra_args", {}).get("vlm_fleet", {})
        assert found.keys() - {"version", "num_earlier"} == names
        assert found.get("num_earlier", num_earlier) == num_earlier
    assert server.bodies[1]["sampling_params"]["presence_penalty"] == 0.0


def test_unsupported_parameters_are_not_continued(plugin_engine: UpstreamEngine):
    two_kinds = make_call(presence_penalty=1.0, repetition_penalty=1.1)
    assert not plugin_engine.can_continue(two_kinds.task)
    with pytest.raises(InvalidRequest) as refused:
        plugin_engine.prepare(make_call(grammar=SCHEMA, output_token_ids=(FIRST_ID,)), [])
    assert refused.value.param == "response_format"


LIMITS = AdapterLimits(max_rank=8, max_bytes=1000)


def write_adapter(directory: Path, **config: Any) -> Path:
    directory.mkdir()
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}
    (directory / "adapter_config.json").write_text(json.dumps(values))
    (directory / "adapter_model.safetensors").write_bytes(b"weights")
    return directory


def test_an_adapter_is_loaded_at_the_server_and_used_by_name(
    engine: UpstreamEngine, api: str, load: Load, server: StandIn, tmp_path: Path
):
    directory = write_adapter(tmp_path / "sql")
    adapter = engine.load_adapter(directory, LIMITS)
    assert server.adapters == {adapter.digest: str(directory)}
    assert (adapter.rank, engine.stats().num_adapters) == (4, 1)
    call = replace(make_call(), adapter=adapter.digest)
    assert len(ids_of(answer(engine, call))) == 8
    assert server.bodies[-1]["model" if api == "vllm" else "lora_path"] == adapter.digest
    other = load(api)  # of a second worker
    assert other.load_adapter(directory, LIMITS).digest == adapter.digest
    for _ in range(2):
        engine.unload_adapter(adapter.digest)
    assert server.adapters == {}
    with pytest.raises(AdapterUnavailable):
        engine.prepare(call, [])


@pytest.mark.parametrize(
    ("name", "config", "adapters", "says"),
    [
        ("sql", {"r": 16}, {}, "r is 16"),
        ("sql", {"use_dora": True}, {}, "use_dora"),
        ("bad", {}, {}, "another base model"),
        ("sql", {}, None, "without LoRA"),
    ],
)
def test_an_unusable_adapter_is_refused(
    engine: UpstreamEngine, server: StandIn, tmp_path: Path, name: str, config, adapters, says: str
):
    server.adapters = adapters
    with pytest.raises(BadAdapter, match=says):
        engine.load_adapter(write_adapter(tmp_path / name, **config), LIMITS)
    assert engine.stats().num_adapters == 0


@pytest.mark.parametrize("in_stream", [False, True])
def test_refusals_of_the_server_reach_the_client_unless_it_is_busy(
    engine: UpstreamEngine, server: StandIn, in_stream: bool
):
    server.refuses_in_stream = in_stream
    for message, code in (
        ("bad value", ErrorCode.INVALID_REQUEST),
        ("longer than the maximum context length", ErrorCode.CONTEXT_LENGTH_EXCEEDED),
    ):
        server.refuse_with = (400, message)
        (last,) = answer(engine, make_call())
        assert (last.error, last.error_code) == (message, code)
    server.refuse_with = (503, "loading")
    assert len(ids_of(answer(engine, make_call()))) == 8


@pytest.mark.parametrize(
    ("status", "message", "code"),
    [
        (400, "Failed to compile regex grammar", ErrorCode.INVALID_REQUEST),
        (400, "Multimodal prompt is too long", ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        (500, "the image cannot be read", None),
        (503, "The request queue is full.", None),
        (None, "Aborted", None),
    ],
)
def test_a_request_aborted_by_sglang_is_refused_or_repeated(
    load: Load, server: StandIn, status: int | None, message: str, code: ErrorCode | None
):
    engine = load("sglang")
    server.abort_with = (status, message)
    outputs = answer(engine, make_call())
    if code is None:
        assert ids_of(outputs) == expected_ids(engine, make_call())
        assert len(server.bodies) == 2
    else:
        assert [(each.error, each.error_code) for each in outputs] == [(message, code)]
        assert len(server.bodies) == 1


def test_a_lost_server_ends_the_engine(engine: UpstreamEngine, server: StandIn):
    server.token_s = 0.05
    start(engine, max_tokens=200)
    server.is_healthy = False
    server.break_after = [0]
    engine.add(engine.prepare(make_call("other"), []))
    with pytest.raises(EngineLoadFailed):
        run(engine)


def test_a_silent_server_is_lost_only_if_it_fails_its_health_check(load: Load, server: StandIn):
    server.token_s = 0.5
    engine = load("vllm", silence_s=0.1)
    assert len(ids_of(answer(engine, make_call(max_tokens=2)))) == 2
    server.is_healthy = False
    with pytest.raises(EngineLoadFailed):
        answer(engine, make_call(max_tokens=2))


def test_a_slowly_starting_server_is_lost_only_when_idle(load: Load, server: StandIn):
    server.is_healthy = False
    threading.Timer(1.0, setattr, (server, "is_healthy", True)).start()
    engine = load("vllm", silence_s=0.1)
    assert len(ids_of(answer(engine, make_call()))) == 8
    server.is_healthy = False
    wait_for(engine.has_work)
    with pytest.raises(EngineLoadFailed):
        engine.step()


def test_an_aborted_or_stopped_request_is_closed(engine: UpstreamEngine, api: str, server: StandIn):
    text = text_of(answer(engine, make_call()))
    server.token_s = 0.02
    stopped = answer(engine, make_call(stop=(text[3],), max_tokens=400))
    assert text_of(stopped) == text[: text.index(text[3])]
    start(engine, max_tokens=400)
    for _ in range(2):
        engine.abort("r")
    wait_for(lambda: not server.num_open)
    assert not engine.has_work()
    # SGLang aborts the request of a closed stream 2 s later
    rids = [body["rid"] for body in server.bodies[1:] if api == "sglang"]
    wait_for(lambda: server.aborted == rids)


def test_a_request_sent_again_gets_only_its_own_tokens(engine: UpstreamEngine, server: StandIn):
    start(engine, max_tokens=200)
    wait_for(lambda: not server.num_open)  # the other tokens have arrived
    engine.abort("r")
    assert ids_of(answer(engine, make_call())) == expected_ids(engine, make_call())


def test_images_tenants_and_bans_are_in_the_body(engine: UpstreamEngine, api: str, server: StandIn):
    call = make_call(num_images=1, logit_bias={70: 5.0}, tenant="salt")
    outputs = answer(engine, call, prepare_image(engine))
    body = server.bodies[-1]
    if api == "vllm":
        (part,) = body["content_parts"]
        assert part["uuid"] == "hash-1"
        assert part["url"].startswith("data:image/png;base64,")
    else:
        assert body["image_data"][0].startswith("data:image/png;base64,")
    prompt = body.get("token_ids", body.get("input_ids"))
    assert prompt.count(320) == 1
    assert outputs[-1].usage is not None
    assert outputs[-1].usage.num_image_tokens == 16
    assert outputs[-1].usage.num_prompt_tokens == len(prompt) + 15
    assert body["sampling_params"]["logit_bias"] == {"70": 5.0, "320": -100.0}  # of the image
    assert body["cache_salt" if api == "vllm" else "extra_key"] == "salt"


def test_choices_are_sent_to_sglang_unchanged(load: Load, server: StandIn):
    choice = Grammar("choice", '["\\ud83d\\ude00", "a\\""]', "guided_choice")
    answer(load("sglang"), make_call(grammar=choice))
    assert server.bodies[-1]["sampling_params"]["ebnf"] == 'root ::= "\N{GRINNING FACE}" | "a\\""'


def test_parameters_that_an_api_lacks_are_refused_by_name(engine: UpstreamEngine, api: str):
    refused: dict[str, dict[str, Any]] = {
        "prompt_logprobs": {"num_prompt_logprobs": 1},
        "guided_grammar": {"grammar": LARK},
        "tool_choice": {"tools": FORCED},
        "response_format": {"tools": replace(FORCED, is_required=False), "grammar": SCHEMA},
    }
    if api == "sglang":
        refused["allowed_token_ids"] = {"allowed_token_ids": (70,)}
    engine.processor.shows_tools = True
    for param, changes in refused.items():
        with pytest.raises(InvalidRequest) as found:
            engine.prepare(make_call(**changes), [])
        assert found.value.param == param
    with pytest.raises(PromptTooLong):
        engine.prepare(make_call(text="x" * 999), [])


def test_stats_include_the_caches_of_the_server(load: Load):
    engine = load("vllm")
    wait_for(lambda: engine.stats().kv_usage_ratio == 0.25)


@pytest.mark.parametrize(
    ("state", "settings", "says"),
    [
        ({"version": "0.18.2"}, {}, "0.18.2"),
        ({}, {"max_model_len": 2 * CONTEXT}, str(CONTEXT)),
        ({}, {"upstream_model": "other"}, "other"),
        ({"is_healthy": False}, {"start_s": 0.2}, "503"),
        ({"refuse_with": (403, "disabled")}, {}, "--enable-scale-out"),
    ],
)
def test_an_unusable_server_is_refused_with_the_reason(
    load: Load, server: StandIn, state: dict[str, Any], settings: dict[str, Any], says: str
):
    vars(server).update(state)
    with pytest.raises((EngineStartError, EngineLoadFailed)) as refused:
        load("vllm", **settings)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def write_program(folder: Path, script: str) -> Path:
    program = folder / "server"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def test_a_missing_or_failing_program_is_quoted(checkpoint: Path, tmp_path: Path):
    values = {"kind": "vllm", "model": str(checkpoint), "command": "no-such-program serve"}
    with pytest.raises(EngineStartError, match="no-such-program"):
        create_engine(values)
    program = write_program(tmp_path, "echo starting\necho out of GPU memory >&2\nexit 3")
    with pytest.raises(EngineLoadFailed, match="exit code 3: out of GPU memory"):
        create_engine({**values, "command": str(program)})


WORKER = """
import sys, time
from engines.upstream.server import ServerProcess
server = ServerProcess([sys.argv[1]], {})
time.sleep(600)
"""


def test_processes_of_a_server_end_with_a_worker_that_is_killed(tmp_path: Path):
    file = tmp_path / "child"
    child = f"(trap '' TERM; exec sleep 600) & echo $! > {file}.new; mv {file}.new {file}"
    program = write_program(tmp_path, f"{child}\nexec sleep 600")
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(program)])
    wait_for(file.exists)
    worker.kill()
    worker.wait()
    pid = int(file.read_text())
    wait_for(lambda: not psutil.pid_exists(pid))


def test_the_start_command_has_the_settings(api: str, checkpoint: Path, tmp_path: Path):
    program = write_program(tmp_path, f'echo "$@" > {tmp_path}/arguments\nenv > {tmp_path}/env')
    values = {
        "kind": api, "model": str(checkpoint), "command": f"{program} serve", "tensor_parallel": 2,
        "max_model_len": 256, "arguments": "--seed 7",
    }  # fmt: skip
    with pytest.raises(EngineLoadFailed):
        create_engine(values)
    words = (tmp_path / "arguments").read_text().split()
    assert words[0] == "serve"
    flag = {"vllm": "--tensor-parallel-size", "sglang": "--tp-size"}[api]
    assert words[words.index(flag) + 1] == "2"
    assert "256" in words
    assert words[-2:] == ["--seed", "7"]
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert "VLM_" not in (tmp_path / "env").read_text()


def test_an_answer_continues_from_its_token_log(engine: UpstreamEngine):
    whole = answer(engine, make_call())
    for num_earlier in (1, 7, 8):
        earlier = tuple(ids_of(whole)[:num_earlier])
        rest = answer(engine, make_call("again", output_token_ids=earlier))
        assert ids(rest) == ids_of(whole)[num_earlier:]
        assert text_of(rest) == text_of(whole)[num_earlier:]
    earlier = (*ids_of(whole)[:3], EOS_ID)
    (last,) = answer(engine, make_call(output_token_ids=earlier))
    assert (last.finish_reason, last.token_ids) == (FinishReason.STOP, ())


MEDIA = {"video": 322, "audio": 323}


@pytest.fixture
def media_checkpoint(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint whose template and tokenizer also support videos and audio."""
    directory = tmp_path / "media"
    shutil.copytree(checkpoint, directory)
    change_json(directory / "config.json", **{f"{kind}_token_id": MEDIA[kind] for kind in MEDIA})
    added = json.loads((directory / "tokenizer.json").read_text())["added_tokens"]
    added += [{**added[-1], "id": MEDIA[kind], "content": f"<{kind}>"} for kind in MEDIA]
    change_json(directory / "tokenizer.json", added_tokens=added)
    template = (directory / "chat_template.jinja").read_text()
    start, end = template.index("{% for content"), template.index("{% endfor %}") + 12
    loops = [template[start:end].replace("image", kind) for kind in ("image", *MEDIA)]
    template = template[:start] + "".join(loops) + template[end:]
    (directory / "chat_template.jinja").write_text(template)
    return directory


@needs_av
def test_vllm_gets_media_as_one_token_each(load: Load, media_checkpoint: Path, server: StandIn):
    engine = load("vllm", model=str(media_checkpoint))
    assert engine.capabilities().takes_video
    assert engine.capabilities().max_audio_s
    clip: Any = Clip()
    sound: Any = Tone()
    media = [
        PreparedImage("seen", engine.prepare_video(clip)),
        PreparedImage("heard", engine.prepare_audio(sound)),
    ]
    answer(engine, make_call(num_images=2), *media)
    body = server.bodies[-1]
    parts = [(x["type"], x["uuid"], x["url"].partition(",")[0]) for x in body["content_parts"]]
    assert parts == [
        ("video_url", "seen", "data:video/jpeg;base64"),
        ("audio_url", "heard", "data:audio/wav;base64"),
    ]
    assert [each for each in body["token_ids"] if each in MEDIA.values()] == [*MEDIA.values()]
    forbidden = {
        int(each) for each, bias in body["sampling_params"]["logit_bias"].items() if bias < -99
    }
    assert forbidden > {*MEDIA.values()}
    usage = answer(engine, make_call(num_images=1), media[1])[-1].usage
    assert usage is not None
    assert (usage.num_image_tokens, usage.num_audio_tokens) == (0, 16)


@needs_av
def test_frames_that_a_server_at_a_url_would_ignore_are_refused(load: Load, media_checkpoint: Path):
    engine = load("vllm", model=str(media_checkpoint))
    for num_sampled in (32, 33):
        clip: Any = Clip(num_frames=60, num_sampled=num_sampled)
        with nullcontext() if num_sampled == 32 else pytest.raises(InvalidImage) as refused:
            engine.prepare_video(clip)
    assert refused is not None
    assert refused.value.param == "num_frames"


def test_sglang_gets_no_videos_for_models_whose_frames_it_samples(
    load: Load, media_checkpoint: Path
):
    has = load("sglang", model=str(media_checkpoint)).capabilities()
    assert (has.takes_video, has.max_audio_s) == (False, 0)


@pytest.fixture
def load_qwen(load: Load, media_checkpoint: Path, server: StandIn) -> Load:
    """SGLang with a model that accepts whole videos; `arguments` configure its video processor.

    The template writes a control token that is not special.
    """
    change_json(media_checkpoint / "config.json", model_type="qwen2_vl")
    added = json.loads((media_checkpoint / "tokenizer.json").read_text())["added_tokens"]
    added.append({**added[-1], "id": added[-1]["id"] + 1, "content": "<call>", "special": False})
    change_json(media_checkpoint / "tokenizer.json", added_tokens=added)
    template = media_checkpoint / "chat_template.jinja"
    template.write_text("<call>" + template.read_text())

    def load_qwen(**processing: Any) -> UpstreamEngine:
        info = {"version": "0.5.23", "incremental_streaming_output": True}
        server.gets["/server_info"] = {**info, "mm_process_config": {"video": processing}}
        return load("sglang", model=str(media_checkpoint))

    return load_qwen


def read_video(url: str) -> tuple[list[int], float]:
    """Returns the gray levels of the frames, and the frames per second."""
    av: Any = pytest.importorskip("av", reason="needs PyAV: pip install '.[video]'")
    head, _, data = url.partition(",")
    assert head == "data:video/mp4;base64"
    with av.open(BytesIO(b64decode(data))) as file:
        images = [frame.to_image() for frame in file.decode(video=0)]
        return [image.getpixel((0, 0))[0] for image in images], file.streams.video[0].average_rate


@needs_av
@pytest.mark.parametrize(
    ("clip", "levels", "fps"),
    [
        (Clip(num_frames=30, num_sampled=4, length_s=10.0, shade=8), [0, 80, 152, 232], 9 / 29),
        (Clip(num_frames=30, num_sampled=3, length_s=10.0, shade=8), [0, 112, 232, 232], 6 / 29),
        (Clip(num_frames=6, num_sampled=6, length_s=3.0, shade=40), [0, 40, 80, 120, 160, 200], 2),
        (Clip(num_frames=30, num_sampled=None, length_s=2.0, shade=8), [0, 80, 152, 232], 45 / 29),
        (Clip(num_frames=30, num_sampled=1), [0, 0], 1),
    ],
    ids=["even", "odd", "fastest", "default", "one"],
)
def test_sglang_gets_the_sampled_frames_at_their_times(
    load_qwen: Load, server: StandIn, clip: Any, levels: list[int], fps: float
):
    """The number of frames is even, since SGLang drops one of an odd number. The prompt has one token for the video."""
    engine = load_qwen()
    assert engine.capabilities().takes_video
    answer(engine, make_call(num_images=1), PreparedImage("seen", engine.prepare_video(clip)))
    body = server.bodies[-1]
    found, rate = read_video(body["video_data"][0])
    assert found == pytest.approx(levels, abs=2)
    assert float(rate) == pytest.approx(fps, rel=1e-3)
    assert body["input_ids"].count(MEDIA["video"]) == 1
    assert str(MEDIA["video"]) in body["sampling_params"]["logit_bias"]


@needs_av
def test_a_video_that_sglang_would_subsample_is_refused(load_qwen: Load):
    """SGLang reads two frames per second and at most 768 per video, unless it is configured."""
    fast, many = Clip(num_sampled=4), Clip(num_frames=800, num_sampled=800, length_s=800.0)
    many.max_frames = 800
    engine = load_qwen()
    for clip in (fast, many):
        with pytest.raises(InvalidImage) as refused:
            engine.prepare_video(clip)
        assert refused.value.param == "num_frames"
    for name in ("fps", "nframes", "max_frames"):
        with pytest.raises(EngineLoadFailed, match=name):
            load_qwen(**{name: 8})


@needs_av
def test_a_prompt_with_a_video_that_sglang_would_tokenize_differently_is_refused(load_qwen: Load):
    """SGLang tokenizes the text of such a prompt, and of the tokens so far, again."""
    engine = load_qwen()
    clip: Any = Clip(num_sampled=2, length_s=10.0)
    video = PreparedImage("seen", engine.prepare_video(clip))
    call = make_call(num_images=1)
    engine.prepare(call, [video])
    ref = ImageRef("sha", 1, "video/mp4", 0, 0, video=VideoOptions())
    assert engine.can_continue(call.task)
    assert not engine.can_continue(replace(call.task, images=(ref,)))
    spelled = make_call(text="</s>", num_images=1)
    with pytest.raises(InvalidRequest, match="control token"):
        engine.prepare(spelled, [video])
    engine.prepare(make_call(text="</s>"), [])
