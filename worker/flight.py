"""One claimed request on its way through this worker, and the words for what the engine says about it.

Pure: no Redis, no threads.
"""

import asyncio
from dataclasses import dataclass

import msgspec

from engines.base import EngineOutput
from shared.protocol import (
    Delta,
    ErrorCode,
    Failed,
    Finished,
    GenerateEvent,
    ImagePart,
    Priority,
    StageTimings,
    Started,
)
from shared.publication import Claim

#: A suspect that came so many tokens further than its earlier attempts will hardly end this worker.
PROVEN_AFTER_TOKENS = 8


@dataclass(slots=True, eq=False)
class Flight:
    """A claim and where it stands. Instants are of `time.monotonic`."""

    claim: Claim
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
    def of(cls, claim: Claim, now: float) -> "Flight":
        """A flight that begins now."""
        return cls(claim, now, now + claim.remaining_s, num_tokens=len(claim.output_token_ids))

    @property
    def request_id(self) -> str:
        """The request's id on the wire."""
        return self.claim.request.request_id

    @property
    def is_alone(self) -> bool:
        """Whether nothing may run beside it: a suspect until it is proven, one on its last chance always."""
        num_new_tokens = self.num_tokens - len(self.claim.output_token_ids)
        is_proven = not self.claim.is_last_chance and num_new_tokens >= PROVEN_AFTER_TOKENS
        return self.claim.is_suspect and not is_proven

    @property
    def is_batch(self) -> bool:
        """Whether it makes way for interactive requests."""
        return self.claim.request.priority is Priority.BATCH

    @property
    def engine_id(self) -> str:
        """The request's id inside the engine: what an earlier attempt still says is not taken for ours."""
        return f"{self.request_id}@{self.claim.attempt}"

    def failed(self, code: ErrorCode, message: str, param: str | None = None) -> Failed:
        """The event that ends it in an error. `param` names what is to blame in the request."""
        return Failed(self.request_id, self.claim.attempt, code, message, param)

    def place_of_picture(self, picture: int) -> str | None:
        """Where the client put a picture, in the words of the wire."""
        for i, message in enumerate(self.claim.request.messages):
            for j, part in enumerate(message.parts):
                if isinstance(part, ImagePart) and part.image == picture:
                    return f"messages.[{i}].content.[{j}].image_url"
        return None

    def events(self, output: EngineOutput) -> list[GenerateEvent]:
        """What an output of the engine means on the wire."""
        request_id, attempt = self.request_id, self.claim.attempt
        events: list[GenerateEvent] = []
        if output.error is not None:
            return [self.failed(ErrorCode.ENGINE_FAILURE, output.error)]
        if output.usage is not None and not self.is_announced:
            self.is_announced = True
            events.append(Started(request_id, attempt, output.usage))
        if output.token_ids or output.text:
            events.append(
                Delta(
                    request_id,
                    attempt,
                    output.index,
                    tuple(output.token_ids),
                    output.text,
                    tuple(output.logprobs),
                )
            )
        if output.finish_reason is not None:
            assert output.usage is not None
            timings = self._timings(output.timings or StageTimings())
            events.append(
                Finished(request_id, attempt, output.finish_reason, output.usage, timings)
            )
        return events

    def _timings(self, engine: StageTimings) -> StageTimings:
        """The engine's stages, with the wait in Redis and the preparation here."""
        parked_s = self.started_at - self.claimed_at
        return msgspec.structs.replace(
            engine,
            queue_s=self.claim.waited_s + parked_s + engine.queue_s,
            preprocess_s=self.added_at - self.started_at,
        )
