"""Speculative decoding: a step verifies a draft of several tokens after the last token.

The sampler samples each position as usual (`runner.sample_drafts`) and stops at the first token that
differs from the draft, so the output is the same with and without drafts, at any temperature. Drafts come
from the grammar of an answer, which forces much of it, and from n-grams of prompt and answer (edits of
code, quotes, extracts). The draft length follows measured step times and acceptance rates.
"""

from array import array
from collections.abc import Set
from dataclasses import dataclass, field
from itertools import takewhile

from engines.core.runner import StepResult
from engines.core.sequence import Batch, ScheduledSequence, Sequence

#: Longest draft.
MAX_DRAFT = 16
#: Length of an n-gram whose continuation is drafted.
_NGRAM = 3
_KEY_MASK = (1 << 24 * _NGRAM) - 1
#: Earlier occurrences of an n-gram that are compared, latest first; the longest match is used.
_MAX_PLACES = 4
#: Longest match that is compared. A draft is at most twice as long as its match.
_MAX_MATCH = 16
#: Tokens indexed per step, so that a long prompt does not delay other sequences.
_MAX_INDEXED = 2048
#: Draft lengths that are tried. With the last token, 3, 7 and 11 draft tokens fill the kernels' groups of four rows.
_LENGTHS = (1, 2, 3, 5, 7, 11, MAX_DRAFT)
#: Prior acceptance rates.
_FORCED_RATE, _RATE = 0.9, 0.5
#: Acceptance rate above which an unprofitable draft is reconsidered early, and the number of tokens until then.
_LIKELY, _REST = 0.6, 8
#: Above this acceptance rate, only costs can forbid drafts, so a successful trial does not resume them.
_SURE = 0.9
#: Weight of the newest measurement.
_NEWEST = 0.1
#: Weights of the newest token in the acceptance rates of a sequence and of grammar drafts.
_NEWEST_OF_SEQUENCE, _NEWEST_OF_FORCED = 0.3, 0.05
#: Consecutive steps with drafts, after which a step without drafts runs to measure its time.
_PLAIN_EVERY = 64
#: Tokens until the next trial draft of a sequence whose drafts do not pay: first and longest.
_FIRST_WAIT, _LONGEST_WAIT = 64, 256
#: Prior cost of a draft token, relative to a step of one sequence; with n sequences, it is divided by n.
_FIRST_COST = 0.25
#: Safety factor on measured costs.
_MARGIN = 1.4
#: Cap of one step time as a multiple of the average.
_MAX_NOISE = 2.0


@dataclass(slots=True, eq=False)
class History:
    """N-gram index of one sequence, and the acceptance rate of its drafts.

    Each position is indexed once, by the three tokens before it as one integer (tuples would take three times the
    memory). Positions after equal n-grams are chained, latest first.
    """

    acceptance_rate: float = _RATE
    is_forced: bool = False  #: whether its last draft came from the grammar
    quiet_until: int = 0  #: no n-gram draft before the sequence has this many tokens
    # number of tokens at which an unprofitable draft is tried; 0: none has been declined
    _trial_at: int = 0
    _wait: int = _FIRST_WAIT
    _is_trial: bool = False  # whether its last draft was a trial
    _key: int = 0  # the n-gram before the first position that is not indexed
    _latest: dict[int, int] = field(default_factory=dict)
    # by position: the position after the previous equal n-gram; 0: none
    _earlier: "array[int]" = field(default_factory=lambda: array("i", [0] * _NGRAM))

    def rests(self, sequence: Sequence) -> bool:
        """Whether no draft is possible now (cheap; true for most text)."""
        token_ids, constraint = sequence.token_ids, sequence.constraint
        if constraint is not None and not constraint.is_silent(token_ids):
            return False
        return len(token_ids) < self.quiet_until or not self._index_tokens(token_ids)

    def _index_tokens(self, token_ids: list[int]) -> int:
        """Index new tokens. Returns the latest position after an earlier occurrence of the last n-gram, or 0."""
        end = len(token_ids)
        latest, earlier = self._latest, self._earlier
        start, key = len(earlier), self._key
        if start == _NGRAM:
            if end < start:
                return 0
            key = token_ids[0] << 48 | token_ids[1] << 24 | token_ids[2]
        for place in range(start, min(end, start + _MAX_INDEXED)):
            earlier.append(latest.get(key, 0))
            latest[key] = place
            key = (key << 24 | token_ids[place]) & _KEY_MASK
        self._key = key
        return latest.get(key, 0) if len(earlier) >= end else 0

    def find(self, sequence: Sequence, most: int) -> list[int]:
        """Up to `most` tokens that followed the longest earlier match of the last tokens."""
        token_ids, earlier = sequence.token_ids, self._earlier
        end, place = len(token_ids), self._index_tokens(token_ids)
        if not place:
            return []
        longest, best = 0, place
        for _ in range(_MAX_PLACES):
            length = _match(token_ids, place, end)
            if length > longest:
                longest, best = length, place
            place = earlier[place]
            if not place or longest >= _MAX_MATCH:
                break
        most = _up_to_image(sequence, best, min(most, 2 * longest))
        draft = token_ids[best : best + most]
        while 0 < len(draft) < most:  # the match overlaps the end: continue periodically
            draft += draft[: most - len(draft)]
        return draft

    def decline(self, num_tokens: int) -> bool:
        """Record an unprofitable draft. Returns whether the draft is tried anyway."""
        is_trial = 0 < self._trial_at <= num_tokens
        if is_trial or not self._trial_at:
            self._trial_at = num_tokens + self._wait
            self._wait = min(2 * self._wait, _LONGEST_WAIT)
        is_likely = self.acceptance_rate > _LIKELY  # costs may fall soon
        self.quiet_until = num_tokens + _REST if is_likely else self._trial_at
        self._is_trial = is_trial
        return is_trial

    def note(self, num_accepted: int, num_tried: int) -> None:
        weight = 1 - (1 - _NEWEST_OF_SEQUENCE) ** num_tried
        self.acceptance_rate += weight * (num_accepted / num_tried - self.acceptance_rate)
        is_trial, self._is_trial = self._is_trial, False
        if num_accepted < num_tried:
            return
        if not is_trial:
            self._wait = _FIRST_WAIT
        elif self.acceptance_rate < _SURE:  # a trial succeeded
            self.quiet_until, self._trial_at = 0, 1


