"""Real vLLM and SGLang servers on a CPU behind the engine."""

import json
from array import array
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForImageTextToText, WhisperFeatureExtractor

from engines.base import AdapterLimits, Engine, EngineCall, EngineOutput, PreparedImage
from engines.registry import create_engine
from engines.upstream.engine import UpstreamEngine
from shared.protocol import (
    Embed,
    ErrorCode,
    FinishReason,
    Function,
    Grammar,
    Rerank,
    TextPart,
    TokensPart,
    Tools,
)
from tests.engines.torch_backend.models.family_table import Family, named, write_checkpoint
from tests.engines.torch_backend.models.test_media import AUDIO_FAMILIES, VIDEO_FAMILIES
from tests.engines.upstream import asking, sglang, vllm
from tests.engines.upstream.asking import (
    Clip,
    Tone,
    answer,
    ids_of,
    prepare_image,
    read_metric,
    text_of,
)
from tests.engines.upstream.vllm import make_settings, run_vllm
from tests.factories_adapters import linear_names, make_changes, write_adapter
from tests.factories_encoders import make_encoder, make_scorer
from tests.waiting import wait_for

pytestmark = pytest.mark.timeout(500)


WRITE = {"vllm": vllm.write_model, "sglang": sglang.write_model}
RUN = {"vllm": vllm.run_vllm, "sglang": sglang.run_sglang}
#: SGLang computes logprobs after the bias that forbids the image token.
LOGPROB_ERROR = {"vllm": 1e-3, "sglang": 0.1}
#: Length of a text that fits into the context, but not together with an image.
NUM_CHARS = {"vllm": vllm.CONTEXT - 30, "sglang": sglang.CONTEXT - 11}
NUM_ABORTED = "sglang:num_aborted_requests_total"
SCHEMA = {"type": "string", "minLength": 6, "maxLength": 9}
GRAMMARS = [
    Grammar("json", json.dumps(SCHEMA), "response_format"),
    Grammar("regex", "[ab]{3}c", "guided_regex"),
    Grammar("choice", '["red", "green"]', "guided_choice"),
    Grammar("lark", 'start: "x" /[0-9]{4}/', "guided_grammar"),
]
FORCED = Tools((Function("f", '{"additionalProperties": false}'),), is_required=True)
TORCH = {"kind": "torch", "device": "cpu", "dtype": "float32", "kv_cache_bytes": 2**22}
POOLING = {"kind": "pooling", "device": "cpu", "dtype": "float32"}
VECTORS = Embed((TextPart("w1 w2"), TextPart("w3 w4 w5"), TokensPart((5, 9, 7))))
SCORES = Rerank(("w1 w2",), ("w3 w4 w5", "w2", "w7 w1"))
only_sglang = pytest.mark.parametrize("kind", ["sglang"], indirect=True)
only_vllm = pytest.mark.parametrize("kind", ["vllm"], indirect=True)


@pytest.fixture(scope="module", params=WRITE)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITE[kind](tmp_path_factory.mktemp(kind) / "tiny")


@pytest.fixture(scope="module")
def url(kind: str, model: Path) -> Iterator[str]:
    with RUN[kind](model) as (url, _):
        yield url


@pytest.fixture
def engine(kind: str, model: Path, url: str) -> Iterator[UpstreamEngine]:
    engine = create_engine({"kind": kind, "model": str(model), "url": url}).engine
    assert isinstance(engine, UpstreamEngine)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def ours(model: Path) -> Iterator[Engine[Any]]:
    engine = create_engine({**TORCH, "model": str(model)}).engine
    yield engine
    engine.close()


make_call = partial(asking.make_call, text="one two three", max_tokens=24)


def run(engine: Engine[Any], call: EngineCall, num_images: int = 0) -> list[EngineOutput]:
    return answer(engine, call, *(prepare_image(engine, seed) for seed in range(num_images)))


@pytest.mark.parametrize("num_images", [0, 1, 2])
def test_greedy_answers_are_those_of_the_torch_engine(
    engine: UpstreamEngine, ours: Engine[Any], kind: str, num_images: int
):
    call = make_call(num_images=num_images, num_logprobs=3, ignore_eos=True)
    found, expected = (run(each, call, num_images) for each in (engine, ours))
    assert ids_of(found) == ids_of(expected)
    assert text_of(found) == text_of(expected)
    assert found[-1].finish_reason is FinishReason.LENGTH
    usages = [each[-1].usage for each in (found, expected)]
    one, other = ((usage.num_prompt_tokens, usage.num_image_tokens) for usage in usages if usage)
    assert one == other
    scores, others = (
        [e.chosen.logprob for o in each for e in o.logprobs] for each in (found, expected)
    )
    assert scores == pytest.approx(others, abs=LOGPROB_ERROR[kind])


