"""Where a request's time went, stage by stage, as durations that add up to its end-to-end time.

The gateway measures its own stages by its own clock; the worker's come as durations in
`StageTimings`. What is left of the end-to-end time is `relay`: publishing, the mailbox, and writing
to the socket. Units: seconds.
"""

import time
from dataclasses import dataclass

from gateway.http.errors import Headers
from shared.protocol import StageTimings


@dataclass(slots=True)
class StageClock:
    """The gateway's readings of one request, on `time.perf_counter`."""

    received_at: float
    image_decode_s: float = 0.0
    submitted_at: float = 0.0  #: when it was handed to the queue
    first_text_at: float | None = None
    ended_at: float | None = None

    @property
    def ingest_s(self) -> float:
        """Received until queued, without the images."""
        return max(0.0, self.submitted_at - self.received_at - self.image_decode_s)

    @property
    def ttft_s(self) -> float | None:
        """Received until the first text, if there was any."""
        return None if self.first_text_at is None else self.first_text_at - self.received_at

    def stop(self) -> None:
        """The request has ended; the first call counts."""
        if self.ended_at is None:
            self.ended_at = time.perf_counter()

    def elapsed_s(self) -> float:
        """Received until it ended, or until now."""
        until = time.perf_counter() if self.ended_at is None else self.ended_at
        return until - self.received_at


def stages_of(clock: StageClock, worker: StageTimings, e2e_s: float) -> dict[str, float]:
    """All stages in their order (`shared.telemetry.metrics.STAGES`)."""
    stages = {
        "ingest": clock.ingest_s,
        "image_decode": clock.image_decode_s,
        "queue": worker.queue_s,
        "preprocess": worker.preprocess_s,
        "vision": worker.vision_s,
        "prefill": worker.prefill_s,
        "decode": worker.decode_s,
    }
    stages["relay"] = max(0.0, e2e_s - sum(stages.values()))
    return stages


def ttft_of(stages: dict[str, float]) -> float:
    """Until the worker had the first token of an answer that is sent whole."""
    return sum(seconds for name, seconds in stages.items() if name not in ("decode", "relay"))


def slowest(timings: list[StageTimings]) -> StageTimings:
    """Of the choices of one request the one that the client waited for."""
    if len(timings) == 1:
        return timings[0]
    return max(timings, key=_total_s)


def _total_s(timings: StageTimings) -> float:
    return (
        timings.queue_s
        + timings.preprocess_s
        + timings.vision_s
        + timings.prefill_s
        + timings.decode_s
    )


def timing_headers(stages: dict[str, float], elapsed_s: float, *, is_whole: bool) -> Headers:
    """The headers that say where the time went. Units: their durations are milliseconds."""
    entries = [f"{name};dur={seconds * 1e3:.3f}" for name, seconds in stages.items()]
    if is_whole:
        entries.append(f"total;dur={elapsed_s * 1e3:.3f}")
    return [
        (b"server-timing", ", ".join(entries).encode()),
        (b"openai-processing-ms", b"%d" % round(elapsed_s * 1e3)),
    ]


def body_timings(stages: dict[str, float], e2e_s: float) -> dict[str, float]:
    """The `timings` object of a body: each stage and the whole. Units: seconds."""
    timings = {f"{name}_s": round(seconds, 6) for name, seconds in stages.items()}
    timings["e2e_s"] = round(e2e_s, 6)
    return timings
