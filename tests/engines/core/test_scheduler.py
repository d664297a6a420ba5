from dataclasses import replace
from typing import Any

import pytest

from engines.core.budget import PrefillLimit
from engines.core.sequence import MAX_OVERTAKES
from shared.protocol import FinishReason, Priority, SamplingParams
from tests.factories_engine import (
    EOS_ID,
    make_image,
    make_scheduler,
    make_sequence,
    run_step,
    shares,
)


def make_batch(num_tokens: int = 4, request_id: str = "batch", **fields):
    return make_sequence(num_tokens, request_id, priority=Priority.BATCH, **fields)


def other(num_tokens: int, request_id: str, token_id: int = 9, **fields):
    """Returns a sequence that shares no prefix with those of `make_sequence`."""
    return make_sequence(token_ids=[token_id] * num_tokens, request_id=request_id, **fields)


def cat_at(offset: int, num_tokens: int, **fields):
    return replace(make_image(offset, num_tokens, "cat"), **fields)


def dog_at(offset: int, num_tokens: int):
    return make_image(offset, num_tokens, "dog")


NO_CACHE = {"enable_prefix_cache": False}
ONE_IMAGE = {"max_images_per_step": 1}
#: By name: settings, then events in order. A sequence is added; a dict has the new tokens of the next step by sequence;
#: a number runs that many steps; a list has the waiting sequences.
COURSES = {
    "a prompt is computed in chunks of the budget": (
        {"max_num_batched_tokens": 8}, make_sequence(20, "a"), {"a": 8}, {"a": 8}, {"a": 4}, {"a": 1}
    ),
    "running sequences are scheduled before waiting ones in one step": (
        {"max_num_batched_tokens": 8}, make_sequence(8, "a"), {"a": 8}, other(20, "b"), {"a": 1, "b": 7}, {"a": 1, "b": 7}
    ),
    "no more sequences run than allowed": (
        {"max_num_seqs": 2}, *(make_sequence(4, name, max_output_tokens=2) for name in "abc"),
        {"a": 4, "b": 4}, {"a": 1, "b": 1}, {"c": 4},
    ),
    "a prefix that this step computes is not computed twice": (
        {}, *(make_sequence(11, name) for name in "abc"), {"a": 11}, {"a": 1, "b": 3, "c": 3}
    ),
    "a chunk of a running prefill is not computed twice": (
        {"max_num_batched_tokens": 16, **ONE_IMAGE},
        *(make_sequence(13, name, images=(cat_at(0, 4), dog_at(8, 4))) for name in "ab"),
        {"a": 8}, {"a": 5}, {"a": 1, "b": 1},
    ),
    "interactive sequences overtake waiting batch sequences": (
        {"max_num_seqs": 1, **NO_CACHE}, make_sequence(4, "first"), make_batch(), make_sequence(4, "second"),
        ["first", "second", "batch"],
    ),
    "the youngest batch sequence is preempted and waits first in its class": (
        {"max_num_seqs": 2}, *(make_batch(4, name) for name in ("old", "young", "waiting")), {"old": 4, "young": 4},
        other(4, "interactive"), {"old": 1, "interactive": 4}, ["young", "waiting"],
    ),
    "batch sequences are preempted for blocks of an interactive one": (
        {"num_blocks": 4, **NO_CACHE}, make_batch(12), {"batch": 12}, make_sequence(8, "interactive"), {"interactive": 8},
        ["batch"],
    ),
    "nothing is preempted for a sequence that would not fit anyway": (
        {"num_blocks": 8, **NO_CACHE}, make_sequence(16, "interactive"), make_batch(), {"interactive": 16, "batch": 4},
        make_sequence(16, "large"), {"interactive": 1, "batch": 1},
    ),
    "a new sequence waits until all its tokens fit": (
        {"num_blocks": 8, "max_num_batched_tokens": 4}, make_sequence(4, "a"), {"a": 4}, other(28, "b"), {"a": 1}
    ),
    "a bidirectional prompt is computed in one step beyond the budget": (
        {"max_num_batched_tokens": 8, "binds_prompts": True, **ONE_IMAGE},
        make_sequence(20, "a", images=(cat_at(2, 4), dog_at(10, 4))), other(12, "b"),
        {"a": 20}, {"a": 1, "b": 12}, {"a": 1, "b": 1},
    ),
    # the first run of slots ends at token 5, the second at 11
    "a chunk has all slots of a bidirectional image beyond the budget": (
        {"max_num_batched_tokens": 4},
        make_sequence(14, "a", images=(cat_at(2, 9, is_whole=True, slots=((1, 3), (4, 9))),)), other(4, "b"),
        {"a": 5}, {"a": 6}, {"a": 3, "b": 1},
    ),
    "images of a step are limited and a chunk ends before the next": (
        ONE_IMAGE, make_sequence(14, "a", images=(cat_at(2, 4), dog_at(8, 4))), {"a": 8}, {"a": 6}
    ),
    "an image is counted once for all sequences of a step": (
        ONE_IMAGE, make_sequence(10, "a", images=(cat_at(2, 4),)), make_sequence(12, "b", images=(cat_at(4, 4),)),
        other(12, "c", images=(dog_at(4, 4),)), {"a": 10, "b": 12, "c": 4}, {"a": 1, "b": 1, "c": 8},
    ),
    "a chunk that ends inside an image continues without encoding it again": (
        {"max_num_batched_tokens": 16, **ONE_IMAGE}, make_sequence(20, "a", images=(cat_at(2, 16),)),
        make_sequence(20, "b", images=(dog_at(8, 8),)), {"a": 16}, {"a": 4, "b": 12},
    ),
    "an image reached in its middle by a prefix hit needs encoding": (
        ONE_IMAGE, make_sequence(20, "a", images=(cat_at(2, 12),)), {"a": 20}, other(8, "b", 3, images=(dog_at(0, 4),)),
        make_sequence(request_id="c", token_ids=[*range(1, 13), 14], images=(cat_at(2, 12),)), {"a": 1, "b": 8},
    ),
    "no more sequences are preempted than can be started": (
        {"max_num_seqs": 4, "max_num_batched_tokens": 8}, *(make_batch(4, name) for name in "abcd"),
        {"a": 4, "b": 4}, {"a": 1, "b": 1, "c": 4, "d": 2}, *(other(8, f"n{number}", 9 + number) for number in range(4)),
        {"a": 1, "b": 1, "c": 1, "n0": 5}, ["n1", "n2", "n3", "d"],
    ),
    "preempted sequences wait before all others in their old order": (
        {"num_blocks": 6, **NO_CACHE}, *(make_sequence(4, name) for name in "abc"), 1, make_sequence(4, "d"), 9,
        ["b", "c", "d"],
    ),
    "batch sequences are preempted before a younger interactive sequence": (
        {"num_blocks": 6, **NO_CACHE}, make_sequence(4, "old"), make_batch(4), make_sequence(4, "young"), 5,
        {"old": 1, "young": 1}, ["batch"],
    ),
    "a batch stream is not overtaken and yields its slot to any number": (
        {"max_num_seqs": 3}, make_batch(4), 1,
        *(each for n in range(MAX_OVERTAKES + 2)
          for each in (other(4, f"n{n}", n, max_output_tokens=1), {"batch": 1, f"n{n}": 4})),
        *(other(4, f"late-{n}", 99 + n) for n in range(3)), 2, ["batch"],
    ),
    "prompts are limited beside streams and not alone": (
        {"prefill_limit": PrefillLimit(6)}, make_sequence(20, "a"), {"a": 20}, other(20, "b"), other(20, "c", 8),
        *({"a": 1, "b": 6} for _ in range(3)), {"a": 1, "b": 2, "c": 4}, {"a": 1, "b": 1, "c": 6},
    ),
    "prompts are not limited beside batch streams": (
        {"prefill_limit": PrefillLimit(6)}, make_batch(4), 1, other(20, "interactive"), {"batch": 1, "interactive": 20},
    ),
    "prompts get more tokens beside more streams": (
        {"prefill_limit": PrefillLimit(4, growth=0.5)}, make_sequence(4, "a"), make_sequence(4, "b"), 1, other(20, "c"),
        {"a": 1, "b": 1, "c": 6},
    ),
}  # fmt: skip


