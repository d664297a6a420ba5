"""What every engine promises to the worker, whatever computes the tokens."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest

import engines.torch_backend  # noqa: F401 - before transformers
from engines.base import Engine, InvalidRequest, PromptTooLong
from engines.core.request import EngineRequest
from shared.protocol import FinishReason
from tests import factories_engine, factories_torch
from tests.factories_engine import Transcript, run_all

CONFIG = factories_torch.make_vlm_config()
WORDS = list(range(1, 15))

CreateEngine = Callable[..., Engine]
make_request = partial(factories_torch.make_request, CONFIG)


@pytest.fixture(scope="module")
def model_pair() -> factories_torch.ModelPair:
    return factories_torch.make_model_pair(CONFIG)


@pytest.fixture(params=["mock", "torch"])
def create_engine(
    request: pytest.FixtureRequest, model_pair: factories_torch.ModelPair
) -> Iterator[CreateEngine]:
    """Makes engines of one kind, and closes them."""
    engines: list[Engine] = []

    def create(**config: object) -> Engine:
        if request.param == "torch":
            engine: Engine = factories_torch.make_engine(model_pair, **config)
        else:
            engine = factories_engine.make_engine(num_output_tokens=100, **config)
        engines.append(engine)
        return engine

    yield create
    for engine in engines:
        engine.close()


def answer(engine: Engine, request: EngineRequest) -> Transcript:
    return run_all(engine, request)[request.request_id]


def test_an_answer_is_complete_and_ordered(create_engine: CreateEngine):
    transcript = answer(create_engine(), make_request("r", [WORDS, 1], max_tokens=5))
    assert len(transcript.token_ids) == 5
    assert transcript.finish_reason is FinishReason.LENGTH
    assert transcript.first_usage is not None
    assert transcript.first_usage.num_image_tokens == CONFIG.tokens_per_image
    assert transcript.last is not None
    assert transcript.last.usage is not None
    assert transcript.last.usage.num_output_tokens == 5
    assert transcript.last.timings is not None
    assert transcript.last.timings.decode_s > 0


def test_answers_in_company_equal_answers_alone(create_engine: CreateEngine):
    requests = [
        make_request("text", [WORDS], max_tokens=6),
        make_request("image", [WORDS, 1, [3]], max_tokens=9),
        make_request("images", [[2], 1, 2, WORDS], max_tokens=4),
        make_request("seeded", [WORDS], max_tokens=6, temperature=1.0, seed=3),
    ]
    together = run_all(create_engine(max_num_batched_tokens=16, num_kv_blocks=24), *requests)
    for request in requests:
        alone = answer(create_engine(enable_prefix_cache=False), request)
        assert together[request.request_id].token_ids == alone.token_ids
        assert together[request.request_id].text == alone.text


def test_the_image_counts(create_engine: CreateEngine):
    engine = create_engine(enable_prefix_cache=False)
    first = answer(engine, make_request("a", [WORDS, 1, [3, 4]]))
    assert answer(engine, make_request("b", [WORDS, 2, [3, 4]])).token_ids != first.token_ids
    assert answer(engine, make_request("c", [WORDS, 1, [3, 4]])).token_ids == first.token_ids
    stats = engine.stats()
    assert (stats.num_encoder_queries, stats.num_encoder_hits) == (3, 1)


def test_another_engine_continues_where_one_was_lost(create_engine: CreateEngine):
    request = partial(make_request, "r", [WORDS, 1], max_tokens=8, temperature=0.7, seed=1)
    whole = answer(create_engine(), request())
    rest = answer(create_engine(), request(output_token_ids=tuple(whole.token_ids[:3])))
    assert rest.token_ids == whole.token_ids[3:]
    assert rest.finish_reason is whole.finish_reason


def test_stop_strings_end_an_answer(create_engine: CreateEngine):
    full = answer(create_engine(), make_request("r", [WORDS])).text
    stop = full[len(full) // 2 :][:4]
    stopped = answer(create_engine(), make_request("r", [WORDS], stop=(stop,)))
    assert stopped.text == full[: full.index(stop)]
    assert stopped.finish_reason is FinishReason.STOP


def test_logprobs_are_ranked(create_engine: CreateEngine):
    transcript = Transcript()
    engine = create_engine()
    engine.add(make_request("r", [WORDS], max_tokens=1, num_logprobs=3))
    (output,) = engine.step()
    transcript.append(output)
    (logprob,) = output.logprobs
    values = [rival.logprob for rival in logprob.top]
    assert len(values) == 3
    assert values == sorted(values, reverse=True)
    assert logprob.chosen == logprob.top[0]
    assert max(values) <= 0


def test_abort_is_silent_and_idempotent(create_engine: CreateEngine):
    engine = create_engine()
    engine.abort("unknown")
    for name in "ab":
        engine.add(make_request(name, [WORDS, 1]))
    engine.step()
    engine.abort("a")
    engine.abort("a")
    assert {output.request_id for output in engine.step()} == {"b"}
    engine.abort("b")
    assert not engine.has_work()
    assert engine.stats().kv_usage_ratio == 0


def test_what_does_not_fit_is_refused_and_nothing_is_queued(create_engine: CreateEngine):
    engine = create_engine(num_kv_blocks=4)
    with pytest.raises(PromptTooLong, match=r"16 tokens.*16 tokens"):
        engine.add(make_request("long", [[5] * 16]))
    with pytest.raises(InvalidRequest, match="logit_bias"):
        engine.add(make_request("bias", [[5]], logit_bias={10**6: 1.0}))
    assert not engine.has_work()


def test_an_id_is_used_once_at_a_time(create_engine: CreateEngine):
    engine = create_engine()
    engine.add(make_request("r", [WORDS]))
    with pytest.raises(InvalidRequest):
        engine.add(make_request("r", [WORDS]))


def test_steps_and_tokens_are_counted(create_engine: CreateEngine):
    engine = create_engine()
    answer(engine, make_request("r", [WORDS], max_tokens=4))
    stats = engine.stats()
    assert stats.num_steps == 4
    assert (stats.num_prompt_tokens, stats.num_output_tokens) == (len(WORDS), 4)
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert {"weights", "kv_cache"} <= stats.memory_bytes.keys()


def test_close_may_be_repeated(create_engine: CreateEngine):
    engine = create_engine()
    engine.add(make_request("r", [WORDS]))
    engine.step()
    engine.close()
    engine.close()
