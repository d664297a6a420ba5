"""The same tokens come out however they are computed, and they are those of transformers.

Greedy answers of random tiny checkpoints in float32 are compared with `LlavaForConditionalGeneration`'s own
generation; seeded ones, which transformers has no like of, with the answer that a request gets alone.
"""

from functools import cache

import pytest
import torch

from engines.base import EngineRequest
from engines.torch_backend.models.config import RopeScaling, VLMConfig
from tests.factories_torch import (
    LLAMA3_SCALING,
    ModelPair,
    make_engine,
    make_model_pair,
    make_request,
    make_vlm_config,
    run_to_end,
)

NUM_TOKENS = 20
PROMPTS: dict[str, list[list[int] | int]] = {
    "text": [list(range(3, 17))],
    "one": [[5, 6, 7], 1, [8, 9, 10, 11]],
    "two": [[5, 6, 7], 1, [8, 9], 2, [12, 13]],
    "again": [[20, 21], 2, [22], 2, [23, 24, 25]],
    "neighbours": [3, 1, [30, 31, 32]],
}
CONFIGS: dict[str, VLMConfig] = {
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
}


@cache
def model_pair(name: str) -> ModelPair:
    return make_model_pair(CONFIGS[name])


def requests(pair: ModelPair, **sampling: object) -> list[EngineRequest]:
    return [
        make_request(pair.config, name, parts, max_tokens=NUM_TOKENS, **sampling)
        for name, parts in PROMPTS.items()
    ]


@cache
def expected_tokens(name: str) -> dict[str, list[int]]:
    """What transformers generates, greedily."""
    pair = model_pair(name)
    expected = {}
    for request in requests(pair):
        token_ids = torch.tensor([request.prompt_token_ids])
        pixels = [image.pixels for image in request.images]
        pictures = {"pixel_values": torch.stack(pixels)} if pixels else {}
        answer = pair.theirs.generate(
            input_ids=token_ids,
            attention_mask=torch.ones_like(token_ids),
            **pictures,
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            pad_token_id=0,
        )
        expected[request.request_id] = answer[0, token_ids.shape[1] :].tolist()
    return expected


def run_alone(pair: ModelPair, wanted: list[EngineRequest]) -> dict[str, list[int]]:
    tokens = {}
    for request in wanted:
        tokens |= run_to_end(make_engine(pair), [request])
    return tokens


def run_batched(pair: ModelPair, wanted: list[EngineRequest]) -> dict[str, list[int]]:
    return run_to_end(make_engine(pair), wanted)


def run_one_after_another_has_begun(
    pair: ModelPair, wanted: list[EngineRequest]
) -> dict[str, list[int]]:
    """Prefill of one beside decode of others."""
    engine = make_engine(pair)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in wanted}
    waiting = list(wanted)
    while waiting or engine.has_work():
        if waiting:
            engine.add(waiting.pop(0))
        for output in [*engine.step(), *engine.step()]:
            tokens[output.request_id] += output.token_ids
    return tokens


def run_chunked(pair: ModelPair, wanted: list[EngineRequest]) -> dict[str, list[int]]:
    return run_to_end(make_engine(pair, max_num_batched_tokens=5), wanted)


def run_with_one_picture_a_step(
    pair: ModelPair, wanted: list[EngineRequest]
) -> dict[str, list[int]]:
    return run_to_end(make_engine(pair, max_images_per_step=1, encoder_cache_bytes=0), wanted)


def run_preempted(pair: ModelPair, wanted: list[EngineRequest]) -> dict[str, list[int]]:
    engine = make_engine(pair, num_kv_blocks=20, enable_prefix_cache=False)
    tokens = run_to_end(engine, wanted)
    assert engine.stats().num_preemptions > 0
    return tokens


def run_prefix_cached(pair: ModelPair, wanted: list[EngineRequest]) -> dict[str, list[int]]:
    engine = make_engine(pair)
    run_to_end(engine, wanted)
    tokens = run_to_end(engine, wanted)
    assert engine.stats().num_prefix_hit_tokens > 0
    return tokens


def run_encoder_cached(pair: ModelPair, wanted: list[EngineRequest]) -> dict[str, list[int]]:
    engine = make_engine(pair, enable_prefix_cache=False)
    run_to_end(engine, wanted)
    before = engine.stats().num_encoder_hits
    tokens = run_to_end(engine, wanted)
    num_pictures = sum(len(request.images) for request in wanted)
    assert engine.stats().num_encoder_hits - before >= num_pictures - 1
    return tokens


def run_resumed(pair: ModelPair, wanted: list[EngineRequest]) -> dict[str, list[int]]:
    """Another worker takes over after a few tokens, a different number for each."""
    first = run_batched(pair, wanted)
    resumed = [
        EngineRequest(
            request.request_id,
            request.prompt_token_ids,
            request.sampling,
            request.images,
            output_token_ids=tuple(first[request.request_id][: 3 + 4 * place]),
        )
        for place, request in enumerate(wanted)
    ]
    return run_to_end(make_engine(pair), resumed)


WAYS = [
    run_alone,
    run_batched,
    run_one_after_another_has_begun,
    run_chunked,
    run_with_one_picture_a_step,
    run_preempted,
    run_prefix_cached,
    run_encoder_cached,
    run_resumed,
]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_equal_those_of_transformers(way, name):
    pair = model_pair(name)
    assert way(pair, requests(pair)) == expected_tokens(name)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_compared_answers_say_something(name):
    """Equal answers prove little if the model repeats one token, or does not see its pictures."""
    answers = expected_tokens(name)
    assert all(len(set(tokens)) > 3 for tokens in answers.values())
    assert len({tuple(tokens) for tokens in answers.values()}) == len(answers)


SAMPLINGS = {
    "plain": {"temperature": 1.0},
    "limited": {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalised": {
        "temperature": 0.8,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.2,
        "logit_bias": {5: 3.0},
    },
}


@cache
def sampled_alone(sampling: str) -> dict[str, list[int]]:
    pair = model_pair("grouped")
    return run_alone(pair, requests(pair, seed=7, **SAMPLINGS[sampling]))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("way", WAYS[1:])
def test_seeded_tokens_are_the_same_in_any_company(way, sampling):
    pair = model_pair("grouped")
    assert way(pair, requests(pair, seed=7, **SAMPLINGS[sampling])) == sampled_alone(sampling)


def test_another_seed_gives_another_answer():
    pair = model_pair("grouped")
    other = run_batched(pair, requests(pair, seed=8, temperature=1.0))
    assert all(other[name] != tokens for name, tokens in sampled_alone("plain").items())


def test_each_output_position_has_noise_of_its_own():
    """With nearly flat scores an answer would repeat one token for ever if it had not."""
    pair = model_pair("grouped")
    request = make_request(pair.config, "hot", PROMPTS["text"], temperature=1e4, seed=3)
    assert len(set(run_to_end(make_engine(pair), [request])["hot"])) > 10
