"""vLLM itself on a CPU behind the engine: answers of the torch engine, takeover, grammars, adapters, two ranks."""

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import LlavaForConditionalGeneration

from engines.base import AdapterLimits, BadGrammar, Engine, EngineCall, EngineOutput
from engines.registry import create_engine
from engines.upstream.engine import UpstreamEngine
from shared.protocol import (
    ChatMessage,
    Embed,
    ErrorCode,
    FinishReason,
    Function,
    Generate,
    Grammar,
    ImagePart,
    Rerank,
    SamplingParams,
    TextPart,
    TokensPart,
    Tools,
)
from tests.engines.upstream.asking import answer, ids_of, prepare_image, text_of
from tests.engines.upstream.vllm import CONTEXT, make_settings, run_vllm, write_model
from tests.factories_adapters import linear_names, make_changes, write_adapter
from tests.factories_encoders import make_encoder, make_scorer
from tests.waiting import wait_for

pytestmark = pytest.mark.timeout(500)

SCHEMA = {"type": "string", "minLength": 6, "maxLength": 9}
GRAMMARS = [
    Grammar("json", json.dumps(SCHEMA), "response_format"),
    Grammar("regex", "[ab]{3}c", "guided_regex"),
    Grammar("choice", '["red", "green"]', "guided_choice"),
    Grammar("lark", 'start: "x" /[0-9]{4}/', "guided_grammar"),
]


POOLING = {"kind": "pooling", "device": "cpu", "dtype": "float32"}
VECTORS = Embed((TextPart("w1 w2"), TextPart("w3 w4 w5"), TokensPart((5, 9, 7))))
SCORES = Rerank(("w1 w2",), ("w3 w4 w5", "w2", "w7 w1"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llava") / "tiny")


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with run_vllm(model) as (url, _):
        yield url


@pytest.fixture
def engine(model: Path, url: str) -> Iterator[UpstreamEngine]:
    engine = create_engine({"kind": "vllm", "model": str(model), "url": url}).engine
    assert isinstance(engine, UpstreamEngine)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def ours(model: Path) -> Iterator[Engine[Any]]:
    values = {"kind": "torch", "device": "cpu", "dtype": "float32", "kv_cache_bytes": 2**22}
    engine = create_engine({**values, "model": str(model)}).engine
    yield engine
    engine.close()


def make_call(
    request_id: str = "r",
    output_token_ids: tuple[int, ...] = (),
    grammar: Grammar | None = None,
    num_images: int = 0,
    adapter: str = "",
    tools: Tools | None = None,
    **sampling: Any,
) -> EngineCall:
    parts = (*(ImagePart(index) for index in range(num_images)), TextPart("one two three"))
    wanted = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **sampling})
    task = Generate((ChatMessage("user", parts),), wanted, grammar=grammar, tools=tools)
    return EngineCall(request_id, task, output_token_ids=output_token_ids, adapter=adapter)


def run(engine: Engine[Any], call: EngineCall, num_images: int = 0) -> list[EngineOutput]:
    return answer(engine, call, *(prepare_image(engine, seed) for seed in range(num_images)))


@pytest.mark.parametrize("num_images", [0, 1, 2])
def test_greedy_answers_are_those_of_the_torch_engine(
    engine: UpstreamEngine, ours: Engine[Any], num_images: int
):
    call = make_call(num_images=num_images, num_logprobs=3, ignore_eos=True)
    found, expected = (run(each, call, num_images) for each in (engine, ours))
    assert ids_of(found) == ids_of(expected)
    assert text_of(found) == text_of(expected)
    assert found[-1].finish_reason is FinishReason.LENGTH
    usages = [outputs[-1].usage for outputs in (found, expected)]
    assert usages[0] is not None
    assert usages[1] is not None
    assert usages[0].num_prompt_tokens == usages[1].num_prompt_tokens
    assert usages[0].num_image_tokens == usages[1].num_image_tokens
    scores, others = (
        [e.chosen.logprob for o in each for e in o.logprobs] for each in (found, expected)
    )
    assert scores == pytest.approx(others, abs=1e-3)


