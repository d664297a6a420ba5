from dataclasses import replace

import pytest

from engines.core.sequence import MAX_OVERTAKES, SequenceStatus
from shared.protocol import FinishReason, Priority, SamplingParams
from tests.factories_engine import (
    EOS_ID,
    make_image,
    make_scheduler,
    make_sequence,
    run_step,
    shares,
)


def test_a_prompt_is_computed_in_chunks_of_the_budget():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_sequence(20, "a"))
    assert [shares(run_step(scheduler))["a"] for _ in range(4)] == [8, 8, 4, 1]


def test_running_sequences_come_before_waiting_ones_and_share_a_step_with_them():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_sequence(8, "a"))
    run_step(scheduler)
    scheduler.add(make_sequence(token_ids=[9] * 20, request_id="b"))
    assert shares(run_step(scheduler)) == {"a": 1, "b": 7}
    assert shares(run_step(scheduler)) == {"a": 1, "b": 7}


def test_no_more_sequences_run_than_allowed():
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_sequence(4, name, max_output_tokens=2))
    assert shares(run_step(scheduler)) == {"a": 4, "b": 4}
    run_step(scheduler)
    assert shares(run_step(scheduler)) == {"c": 4}


def test_a_prefix_that_this_step_computes_is_not_computed_twice():
    scheduler = make_scheduler()
    for name in "abc":
        scheduler.add(make_sequence(11, name))
    assert shares(run_step(scheduler)) == {"a": 11}
    assert shares(run_step(scheduler)) == {"a": 1, "b": 3, "c": 3}


def test_a_chunk_of_a_running_prefill_is_not_computed_twice():
    scheduler = make_scheduler(max_num_batched_tokens=16, max_images_per_step=1)
    images = (make_image(0, 4, "cat"), make_image(8, 4, "dog"))
    scheduler.add(make_sequence(13, "a", images=images))
    scheduler.add(make_sequence(13, "b", images=images))
    assert shares(run_step(scheduler)) == {"a": 8}
    assert shares(run_step(scheduler)) == {"a": 5}
    assert shares(run_step(scheduler)) == {"a": 1, "b": 1}


def test_without_prefix_cache_equal_prompts_share_a_step():
    scheduler = make_scheduler(enable_prefix_cache=False)
    for name in "ab":
        scheduler.add(make_sequence(11, name))
    assert shares(run_step(scheduler)) == {"a": 11, "b": 11}


def test_the_youngest_is_preempted_and_keeps_its_tokens():
    scheduler = make_scheduler(num_blocks=4, enable_prefix_cache=False)
    old, young = make_sequence(7, "old"), make_sequence(4, "young")
    scheduler.add(old)
    scheduler.add(young)
    run_step(scheduler)
    for _ in range(5):
        run_step(scheduler)
    assert young.status is SequenceStatus.WAITING
    assert young.num_computed_tokens == 0
    assert young.num_output_tokens > 0
    assert young.block_ids == []
    assert scheduler.num_preemptions == young.num_preemptions == 1
    scheduler.finish(old, FinishReason.ABORT)
    assert shares(scheduler.schedule()) == {"young": young.num_tokens}


def test_the_preempted_wait_before_all_others_in_their_old_order():
    scheduler = make_scheduler(num_blocks=6, enable_prefix_cache=False)
    for name in "abc":
        scheduler.add(make_sequence(4, name))
    run_step(scheduler)
    scheduler.add(make_sequence(4, "d"))
    while len(scheduler.running) > 1:
        run_step(scheduler)
    assert list(scheduler.waiting) == ["b", "c", "d"]


def test_nobody_is_admitted_in_a_step_that_preempts():
    scheduler = make_scheduler(num_blocks=4, enable_prefix_cache=False)
    scheduler.add(make_sequence(8, "a"))
    scheduler.add(make_sequence(3, "b"))
    run_step(scheduler)
    scheduler.add(make_sequence(1, "c"))
    while not scheduler.num_preemptions:
        batch = run_step(scheduler)
    assert shares(batch) == {"a": 1}


