"""Ways in which an engine computes the same answers.

Each way accepts a function that starts an engine with configuration changes, and requests; it returns all tokens of
each request. It fails if its condition did not occur, such as a preemption or a cache hit.
"""

from collections.abc import Callable
from dataclasses import replace

from engines.core.engine import BatchingEngine
from engines.core.sequence import EngineRequest, Sequence
from engines.core.speculation import History, Speculator
from engines.torch_backend.sampling import needs_host
from tests.factories_torch import encode_in_smallest_parts, run_to_end, smallest_chunks
from tests.long import IS_LONG

Start = Callable[..., BatchingEngine]
Tokens = dict[str, list[int]]
Way = Callable[[Start, list[EngineRequest]], Tokens]


def run_alone(start: Start, wanted: list[EngineRequest]) -> Tokens:
    tokens: Tokens = {}
    for request in wanted:
        tokens |= run_to_end(start(), [request])
    return tokens


def run_batched(start: Start, wanted: list[EngineRequest]) -> Tokens:
    return run_to_end(start(), wanted)


def run_one_after_another_has_begun(start: Start, wanted: list[EngineRequest]) -> Tokens:
    """Prefill of each request runs beside the decode of others."""
    return _run_in_turn(start(), wanted)


def run_beside_smooth_streams(start: Start, wanted: list[EngineRequest]) -> Tokens:
    """As `run_one_after_another_has_begun`, with prompts and images in the smallest parts."""
    engine = start(max_mixed_prefill_tokens=3)
    encode_in_smallest_parts(engine)
    with smallest_chunks():
        return _run_in_turn(engine, wanted)


def _run_in_turn(engine: BatchingEngine, wanted: list[EngineRequest]) -> Tokens:
    tokens: Tokens = {request.request_id: [] for request in wanted}
    waiting = list(wanted)
    while waiting or engine.has_work():
        if waiting:
            engine.add(waiting.pop(0))
        for output in [*engine.step(), *engine.step()]:
            tokens[output.request_id] += output.token_ids
    return tokens


def run_chunked(start: Start, wanted: list[EngineRequest]) -> Tokens:
    """Chunks end inside images and inside blocks."""
    return run_to_end(start(max_num_batched_tokens=5), wanted)


def run_with_one_image_a_step(start: Start, wanted: list[EngineRequest]) -> Tokens:
    return run_to_end(start(max_images_per_step=1, encoder_cache_bytes=0), wanted)


def run_preempted(start: Start, wanted: list[EngineRequest]) -> Tokens:
    engine = start(num_kv_blocks=20, enable_prefix_cache=False)
    tokens = run_to_end(engine, wanted)
    assert engine.stats().num_preemptions > 0
    return tokens


def run_prefix_cached(start: Start, wanted: list[EngineRequest]) -> Tokens:
    engine = start()
    run_to_end(engine, wanted)
    tokens = run_to_end(engine, wanted)
    assert engine.stats().num_prefix_hit_tokens > 0
    return tokens


def run_encoder_cached(start: Start, wanted: list[EngineRequest]) -> Tokens:
    engine = start(enable_prefix_cache=False)
    run_to_end(engine, wanted)
    before = engine.stats().num_encoder_hits
    tokens = run_to_end(engine, wanted)
    num_images = sum(len(request.images) for request in wanted)
    assert engine.stats().num_encoder_hits - before >= num_images - 1
    return tokens


def run_taken_over(start: Start, wanted: list[EngineRequest]) -> Tokens:
    """Another worker continues each request after a different number of tokens."""
    return run_to_end(start(), begin_elsewhere(start, wanted))


def run_under_all_of_it(start: Start, wanted: list[EngineRequest]) -> Tokens:
    """A takeover in chunks, with few blocks, shared prefixes, and one image per step."""
    engine = start(num_kv_blocks=12, max_num_batched_tokens=5, max_images_per_step=1)
    begun = begin_elsewhere(start, wanted)
    with smallest_chunks():
        tokens = run_to_end(engine, begun)
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_prefix_hit_tokens > 0
    return tokens


