"""Several tokens of an answer in one step: guessed before it, kept where they are what is sampled.

A step computes the last token and a draft behind it. The sampler then samples as ever, place by
place; as long as it samples what the draft has, the next place is known too. So an answer is the
same with and without drafts, at any temperature. Grammars guess well, as they force much of what
they allow; what stood in prompt or answer before comes again: edits of code, quotes, extracts. How
long drafts are follows what steps take, and how often a sequence's were right.
"""

from array import array
from collections.abc import Callable, Set
from collections.abc import Sequence as Items
from itertools import takewhile

from engines.core.runner import StepResult, TokenChoice
from engines.core.sequence import Batch, ScheduledSequence, Sequence

#: Tokens of a draft at most.
MAX_DRAFT = 16
#: Tokens that have to come again before what followed them is guessed.
_NGRAM = 3
_KEY_MASK = (1 << 24 * _NGRAM) - 1
#: Places where they stood that are compared, the latest first; the longest match is taken.
_MAX_PLACES = 4
#: A match is compared so far; a draft is twice as long as its match at most.
_MAX_MATCH = 16
#: Tokens of a text that are indexed in one step: long prompts must not hold up others.
_MAX_INDEXED = 2048
#: Draft lengths that are tried: kernels compute rows by four.
_LENGTHS = (1, 2, 3, 5, 7, 11, MAX_DRAFT)
#: How often a token of a draft is right, before it is known.
_FORCED_RIGHT, _RIGHT = 0.9, 0.5
#: Where drafts are right more often than that, one that does not pay is thought of again so soon.
_LIKELY, _REST = 0.6, 8
#: A sequence begins with one draft that may not pay, where those of others were right so often.
_WORTH_A_TRIAL = 0.3
#: Drafts that are right so often and do not pay will not, however often they are right.
_SURE = 0.9
#: Weight of the newest measurement.
_NEWEST = 0.1
#: Weight of the newest token in how often a sequence's drafts are right; the engine's follows slowly.
_NEWEST_OF_SEQUENCE, _NEWEST_OF_ALL = 0.3, 0.05
#: After so many steps in a row with drafts one goes without: what that takes has to be seen.
_PLAIN_EVERY = 64
#: A sequence whose drafts would not pay has none for so many tokens, at first and at most; then one.
_FIRST_WAIT, _LONGEST_WAIT = 64, 256
#: After so many tokens behind which nothing stood before, only every fourth is looked at.
_NUM_MISSES, _NEXT_LOOK = 32, 4
#: What is known of other sequences is forgotten by that share with each new one.
_FORGOTTEN = 0.01
#: A token of a draft is taken to cost that share of a step, over its sequences, before it is known.
_FIRST_COST = 0.25
#: What a draft costs counts so many times: what was measured is not exact.
_MARGIN = 1.4
#: Step times are noisy: one counts as so many times the usual at most.
_MAX_NOISE = 2.0

#: Samples the next tokens of shares, by their places; of which each has so many tokens more by now.
Sample = Callable[[list[int], int], list[TokenChoice]]


def sample_drafts(
    items: Items[ScheduledSequence], choices: list[TokenChoice | None], sample: Sample
) -> None:
    """Sample the tokens behind drafts, while these are right, into `following` of the choices.

    While `sample` is called, the sequences have the tokens that were sampled before it.
    """
    places = [place for place, item in enumerate(items) if item.draft]
    if not places:
        return
    ends = {place: len(items[place].sequence.token_ids) for place in places}
    last = {place: choices[place] for place in places}
    try:
        num_more = 0
        while places := [p for p in places if _is_right(items[p], last[p], num_more)]:
            for place in places:
                choice = last[place]
                assert choice is not None
                items[place].sequence.token_ids.append(choice.token_id)
            num_more += 1
            for place, choice in zip(places, sample(places, num_more), strict=True):
                first = choices[place]
                assert first is not None
                first.following += (choice,)
                last[place] = choice
    finally:
        for place, end in ends.items():
            del items[place].sequence.token_ids[end:]


def _is_right(item: ScheduledSequence, choice: TokenChoice | None, num_more: int) -> bool:
    draft = item.draft
    return choice is not None and num_more < len(draft) and draft[num_more] == choice.token_id


