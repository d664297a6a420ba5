"""The equivalence matrix: every way to compute an answer gives the same tokens, those of transformers.

Rows are the ways of `ways.py`: all of them for the first case of each kind, and for every case in `make families`.
Columns are the cases below: models, sampling, forms of attention, quantized weights. Each cell answers five prompts
with no, one or several images. `LlavaForConditionalGeneration` generates the expected tokens on tiny random weights
in float32: seeded ones by its logits and our sampler, quantized ones by the dequantized weights.

For other arithmetic, in bfloat16 or compared with unquantized weights, the logits of equal texts must stay within
a stated tolerance of transformers' in float32, by every way.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LogitsProcessor, LogitsProcessorList

from engines.core.constraint import Constraint
from engines.core.runner import TokenChoice
from engines.core.sequence import EngineRequest, Sequence
from engines.torch_backend import runner
from engines.torch_backend.layers.linear import METHODS
from engines.torch_backend.models.config import RopeScaling
from engines.torch_backend.models.llava import VLMConfig
from engines.torch_backend.ops.registry import CpuKernels, Ops
from engines.torch_backend.sampling import sample
from tests.cpu_levels import OUTERMOST, RUNNABLE, ops_of
from tests.engines.torch_backend.ways import Tokens, Way, run_batched, ways_of
from tests.factories_engine import SumMatcher
from tests.factories_torch import (
    LLAMA3_SCALING,
    PROMPTS,
    ModelPair,
    halve_pair,
    make_engine,
    make_model_pair,
    make_request,
    make_requests,
    make_vlm_config,
    quantize_pair,
    run_to_end,
)
from tests.long import IS_LONG

NUM_TOKENS = 16
MODELS: dict[str, VLMConfig] = {
    "grouped": make_vlm_config(),
    "plain": make_vlm_config(text={"num_kv_heads": 4}),
    "single": make_vlm_config(text={"num_kv_heads": 1, "head_dim": 16}),
    "full": make_vlm_config(vision_feature_select_strategy="full"),
    "last": make_vlm_config(vision_feature_layers=(-1,)),
    "first": make_vlm_config(vision_feature_layers=(1,)),
    "layers": make_vlm_config(
        vision_feature_layers=(-3, -1), vision_feature_select_strategy="full"
    ),
    "tied": make_vlm_config(text={"tie_word_embeddings": True}),
    "llama3": make_vlm_config(text={"rope_scaling": LLAMA3_SCALING}),
    "linear": make_vlm_config(text={"rope_scaling": RopeScaling("linear", 4.0)}),
    "biases": make_vlm_config(
        text={"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
        projector_bias=False,
        vision={"hidden_act": "gelu"},
    ),
    "other": make_vlm_config(
        text={"rope_theta": 500000.0, "rms_norm_eps": 1e-4, "hidden_act": "gelu_pytorch_tanh"}
    ),
    # wide enough for kernels of quantized layers
    "wide": make_vlm_config(text={"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}),
}
SAMPLINGS = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7},
    "truncated": {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 7},
    "penalised": {
        "temperature": 0.8,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.2,
        "logit_bias": {5: 3.0},
        "seed": 7,
    },
    "held": {"temperature": 1.0, "seed": 7, "is_held": True},
}


@dataclass(frozen=True)
class Case:
    """A column of the matrix."""

    model: str = "grouped"
    sampling: str = "greedy"
    attention: str = "flash"
    weights: str = "full"
    kernels: CpuKernels = "off"
    level: str = ""  #: of the kernels

    def __str__(self) -> str:
        usual = ("flash", "full", "off", "")
        return "-".join(value for value in vars(self).values() if value not in usual)


CASES = [
    *(Case(model=name) for name in MODELS if name != "wide"),
    *(Case(sampling=name) for name in SAMPLINGS if name != "greedy"),
    *(Case(attention="math", sampling=s) for s in ("greedy", "seeded")),
    *(Case("wide", s, weights=name) for name in METHODS for s in ("greedy", "seeded")),
    *(
        case
        for level in OUTERMOST
        for case in (
            Case("grouped", kernels="exact", level=level.name),
            Case("biases", "seeded", kernels="exact", level=level.name),
            *(
                Case("wide", weights=name, kernels="exact", level=level.name)
                for name in ("halves", *METHODS)
            ),
        )
    ),
]


def str_of_cell(value: object) -> str:
    """Returns the pytest ID of a way or a case."""
    return getattr(value, "__name__", None) or str(value)


LEVEL_NAMES = [level.name for level in OUTERMOST]


@contextmanager
def attention_form(name: str) -> Iterator[None]:
    """Uses torch's fused attention kernel, or its plain one for `math`."""
    with sdpa_kernel(SDPBackend.MATH if name == "math" else SDPBackend.FLASH_ATTENTION):
        yield


