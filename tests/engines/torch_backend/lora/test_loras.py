"""LoRA adapters in a batch: each sequence gets the tokens of transformers with its adapter merged into the weights."""

from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engines.core.engine import BatchingEngine
from engines.core.sequence import EngineRequest
from engines.torch_backend.layers.linear import METHODS
from tests.cpu_levels import RUNNABLE
from tests.engines.torch_backend.models import test_families
from tests.engines.torch_backend.models.family_table import FAMILIES, Family, text
from tests.engines.torch_backend.test_equivalence import (
    generate_with_transformers,
    model_pair,
    native_ops,
    requests,
    str_of_cell,
)
from tests.engines.torch_backend.ways import Tokens, Way, run_chunked, run_taken_over, ways_of
from tests.factories_adapters import LIMITS, linear_names, make_changes, merged, write_adapter
from tests.factories_torch import PROMPTS, ModelPair, make_engine, make_request, run_to_end
from tests.long import IS_LONG, few

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SOME = ("q_proj", "v_proj", "down_proj")
DECODER = "language_model.layers"
#: The adapter that each prompt requests.
WANTED = dict(zip(PROMPTS, ("a", "b", "b", "", "a"), strict=True))
Changes = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """The base weights of the adapters, and the kernel level that computes them."""

    weights: str = "full"
    level: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.weights, self.level)))

    @property
    def model(self) -> str:
        return "wide" if self.weights in METHODS else "grouped"

    @property
    def pair(self) -> ModelPair:
        return model_pair(self.model, self.weights, "exact" if self.level else "off", self.level)

    def start(self, directories: dict[str, Path], **changes: Any) -> BatchingEngine:
        ops = native_ops("exact", self.level) if self.level else None
        engine = make_engine(self.pair, ops, **changes)
        for directory in directories.values():
            engine.load_adapter(directory, LIMITS)
        return engine


LEVELS = ["", *(level.name for level in few(RUNNABLE, RUNNABLE[:1] + RUNNABLE[-1:]))]
CASES = [Case(weights, level) for weights in ("full", *METHODS) for level in LEVELS]


@cache
def changes_of(model: str) -> dict[str, Changes]:
    """Returns adapter `a` on all linear layers with one rank, and `b` on some of them with another rank."""
    theirs = model_pair(model).theirs
    return {
        "a": make_changes(theirs, linear_names(theirs, ALL, DECODER), rank=4, seed=1),
        "b": make_changes(theirs, linear_names(theirs, SOME, DECODER), rank=8, seed=2),
    }


@cache
def expected_tokens(model: str, weights: str) -> Tokens:
    pair = model_pair(model, weights)
    changed = {name: merged(pair.theirs, each) for name, each in changes_of(model).items()}
    pairs = {name: replace(pair, theirs=theirs) for name, theirs in changed.items()} | {"": pair}
    tokens = {}
    for request in requests(pair):
        name = request.request_id
        tokens[name] = generate_with_transformers(pairs[WANTED[name]], request)
        unchanged = generate_with_transformers(pair, request)
        assert (tokens[name] == unchanged) == (WANTED[name] == ""), "the adapter changes nothing"
    return tokens


def write_all(directory: Path, changes: dict[str, Changes]) -> dict[str, Path]:
    return {name: write_adapter(directory / name, each) for name, each in changes.items()}


def adapted(
    wanted: list[EngineRequest], engine: BatchingEngine, directories: dict[str, Path]
) -> list[EngineRequest]:
    adapters: dict[str, Any] = {
        name: engine.load_adapter(path, LIMITS) for name, path in directories.items()
    }
    return [
        replace(request, adapter=adapters.get(WANTED.get(request.request_id, "")))
        for request in wanted
    ]


def _ways(case: Case) -> list[Way]:
    """Returns fewer ways for the lower kernel levels, whose adapters are computed by the same code."""
    ways = ways_of(is_first=case == Case("int4", LEVELS[:2][-1]))
    return ways if IS_LONG or case.level in LEVELS[:2] else ways[-1:]


CELLS = [(way, case) for case in CASES for way in _ways(case)]


@pytest.mark.parametrize(("way", "case"), CELLS, ids=str_of_cell)
def test_every_way_applies_each_sequences_adapter(way: Way, case: Case, tmp_path: Path):
    directories = write_all(tmp_path, changes_of(case.model))
    start = partial(case.start, directories)
    wanted = adapted(requests(case.pair), start(), directories)
    assert way(start, wanted) == expected_tokens(case.model, case.weights)


def test_blocks_of_a_prompt_are_shared_only_within_an_adapter(tmp_path: Path):
    case = Case()
    directories = write_all(tmp_path, changes_of("grouped"))
    engine = case.start(directories)
    adapters = [None, *(engine.load_adapter(path, LIMITS) for path in directories.values())]
    request = make_request(case.pair.config, "r", PROMPTS["text"])

    def ask() -> list[list[int]]:
        wanted = [replace(request, adapter=adapter) for adapter in adapters]
        return [run_to_end(engine, [each])["r"] for each in wanted]

    first = ask()
    assert engine.stats().num_prefix_hit_tokens == 0
    assert ask() == first
    assert engine.stats().num_prefix_hit_tokens > 0
    assert len({tuple(tokens) for tokens in first}) == 3
    plain = run_to_end(case.start({}), [request])["r"]
    assert first[0] == plain  # steps without an adapter equal those of a model without adapters