def test_a_long_running_sequence_alone_gets_the_whole_pool():
    scheduler = make_scheduler(num_blocks=4)
    names = ["a", "b", "c"]
    for name in names:
        scheduler.add(make_sequence(4, name, max_output_tokens=12))
    finished: list[str] = []
    while scheduler.has_work():
        before = {*scheduler.running, *scheduler.waiting}
        run_step(scheduler)
        finished += sorted(before - {*scheduler.running, *scheduler.waiting})
    assert finished == names


def make_batch(num_tokens: int = 4, request_id: str = "batch", **fields):
    return make_sequence(num_tokens, request_id, priority=Priority.BATCH, **fields)


def test_interactive_sequences_pass_batch_ones_that_wait():
    scheduler = make_scheduler(max_num_seqs=1, enable_prefix_cache=False)
    for sequence in (make_sequence(4, "first"), make_batch(), make_sequence(4, "second")):
        scheduler.add(sequence)
    assert list(scheduler.waiting) == ["first", "second", "batch"]


def test_a_seat_is_taken_from_the_youngest_batch_sequence_which_waits_before_its_like():
    scheduler = make_scheduler(max_num_seqs=2)
    for name in ("old", "young", "waiting"):
        scheduler.add(make_batch(4, name))
    run_step(scheduler)
    scheduler.add(make_sequence(token_ids=[9] * 4, request_id="interactive"))
    assert shares(run_step(scheduler)) == {"old": 1, "interactive": 4}
    assert list(scheduler.running) == ["interactive", "old"]
    assert list(scheduler.waiting) == ["young", "waiting"]


def test_blocks_are_taken_from_batch_sequences_for_an_interactive_one():
    scheduler = make_scheduler(num_blocks=4, enable_prefix_cache=False)
    batch = make_batch(12)
    scheduler.add(batch)
    run_step(scheduler)
    scheduler.add(make_sequence(8, "interactive"))
    assert shares(run_step(scheduler)) == {"interactive": 8}
    assert (batch.status, batch.num_output_tokens) == (SequenceStatus.WAITING, 1)


def test_batch_is_preempted_before_a_younger_interactive_sequence():
    scheduler = make_scheduler(num_blocks=6, enable_prefix_cache=False)
    for sequence in (make_sequence(4, "old"), make_batch(4), make_sequence(4, "young")):
        scheduler.add(sequence)
    while not scheduler.num_preemptions:
        run_step(scheduler)
    assert list(scheduler.waiting) == ["batch"]


def test_nothing_is_taken_from_batch_sequences_where_there_is_room():
    scheduler = make_scheduler(max_num_seqs=2)
    scheduler.add(make_batch(4))
    run_step(scheduler)
    scheduler.add(make_sequence(token_ids=[9] * 4, request_id="interactive"))
    assert shares(run_step(scheduler)) == {"batch": 1, "interactive": 4}


def test_a_batch_sequence_is_passed_a_limited_number_of_times():
    """Newcomers without end: it gets its seat after so many, and nobody takes it away again."""
    scheduler = make_scheduler(max_num_seqs=1)
    batch = make_batch(4, max_output_tokens=3)
    scheduler.add(batch)
    num_newcomers = 0
    while batch.finish_reason is None:
        scheduler.add(make_sequence(4, f"n{num_newcomers}", max_output_tokens=1))
        num_newcomers += 1
        run_step(scheduler)
        scheduler.check_integrity()
        assert num_newcomers < MAX_OVERTAKES + 10
    assert num_newcomers >= MAX_OVERTAKES


def test_a_batch_prompt_that_has_begun_is_passed_a_limited_number_of_times():
    """Newcomers without end, each with an image behind its first tokens, of which a step encodes one."""
    scheduler = make_scheduler(max_images_per_step=1, enable_prefix_cache=False)
    batch = make_batch(12, images=(make_image(4, 4, "batch"),), max_output_tokens=1)
    scheduler.add(make_sequence(12, "n", images=(make_image(4, 4, "n"),), max_output_tokens=1))
    scheduler.add(batch)
    num_newcomers = 0
    while batch.finish_reason is None:
        image = make_image(4, 4, f"n{num_newcomers}")
        newcomer = make_sequence(12, f"n{num_newcomers}", images=(image,), max_output_tokens=1)
        scheduler.add(newcomer)
        num_newcomers += 1
        run_step(scheduler)
        assert batch.num_computed_tokens > 0
        assert num_newcomers < MAX_OVERTAKES + 10