@only_sglang
def test_a_closed_stream_is_aborted(engine: UpstreamEngine, url: str):
    before = read_metric(url, NUM_ABORTED)
    engine.add(engine.prepare(make_call(max_tokens=400, ignore_eos=True), []))
    while not ids_of(engine.step()):
        pass
    engine.abort("r")
    wait_for(lambda: read_metric(url, NUM_ABORTED) == before + 1)


def test_a_closed_request_can_be_sent_again_immediately(engine: UpstreamEngine):
    """This happens after the death of a worker. SGLang reserves the ID of a closed stream for 2 s."""
    call = make_call(max_tokens=100, ignore_eos=True)
    whole = ids_of(run(engine, call))
    engine.add(engine.prepare(call, []))
    first: list[int] = []
    while not first:
        first = ids_of(engine.step())
    engine.abort("r")
    again = make_call("r", tuple(first), max_tokens=100, ignore_eos=True)
    assert [*first, *ids_of(run(engine, again))] == whole


@only_vllm
def test_an_adapter_changes_the_answers_that_name_it(
    engine: UpstreamEngine, ours: Engine[Any], model: Path, tmp_path: Path
):
    theirs = AutoModelForImageTextToText.from_pretrained(model)
    targets = ("q_proj", "v_proj", "down_proj")
    changes = make_changes(theirs, linear_names(theirs, targets, within="language_model"))
    directory = write_adapter(tmp_path / "sql", changes, target_modules=targets)
    limits = AdapterLimits(max_rank=8, max_bytes=2**20)
    texts = []
    for each in (engine, ours):
        adapter = each.load_adapter(directory, limits)
        call = make_call(adapter=adapter.digest, ignore_eos=True)
        texts.append(text_of(run(each, call)))
        assert texts[-1] != text_of(run(each, make_call(ignore_eos=True)))
        each.unload_adapter(adapter.digest)
    assert texts[0] == texts[1]


def test_an_image_that_expands_beyond_the_context_is_refused(engine: UpstreamEngine, kind: str):
    """Only the server knows the number of its tokens, and reports the error inside the stream."""
    call = make_call(text="x" * NUM_CHARS[kind], num_images=1, max_tokens=1)
    (last,) = run(engine, call, num_images=1)
    assert last.error_code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


@only_vllm
@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
@pytest.mark.parametrize("cut", [0, 2, 4])
def test_a_grammar_holds_after_a_takeover_too(engine: UpstreamEngine, grammar: Grammar, cut: int):
    wanted: dict[str, Any] = {"grammar": grammar, "max_tokens": 120}
    whole = answer(engine, make_call(**wanted))
    assert whole[-1].finish_reason is FinishReason.STOP
    again = make_call("again", tuple(ids_of(whole)[:cut]), **wanted)
    assert engine.can_continue(again.task)
    assert ids_of(answer(engine, again)) == ids_of(whole)[cut:]


@only_vllm
def test_a_function_call_is_forced_and_continued(engine: UpstreamEngine):
    wanted: dict[str, Any] = {"tools": FORCED, "max_tokens": 200}
    whole = answer(engine, make_call(**wanted))
    assert whole[-1].finish_reason is FinishReason.TOOL_CALLS
    names = {piece.name for output in whole for piece in output.calls if piece.name}
    assert names == {"f"}
    again = make_call("again", tuple(ids_of(whole)[:3]), **wanted)
    assert ids_of(answer(engine, again)) == ids_of(whole)[3:]


@only_vllm
def test_penalties_count_the_tokens_of_earlier_attempts(engine: UpstreamEngine):
    wanted: dict[str, Any] = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "ignore_eos": True}
    whole = answer(engine, make_call(**wanted))
    assert ids_of(whole) != ids_of(answer(engine, make_call(ignore_eos=True)))
    rest = answer(engine, make_call("again", tuple(ids_of(whole)[:9]), **wanted))
    assert ids_of(rest) == ids_of(whole)[9:]


@pytest.mark.parametrize("task", [VECTORS, SCORES], ids=["embed", "rerank"])
def test_vectors_and_scores_of_vllm_equal_those_of_our_engine(task: Embed | Rerank, tmp_path: Path):
    make = make_scorer if task is SCORES else make_encoder
    model = make(tmp_path / "encoder", "bert", config={"num_attention_heads": 1})
    found = []
    changes = {"arguments": "--runner pooling --enforce-eager", "max_model_len": None}
    with run_vllm(model, **changes) as (url, _):
        for values in ({"kind": "openai-pooling", "url": url}, POOLING):
            each = create_engine({**values, "model": str(model)}).engine
            [output] = answer(each, EngineCall("r", task))
            found.append(array("f", output.values).tolist())
            each.close()
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def make_video_family() -> Family:
    """vLLM's attention on CPUs needs heads of at least 32 channels."""
    config = named("Qwen2-VL").create()
    text = config.get_text_config()
    text.num_attention_heads = text.num_key_value_heads = 2
    text.rope_parameters = {**text.rope_parameters, "mrope_section": [4, 6, 6]}
    placeholder = "<|vision_start|><|video_pad|><|vision_end|>"
    return replace(named("Qwen2-VL"), create=lambda: config, video_placeholder=placeholder)