def native_ops(mode: CpuKernels, level: str = "") -> Ops | None:
    if mode == "off":
        return None
    return ops_of(mode, next(known for known in RUNNABLE if known.name == level))


@cache
def model_pair(
    name: str, weights: str = "full", kernels: CpuKernels = "off", level: str = ""
) -> ModelPair:
    pair = make_model_pair(MODELS[name], std=0.12 if name == "wide" else 0.3)
    if weights == "full":
        return pair
    if weights == "halves":
        return halve_pair(pair)
    return quantize_pair(pair, METHODS[weights], ops=native_ops(kernels, level))


def requests(pair: ModelPair, *, is_held: bool = False, **sampling: object) -> list[EngineRequest]:
    """Returns one request per prompt. `is_held`: with a grammar."""
    constraint = Constraint(SumMatcher(pair.config.text.vocab_size)) if is_held else None
    wanted = make_requests(pair, max_tokens=NUM_TOKENS, **sampling)
    return [replace(request, constraint=constraint) for request in wanted]


class OurSampler(LogitsProcessor):
    """Masks all tokens of transformers' logits except the one that our sampler samples from them."""

    def __init__(self, request: EngineRequest) -> None:
        self._request = request

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token_ids, prompt = input_ids[0].tolist(), self._request.prompt_token_ids
        sequence = Sequence("theirs", token_ids, len(prompt), self._request.sampling)
        if self._request.constraint is not None:
            sequence.constraint = self._request.constraint.begin()
        [choice] = sample(scores, [sequence])
        return torch.full_like(scores, -torch.inf).index_fill_(
            1, torch.tensor([choice.token_id]), 0
        )


def generate_with_transformers(pair: ModelPair, request: EngineRequest) -> list[int]:
    token_ids = torch.tensor([request.prompt_token_ids])
    pixels = [image.pixels for image in request.images]
    is_greedy = request.sampling.temperature == 0
    answer = pair.theirs.generate(
        input_ids=token_ids,
        attention_mask=torch.ones_like(token_ids),
        **({"pixel_values": torch.stack(pixels)} if pixels else {}),
        do_sample=False,
        logits_processor=LogitsProcessorList([] if is_greedy else [OurSampler(request)]),
        max_new_tokens=NUM_TOKENS,
        pad_token_id=0,
    )
    return answer[0, token_ids.shape[1] :].tolist()


@cache
def expected_tokens(model: str, sampling: str, weights: str) -> Tokens:
    pair = model_pair(model, weights)
    wanted = requests(pair, **SAMPLINGS[sampling])
    answers = {request.request_id: generate_with_transformers(pair, request) for request in wanted}
    # equal answers prove little if the model repeats one token or ignores its images
    assert all(len(set(tokens)) > 3 for tokens in answers.values())
    assert len({tuple(tokens) for tokens in answers.values()}) == len(answers)
    return answers


#: The first case of each kind: a model, a sampling with a seed, quantized weights with kernels.
FIRST = [
    Case(),
    Case(sampling="penalised"),
    *(Case("wide", weights="int8", kernels="exact", level=name) for name in LEVEL_NAMES[:1]),
]


def _ways(case: Case) -> list[Way]:
    """Returns only the most comprehensive way for cases of kernel levels and of other model shapes."""
    ways = ways_of(is_first=case in FIRST)
    is_other = case.level or case.model not in ("grouped", "wide")
    return ways if IS_LONG or case in FIRST or not is_other else ways[-1:]


CELLS = [(way, case) for case in CASES for way in _ways(case)]


@pytest.mark.parametrize(("way", "case"), CELLS, ids=str_of_cell)
def test_every_way_gives_the_tokens_of_transformers(way: Way, case: Case):
    kernels = native_ops(case.kernels, case.level)
    pair = model_pair(case.model, case.weights, case.kernels, case.level)
    start = partial(make_engine, pair, kernels)
    with attention_form(case.attention):
        tokens = way(start, requests(pair, **SAMPLINGS[case.sampling]))
    assert tokens == expected_tokens(case.model, case.sampling, case.weights)