class History:
    """Where the tokens of one sequence stood before, and how often guesses from that were right.

    Each place is indexed once, by the three tokens in front of it as one number (tuples would take
    three times the memory); places behind the same three are chained, the latest first.
    """

    __slots__ = (
        "_earlier",
        "_is_trial",
        "_key",
        "_latest",
        "_num_misses",
        "_trial_at",
        "_wait",
        "is_forced",
        "quiet_until",
        "right",
    )

    def __init__(self, right: float) -> None:
        """`right`: the share of guessed tokens that will be, as far as is known."""
        self.right = right
        self.is_forced = False  #: whether its last draft was its grammar's
        self.quiet_until = 0  #: the length from which on it is looked at again
        # the length from which on a draft is tried that would not pay; 0: none has been declined
        self._trial_at = 0 if right < _WORTH_A_TRIAL else 1
        self._wait = _FIRST_WAIT
        self._num_misses = 0
        self._is_trial = False  # whether its last draft was not thought to pay
        self._key = 0  # the three tokens in front of the first place without index
        self._latest: dict[int, int] = {}
        self._earlier = array("i", [0] * _NGRAM)  # by place; 0: none

    def rests(self, sequence: Sequence) -> bool:
        """Whether nothing is guessed of a sequence by now: most text is new, and told apart here at little cost."""
        token_ids, constraint = sequence.token_ids, sequence.constraint
        if constraint is not None and not constraint.is_silent(token_ids):
            return False
        num_tokens = len(token_ids)
        if num_tokens < self.quiet_until:
            return True
        if self._look(token_ids):
            return False
        self._num_misses += 1
        if self._num_misses >= _NUM_MISSES:
            self.quiet_until = num_tokens + _NEXT_LOOK
        return True

    def _look(self, token_ids: list[int]) -> int:
        """Index what has come; returns where the last tokens stood before, 0 for nowhere."""
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
        """At most so many tokens that followed the last ones where these stood before."""
        token_ids, earlier = sequence.token_ids, self._earlier
        end, place = len(token_ids), self._look(token_ids)
        if not place:
            return []
        self._num_misses = 0
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
        while 0 < len(draft) < most:  # the end is reached: what it repeats goes on
            draft += draft[: most - len(draft)]
        return draft

    def decline(self, num_tokens: int) -> bool:
        """Note that a draft would not pay; returns whether it is tried all the same."""
        is_trial = 0 < self._trial_at <= num_tokens
        if is_trial or not self._trial_at:
            self._trial_at = num_tokens + self._wait
            self._wait = min(2 * self._wait, _LONGEST_WAIT)
        is_likely = self.right > _LIKELY  # then steps may be cheaper soon, or others draft as well
        self.quiet_until = num_tokens + _REST if is_likely else self._trial_at
        self._is_trial = is_trial
        return is_trial

    def note(self, num_right: int, num_tried: int) -> None:
        """Of so many guessed tokens that were looked at so many were right."""
        weight = 1 - (1 - _NEWEST_OF_SEQUENCE) ** num_tried
        self.right += weight * (num_right / num_tried - self.right)
        is_trial, self._is_trial = self._is_trial, False
        if num_right < num_tried:
            return
        if not is_trial:
            self._wait = _FIRST_WAIT
        elif self.right < _SURE:  # what was tried may be tried again
            self.quiet_until, self._trial_at = 0, 1


def _match(token_ids: list[int], place: int, end: int) -> int:
    """How many tokens in front of two places are alike, of which three are."""
    length = _NGRAM
    while (
        length < _MAX_MATCH
        and length < place
        and token_ids[place - 1 - length] == token_ids[end - 1 - length]
    ):
        length += 1
    return length


def _up_to_image(sequence: Sequence, place: int, most: int) -> int:
    """How many tokens from a place on are text: an image's slots are no tokens that are sampled."""
    if place < sequence.num_prompt_tokens:
        for image in sequence.images:
            if image.offset + image.num_tokens > place:
                return max(0, min(most, image.offset - place))
    return most