def run_overlapped(start: Start, wanted: list[EngineRequest]) -> Tokens:
    """Steps are launched before the tokens of earlier ones are known, with few blocks and new requests."""
    engine = start(overlap_steps=True, num_kv_blocks=24)
    tokens = _run_in_turn(engine, wanted)
    is_possible = not any(needs_host(request) for request in wanted)
    assert (engine.pipeline.num_overlapped > 0) == is_possible
    return tokens


class Restless(History):
    """The history of a sequence that always drafts tokens."""

    def rests(self, sequence: Sequence) -> bool:
        return False


class Oracle(Speculator):
    """Drafts the right tokens; every third draft ends with a wrong one."""

    def __init__(self, answers: Tokens) -> None:
        super().__init__()
        self._answers = answers
        self._num_asked = 0

    def begin(self, sequence: Sequence) -> None:
        sequence.history = Restless(acceptance_rate=1.0)

    def draft(
        self, sequence: Sequence, num_running: int, most: int, most_beside: int
    ) -> tuple[int, ...]:
        self.is_timed = True
        rest = self._answers[sequence.request_id][sequence.num_output_tokens :]
        draft = rest[: max(0, min(most, 5, len(rest) - 1))]
        self._num_asked += 1
        if draft and self._num_asked % 3 == 0:
            draft[-1] = abs(draft[-1] - 1)
        self._num_planned += len(draft)
        return tuple(draft)


def run_with_drafts(start: Start, wanted: list[EngineRequest]) -> Tokens:
    """Several drafted tokens per step, some of them wrong."""
    return _run_with_drafts(start(), run_batched(start, wanted), wanted)


def run_with_drafts_under_all_of_it(start: Start, wanted: list[EngineRequest]) -> Tokens:
    """A takeover in chunks, with few blocks. The longest answers are last: nothing is drafted beside prompts."""
    engine = start(num_kv_blocks=20, max_num_batched_tokens=5, max_num_seqs=3)
    answers = run_batched(start, wanted)
    return _run_with_drafts(engine, answers, begin_elsewhere(start, wanted)[::-1])


def _run_with_drafts(
    engine: BatchingEngine, answers: Tokens, wanted: list[EngineRequest]
) -> Tokens:
    if engine.scheduler.speculator is None:  # its states cannot be rolled back
        return run_to_end(engine, wanted)
    oracle = engine.scheduler.speculator = Oracle(answers)
    tokens = run_to_end(engine, wanted)
    assert 0 < oracle.num_accepted < oracle.num_drafted
    return tokens


def begin_elsewhere(start: Start, wanted: list[EngineRequest]) -> list[EngineRequest]:
    """Returns the requests as they are queued again after the death of their first worker."""
    first = run_batched(start, wanted)
    return [
        replace(request, output_token_ids=tuple(first[request.request_id][: 2 + 3 * place]))
        for place, request in enumerate(wanted)
    ]


#: Ways that combine most of the others, for all but the first case of each kind. `make families` runs all ways.
SHORT_WAYS: list[Way] = [run_overlapped, run_under_all_of_it]
#: Ways that do not depend on the size of the pool.
ROOMY_WAYS: list[Way] = [
    run_alone,
    run_batched,
    run_one_after_another_has_begun,
    run_beside_smooth_streams,
    run_chunked,
    run_with_one_image_a_step,
    run_prefix_cached,
    run_encoder_cached,
    run_taken_over,
]
WAYS: list[Way] = [
    *ROOMY_WAYS,
    run_preempted,
    run_overlapped,
    run_under_all_of_it,
    run_with_drafts,
    run_with_drafts_under_all_of_it,
]


def ways_of(*, is_first: bool) -> list[Way]:
    """Returns the ways for a case."""
    return WAYS if is_first or IS_LONG else SHORT_WAYS