def test_a_batch_stream_is_passed_by_nobody_and_yields_its_seat_however_many_come():
    scheduler = make_scheduler(max_num_seqs=3)
    scheduler.add(make_batch(4))
    run_step(scheduler)
    for number in range(MAX_OVERTAKES + 2):
        scheduler.add(
            make_sequence(token_ids=[number] * 4, request_id=f"n{number}", max_output_tokens=1)
        )
        assert shares(run_step(scheduler))["batch"] == 1
    for number in range(3):
        scheduler.add(make_sequence(token_ids=[99 + number] * 4, request_id=f"late-{number}"))
    run_step(scheduler)
    run_step(scheduler)
    assert list(scheduler.waiting) == ["batch"]


def test_way_is_made_for_no_more_than_can_be_started():
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=8)
    for name in "abcd":
        scheduler.add(make_batch(4, name))
    while len(scheduler.running) < 4:
        run_step(scheduler)
    for number in range(4):
        scheduler.add(make_sequence(token_ids=[9 + number] * 8, request_id=f"n{number}"))
    assert shares(run_step(scheduler)) == {"a": 1, "b": 1, "c": 1, "n0": 5}
    assert list(scheduler.waiting) == ["n1", "n2", "n3", "d"]


def test_no_way_is_made_for_one_that_would_not_fit_even_then():
    scheduler = make_scheduler(num_blocks=8, enable_prefix_cache=False)
    scheduler.add(make_sequence(16, "interactive"))
    scheduler.add(make_batch(4))
    run_step(scheduler)
    scheduler.add(make_sequence(16, "large"))
    assert shares(run_step(scheduler)) == {"interactive": 1, "batch": 1}


def test_a_newcomer_waits_until_all_its_tokens_fit():
    scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=4)
    scheduler.add(make_sequence(4, "a"))
    run_step(scheduler)
    scheduler.add(make_sequence(token_ids=[9] * 28, request_id="b"))
    assert shares(run_step(scheduler)) == {"a": 1}


def test_a_newcomer_leaves_a_block_to_each_running_sequence():
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_sequence(8, "a"))
    scheduler.add(make_sequence(token_ids=[9] * 8, request_id="b"))
    assert shares(run_step(scheduler)) == {"a": 8}


def test_a_repeated_prefill_after_preemption_is_no_cache_hit():
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_sequence(token_ids=[9] * 4, request_id="old"))
    scheduler.add(make_sequence(7, "young"))
    run_step(scheduler)
    while not scheduler.num_preemptions:
        run_step(scheduler)
    scheduler.finish(scheduler.running["old"], FinishReason.ABORT)
    assert shares(run_step(scheduler))["young"] < 7
    assert scheduler.running["young"].num_cached_tokens == 0
    assert (scheduler.blocks.num_query_tokens, scheduler.blocks.num_hit_tokens) == (11, 0)


def test_a_prompt_that_sees_all_of_itself_is_computed_in_one_step_whatever_the_budget():
    scheduler = make_scheduler(max_num_batched_tokens=8, max_images_per_step=1, binds_prompts=True)
    images = (make_image(2, 4, "cat"), make_image(10, 4, "dog"))
    scheduler.add(make_sequence(20, "a", images=images))
    scheduler.add(make_sequence(token_ids=[9] * 12, request_id="b"))
    assert [shares(run_step(scheduler)) for _ in range(3)] == [
        {"a": 20},
        {"a": 1, "b": 12},
        {"a": 1, "b": 1},
    ]


