"""A real llama-server behind the engine: the answers of the torch engine, takeover, and faults."""

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engines.base import Engine, RequestError
from engines.registry import create_engine
from engines.upstream.engine import UpstreamEngine
from shared.protocol import FinishReason, Grammar, TokensPart
from tests.engines.upstream import asking
from tests.engines.upstream.asking import answer, ids_of, text_of
from tests.engines.upstream.llama import CONTEXT, find_binary, run_llama_server, write_model

PROMPT = tuple(range(40, 60))
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with run_llama_server(model) as (url, _):
        yield url


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def load(model: Path, **settings: Any) -> Engine[Any]:
    values = {"kind": "llama-server", "model": str(model), "max_num_seqs": 4, **settings}
    return create_engine(values).engine


@pytest.fixture
def engine(model: Path, url: str) -> Iterator[Engine[Any]]:
    engine = load(model, url=url)
    yield engine
    engine.close()


make_call = partial(asking.make_call, prompt=TokensPart(PROMPT), max_tokens=24)


def test_greedy_answers_are_those_of_the_torch_engine(engine: Engine[Any], model: Path):
    call = make_call(ignore_eos=True)
    outputs = answer(engine, call)
    settings = {"kind": "torch", "device": "cpu", "dtype": "float32", "kv_cache_bytes": 2**22}
    ours = create_engine({**settings, "model": str(model)}).engine
    expected = answer(ours, call)
    ours.close()
    assert text_of(outputs) == text_of(expected)
    assert outputs[-1].usage == expected[-1].usage
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_tokens_of_a_partial_character_are_counted_with_their_ids(engine: Engine[Any]):
    sampling: dict[str, Any] = {"ignore_eos": True, "temperature": 1.0, "max_tokens": 200}
    call = make_call(seed=2**64 - 1, **sampling)  # a client's -1
    outputs = answer(engine, call)
    assert text_of(answer(engine, call)) == text_of(outputs)
    assert outputs[-1].usage is not None
    num_known = len(ids_of(outputs)) + sum(output.num_without_id for output in outputs)
    assert outputs[-1].usage.num_output_tokens == num_known
    index = 0
    for output in outputs:
        assert output.index == index
        index += len(output.token_ids) + output.num_without_id


@pytest.mark.parametrize("cut", [0, 3, 6])
def test_a_schema_holds_after_a_takeover_too(engine: Engine[Any], cut: int):
    grammar = Grammar("json", json.dumps(SCHEMA), "response_format")
    whole = answer(engine, make_call(grammar=grammar, max_tokens=100, temperature=0.8, seed=2))
    earlier = tuple(ids_of(whole[:cut]))
    again = make_call("again", earlier, grammar=grammar, max_tokens=100, temperature=0.8, seed=5)
    assert engine.can_continue(again.task)
    rest = answer(engine, again)
    found = json.loads(text_of(whole[:cut]) + text_of(rest))
    assert set(found) == {"a", "b"}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"allowed_token_ids": (40,)}, "allowed_token_ids"),
        ({"num_prompt_logprobs": 1}, "prompt_logprobs"),
        ({"grammar": Grammar("regex", "a+", "guided_regex")}, "guided_regex"),
        ({"grammar": Grammar("json", '{"$ref": "#/nowhere"}', "schema")}, "schema"),
    ],
)
def test_parameters_that_the_server_lacks_fail_only_their_request(
    engine: Engine[Any], changes: dict[str, Any], param: str
):
    with pytest.raises(RequestError) as refused:
        engine.prepare(make_call(**changes), [])
    assert refused.value.param == param
    assert answer(engine, make_call("next"))[-1].finish_reason is not None


def test_the_server_is_started_and_stopped_with_the_engine(model: Path):
    command = find_binary()
    engine = load(model, command=command, max_model_len=CONTEXT, arguments="--threads 1")
    assert len(answer(engine, make_call(ignore_eos=True))) > 0
    assert isinstance(engine, UpstreamEngine)
    assert engine.max_model_len == CONTEXT
    assert engine._server is not None
    pid = engine._server.pid
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
