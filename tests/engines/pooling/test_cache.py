"""The result cache: equal inputs of one tenant are computed once, within limits of memory and age, despite aborts."""

import random
from array import array

from engines.base import EngineCall, PreparedImage
from engines.mock_pooling.engine import MockPoolingModel, MockPoolingSettings, numbers_of
from engines.pooling.batch import ResultCache
from engines.pooling.engine import PoolingEngine
from shared.protocol import Embed, ImagePart, ImageRef, Priority, Rerank, TextPart


class CountingModel(MockPoolingModel):
    def __init__(self):
        super().__init__(MockPoolingSettings(mock={"step_s": 0, "s_per_token": 0}))
        self.num_computed = 0

    def compute(self, rows):
        self.num_computed += len(rows)
        super().compute(rows)


def make_engine(**settings):
    model = CountingModel()
    return PoolingEngine(model, MockPoolingSettings(**settings)), model


def add(engine, name, *texts, tenant="", priority=Priority.INTERACTIVE, **wishes):
    task = Embed(tuple(map(TextPart, texts)), **wishes)
    engine.add(engine.prepare(EngineCall(name, task, tenant, priority), []))


def finish(engine):
    outputs = {}
    while engine.has_work():
        for output in engine.step():
            assert output.request_id not in outputs
            outputs[output.request_id] = output
    return outputs


def vectors(*texts, **wishes):
    model = CountingModel()
    rows = model.rows(Embed(tuple(map(TextPart, texts)), **wishes), [])
    return b"".join(numbers_of(row).tobytes() for row in rows)


def test_equal_inputs_of_concurrent_calls_are_computed_once():
    engine, model = make_engine()
    add(engine, "a", "one", "two words", "one")
    add(engine, "b", "two words", "three")
    outputs = finish(engine)
    assert model.num_computed == 3
    assert outputs["a"].values == vectors("one", "two words", "one")
    assert outputs["b"].values == vectors("two words", "three")
    assert (outputs["a"].usage.num_prompt_tokens, outputs["a"].usage.num_cached_tokens) == (4, 1)
    assert (outputs["b"].usage.num_prompt_tokens, outputs["b"].usage.num_cached_tokens) == (3, 2)
    stats = engine.stats()
    assert (stats.num_result_queries, stats.num_result_hits) == (5, 2)


def test_cached_results_need_no_step_and_delay_no_other_call():
    engine, model = make_engine()
    add(engine, "a", "one", "two")
    finish(engine)
    add(engine, "b", "two", "one")
    [output] = engine.step()
    assert output.values == vectors("two", "one")
    assert model.num_computed == 2
    assert output.timings.prefill_s == 0
    assert engine.stats().memory_bytes["result_cache"] == engine.stats().result_cache_bytes > 0
    add(engine, "other", "new")
    ended = []
    for number in range(3):
        add(engine, f"again {number}", "one")
        ended += [output.request_id for output in engine.step()]
    assert set(ended[:2]) == {"again 0", "other"}

    engine, model = make_engine(result_cache_bytes=0)
    add(engine, "a", "one", "one")
    finish(engine)
    add(engine, "b", "one")
    assert finish(engine)["b"].values == vectors("one")
    assert model.num_computed == 3
    assert engine.stats().num_result_queries == engine.stats().result_cache_bytes == 0


def test_options_tenants_tasks_and_images_have_separate_results():
    engine, model = make_engine()
    add(engine, "a", "one")
    add(engine, "b", "one", tenant="t")
    add(engine, "c", "one", dimensions=16)
    add(engine, "d", "one", is_normalized=False)
    add(engine, "e", "one", prompt_name="query")
    engine.add(engine.prepare(EngineCall("f", Rerank(("one",), ("one",))), []))
    pixels = [PreparedImage(name, name.encode()) for name in ("h1", "h2", "h1")]
    ref = ImageRef("", 1, "image/png", 1, 1)
    task = Embed(tuple(map(ImagePart, range(3))), (ref,) * 3)
    engine.add(engine.prepare(EngineCall("g", task), pixels))
    outputs = finish(engine)
    assert model.num_computed == 6 + 2
    assert outputs["c"].values == vectors("one", dimensions=16)
    first, second, third = array("f", outputs["g"].values)[::64]
    assert first == third != second


def test_an_interactive_call_does_not_wait_for_an_equal_batch_call():
    engine, model = make_engine(max_batch_tokens=1)
    add(engine, "later", "one", "x", priority=Priority.BATCH)
    add(engine, "now", "y", "one")
    ended = []
    while engine.has_work():
        ended += [output.request_id for output in engine.step()]
    assert ended == ["now", "later"]
    assert model.num_computed == 3
    add(engine, "later", "z", priority=Priority.BATCH)
    add(engine, "now", "z")
    engine.abort("now")
    assert set(finish(engine)) == {"later"}


def test_an_engine_with_two_steps_of_work_reports_waiting_calls():
    engine, _ = make_engine(max_batch_tokens=2)
    add(engine, "a", "w w w")
    assert engine.stats().num_waiting == 0
    add(engine, "b", "v")
    assert engine.stats().num_waiting == 2


def test_bytes_and_age_are_bounded_and_the_least_recently_used_is_evicted():
    now = [0.0]
    cache = ResultCache(3000, 10.0, lambda: now[0])
    for name in (b"a", b"b", b"c"):
        cache.keep(name, b"x" * 700)
    assert cache.find(b"a")
    cache.keep(b"d", b"x" * 700)
    assert [cache.find(name) is not None for name in (b"a", b"b", b"c", b"d")] == [1, 0, 1, 1]
    assert cache.num_bytes <= 3000
    now[0] = 10.5
    assert cache.find(b"a") is None
    cache.keep(b"large", b"x" * 4000)
    assert cache.find(b"large") is None
    assert cache.num_bytes == 0


def test_any_order_of_calls_and_aborts_returns_the_right_vectors():
    for seed in range(60):
        chance = random.Random(seed)
        engine, _ = make_engine(
            max_batch_tokens=3, result_cache_bytes=chance.choice((1, 700, 9000))
        )
        wanted, outputs = {}, {}
        for number in range(30):
            texts = [f"w{chance.randrange(6)}" for _ in range(chance.randrange(1, 5))]
            tenant, name = chance.choice("st"), str(number)
            priority = chance.choice(list(Priority))
            add(engine, name, *texts, tenant=tenant, priority=priority)
            wanted[name] = vectors(*texts)
            if chance.random() < 0.3:
                gone = chance.choice([*wanted])
                engine.abort(gone)
                if gone not in outputs:
                    del wanted[gone]
            if engine.has_work() and chance.random() < 0.5:
                outputs |= {output.request_id: output.values for output in engine.step()}
        outputs |= {name: output.values for name, output in finish(engine).items()}
        assert outputs == wanted
        assert engine.stats().num_running == engine.stats().num_waiting == 0
