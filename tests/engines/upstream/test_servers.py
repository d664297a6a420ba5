"""vLLM and SGLang themselves on a CPU behind the engine: answers of the torch engine, takeover, adapters, aborts."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForImageTextToText

from engines.base import AdapterLimits, Engine, EngineCall, EngineOutput
from engines.registry import create_engine
from engines.upstream.engine import UpstreamEngine
from engines.upstream.server import ServerProcess
from shared.protocol import (
    ChatMessage,
    ErrorCode,
    FinishReason,
    Generate,
    ImagePart,
    SamplingParams,
    TextPart,
)
from tests.engines.upstream import asking, sglang, vllm
from tests.engines.upstream.asking import answer, ids_of, prepare_image, read_metric, text_of
from tests.factories_adapters import linear_names, make_changes, write_adapter
from tests.waiting import wait_for

pytestmark = pytest.mark.timeout(500)


@dataclass(frozen=True)
class Server:
    write_model: Callable[[Path], Path]
    run: Callable[[Path], AbstractContextManager[tuple[str, ServerProcess]]]
    num_aborted: str  #: a counter; empty: the server has none
    num_chars: int  #: of a text that fits into the context, but not with an image
    logprob_error: float  #: SGLang's logprobs are after the bias that forbids the image's token


SERVERS = {
    "vllm": Server(vllm.write_model, vllm.run_vllm, "", vllm.CONTEXT - 30, 1e-3),
    "sglang": Server(
        sglang.write_model,
        sglang.run_sglang,
        "sglang:num_aborted_requests_total",
        sglang.CONTEXT - 11,
        0.1,
    ),
}


@pytest.fixture(scope="module", params=SERVERS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SERVERS[kind].write_model(tmp_path_factory.mktemp(kind) / "tiny")


@pytest.fixture(scope="module")
def url(kind: str, model: Path) -> Iterator[str]:
    with SERVERS[kind].run(model) as (url, _):
        yield url


@pytest.fixture
def engine(kind: str, model: Path, url: str) -> Iterator[UpstreamEngine]:
    engine = create_engine({"kind": kind, "model": str(model), "url": url}).engine
    assert isinstance(engine, UpstreamEngine)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def ours(model: Path) -> Iterator[Engine[Any]]:
    values = {"kind": "torch", "device": "cpu", "dtype": "float32", "kv_cache_bytes": 2**22}
    engine = create_engine({**values, "model": str(model)}).engine
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
    usages = [outputs[-1].usage for outputs in (found, expected)]
    assert usages[0] is not None
    assert usages[1] is not None
    assert usages[0].num_prompt_tokens == usages[1].num_prompt_tokens
    assert usages[0].num_image_tokens == usages[1].num_image_tokens
    scores, others = (
        [e.chosen.logprob for o in each for e in o.logprobs] for each in (found, expected)
    )
    assert scores == pytest.approx(others, abs=SERVERS[kind].logprob_error)


def test_a_closed_stream_is_aborted(engine: UpstreamEngine, kind: str, url: str):
    if not (name := SERVERS[kind].num_aborted):
        pytest.skip("the server does not count aborted requests")
    before = read_metric(url, name)
    engine.add(engine.prepare(make_call(max_tokens=400, ignore_eos=True), []))
    while not ids_of(engine.step()):
        pass
    engine.abort("r")
    wait_for(lambda: read_metric(url, name) == before + 1)


def test_a_closed_request_can_be_sent_again_at_once(engine: UpstreamEngine):
    """As after a worker's death. SGLang keeps a closed stream's id for 2 s."""
    call = make_call(max_tokens=100, ignore_eos=True)
    whole = ids_of(run(engine, call))
    engine.add(engine.prepare(call, []))
    first: list[int] = []
    while not first:
        first = ids_of(engine.step())
    engine.abort("r")
    again = make_call("r", tuple(first), max_tokens=100, ignore_eos=True)
    assert [*first, *ids_of(run(engine, again))] == whole


def test_an_adapter_changes_the_answers_that_name_it(
    engine: UpstreamEngine, ours: Engine[Any], kind: str, model: Path, tmp_path: Path
):
    if kind == "sglang":
        pytest.skip("adapters are not tested with SGLang")
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
    """Only the server knows its size, and reports it inside the stream."""
    parts = (ImagePart(0), TextPart("x" * SERVERS[kind].num_chars))
    call = EngineCall("r", Generate((ChatMessage("user", parts),), SamplingParams(max_tokens=1)))
    (last,) = run(engine, call, num_images=1)
    assert last.error_code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