TOLERANCES = {
    ("bfloat16", "off"): 0.03,
    ("float16", "off"): 0.004,
    ("int8", "off"): 0.045,
    ("int8", "fast"): 0.06,
    ("int4", "off"): 0.5,
    ("int4", "fast"): 0.5,
}


@cache
def pair_of_precision(precision: str, kernels: CpuKernels, level: str) -> ModelPair:
    """Returns our model in that precision, with transformers' in full."""
    pair = model_pair("wide")
    if precision.endswith("float16"):
        return replace(pair, ours=deepcopy(pair.ours).to(getattr(torch, precision)))
    scheme, form = METHODS[precision], native_ops(kernels, level)
    return quantize_pair(pair, scheme, same_weights=False, ops=form)


Place = tuple[str, int]  #: a request and its output position


@cache
def expected_logits() -> dict[Place, torch.Tensor]:
    """Returns the logits of transformers for its own answers, in float32."""
    pair = model_pair("wide")
    answers = expected_tokens("wide", "greedy", "full")
    logits: dict[Place, torch.Tensor] = {}
    for request in requests(pair):
        prompt, answer = request.prompt_token_ids, answers[request.request_id]
        pixels = [image.pixels for image in request.images]
        with torch.inference_mode():
            scores = pair.theirs(
                input_ids=torch.tensor([[*prompt, *answer]]),
                **({"pixel_values": torch.stack(pixels)} if pixels else {}),
            ).logits[0, len(prompt) - 1 : -1]
        logits |= {(request.request_id, place): row for place, row in enumerate(scores)}
    return logits


def dictate(answers: Tokens, seen: dict[Place, torch.Tensor]) -> Callable[..., list[TokenChoice]]:
    """Returns a sampler that records the logits and returns the given answers, so that all texts are equal."""

    def choose(
        logits: torch.Tensor, sequences: list[Sequence], positions: list[int]
    ) -> list[TokenChoice]:
        choices = []
        for row, sequence, place in zip(logits, sequences, positions, strict=True):
            seen[sequence.request_id, place] = row.float()
            choices.append(TokenChoice(answers[sequence.request_id][place]))
        return choices

    return choose


@pytest.mark.parametrize(
    ("way", "precision", "kernels", "level"),
    [
        (way, precision, kernels, level)
        for precision, kernels in TOLERANCES
        for level in ([""] if kernels == "off" else LEVEL_NAMES)
        for way in ways_of(is_first=False)
    ],
)
def test_logits_stay_within_the_tolerance_of_their_precision(
    way: Way, precision: str, kernels: CpuKernels, level: str, monkeypatch: pytest.MonkeyPatch
):
    pair = pair_of_precision(precision, kernels, level)
    seen: dict[Place, torch.Tensor] = {}
    answers = expected_tokens("wide", "greedy", "full")
    monkeypatch.setattr(runner, "sample", dictate(answers, seen))
    way(partial(make_engine, pair, native_ops(kernels, level)), requests(pair))
    expected = expected_logits()
    assert seen.keys() == expected.keys()
    errors = torch.stack(
        [(seen[place] - logits).norm() / logits.norm() for place, logits in expected.items()]
    )
    tolerance = TOLERANCES[precision, kernels]
    assert errors.mean() < tolerance
    assert errors.max() < 2 * tolerance


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("scheme", METHODS)
@pytest.mark.parametrize("way", [way for way in ways_of(is_first=False) if way is not run_batched])
def test_every_way_rounds_activations_equally(way: Way, scheme: str, level: str):
    """transformers does not round activations to 8 bits, so the ways are compared with each other."""
    kernels = native_ops("fast", level)
    pair = model_pair("wide", scheme, "fast", level)
    start = partial(make_engine, pair, kernels)
    assert way(start, requests(pair)) == run_batched(start, requests(pair))


def test_each_seed_and_output_position_has_its_own_noise():
    pair = model_pair("grouped")
    other = run_batched(partial(make_engine, pair), requests(pair, seed=8, temperature=1.0))
    seeded = expected_tokens("grouped", "seeded", "full")
    assert all(other[name] != tokens for name, tokens in seeded.items())
    # without separate noise, nearly flat scores would repeat one token
    request = make_request(pair.config, "hot", PROMPTS["text"], temperature=1e4, seed=3)
    assert len(set(run_to_end(make_engine(pair), [request])["hot"])) > 10