def _match(token_ids: list[int], place: int, end: int) -> int:
    """Length of the common suffix before two positions; at least an n-gram."""
    length = _NGRAM
    while (
        length < _MAX_MATCH
        and length < place
        and token_ids[place - 1 - length] == token_ids[end - 1 - length]
    ):
        length += 1
    return length


def _up_to_image(sequence: Sequence, place: int, most: int) -> int:
    """Limit `most` to the tokens before the next image: image placeholder tokens are never sampled."""
    if place < sequence.num_prompt_tokens:
        for image in sequence.images:
            if image.offset + image.num_tokens > place:
                return max(0, min(most, image.offset - place))
    return most


class Speculator:
    """Drafts for the sequences of one engine.

    A longer draft makes the step longer for all sequences, and saves steps of one sequence if it is accepted. The
    length maximizes the expected token rate at the measured costs.
    """

    def __init__(self, eos_token_ids: Set[int] = frozenset(), *, repeats: bool = True) -> None:
        """Drafts contain no end-of-sequence token. `repeats`: draft from n-grams too."""
        self._eos_token_ids = eos_token_ids
        self.repeats = repeats
        self.num_drafted = 0
        self.num_accepted = 0
        self.is_timed = False  #: whether the planned step is to be measured
        # time of a step without drafts, by number of sequences
        self._plain_s: dict[int, float] = {}
        # cost of a draft token relative to that time, by the `_magnitude` of the step
        self._costs: dict[tuple[int, int], float] = {}
        self._forced_rate = _FORCED_RATE  # acceptance rate of grammar drafts
        self._num_draft_steps = 0  # steps in a row with drafts
        self._num_wanted = 0  # sequences with a draft in the step before
        self._begin_step()

    def _begin_step(self) -> None:
        self._num_wanting = self._num_planned = 0
        self._num_expected = 0.0

    def begin(self, sequence: Sequence) -> None:
        sequence.history = History()

    def draft(
        self, sequence: Sequence, num_running: int, most: int, most_beside: int
    ) -> tuple[int, ...]:
        """At most `most` draft tokens for a sequence; empty if drafting would lower the token rate.

        `most_beside`: limit of this and all later drafts of the step together, if some sequences have no draft.
        """
        self.is_timed = True
        history, constraint = sequence.history, sequence.constraint
        num_tokens = len(sequence.token_ids)
        assert history is not None
        is_quiet = num_tokens < history.quiet_until
        # measure plain steps first, and again periodically
        if self._num_draft_steps >= _PLAIN_EVERY or num_running not in self._plain_s:
            return ()
        num_left = sequence.max_output_tokens - num_tokens + sequence.num_prompt_tokens
        most = min(most, MAX_DRAFT, num_left - 1)
        draft, acceptance_rate = [], self._forced_rate
        if constraint is not None and most > 0:
            draft = constraint.draft(sequence.token_ids, sequence.num_prompt_tokens)
        history.is_forced = bool(draft)
        if not draft and not is_quiet and most > 0:
            draft, acceptance_rate = history.find(sequence, most), history.acceptance_rate
        if not draft:
            return ()
        eos = self._eos_token_ids | set(sequence.sampling.stop_token_ids)
        if not eos.isdisjoint(draft):
            draft = list(takewhile(lambda each: each not in eos, draft))
        most = min(most, len(draft))
        if self._num_wanted < num_running:
            num_rivals = max(1, self._num_wanted - self._num_wanting)
            most = min(most, -(-most_beside // num_rivals))
        if most < 1:
            return ()
        longest, expected = self._longest(acceptance_rate, most, num_running)
        if not longest:
            if history.is_forced or not history.decline(num_tokens):
                return ()
            longest = 1 if num_running > 1 else min(2, most)
        self._num_wanting += 1
        self._num_planned += longest
        self._num_expected += expected
        return tuple(draft[:longest])

    def _longest(self, p: float, most: int, num_running: int) -> tuple[int, float]:
        """The best draft length and the expected number of accepted tokens.

        `p`: acceptance rate. A length of unknown cost is tried only if the cost of the next shorter length is known.
        """
        num_sure, num_planned = num_running + self._num_expected, self._num_planned
        best = num_sure / (1 + self._cost(num_running, num_planned))
        longest, expected = 0, 0.0
        for length in _LENGTHS:
            length = min(length, most)
            gain = p * (1 - p**length) / (1 - p) if p < 1 else length
            rate = (num_sure + gain) / (1 + self._cost(num_running, num_planned + length))
            if rate > best:
                best, longest, expected = rate, length, gain
            if length == most or _magnitude(num_running, num_planned + length) not in self._costs:
                break
        return longest, expected

    def _cost(self, num_running: int, num_tokens: int) -> float:
        """Cost of this many draft tokens, relative to the time of a step without drafts."""
        if not num_tokens:
            return 0.0
        size, magnitude = _magnitude(num_running, num_tokens)
        for known in range(magnitude, 0, -1):
            cost = self._costs.get((size, known))
            if cost is not None:
                return _MARGIN * num_tokens * cost
        return num_tokens * _FIRST_COST / num_running

    def note(self, batch: Batch, result: StepResult, seconds: float) -> None:
        self.is_timed = False
        self._num_wanted, is_drafted = self._num_wanting, self._num_planned > 0
        self._begin_step()
        num_running, num_draft_tokens, is_decode = len(batch.items), 0, True
        for item, choice in zip(batch.items, result.choices, strict=True) if is_drafted else ():
            num_drafted = len(item.draft)
            if choice is None or item.num_new_tokens - num_drafted != 1:
                is_decode = False
            elif num_drafted:
                num_draft_tokens += num_drafted
                self._note_draft(item, len(choice.following))
        self.num_drafted += num_draft_tokens
        plain_s = self._plain_s.get(num_running)
        if not is_decode:  # the step had prompt tokens: its time is not comparable
            return
        if num_draft_tokens == 0:
            self._num_draft_steps = 0
            if plain_s is not None:
                seconds = _NEWEST * min(seconds, _MAX_NOISE * plain_s) + (1 - _NEWEST) * plain_s
            self._plain_s[num_running] = seconds
        elif plain_s is not None:
            self._num_draft_steps += 1
            cost = min(max(0.0, seconds / plain_s - 1) / num_draft_tokens, _MAX_NOISE)
            key = _magnitude(num_running, num_draft_tokens)
            known = self._costs.get(key, cost)
            self._costs[key] = known + _NEWEST * (cost - known)

    def _note_draft(self, item: ScheduledSequence, num_accepted: int) -> None:
        self.num_accepted += num_accepted
        num_tried = min(num_accepted + 1, len(item.draft))
        history = item.sequence.history
        assert history is not None
        if history.is_forced:
            weight = 1 - (1 - _NEWEST_OF_FORCED) ** num_tried
            self._forced_rate += weight * (num_accepted / num_tried - self._forced_rate)
        else:
            history.note(num_accepted, num_tried)


def _magnitude(num_running: int, num_tokens: int) -> tuple[int, int]:
    return num_running.bit_length(), num_tokens.bit_length()
