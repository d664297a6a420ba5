"""Several tokens of an answer in one step: guessed before it, and kept where they are what is drawn.

A step computes the last token and a draft behind it. The sampler then draws as ever, place by
place; as long as it draws what the draft has, the next place is known too. So an answer is the
same with and without drafts, at any temperature. Grammars guess well, as they force much of what
they allow; what stood in prompt or answer before comes again. How long drafts are follows what
steps take.
"""

from collections.abc import Callable, Set
from collections.abc import Sequence as Items
from itertools import takewhile

from engines.core.runner import StepResult, TokenChoice
from engines.core.sequence import Batch, ScheduledSequence, Sequence

#: Tokens of a draft at most.
MAX_DRAFT = 16
_NGRAM = 3
#: Weight of the newest measurement.
_NEWEST = 0.1
#: A guess that was wrong so often is tried now and then only.
_PLAIN_EVERY = 64

#: Draws the next tokens of shares, by their places; of which each has so many tokens more by now.
Draw = Callable[[list[int], int], list[TokenChoice]]


def draw_on(items: Items[ScheduledSequence], choices: list[TokenChoice | None], draw: Draw) -> None:
    """Draw the tokens behind drafts, while these are right, into `following` of the choices.

    The sequences have the tokens that were drawn before while `draw` is called, and as they were after.
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
            for place, choice in zip(places, draw(places, num_more), strict=True):
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


class Speculator:
    """Guesses for the sequences of one engine.

    A token more in a draft costs time, and saves a step's share where it is right: drafts are as
    long as that pays, by what was measured.
    """

    def __init__(self, eos_token_ids: Set[int] = frozenset()) -> None:
        """No draft has tokens that end an answer: what is drawn behind one may."""
        self._eos_token_ids = eos_token_ids
        self.num_guessed = 0  #: tokens of drafts that were computed
        self.num_accepted = 0
        self.is_asked = False  #: for the step that is planned: what comes of it is worth a note
        self._plain_s: dict[int, float] = {}  # a step without drafts, by number of sequences
        self._token_s = 0.0  # a token of a draft more
        self._right = {True: 0.9, False: 0.5}  # how often a token is right: of grammars, of others
        self._num_drafted = 0  # steps in a row with drafts

    def guess(self, sequence: Sequence, num_running: int, most: int) -> tuple[int, ...]:
        """What may follow the tokens of a sequence: at most so many, none where it does not pay."""
        self.is_asked = True
        constraint = sequence.constraint
        most = min(most, MAX_DRAFT, sequence.max_output_tokens - sequence.num_output_tokens - 1)
        if constraint is None or most < 1 or not self._plain_s.get(num_running):
            return ()
        if self._num_drafted >= _PLAIN_EVERY:  # what steps take without has to be seen
            return ()
        draft = constraint.draft(sequence.token_ids, sequence.num_prompt_tokens)
        sequence.is_draft_forced = bool(draft)
        if not draft:
            draft = find_repetition(sequence)
        longest = min(most, self._longest(sequence.is_draft_forced, num_running))
        return tuple(takewhile(lambda each: each not in self._eos_token_ids, draft[:longest]))

    def _longest(self, is_forced: bool, num_running: int) -> int:
        """How long a draft pays."""
        if self._token_s <= 0:
            return MAX_DRAFT
        worth = self._plain_s[num_running] / num_running / self._token_s
        share, right, longest = 1.0, self._right[is_forced], 0
        while longest < MAX_DRAFT and (share := share * right) * worth > 1:
            longest += 1
        return longest

    def note(self, batch: Batch, result: StepResult, seconds: float) -> None:
        """What came of a step, and how long it took."""
        self.is_asked = False
        num_sequences, num_guessed = len(batch.items), 0
        for item, choice in zip(batch.items, result.choices, strict=True):
            if item.num_new_tokens - len(item.draft) != 1 or choice is None:
                return  # prompts: it says nothing about drafts
            if item.draft:
                num_right = len(choice.following)
                num_guessed += len(item.draft)
                self.num_accepted += num_right
                kind, tried = item.sequence.is_draft_forced, min(num_right + 1, len(item.draft))
                weight = min(0.5, _NEWEST * tried / 4)
                self._right[kind] += weight * (num_right / tried - self._right[kind])
        self.num_guessed += num_guessed
        plain_s = self._plain_s.get(num_sequences)
        if num_guessed == 0:
            self._num_drafted = 0
            weight = _NEWEST if plain_s else 1.0
            self._plain_s[num_sequences] = weight * seconds + (1 - weight) * (plain_s or 0.0)
        elif plain_s:
            self._num_drafted += 1
            token_s = max(0.0, seconds - plain_s) / num_guessed
            self._token_s += _NEWEST * (min(token_s, plain_s) - self._token_s)


def find_repetition(sequence: Sequence) -> list[int]:
    """What followed the last tokens of a sequence where they stood before."""
    token_ids = sequence.token_ids
    end = len(token_ids)
    if end <= _NGRAM:
        return []
    places = sequence.ngrams
    for place in range(sequence.num_indexed, end - _NGRAM):
        places[tuple(token_ids[place : place + _NGRAM])] = place + _NGRAM
    sequence.num_indexed = end - _NGRAM
    found = places.get(tuple(token_ids[-_NGRAM:]))
    return [] if found is None else token_ids[found : found + MAX_DRAFT]
