"""Embeddings and scores of a server behind HTTP."""

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import engines.torch_backend  # noqa: F401 - before transformers
from engines.base import Engine, EngineCall, EngineLoadFailed, EngineOutput, InvalidRequest
from engines.pooling.batch import NOT_FINITE
from engines.registry import create_engine
from shared.protocol import Embed, ErrorCode, FinishReason, Rerank, TextPart, TokensPart
from tests.engines.upstream import asking
from tests.engines.upstream.stand_in import BAD_ID, NAN_ID, StandIn
from tests.factories_encoders import make_encoder

EMBED, RERANK = "/v1/embeddings", "/v1/rerank"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"), "bert")


@pytest.fixture
def load(checkpoint: Path, server: StandIn) -> Iterator[Callable[..., Engine]]:
    """Returns a function that creates an engine for a server with these paths."""
    engines: list[Engine] = []

    def load(*paths: str) -> Engine:
        server.vectors = paths
        values = {"kind": "openai-pooling", "model": str(checkpoint), "url": server.url}
        engines.append(create_engine(values).engine)
        return engines[-1]

    yield load
    for engine in engines:
        engine.close()


def run(engine: Engine, task: Embed | Rerank, *others: Embed | Rerank) -> list[EngineOutput]:
    for number, each in enumerate((task, *others)):
        engine.add(engine.prepare(EngineCall(str(number), each), []))
    return sorted(asking.run(engine), key=lambda output: output.request_id)


def test_token_ids_go_to_the_server_in_one_request(load, server: StandIn):
    inputs = (TextPart("w1 w2"), TokensPart((5, 6)))
    (output,) = run(load(EMBED), Embed(inputs, dimensions=None))
    assert sorted(server.bodies[-1]["input"]) == [[1, 5, 6, 2], [5, 6]]
    assert output.dimensions == 16
    assert len(output.values) == 2 * 16 * 4
    assert output.usage is not None
    assert output.usage.num_prompt_tokens == 6


@pytest.mark.parametrize(
    ("bad", "good", "error"),
    [
        (Embed((TokensPart((BAD_ID,)),)), Embed((TokensPart((5,)),)), "a bad id"),
        (Embed((TokensPart((NAN_ID,)),)), Embed((TokensPart((5,)),)), NOT_FINITE),
        (Rerank(("w1",), ("w2", "")), Rerank(("w2",), ("w1",)), NOT_FINITE),  # null
    ],
)
def test_a_bad_input_fails_only_its_request(load, bad: Any, good: Any, error: str):
    first, second = run(load(RERANK if isinstance(bad, Rerank) else EMBED), bad, good)
    assert (first.error, first.error_code) == (error, ErrorCode.INVALID_REQUEST)
    assert second.finish_reason is FinishReason.STOP


def test_scores_are_in_the_order_of_the_documents(load, server: StandIn):
    engine = load(RERANK)
    assert engine.capabilities().tasks == ("rerank", "tokenize")
    documents = ("w1", "w1 w2 w3", "w1 w2")
    (output,) = run(engine, Rerank(("w4",), documents))
    assert array("f", output.values).tolist() == pytest.approx([len(d) / 100 for d in documents])
    run(engine, Rerank(("w5",), ("w1 w2 w3",), max_document_tokens=2))
    assert server.bodies[-1]["documents"] == ["w1 w2"]


@pytest.mark.parametrize(
    ("path", "task", "param"),
    [
        (EMBED, Embed((TextPart("w1"),), is_normalized=False), "normalized"),
        (EMBED, Embed((TextPart("w1"),), dimensions=3), "dimensions"),
        (RERANK, Rerank(("w1",), ("w2",), is_raw=True), "raw_scores"),
    ],
)
def test_unsupported_tasks_are_refused_by_name(load, path: str, task: Any, param: str):
    with pytest.raises(InvalidRequest) as refused:
        load(path).prepare(EngineCall("r", task), [])
    assert refused.value.param == param


def test_a_failing_server_ends_the_engine(load, server: StandIn, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engines.upstream.vectors.RETRY_S", (0.0,))
    engine = load(EMBED)
    server.vectors = ()
    with pytest.raises(EngineLoadFailed, match="404"):
        run(engine, Embed((TextPart("w1"),)))
