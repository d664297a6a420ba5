"""One claimed request on its way through this worker, and the words for what the engine says about it.

Pure: no Redis, no threads.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engines.base import EngineOutput
from shared.protocol import (
    Call,
    CallEvent,
    ErrorCode,
    Failed,
    Finished,
    ImagePart,
    Priority,
    StageTimings,
    Started,
    Tokens,
)
from shared.queue.api import CLEARED_AFTER_TOKENS, Claim
from worker.wire import read_claim


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A claim and where it stands. Instants are of `time.monotonic`."""

    claim: Claim
    call: Call
    output_token_ids: tuple[int, ...]  #: what earlier attempts have published
    claimed_at: float
    deadline_at: float
    started_at: float = 0.0  #: its preparation began; 0 while it is parked
    added_at: float = 0.0  #: the engine accepted it
    num_tokens: int = 0  #: output tokens published so far
    num_publications: int = 0
    is_announced: bool = False  #: `Started` was said
    is_traced: bool = False  #: its spans are made
    preparation: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, claim: Claim, now: float) -> "ActiveRequest":
        """The request of a claim that was made now. Raises: Unreadable."""
        call, tokens = read_claim(claim)
        return cls(claim, call, tokens, now, now + claim.remaining_s, num_tokens=len(tokens))

    @property
    def request_id(self) -> str:
        """The request's id on the wire."""
        return self.claim.id

    @property
    def is_alone(self) -> bool:
        """Whether nothing may run beside it: a suspect until it is cleared."""
        num_new_tokens = self.num_tokens - len(self.output_token_ids)
        return self.claim.is_suspect and num_new_tokens < CLEARED_AFTER_TOKENS

    @property
    def is_batch(self) -> bool:
        """Whether it makes way for interactive requests."""
        return self.call.priority is Priority.BATCH

    @property
    def engine_id(self) -> str:
        """The request's id inside the engine: what an earlier attempt still says is not taken for ours."""
        return f"{self.request_id}@{self.claim.attempt}"

    def failed(self, code: ErrorCode, message: str, param: str | None = None) -> Failed:
        """The event that ends it in an error. `param` names what is to blame in the request."""
        return Failed(self.request_id, self.claim.attempt, code, message, param)

    def place_of_image(self, index: int) -> str | None:
        """Where the client put an image, in the words of the wire."""
        for i, message in enumerate(self.call.task.messages):
            for j, part in enumerate(message.parts):
                if isinstance(part, ImagePart) and part.image == index:
                    return f"messages.[{i}].content.[{j}].image_url"
        return None

    def events(self, outputs: Sequence[EngineOutput]) -> list[CallEvent]:
        """What consecutive outputs of the engine mean on the wire: their tokens are one event."""
        request_id, attempt = self.request_id, self.claim.attempt
        events: list[CallEvent] = []
        first, last = outputs[0], outputs[-1]
        if first.usage is not None and first.error is None and not self.is_announced:
            self.is_announced = True
            events.append(Started(request_id, attempt, first.usage))
        said = [output for output in outputs if output.token_ids or output.text]
        if said:
            events.append(to_delta(request_id, attempt, said))
        if last.error is not None:
            events.append(self.failed(ErrorCode.ENGINE_FAILURE, last.error))
        elif last.finish_reason is not None:
            assert last.usage is not None
            timings = self._timings(last.timings or StageTimings())
            events.append(Finished(request_id, attempt, last.finish_reason, last.usage, timings))
        return events

    def _timings(self, engine: StageTimings) -> StageTimings:
        """The engine's stages, with the wait in Redis and the preparation here."""
        parked_s = self.started_at - self.claimed_at
        return msgspec.structs.replace(
            engine,
            queue_s=self.claim.waited_s + parked_s + engine.queue_s,
            preprocess_s=self.added_at - self.started_at,
        )


def to_delta(request_id: str, attempt: int, pieces: Sequence[EngineOutput | Tokens]) -> Tokens:
    """The tokens of consecutive pieces as one event."""
    return Tokens(
        request_id,
        attempt,
        pieces[0].index,
        tuple([token_id for piece in pieces for token_id in piece.token_ids]),
        "".join([piece.text for piece in pieces]),
        tuple([logprob for piece in pieces for logprob in piece.logprobs]),
    )
