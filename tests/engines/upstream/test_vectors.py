"""Embeddings and scores of a server behind HTTP."""

from array import array
from pathlib import Path
from typing import Any

import pytest

import engines.torch_backend  # noqa: F401 - before transformers
from engines.base import Engine, EngineCall, EngineLoadFailed, EngineOutput, InvalidRequest
from engines.registry import create_engine
from shared.protocol import Embed, ErrorCode, FinishReason, Rerank, TextPart, TokensPart
from tests.engines.upstream import asking
from tests.engines.upstream.stand_in import BAD_ID, StandIn
from tests.factories_encoders import make_encoder

RERANK = ("/v1/rerank",)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"), "bert")


def load(checkpoint: Path, server: StandIn, **settings: Any) -> Engine:
    values = {"kind": "openai-pooling", "model": str(checkpoint), "url": server.url, **settings}
    return create_engine(values).engine


def run(engine: Engine, task: Embed | Rerank, *others: Embed | Rerank) -> list[EngineOutput]:
    for number, each in enumerate((task, *others)):
        engine.add(engine.prepare(EngineCall(str(number), each), []))
    return sorted(asking.run(engine), key=lambda output: output.request_id)


def test_token_ids_go_to_the_server_in_one_request(checkpoint: Path, server: StandIn):
    engine = load(checkpoint, server)
    inputs = (TextPart("w1 w2"), TokensPart((5, 6)))
    (output,) = run(engine, Embed(inputs, dimensions=None))
    assert sorted(server.bodies[-1]["input"]) == [[1, 5, 6, 2], [5, 6]]
    assert output.dimensions == 16
    assert len(output.values) == 2 * 16 * 4
    assert output.usage is not None
    assert output.usage.num_prompt_tokens == 6
    engine.close()


def test_a_refused_input_fails_its_request_alone(checkpoint: Path, server: StandIn):
    engine = load(checkpoint, server)
    bad, good = Embed((TokensPart((BAD_ID,)),)), Embed((TokensPart((5,)),))
    first, second = run(engine, bad, good)
    assert (first.error, first.error_code) == ("a bad id", ErrorCode.INVALID_REQUEST)
    assert second.finish_reason is FinishReason.STOP
    engine.close()


def test_scores_are_in_the_order_of_the_documents(checkpoint: Path, server: StandIn):
    server.vectors = RERANK
    engine = load(checkpoint, server)
    documents = ("w1", "w1 w2 w3", "w1 w2")
    (output,) = run(engine, Rerank(("w4",), documents))
    assert array("f", output.values).tolist() == pytest.approx([len(d) / 100 for d in documents])
    assert engine.capabilities().tasks == ("rerank", "tokenize")
    engine.close()


def test_a_document_is_truncated_before_it_is_sent(checkpoint: Path, server: StandIn):
    server.vectors = RERANK
    engine = load(checkpoint, server)
    run(engine, Rerank(("w4",), ("w1 w2 w3",), max_document_tokens=2))
    assert server.bodies[-1]["documents"] == ["w1 w2"]
    engine.close()


@pytest.mark.parametrize(
    ("vectors", "task", "param"),
    [
        (("/v1/embeddings",), Embed((TextPart("w1"),), is_normalized=False), "normalized"),
        (("/v1/embeddings",), Embed((TextPart("w1"),), dimensions=3), "dimensions"),
        (RERANK, Rerank(("w1",), ("w2",), is_raw=True), "raw_scores"),
    ],
)
def test_what_the_api_lacks_is_refused_by_name(
    checkpoint: Path, server: StandIn, vectors: tuple[str, ...], task: Any, param: str
):
    server.vectors = vectors
    engine = load(checkpoint, server)
    with pytest.raises(InvalidRequest) as refused:
        engine.prepare(EngineCall("r", task), [])
    assert refused.value.param == param
    engine.close()


def test_a_server_that_fails_ends_the_engine(
    checkpoint: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("engines.upstream.vectors.RETRY_S", (0.0,))
    engine = load(checkpoint, server)
    server.vectors = ()
    with pytest.raises(EngineLoadFailed, match="404"):
        run(engine, Embed((TextPart("w1"),)))
    engine.close()


def test_a_server_of_neither_api_is_refused(checkpoint: Path, server: StandIn):
    server.vectors = ()
    with pytest.raises(EngineLoadFailed, match="neither"):
        load(checkpoint, server)
