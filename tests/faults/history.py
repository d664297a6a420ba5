"""The oracle: what clients received, and the promises that it violates.

Clients record every token and every end when it arrives; `violations` evaluates the history afterwards. It does not use
knowledge of the fleet: it checks what clients can rely on.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

#: The ends of an accepted request. A refused request was refused by its status line and never accepted.
FINISHED, FAILED, CANCELLED, REFUSED = "finished", "failed", "cancelled", "refused"
LATEST_END_S = 2.0  #: after the deadline


@dataclass(slots=True)
class Seen:
    """The response that a client received. Instants are of `time.monotonic`."""

    deadline: float
    expected: Sequence[str]  #: the complete, uninterrupted answer
    tokens: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  #: arrival of tokens and ends
    num_late: int = 0  #: tokens after an end
    answer_ids: set[str] = field(default_factory=set)  #: all values of `id` in the response

    def violations(self) -> Iterator[str]:
        """P1: exactly one end, in time, with nothing after it. P2, P3: the tokens equal those of the answer, in order."""
        if len(self.ends) != 1:
            yield f"P1: {len(self.ends)} ends: {self.ends}"
        if self.times and self.times[-1] > self.deadline + LATEST_END_S:
            yield f"P1: it went on for {self.times[-1] - self.deadline:.1f} s after its deadline"
        if self.num_late:
            yield f"P1: {self.num_late} tokens after its end"
        if self.tokens and REFUSED in self.ends:
            yield "P1: refused after it had begun"
        length = len(self.expected if FINISHED in self.ends else self.tokens)
        if self.tokens != list(self.expected[:length]):
            yield f"P3: {self.tokens} is not the uninterrupted answer {list(self.expected)}"
        if len(self.answer_ids) > 1:
            yield f"P8: pieces of several answers: {sorted(self.answer_ids)}"


class History:
    """Requests and responses of all clients of one run."""

    def __init__(self) -> None:
        self.seen: dict[str, Seen] = {}

    def ask(self, request: str, deadline: float, expected: Sequence[str]) -> None:
        self.seen[request] = Seen(deadline, expected)

    def token(self, request: str, token: str, answer_id: str) -> None:
        seen = self.seen[request]
        seen.tokens.append(token)
        seen.times.append(time.monotonic())
        seen.answer_ids.add(answer_id)
        seen.num_late += bool(seen.ends)

    def end(self, request: str, kind: str) -> None:
        self.seen[request].ends.append(kind)
        self.seen[request].times.append(time.monotonic())

    def tokens(self, request: str) -> list[str]:
        """Returns the tokens that a client has received, in order."""
        return self.seen[request].tokens if request in self.seen else []

    def outcome(self, request: str) -> str:
        """Returns the first end of a request; empty if it has not ended."""
        return next(iter(self.seen[request].ends), "")

    def outcomes(self) -> Counter[str]:
        """Counts the requests by their end."""
        return Counter(end for request in self.seen if (end := self.outcome(request)))

    def longest_pause_s(self, request: str = "") -> float:
        """Returns the longest time between two tokens of one request, or of this one."""
        asked = [self.seen[request]] if request else self.seen.values()
        pauses = (later - earlier for seen in asked for earlier, later in pairwise(seen.times))
        return max(pauses, default=0.0)

    def violations(self) -> list[str]:
        """Returns a description of every violation."""
        found = [f"{name}: {law}" for name, seen in self.seen.items() for law in seen.violations()]
        for (one, seen), (other, also) in combinations(self.seen.items(), 2):
            if shared := seen.answer_ids & also.answer_ids:
                found.append(f"P8: {shared} went to {one} and to {other}")
        return found


def conservation(accepted: int, outcomes: Mapping[str, int]) -> list[str]:
    """Checks that no request is lost or invented: accepted = finished + failed + cancelled."""
    ended = sum(outcomes.get(kind, 0) for kind in (FINISHED, FAILED, CANCELLED))
    if ended == accepted:
        return []
    return [f"{accepted} requests were accepted and {ended} ended: {dict(outcomes)}"]