class Speculator:
    """Guesses for the sequences of one engine.

    A token more in a draft makes the step longer for all of its sequences, and saves one of them a
    step where it is right: drafts are as long as that pays, by what was measured.
    """

    def __init__(self, eos_token_ids: Set[int] = frozenset(), *, repeats: bool = True) -> None:
        """No draft has tokens that end an answer: what is sampled behind one may.

        `repeats`: answers without a grammar are guessed too, by what stood before.
        """
        self._eos_token_ids = eos_token_ids
        self.repeats = repeats
        self.num_guessed = 0  #: tokens of drafts that were computed
        self.num_accepted = 0
        self.is_asked = False  #: for the step that is planned: what comes of it is worth a note
        self._plain_s: dict[int, float] = {}  # a step without drafts, by number of sequences
        # a token of drafts, as a share of that step, by magnitudes of sequences and of draft tokens
        self._costs: dict[tuple[int, int], float] = {}
        # how often a token is right: of grammars, and where a sequence begins
        self._forced_right, self._first_right = _FORCED_RIGHT, _RIGHT
        self._num_drafted = 0  # steps in a row with drafts
        self._num_wanted = 0  # sequences that had a draft worth its time, in the step before
        self._begin_step()

    def _begin_step(self) -> None:
        self._num_wanting = self._num_planned = 0
        self._num_expected = 0.0

    def begin(self, sequence: Sequence) -> None:
        """Take on a sequence in which something is to be guessed: held to a grammar, or any where it `repeats`."""
        # others' text came again: that says little of this one's, and wrong guesses cost
        sequence.history = History(min(self._first_right, _RIGHT))
        self._first_right += _FORGOTTEN * (_RIGHT - self._first_right)

    def guess(
        self, sequence: Sequence, num_running: int, most: int, most_beside: int
    ) -> tuple[int, ...]:
        """What may follow the tokens of a sequence: at most so many, none where it does not pay.

        `most_beside` holds where others do not take several tokens in this step as well.
        """
        self.is_asked = True
        history, constraint = sequence.history, sequence.constraint
        num_tokens = len(sequence.token_ids)
        assert history is not None
        is_quiet = num_tokens < history.quiet_until
        # what steps take without has to be seen, at first and now and then
        if (
            (is_quiet and (constraint is None or constraint.is_silent(sequence.token_ids)))
            or self._num_drafted >= _PLAIN_EVERY
            or num_running not in self._plain_s
        ):
            return ()
        num_left = sequence.max_output_tokens - num_tokens + sequence.num_prompt_tokens
        most = min(most, MAX_DRAFT, num_left - 1)
        draft, right = [], self._forced_right
        if constraint is not None and most > 0:
            draft = constraint.draft(sequence.token_ids, sequence.num_prompt_tokens)
        history.is_forced = bool(draft)
        if not draft and not is_quiet and most > 0:
            draft, right = history.find(sequence, most), history.right
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
        longest, expected = self._longest(right, most, num_running)
        if not longest:
            if history.is_forced or not history.decline(num_tokens):
                return ()
            longest = 1 if num_running > 1 else min(2, most)
        self._num_wanting += 1
        self._num_planned += longest
        self._num_expected += expected
        return tuple(draft[:longest])

    def _longest(self, right: float, most: int, num_running: int) -> tuple[int, float]:
        """How long a draft is best, and how many of its tokens will be right.

        A length of unknown cost is tried only behind one that is known.
        """
        num_sure, num_planned = num_running + self._num_expected, self._num_planned
        best = num_sure / (1 + self._cost(num_running, num_planned))
        longest, expected = 0, 0.0
        for length in _LENGTHS:
            length = min(length, most)
            gain = right * (1 - right**length) / (1 - right) if right < 1 else length
            rate = (num_sure + gain) / (1 + self._cost(num_running, num_planned + length))
            if rate > best:
                best, longest, expected = rate, length, gain
            if length == most or _magnitude(num_running, num_planned + length) not in self._costs:
                break
        return longest, expected

    def _cost(self, num_running: int, num_tokens: int) -> float:
        """What so many draft tokens make a step longer, as a share of one without."""
        if not num_tokens:
            return 0.0
        size, magnitude = _magnitude(num_running, num_tokens)
        for known in range(magnitude, 0, -1):
            cost = self._costs.get((size, known))
            if cost is not None:
                return _MARGIN * num_tokens * cost
        return num_tokens * _FIRST_COST / num_running

    def note(self, batch: Batch, result: StepResult, seconds: float) -> None:
        """What came of a step, and how long it took."""
        self.is_asked = False
        self._num_wanted, is_drafted = self._num_wanting, self._num_planned > 0
        self._begin_step()
        num_running, num_guessed, is_decode = len(batch.items), 0, True
        for item, choice in zip(batch.items, result.choices, strict=True) if is_drafted else ():
            num_drafted = len(item.draft)
            if choice is None or item.num_new_tokens - num_drafted != 1:
                is_decode = False
            elif num_drafted:
                num_guessed += num_drafted
                self._note_draft(item, len(choice.following))
        self.num_guessed += num_guessed
        plain_s = self._plain_s.get(num_running)
        if not is_decode:  # prompts: its time says nothing about drafts
            return
        if num_guessed == 0:
            self._num_drafted = 0
            if plain_s is not None:
                seconds = _NEWEST * min(seconds, _MAX_NOISE * plain_s) + (1 - _NEWEST) * plain_s
            self._plain_s[num_running] = seconds
        elif plain_s is not None:
            self._num_drafted += 1
            cost = min(max(0.0, seconds / plain_s - 1) / num_guessed, _MAX_NOISE)
            key = _magnitude(num_running, num_guessed)
            known = self._costs.get(key, cost)
            self._costs[key] = known + _NEWEST * (cost - known)

    def _note_draft(self, item: ScheduledSequence, num_right: int) -> None:
        self.num_accepted += num_right
        num_tried = min(num_right + 1, len(item.draft))
        history, weight = item.sequence.history, 1 - (1 - _NEWEST_OF_ALL) ** num_tried
        assert history is not None
        if history.is_forced:
            self._forced_right += weight * (num_right / num_tried - self._forced_right)
        else:
            history.note(num_right, num_tried)
            self._first_right += weight * (num_right / num_tried - self._first_right)


def _magnitude(num_running: int, num_tokens: int) -> tuple[int, int]:
    return num_running.bit_length(), num_tokens.bit_length()