def test_running_requests_keep_an_unloaded_adapter(tmp_path: Path):
    directories = write_all(tmp_path, changes_of("grouped"))
    engine = Case().start(directories)
    wanted = adapted(requests(Case().pair), engine, directories)
    digests = {request.adapter.digest for request in wanted if request.adapter}
    for request in wanted:
        engine.add(request)
    tokens: Tokens = {request.request_id: [] for request in wanted}
    while engine.has_work():
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
        for digest in digests:
            engine.unload_adapter(digest)
    assert tokens == expected_tokens("grouped", "full")
    assert "adapters" not in engine.stats().memory_bytes


# Models of transformers
#: The linear layers that adapters can change, for models with head norms, experts, states or images.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LONG_GENERIC = [text("Mistral", "Mistral", sliding_window=8), text("Helium", "Helium", head_dim=16)]
GENERIC: list[tuple[Family, tuple[str, ...]]] = [
    *((family, ALL) for family in LONG_GENERIC if IS_LONG),
    (text("Qwen3", "Qwen3", head_dim=16), ALL),
    (text("GLM", "Glm", head_dim=16), ALL),  # partial rotary; gate_up_proj
    (text("ERNIE 4.5", "Ernie4_5"), ALL),  # interleaved rotary
    (text("Phi-3", "Phi3", partial_rotary_factor=0.5, hidden_size=128), ALL),  # qkv_proj
    *(
        (family, ALL if family.name in ("Qwen2.5-VL",) else ATTENTION)
        for family in FAMILIES
        if family.name in few(("Qwen2.5-VL", "GPT-OSS", "Gemma 3"), ("GPT-OSS", "Qwen2.5-VL"))
    ),
]


@dataclass(frozen=True)
class AdaptedModel:
    """A model, its adapters, and the answers of transformers with each of them."""

    loaded: test_families.Loaded
    directories: dict[str, Path]
    asked: list[EngineRequest]
    expected: Tokens


@pytest.fixture(scope="module", params=GENERIC, ids=lambda value: value[0].name)
def adapted_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AdaptedModel:
    family, ends = request.param
    folder = tmp_path_factory.mktemp("adapted")
    loaded = test_families.load_family(family, folder / "model")
    theirs = test_families.load_reference(folder / "model", family.auto)
    # the name suffixes also match qkv_proj and gate_up_proj
    names = [n for n in linear_names(theirs, ends) if "visual" not in n and "vision" not in n]
    changes = {
        "a": make_changes(theirs, names, seed=1),
        "b": make_changes(theirs, names[::2], rank=8, seed=2),
    }
    models = {"": theirs} | {name: merged(theirs, each) for name, each in changes.items()}
    asked = [asked for asked in loaded.requests if not asked.images][:2]
    expected = {
        asked_of(each, name): test_families.generate(model, each.prompt_token_ids)
        for each in asked
        for name, model in models.items()
    }
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)
    return AdaptedModel(loaded, write_all(folder, changes), asked, expected)


def asked_of(request: EngineRequest, adapter: str) -> str:
    return f"{request.request_id} {adapter}"


@pytest.mark.parametrize(
    ("way", "level"),
    # an engine creates the kernels of one model, so another engine cannot take over here
    [
        (run_chunked, ""),
        (run_taken_over, ""),
        *((run_chunked, each.name) for each in RUNNABLE[-1:]),
    ],
)
def test_models_of_transformers_support_adapters(adapted_model: AdaptedModel, way: Way, level: str):
    ops = native_ops("exact", level) if level else None

    def start(**more: Any) -> BatchingEngine:
        engine = adapted_model.loaded.start(ops, **more)
        for name, directory in adapted_model.directories.items():
            adapters[name] = engine.load_adapter(directory, LIMITS)
        return engine

    adapters: dict[str, Any] = {"": None}
    start()
    wanted = [
        replace(request, request_id=asked_of(request, name), adapter=adapter)
        for request in adapted_model.asked
        for name, adapter in adapters.items()
    ]
    assert way(start, wanted) == adapted_model.expected


def test_a_layer_that_bypasses_its_adapter_fails_only_its_request(tmp_path: Path):
    """The request never gets an answer of the model without its adapter."""
    case = Case()
    engine = case.start({})
    path = write_adapter(tmp_path, changes_of("grouped")["a"])
    adapter = engine.load_adapter(path, LIMITS)
    attention = case.pair.ours.language_model.model.layers[1].self_attn
    out, weight = attention.out, attention.o_proj.weight
    attention.out = lambda x, add_to: add_to.add(x @ weight.t())
    asked = make_request(case.pair.config, "adapted", PROMPTS["text"])
    try:
        engine.add(replace(asked, adapter=adapter))
        engine.add(make_request(case.pair.config, "plain", PROMPTS["one"]))
        outputs = []
        while engine.has_work():
            outputs += engine.step()
    finally:
        attention.out = out
    [failed] = [output for output in outputs if output.error]
    assert failed.request_id == "adapted"
    assert "1.self_attn.o_proj" in str(failed.error)
    assert outputs[-1].request_id == "plain"
    assert outputs[-1].finish_reason
