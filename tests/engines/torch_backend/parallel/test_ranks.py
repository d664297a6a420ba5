"""An engine whose model several ranks share gives the tokens of one that has all of it."""

import os
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import pytest

from engines.base import EngineStartError
from engines.core.request import EngineRequest
from engines.text.processor import ChatProcessor
from engines.torch_backend.layers.linear import METHODS
from engines.torch_backend.loading.load import load_engine
from engines.torch_backend.loading.make_checkpoint import make_checkpoint
from engines.torch_backend.parallel.ranks import EXIT_BROKEN
from engines.torch_backend.settings import TorchSettings
from shared.protocol import SamplingParams
from tests.contract.test_model_family import ask
from tests.engines.torch_backend import ways
from tests.engines.torch_backend.parallel.threads import SharedModel, make_processor
from tests.factories_torch import run_to_end
from tests.long import IS_LONG

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
CASES = [(2, None), (4, "int8"), (2, "int4")]
if IS_LONG:
    CASES = [(size, scheme) for size in (2, 4) for scheme in (None, *METHODS)]
WAYS = [
    ways.run_beside_smooth_streams,
    ways.run_under_all_of_it,
    ways.run_overlapped,
    ways.run_with_drafts,
]


def make_requests(processor: ChatProcessor, **sampling: Any) -> list[EngineRequest]:
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


def find_ranks() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "engines.torch_backend.loading.rank" in child.cmdline()]


def test_ranks_that_are_processes_give_the_tokens_of_one_and_end_the_engine_with_them(
    llava: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = compute_alone(llava, None)
    exit_codes: SimpleQueue[int] = SimpleQueue()
    monkeypatch.setattr(os, "_exit", exit_codes.put)
    monkeypatch.setenv("VLM_REDIS_URL", "redis://:secret@127.0.0.1:1")
    monkeypatch.chdir(llava.parent)
    settings = TorchSettings(
        model=f"./{llava.name}", dtype="float32", tensor_parallel=2, num_kv_blocks=64,
        cpu_kernels="off",
    )  # fmt: skip
    engine: Any = load_engine(settings, None).engine
    requests = make_requests(make_processor(llava))
    try:
        assert run_to_end(engine, requests) == expected

        [rank] = find_ranks()
        assert not any("secret" in value for value in rank.environ().values())
        for process in (psutil.Process(), rank):
            listening = [
                c.laddr.ip for c in process.net_connections("inet") if c.status == "LISTEN"
            ]
            assert set(listening) <= {"127.0.0.1", "::1"}

        rank.kill()
        with pytest.raises(RuntimeError):
            run_to_end(engine, requests)
        assert exit_codes.get(timeout=60) == EXIT_BROKEN  # where nothing else ends the process
    finally:
        engine.close()


def test_what_ranks_cannot_share_is_told_and_leaves_no_process(tmp_path: Path) -> None:
    make_checkpoint("tiny", tmp_path / "t", changes={"text_config": {"intermediate_size": 97}})
    settings = TorchSettings(model=str(tmp_path / "t"), tensor_parallel=2, cpu_kernels="off")

    with pytest.raises(EngineStartError, match="2 devices cannot share 97 intermediate_size"):
        load_engine(settings, None)

    _, alive = psutil.wait_procs(find_ranks(), timeout=30)
    assert not alive