def test_a_chunk_holds_all_slots_of_an_image_that_sees_itself_whatever_the_budget():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    image = replace(make_image(2, 9, "cat"), is_whole=True, slots=((1, 3), (4, 9)))
    scheduler.add(make_sequence(14, "a", images=(image,)))
    scheduler.add(make_sequence(token_ids=[9] * 4, request_id="b"))
    # the first run of slots ends at 5, the second at 11
    assert [shares(run_step(scheduler)) for _ in range(3)] == [{"a": 5}, {"a": 6}, {"a": 3, "b": 1}]


def test_images_of_a_step_are_limited_and_a_chunk_ends_before_the_next():
    scheduler = make_scheduler(max_images_per_step=1)
    images = (make_image(2, 4, "cat"), make_image(8, 4, "dog"))
    scheduler.add(make_sequence(14, "a", images=images))
    assert shares(run_step(scheduler)) == {"a": 8}
    assert shares(run_step(scheduler)) == {"a": 6}


def test_an_image_is_counted_once_for_all_who_need_it_in_a_step():
    scheduler = make_scheduler(max_images_per_step=1)
    scheduler.add(make_sequence(10, "a", images=(make_image(2, 4, "cat"),)))
    scheduler.add(make_sequence(12, "b", images=(make_image(4, 4, "cat"),)))
    other = [9] * 12
    scheduler.add(make_sequence(token_ids=other, request_id="c", images=(make_image(4, 4, "dog"),)))
    assert shares(run_step(scheduler)) == {"a": 10, "b": 12, "c": 4}
    assert shares(run_step(scheduler)) == {"a": 1, "b": 1, "c": 8}


def test_a_chunk_that_ends_inside_an_image_goes_on_without_encoding_it_again():
    scheduler = make_scheduler(max_images_per_step=1, max_num_batched_tokens=16)
    scheduler.add(make_sequence(20, "a", images=(make_image(2, 16, "cat"),)))
    scheduler.add(make_sequence(20, "b", images=(make_image(8, 8, "dog"),)))
    assert shares(run_step(scheduler)) == {"a": 16}
    assert shares(run_step(scheduler)) == {"a": 4, "b": 12}


def test_an_image_reached_in_its_middle_by_a_prefix_hit_needs_encoding():
    scheduler = make_scheduler(max_images_per_step=1)
    scheduler.add(make_sequence(20, "a", images=(make_image(2, 12, "cat"),)))
    run_step(scheduler)
    other = make_sequence(token_ids=[3] * 8, request_id="b", images=(make_image(0, 4, "dog"),))
    same = make_sequence(13, "c", images=(make_image(2, 12, "cat"),))
    same.token_ids = [*same.token_ids[:12], 14]
    scheduler.add(other)
    scheduler.add(same)
    assert shares(scheduler.schedule()) == {"a": 1, "b": 8}


@pytest.mark.parametrize(
    ("token_id", "ignore_eos", "reason"),
    [
        (7, False, FinishReason.LENGTH),
        (EOS_ID, False, FinishReason.STOP),
        (EOS_ID, True, FinishReason.LENGTH),
    ],
)
def test_a_sequence_ends_by_its_end_token_or_its_length(
    token_id: int, ignore_eos: bool, reason: FinishReason
):
    scheduler = make_scheduler()
    sequence = make_sequence(5, max_output_tokens=1)
    sequence.sampling = SamplingParams(ignore_eos=ignore_eos)
    scheduler.add(sequence)
    run_step(scheduler, token_id)
    assert sequence.finish_reason is reason
    assert sequence.status is SequenceStatus.FINISHED
    assert scheduler.blocks.num_free_blocks == 64
    assert not scheduler.has_work()


def test_an_end_token_in_the_prompt_ends_nothing():
    scheduler = make_scheduler()
    scheduler.add(make_sequence(token_ids=[1, EOS_ID]))
    run_step(scheduler)
    assert scheduler.has_work()


def test_finishing_a_waiting_sequence_removes_it():
    scheduler = make_scheduler()
    sequence = make_sequence(5)
    scheduler.add(sequence)
    scheduler.finish(sequence, FinishReason.ABORT)
    assert not scheduler.has_work()
    assert not scheduler.schedule().items