@pytest.mark.parametrize("course", COURSES)
def test_steps_have_the_expected_shares(course: str):
    config, *events = COURSES[course]
    scheduler = make_scheduler(**config)
    for event in events:
        if isinstance(event, dict):
            assert shares(run_step(scheduler)) == event
        elif isinstance(event, list):
            assert list(scheduler.waiting) == event
        elif isinstance(event, int):
            for _ in range(event):
                run_step(scheduler)
        else:
            scheduler.add(event)


@pytest.mark.parametrize(
    ("config", "num_tokens", "has_image", "least"),
    [
        pytest.param({"max_num_seqs": 1}, 4, False, MAX_OVERTAKES, id="waiting for a slot"),
        pytest.param({**NO_CACHE, **ONE_IMAGE}, 12, True, 1, id="begun, before its image"),
    ],
)
def test_overtakes_of_batch_requests_are_limited(config, num_tokens, has_image, least):
    """New requests arrive in every step."""

    def fields(name: str) -> dict[str, Any]:
        images = (make_image(4, 4, name),) if has_image else ()
        return {"request_id": name, "images": images, "max_output_tokens": 1}

    scheduler = make_scheduler(**config)
    batch = make_batch(num_tokens, **fields("batch"))
    scheduler.add(make_sequence(num_tokens, **fields("n")))
    scheduler.add(batch)
    for number in range(MAX_OVERTAKES + 10):
        scheduler.add(make_sequence(num_tokens, **fields(f"n{number}")))
        run_step(scheduler)
        if batch.finish_reason is not None:
            break
        assert batch.num_computed_tokens > 0 or not has_image
    assert batch.finish_reason is not None
    assert number >= least


