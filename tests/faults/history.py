"""The oracle: what clients saw, and which promises that breaks.

Clients write down every token and every end as it comes; `violations` reads the whole history afterwards. It must
not know how a fleet works: the laws are those that a client may rely on.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

#: How an accepted request may end. A refused one was never accepted: it was sent away by its status line.
FINISHED, FAILED, CANCELLED, REFUSED = "finished", "failed", "cancelled", "refused"
LATEST_END_S = 2.0  #: after the deadline

#: A run of so many tokens of another request's answer is no coincidence.
FOREIGN_RUN = 4


@dataclass(frozen=True, slots=True)
class Sight:
    """One thing that a client saw: a token at its place in the answer, or an end. Units: seconds since any start."""

    request: str
    at: float
    index: int = 0
    token: str = ""
    terminal: str = ""
    answer_id: str = ""  #: the `id` that the answer bore


@dataclass(slots=True)
class History:
    """All that the clients of one run asked and saw. `expected`: the whole answer, where it is known."""

    sights: list[Sight] = field(default_factory=list)
    deadlines: dict[str, float] = field(default_factory=dict)  #: by request that was sent
    expected: dict[str, Sequence[str]] = field(default_factory=dict)

    def ask(self, request: str, deadline: float, expected: Sequence[str] | None = None) -> None:
        """A client sends a request."""
        self.deadlines[request] = deadline
        if expected is not None:
            self.expected[request] = expected

    def see(self, sight: Sight) -> None:
        """A client sees something."""
        self.sights.append(sight)

    def tokens(self, request: str) -> list[str]:
        """The tokens that a client saw, in order."""
        return [s.token for s in self.sights if s.request == request and not s.terminal]

    def outcome(self, request: str) -> str:
        """How a request has ended, by its first end; empty if it has not."""
        ends = (s.terminal for s in self.sights if s.request == request and s.terminal)
        return next(ends, "")

    def outcomes(self) -> Counter[str]:
        """How many requests ended how."""
        return Counter(end for request in self.deadlines if (end := self.outcome(request)))

    def longest_pause_s(self, request: str = "") -> float:
        """Between two tokens of one request, or of this one."""
        pauses = [0.0]
        for asked in [request] if request else self.deadlines:
            times = [s.at for s in self.sights if s.request == asked]
            pauses += [later - earlier for earlier, later in pairwise(times)]
        return max(pauses)

    def violations(self) -> list[str]:
        """Every broken law, in words; none if all is well."""
        by_request: dict[str, list[Sight]] = defaultdict(list)
        for sight in self.sights:
            by_request[sight.request].append(sight)
        found = [f"{request}: nobody asked it" for request in by_request.keys() - self.deadlines]
        for request, deadline in self.deadlines.items():
            sights = by_request.get(request, [])
            found += _broken_ends(request, sights, deadline)
            found += _broken_order(request, sights)
            found += self._broken_answer(request, sights)
        return found + _shared_answers(self.sights)

    def _broken_answer(self, request: str, sights: Sequence[Sight]) -> list[str]:
        """P3 and P8: the tokens are those of the uninterrupted answer, and of no other request's."""
        expected = self.expected.get(request)
        if expected is None:
            return []
        tokens = [s.token for s in sights if not s.terminal]
        is_whole = any(s.terminal == FINISHED for s in sights)
        if tokens == list(expected) if is_whole else tokens == list(expected[: len(tokens)]):
            return []
        found = [f"P3 {request}: {tokens} is not the uninterrupted answer {list(expected)}"]
        for other, answer in self.expected.items():
            if other != request and _has_foreign_run(tokens, expected, answer):
                found.append(f"P8 {request}: holds tokens of {other}")
        return found


def _broken_ends(request: str, sights: Sequence[Sight], deadline: float) -> list[str]:
    """P1: exactly one end, in time, and nothing after it."""
    ends = [s for s in sights if s.terminal]
    if len(ends) != 1:
        return [f"P1 {request}: {len(ends)} ends: {[s.terminal for s in ends]}"]
    found = []
    if ends[0].at > deadline + LATEST_END_S:
        found.append(f"P1 {request}: ended {ends[0].at - deadline:.1f} s after its deadline")
    if sights[-1] is not ends[0]:
        found.append(f"P1 {request}: tokens after its end")
    if ends[0].terminal == REFUSED and len(sights) > 1:
        found.append(f"P1 {request}: refused after it had begun")
    return found


def _broken_order(request: str, sights: Sequence[Sight]) -> list[str]:
    """P2: the tokens are numbered from 0 without gap or duplicate."""
    indexes = [s.index for s in sights if not s.terminal]
    if indexes == list(range(len(indexes))):
        return []
    return [f"P2 {request}: token indexes are {indexes}"]


def _shared_answers(sights: Iterable[Sight]) -> list[str]:
    """P8: a request has one answer, and no other request has the same."""
    ids: dict[str, set[str]] = defaultdict(set)
    requests: dict[str, set[str]] = defaultdict(set)
    for sight in sights:
        if sight.answer_id:
            ids[sight.request].add(sight.answer_id)
            requests[sight.answer_id].add(sight.request)
    return [f"P8 {r}: pieces of several answers: {sorted(i)}" for r, i in ids.items() if len(i) > 1] + [
        f"P8 answer {i} went to several requests: {sorted(r)}" for i, r in requests.items() if len(r) > 1
    ]  # fmt: skip


def _has_foreign_run(tokens: Sequence[str], own: Sequence[str], other: Sequence[str]) -> bool:
    run = 0
    for i, token in enumerate(tokens):
        is_own = i < len(own) and own[i] == token
        run = run + 1 if not is_own and token in other else 0
        if run >= FOREIGN_RUN:
            return True
    return False


def conservation(accepted: int, outcomes: Mapping[str, int]) -> list[str]:
    """Nothing is lost and nothing appears: accepted = finished + failed + cancelled."""
    ended = sum(outcomes.get(kind, 0) for kind in (FINISHED, FAILED, CANCELLED))
    if ended == accepted:
        return []
    return [f"{accepted} requests were accepted and {ended} ended: {dict(outcomes)}"]
