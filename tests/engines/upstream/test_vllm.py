"""What vLLM itself on a CPU does behind the engine, beyond `test_servers.py`: grammars, penalties, vectors, two ranks."""

import json
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engines.base import EngineCall
from engines.registry import create_engine
from engines.upstream.engine import UpstreamEngine
from shared.protocol import (
    Embed,
    FinishReason,
    Function,
    Grammar,
    Rerank,
    TextPart,
    TokensPart,
    Tools,
)
from tests.engines.upstream import asking
from tests.engines.upstream.asking import answer, ids_of
from tests.engines.upstream.vllm import make_settings, run_vllm, write_model
from tests.factories_encoders import make_encoder, make_scorer

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


make_call = partial(asking.make_call, text="one two three", max_tokens=24)


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
@pytest.mark.parametrize("cut", [0, 2, 4])
def test_a_grammar_holds_after_a_takeover_too(engine: UpstreamEngine, grammar: Grammar, cut: int):
    wanted: dict[str, Any] = {"grammar": grammar, "max_tokens": 120}
    whole = answer(engine, make_call(**wanted))
    assert whole[-1].finish_reason is FinishReason.STOP
    again = make_call("again", tuple(ids_of(whole)[:cut]), **wanted)
    assert engine.can_continue(again.task)
    assert ids_of(answer(engine, again)) == ids_of(whole)[cut:]


def test_a_function_call_is_forced_and_continued(engine: UpstreamEngine):
    tools = Tools((Function("f", '{"additionalProperties": false}'),), is_required=True)
    wanted: dict[str, Any] = {"tools": tools, "max_tokens": 200}
    whole = answer(engine, make_call(**wanted))
    assert whole[-1].finish_reason is FinishReason.TOOL_CALLS
    names = {piece.name for output in whole for piece in output.calls if piece.name}
    assert names == {"f"}
    again = make_call("again", tuple(ids_of(whole)[:3]), **wanted)
    assert ids_of(answer(engine, again)) == ids_of(whole)[3:]


def test_penalties_count_the_tokens_of_earlier_attempts(engine: UpstreamEngine):
    wanted: dict[str, Any] = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "ignore_eos": True}
    whole = answer(engine, make_call(**wanted))
    assert ids_of(whole) != ids_of(answer(engine, make_call(ignore_eos=True)))
    rest = answer(engine, make_call("again", tuple(ids_of(whole)[:9]), **wanted))
    assert ids_of(rest) == ids_of(whole)[9:]


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
    expected = ids_of(answer(engine, make_call(ignore_eos=True)))
    with run_vllm(model, tensor_parallel=2) as (url, server):
        settings = make_settings(model, url=url, tensor_parallel=2).model_dump()
        two = create_engine({"kind": "vllm", **settings}).engine
        assert ids_of(answer(two, make_call(ignore_eos=True))) == expected
        two.close()
        assert server.pid
