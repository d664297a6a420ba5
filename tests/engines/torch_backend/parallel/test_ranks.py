"""An engine whose model several ranks share gives the tokens of one that has all of it."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engines.core.request import EngineRequest
from engines.torch_backend.layers.quantization import SCHEMES
from engines.torch_backend.loading.load import load_engine
from engines.torch_backend.loading.make_checkpoint import make_checkpoint
from engines.torch_backend.multimodal.processor import TorchProcessor
from engines.torch_backend.settings import TorchSettings
from shared.protocol import SamplingParams
from tests.contract.test_model_family import ask
from tests.engines.torch_backend import ways
from tests.engines.torch_backend.parallel.threads import SharedModel, make_processor
from tests.factories_torch import run_to_end

WIDE = {
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
QUESTIONS: dict[str, list[str | tuple[int, int, int]]] = {
    "text": ["Say a word."],
    "image": [(28, 28, 1), "What is it?"],
    "more": ["Look: ", (60, 20, 2), " and say."],
    "two": [(28, 28, 1), "Or ", (64, 64, 3), "?"],
    "again": ["Say a word, and another one."],
    "last": ["Look: ", (60, 20, 2), " and say it again."],
}
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 7}
ALL = bool(os.environ.get("FAMILIES_ALL"))
CASES = [(2, None), (4, "int8"), (2, "int4")]
if ALL:
    CASES = [(size, scheme) for size in (2, 4) for scheme in (None, *SCHEMES)]
WAYS = [ways.run_beside_smooth_streams, ways.run_under_all_of_it, ways.run_overlapped]


def make_requests(processor: TorchProcessor, **sampling: Any) -> list[EngineRequest]:
    params = SamplingParams(
        **{"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, **sampling}
    )
    prompts = {name: ask(processor, question) for name, question in QUESTIONS.items()}
    return [
        EngineRequest(name, prompt.token_ids, params, prompt.images, positions=prompt.positions)
        for name, prompt in prompts.items()
    ]


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llava") / "checkpoint"
    make_checkpoint("tiny", directory, changes={"text_config": WIDE})
    return directory


@cache
def compute_alone(directory: Path, scheme: str | None) -> ways.Tokens:
    whole = SharedModel(directory, 1, scheme)
    with whole.running() as start:
        return run_to_end(start(), make_requests(whole.processor))


@pytest.mark.parametrize(("size", "scheme"), CASES)
def test_ranks_give_the_tokens_of_one(llava: Path, size: int, scheme: str | None) -> None:
    expected = compute_alone(llava, scheme)
    shared = SharedModel(llava, size, scheme)
    with shared.running() as start:
        for way in WAYS:
            assert way(start, make_requests(shared.processor)) == expected, way.__name__


def test_ranks_that_are_processes_give_the_tokens_of_one(llava: Path) -> None:
    expected = compute_alone(llava, None)
    settings = TorchSettings(
        model=str(llava), dtype="float32", tensor_parallel=2, num_kv_blocks=64, cpu_kernels="off"
    )
    engine: Any = load_engine(settings, None).engine
    try:
        assert run_to_end(engine, make_requests(make_processor(llava))) == expected
    finally:
        engine.close()