@pytest.mark.parametrize("num_images", [0, 1])
@pytest.mark.parametrize("num_earlier", [1, 9, 20])
def test_an_answer_continues_from_its_token_log(
    engine: UpstreamEngine, num_earlier: int, num_images: int
):
    wanted: dict[str, Any] = {"num_images": num_images, "ignore_eos": True}
    whole = run(engine, make_call(**wanted), num_images)
    earlier = tuple(ids_of(whole)[:num_earlier])
    rest = run(engine, make_call("again", earlier, **wanted), num_images)
    assert ids_of(rest) == ids_of(whole)[num_earlier:]
    assert text_of(whole).endswith(text_of(rest))


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
@pytest.mark.parametrize("cut", [0, 2, 4])
def test_a_grammar_holds_after_a_takeover_too(engine: UpstreamEngine, grammar: Grammar, cut: int):
    wanted: dict[str, Any] = {"grammar": grammar, "max_tokens": 120}
    whole = run(engine, make_call(**wanted))
    assert whole[-1].finish_reason is FinishReason.STOP
    again = make_call("again", tuple(ids_of(whole)[:cut]), **wanted)
    assert engine.can_continue(again.task)
    assert ids_of(run(engine, again)) == ids_of(whole)[cut:]


def test_a_function_call_is_forced_and_continued(engine: UpstreamEngine):
    tools = Tools((Function("f", '{"additionalProperties": false}'),), is_required=True)
    wanted: dict[str, Any] = {"tools": tools, "max_tokens": 200}
    whole = run(engine, make_call(**wanted))
    assert whole[-1].finish_reason is FinishReason.TOOL_CALLS
    names = {piece.name for output in whole for piece in output.calls if piece.name}
    assert names == {"f"}
    again = make_call("again", tuple(ids_of(whole)[:3]), **wanted)
    assert ids_of(run(engine, again)) == ids_of(whole)[3:]


def test_penalties_count_the_tokens_of_earlier_attempts(engine: UpstreamEngine):
    wanted: dict[str, Any] = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "ignore_eos": True}
    whole = run(engine, make_call(**wanted))
    assert ids_of(whole) != ids_of(run(engine, make_call(ignore_eos=True)))
    rest = run(engine, make_call("again", tuple(ids_of(whole)[:9]), **wanted))
    assert ids_of(rest) == ids_of(whole)[9:]


def test_a_closed_stream_is_aborted(engine: UpstreamEngine, url: str):
    engine.add(engine.prepare(make_call(max_tokens=400, ignore_eos=True), []))
    while not ids_of(engine.step()):
        pass
    assert read_metric(url, "vllm:num_requests_running") == 1
    engine.abort("r")
    wait_for(lambda: read_metric(url, "vllm:num_requests_running") == 0)
    wait_for(lambda: engine.stats().num_prefix_query_tokens > 0)  # its own metrics are read


def read_metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_an_adapter_changes_the_answers_that_name_it(
    engine: UpstreamEngine, ours: Engine[Any], model: Path, tmp_path: Path
):
    theirs = LlavaForConditionalGeneration.from_pretrained(model)
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


def test_an_image_that_expands_beyond_the_context_is_refused(engine: UpstreamEngine):
    """Only the server knows its size, and reports it inside the stream."""
    parts = (ImagePart(0), TextPart("x" * (CONTEXT - 30)))
    call = EngineCall("r", Generate((ChatMessage("user", parts),), SamplingParams(max_tokens=1)))
    (last,) = run(engine, call, num_images=1)
    assert last.error_code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


def test_a_refusal_of_the_server_ends_its_request_alone(engine: UpstreamEngine):
    grammar = Grammar("json", '{"$ref": "#/nowhere"}', "response_format")
    with pytest.raises(BadGrammar):
        engine.prepare(make_call(grammar=grammar), [])
    assert len(ids_of(run(engine, make_call("next", ignore_eos=True)))) == 24


@pytest.mark.parametrize("task", [VECTORS, SCORES], ids=["embed", "rerank"])
def test_vectors_and_scores_are_those_of_the_pooling_engine(task: Embed | Rerank, tmp_path: Path):
    make = make_scorer if task is SCORES else make_encoder
    model = make(tmp_path / "encoder", "bert", config={"num_attention_heads": 1})
    found = []
    with run_vllm(model, arguments="--runner pooling --enforce-eager") as (url, _):
        for values in ({"kind": "openai-pooling", "url": url}, POOLING):
            each = create_engine({**values, "model": str(model)}).engine
            [output] = answer(each, EngineCall("r", task))
            found.append(array("f", output.values).tolist())
            each.close()
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def test_two_ranks_give_the_answer_of_one(
    engine: UpstreamEngine, model: Path, monkeypatch: pytest.MonkeyPatch
):
    """The server is started with `--tensor-parallel-size 2` and ends with the engine."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|0")
    expected = ids_of(run(engine, make_call(ignore_eos=True)))
    with run_vllm(model, tensor_parallel=2) as (url, server):
        settings = make_settings(model, url=url, tensor_parallel=2).model_dump()
        two = create_engine({"kind": "vllm", **settings}).engine
        assert ids_of(run(two, make_call(ignore_eos=True))) == expected
        two.close()
        assert server.pid