def test_a_batch_request_overtaken_too_often_precedes_others():
    scheduler = make_scheduler()
    first, second = make_batch(4, "first"), make_batch(4, "second")
    for sequence in (first, second):
        scheduler.add(sequence)
    run_step(scheduler)
    second.token_ids += [1, 2]  # further prompt tokens to compute
    second.num_overtakes = MAX_OVERTAKES - 1
    scheduler.add(other(4, "new"))
    run_step(scheduler)
    assert list(scheduler.running) == ["new", "second", "first"]


def test_a_repeated_prefill_after_preemption_is_not_counted_as_a_hit():
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(other(4, "old"))
    scheduler.add(make_sequence(7, "young"))
    run_step(scheduler)
    while not scheduler.num_preemptions:
        run_step(scheduler)
    scheduler.finish(scheduler.running["old"], FinishReason.ABORT)
    assert shares(run_step(scheduler))["young"] < 7
    assert scheduler.running["young"].num_cached_tokens == 0
    assert (scheduler.blocks.num_query_tokens, scheduler.blocks.num_hit_tokens) == (11, 0)


@pytest.mark.parametrize(
    ("token_id", "ignore_eos", "reason"),
    [
        (7, False, FinishReason.LENGTH),
        (EOS_ID, False, FinishReason.STOP),
        (EOS_ID, True, FinishReason.LENGTH),
    ],
)
def test_a_sequence_ends_by_its_end_token_or_its_length(token_id: int, ignore_eos: bool, reason):
    scheduler = make_scheduler()
    sequence = make_sequence(token_ids=[1, EOS_ID, 2], max_output_tokens=2)
    sequence.sampling = SamplingParams(ignore_eos=ignore_eos)
    scheduler.add(sequence)
    run_step(scheduler)
    assert scheduler.has_work()  # an end token in the prompt is ignored
    run_step(scheduler, token_id)
    assert sequence.finish_reason is reason
    assert not sequence.is_running
    assert scheduler.blocks.num_free_blocks == 64
    assert not scheduler.has_work()
