"""The contract of engines for vectors and scores, towards the thread that drives them.

An engine joins by its name in the registry and a line in `SETTINGS`.
"""

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import engines.torch_backend  # noqa: F401 - before transformers
from engines.base import Engine, EngineCall, EngineOutput, InvalidRequest, PromptTooLong
from engines.registry import create_engine
from shared.protocol import (
    Embed,
    FinishReason,
    Generate,
    Priority,
    SamplingParams,
    TextPart,
    Tokenize,
    TokensPart,
)
from tests.engines.upstream.stand_in import StandIn, run_stand_in
from tests.factories_encoders import make_encoder

SETTINGS: dict[str, dict[str, Any]] = {
    "mock_pooling": {"mock": {"step_s": 0, "s_per_token": 0}},
    "pooling": {"device": "cpu", "dtype": "float32"},
    "openai-pooling": {},
}
TEXTS = ("w1 w2", "w3", "w4 w5 w6 w7 w8 w9", "w1 w9")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"), "bert")


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    """A simulated server with the embeddings API."""
    with run_stand_in() as server:
        yield server


@pytest.fixture(params=SETTINGS)
def engine(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Engine]:
    """An engine with small steps and without a result cache."""
    values = {"kind": request.param, "max_batch_tokens": 12, **SETTINGS[request.param]}
    values["result_cache_bytes"] = 0
    if request.param != "mock_pooling":
        values["model"] = str(checkpoint)
    if request.param == "openai-pooling":
        values["url"] = request.getfixturevalue("stand_in").url
    loaded = create_engine(values)
    assert loaded.card.tasks == loaded.engine.capabilities().tasks
    yield loaded.engine
    loaded.engine.close()
    loaded.engine.close()


def add(
    engine: Engine, name: str, *texts: str, priority=Priority.INTERACTIVE, **wishes: Any
) -> None:
    task = Embed(tuple(map(TextPart, texts)), **wishes)
    engine.add(engine.prepare(EngineCall(name, task, priority=priority), []))


def finish(engine: Engine) -> dict[str, EngineOutput]:
    """Returns the only output of each call."""
    outputs: dict[str, EngineOutput] = {}
    while engine.has_work():
        for output in engine.step():
            assert output.request_id not in outputs
            assert output.finish_reason is FinishReason.STOP
            outputs[output.request_id] = output
    return outputs


def vectors(output: EngineOutput) -> list[list[float]]:
    numbers, size = array("f", output.values).tolist(), output.dimensions
    return [numbers[begin : begin + size] for begin in range(0, len(numbers), size)]


def test_a_call_ends_once_with_a_unit_vector_for_each_input(engine: Engine):
    add(engine, "r", *TEXTS)
    output = finish(engine)["r"]
    assert len(vectors(output)) == len(TEXTS)
    for vector in vectors(output):
        assert sum(x * x for x in vector) == pytest.approx(1, abs=1e-5)
    assert output.usage is not None
    assert output.usage.num_prompt_tokens >= 11
    assert output.usage.num_output_tokens == 0
    assert output.timings is not None
    assert output.timings.prefill_s > 0


def test_vectors_in_a_batch_equal_vectors_alone(engine: Engine):
    for name, text in enumerate(TEXTS):
        add(engine, str(name), text, *TEXTS[:name])
    together = finish(engine)
    for name, text in enumerate(TEXTS):
        add(engine, "alone", text)
        [alone] = vectors(finish(engine)["alone"])
        assert vectors(together[str(name)])[0] == pytest.approx(alone, abs=1e-6)


def test_tokenized_ids_are_those_that_are_embedded(engine: Engine):
    of = Generate((), SamplingParams(), prompt=TextPart(TEXTS[0]))
    made = engine.tokenize(Tokenize(of, with_strings=True), [])
    assert len(made.token_ids) == len(made.strings) >= 2
    add(engine, "text", TEXTS[0])
    output = finish(engine)["text"]
    assert output.usage is not None
    assert output.usage.num_prompt_tokens == len(made.token_ids)
    with pytest.raises(InvalidRequest):
        engine.tokenize(Tokenize(Generate((), SamplingParams())), [])


def test_abort_is_silent_and_idempotent(engine: Engine):
    engine.abort("unknown")
    add(engine, "a", *TEXTS)
    add(engine, "b", *TEXTS)
    engine.step()
    engine.abort("a")
    engine.abort("a")
    assert set(finish(engine)) == {"b"}
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)


def test_an_input_that_is_too_long_is_refused_by_its_place(engine: Engine):
    with pytest.raises(PromptTooLong) as refused:
        add(engine, "long", "w1", "w2 " * 600)
    assert refused.value.param == "input.[1]"
    call = EngineCall("ids", Embed((TokensPart((10**6,)),), first=None))
    with pytest.raises(InvalidRequest) as unknown:
        engine.prepare(call, [])
    assert unknown.value.param == "input"
    assert not engine.has_work()


def test_an_id_is_used_once_at_a_time(engine: Engine):
    add(engine, "r", "w1")
    with pytest.raises(InvalidRequest):
        add(engine, "r", "w1")


def test_interactive_calls_precede_batch_calls(engine: Engine):
    add(engine, "later", "w1 w2 w3 w4 w5 w6 w7 w8 w9", priority=Priority.BATCH)
    add(engine, "now", "w1")
    assert [output.request_id for output in engine.step()] == ["now"]


def test_steps_are_counted(engine: Engine):
    add(engine, "r", *TEXTS)
    finish(engine)
    stats = engine.stats()
    assert 1 <= stats.num_steps <= len(TEXTS)
    assert "weights" in stats.memory_bytes
