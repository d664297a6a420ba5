"""A worker's spans of a request: one for the attempt, with the children queue, preprocess, vision, prefill, decode.

They are created when the attempt ends, from its `StageTimings`. Their parent is the gateway's span, which the call
names. They contain no text and no images.
"""

import time
from typing import TYPE_CHECKING

from shared.protocol import StageTimings
from shared.telemetry.tracing import NOT_FAILURES, Attributes, epoch_ns, lay_out
from worker.active_requests import ActiveRequest

if TYPE_CHECKING:
    from shared.telemetry.spans import Tracer

_IN_REDIS: Attributes = {"vlm.queue": "redis"}
_IN_ENGINE: Attributes = {"vlm.queue": "engine"}


class RequestTracer:
    def __init__(self, tracer: "Tracer") -> None:
        self._tracer = tracer

    def trace(self, active: ActiveRequest, engine: StageTimings | None, outcome: str) -> None:
        """A span from the time the request was queued until now. `outcome`: ok, cancelled or a code."""
        request, waited_s = active.call, active.claim.waited_s
        if active.is_traced or request.trace_parent is None:  # already exported, or not sampled
            return
        active.is_traced = True
        now = time.monotonic()
        duration_s = waited_s + now - active.claimed_at
        span = self._tracer.begin(
            f"{type(request.task).__struct_config__.tag} {request.model}",
            "consumer",
            request.trace_parent,
            epoch_ns(duration_s),
        )
        if not span.is_recorded:
            return
        span.add(
            {
                "gen_ai.request.model": request.model,
                "vlm.request.id": request.id,
                "vlm.attempt": active.claim.attempt,
                "vlm.image.count": len(request.task.images),
                "vlm.outcome": outcome,
            }
        )
        error = None if outcome in NOT_FAILURES else outcome
        span.end(duration_s, lay_out(_durations(active, engine, now)), error)


def _durations(
    active: ActiveRequest, engine: StageTimings | None, now: float
) -> list[tuple[str, float, Attributes]]:
    """Durations of the stages that the request reached, in order. Units: seconds."""
    started_at = active.started_at or now
    rest_s = (active.added_at or now) - started_at - active.media_decode_s
    durations: list[tuple[str, float, Attributes]] = [
        ("queue", active.claim.waited_s + started_at - active.claimed_at, _IN_REDIS),
        ("media_decode", active.media_decode_s, {}),
        ("preprocess", rest_s, {}),
    ]
    if engine is not None:
        durations += [
            ("queue", engine.queue_s, _IN_ENGINE),
            ("vision", engine.vision_s, {}),
            ("prefill", engine.prefill_s, {}),
            ("decode", engine.decode_s, {}),
        ]
    return durations