def make_audio_family() -> Family:
    """vLLM's processor supports only windows of 30 seconds."""
    family = named("Qwen2-Audio", AUDIO_FAMILIES)
    config, processor = family.create(), family.create_processor()  # type: ignore[misc]
    text = config.get_text_config()
    text.num_attention_heads = text.num_key_value_heads = 2
    config.audio_config.max_source_positions = 1500
    processor.feature_extractor = WhisperFeatureExtractor(feature_size=80)
    return replace(family, create=lambda: config, create_processor=lambda: processor)


@pytest.mark.parametrize("media", ["video", "audio"])
def test_media_give_the_tokens_of_the_torch_engine_and_are_taken_over(media: str, tmp_path: Path):
    write_checkpoint(make_video_family() if media == "video" else make_audio_family(), tmp_path)
    opened: Any = Clip(56, num_frames=4, num_sampled=4) if media == "video" else Tone()
    whole: list[list[int]] = []
    arguments = f"--enforce-eager {vllm.PLUGIN}"  # Qwen2-Audio supports no LoRA
    with run_vllm(tmp_path, arguments=arguments) as (url, _):
        for values in ({"kind": "vllm", "url": url}, TORCH):
            each = create_engine({**values, "model": str(tmp_path)}).engine
            prepared = PreparedImage(media, getattr(each, f"prepare_{media}")(opened))
            wanted: dict[str, Any] = {"num_images": 1, "ignore_eos": True}
            ids = ids_of(answer(each, make_call(**wanted), prepared))
            rest = answer(each, make_call("again", tuple(ids[:5]), **wanted), prepared)
            assert ids_of(rest) == ids[5:]
            whole.append(ids)
            each.close()
    assert whole[0] == whole[1]


@pytest.mark.parametrize(
    ("name", "num_frames"),
    [("Qwen2-VL", 4), ("Qwen2.5-VL", 2), ("Qwen3-VL", 4)],  # SGLang has no times for Qwen2.5-VL
)
def test_a_video_gives_the_tokens_of_the_torch_engine_in_sglang(
    name: str, num_frames: int, tmp_path: Path
):
    family = named(name, VIDEO_FAMILIES)
    config = family.create()
    config.vision_config.in_chans = 3  # as in published checkpoints
    write_checkpoint(replace(family, create=lambda: config), tmp_path)
    found: list[Any] = []
    with sglang.run_sglang(tmp_path) as (url, _):
        for values in ({"kind": "sglang", "url": url}, TORCH):
            engine = create_engine({**values, "model": str(tmp_path)}).engine
            for shade in (60, 20):
                clip: Any = Clip(336, num_frames, num_frames, num_frames / 2, shade)
                video = PreparedImage(f"{shade}", engine.prepare_video(clip))
                bias = {config.video_token_id: -100.0}
                wanted: dict[str, Any] = {"num_logprobs": 1, "logit_bias": bias, "ignore_eos": True}
                call = make_call(num_images=1, **wanted)
                outputs = answer(engine, call, video)
                usage = outputs[-1].usage
                assert usage is not None
                scores = [e.chosen.logprob for output in outputs for e in output.logprobs]
                found.append((ids_of(outputs), usage.num_prompt_tokens, scores))
            engine.close()
    for (ids, num_prompt, scores), expected in zip(found[:2], found[2:], strict=True):
        assert (ids, num_prompt) == expected[:2]
        assert scores == pytest.approx(expected[2], abs=LOGPROB_ERROR["sglang"])
    assert found[0][2] != pytest.approx(found[1][2], abs=LOGPROB_ERROR["sglang"])


@only_vllm
def test_two_ranks_give_the_same_answer_as_one(
    engine: UpstreamEngine, model: Path, monkeypatch: pytest.MonkeyPatch
):
    """The server is started with `--tensor-parallel-size 2` and ends with the engine."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|0")
    expected = ids_of(answer(engine, make_call(ignore_eos=True)))
    with run_vllm(model, tensor_parallel=2) as (url, server):
        settings = make_settings(model, url=url, tensor_parallel=2).model_dump()
        two = create_engine({"kind": "vllm", **settings}).engine
        assert ids_of(answer(two, make_call(ignore_eos=True))) == expected
        two.close()
        assert server.pid
