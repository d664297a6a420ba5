"""Records one request: stages, metrics, log line and span.

The stages are durations that add up to the end-to-end time. The gateway measures its own stages, and the worker sends
its stages (`shared.protocol.StageTimings`). The remaining time is `relay`: publishing, the mailbox and the socket.

The log never contains the prompt, the answer, a key or an image. Tenants and the client's `user` are logged as short
hashes. Attributes of the span follow OpenTelemetry's GenAI conventions; additional ones begin with `vlm.`. The
worker's stages are children of the same span.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gateway.calls.models import OTHER
from gateway.calls.open_call import ChoiceEvent, OpenCall
from gateway.calls.surface import Surface, Totals
from gateway.http.errors import ApiError, Headers, Overloaded, from_failed
from gateway.http.exchange import RequestContext, short_hash
from shared.protocol import ErrorCode, Failed, Finished, FinishReason, Priority, Tokens
from shared.telemetry.metrics import STAGES, GatewayMetrics, RequestRecord
from shared.telemetry.tracing import NOT_FAILURES, Attributes, Stage, epoch_ns, trace_id_of

if TYPE_CHECKING:
    from shared.telemetry.spans import RequestSpan, Tracer

_LARGEST_INT = 2**63 - 1  #: larger numbers are not recorded, and their requests are refused

logger = logging.getLogger(__name__)


class Recorder:
    """Records one request. `model`: a metrics label, always a known name. Units: seconds, of `time.perf_counter`."""

    image_decode_s = 0.0
    submitted_at = 0.0  #: when the request was sent to the queue
    model = OTHER
    user: str | None = None
    key = ""  #: name of the stored key
    priority = Priority.INTERACTIVE
    num_prompts = 1
    outcome = "cancelled"
    is_followed = False  #: the answer is of an earlier request, which is counted instead
    _first_text_at: float | None = None
    _ended_at: float | None = None
    _is_streamed = False
    _num_choices = 0
    _stages: Mapping[str, float] = {}  #: stages of a complete answer, without `relay`
    _span: "RequestSpan | None" = None
    _tracer: "Tracer | None" = None

    def __init__(self, surface: Surface, context: RequestContext, metrics: GatewayMetrics) -> None:
        self.surface = surface
        self.context = context
        self.metrics = metrics
        self.totals = Totals()
        self._last_token_at: dict[int, float] = {}

    # Request

    def trace(self, tracer: "Tracer") -> None:
        begin_ns = epoch_ns(self.elapsed_s())
        name = self.surface.name
        self._tracer = tracer
        self._span = tracer.begin(name, "server", self.context.trace_parent, begin_ns)
        self.context.trace_parent = self._span.trace_parent

    def describe(self, request: Any) -> None:
        if self._span is not None:
            numbers = self.surface.describe(request)
            self._span.add(
                {
                    f"gen_ai.request.{name}": number
                    for name, number in numbers.items()
                    if number is not None and abs(number) <= _LARGEST_INT
                }
            )

    def begin(self, call: OpenCall, *, is_streamed: bool) -> None:
        """Record that the call was queued, or that it reads the answer of an earlier request."""
        self.is_followed = call.is_follower
        self._is_streamed = is_streamed
        self._num_choices = len(call.choices)

    # Durations

    def elapsed_s(self) -> float:
        """Time from arrival to the end of the request, or until now."""
        until = time.perf_counter() if self._ended_at is None else self._ended_at
        return until - self.context.received_at

    @property
    def _ingest_s(self) -> float:
        """Time from arrival to the queue, without the time to load images."""
        return max(0.0, self.submitted_at - self.context.received_at - self.image_decode_s)

    @property
    def _ttft_s(self) -> float | None:
        """Time from arrival to the first text. None: no text yet."""
        first = self._first_text_at
        return None if first is None else first - self.context.received_at

    # Events

    @property
    def is_complete(self) -> bool:
        return 0 < len(self.totals.finished) == self._num_choices

    def note(self, events: Sequence[ChoiceEvent]) -> None:
        """Record events that arrived together. Raises: ApiError for a failure."""
        now = time.perf_counter()
        for index, event in events:
            if isinstance(event, Tokens):
                self._note_tokens(index, event, now)
            elif isinstance(event, Finished):
                self._note_end(index, event)
            elif isinstance(event, Failed):
                error = from_failed(event)
                if error.param == "prompt" and self.num_prompts > 1:
                    error.param += f".[{index * self.num_prompts // self._num_choices}]"
                raise error

    def _note_end(self, index: int, event: Finished) -> None:
        if event.finish_reason is FinishReason.ABORT:
            message = "The request was cancelled."
            raise from_failed(Failed(event.request_id, event.attempt, ErrorCode.CANCELLED, message))
        totals = self.totals
        if self.num_prompts == 1:
            if not totals.finished:
                totals.prompt = event.usage
        elif index % (self._num_choices // self.num_prompts) == 0:
            totals.prompt += event.usage
        totals.finished.append(event)
        totals.num_output_tokens += event.usage.num_output_tokens

    def _note_tokens(self, index: int, event: Tokens, now: float) -> None:
        if event.text and self._first_text_at is None:
            self._first_text_at = now
        last = self._last_token_at.get(index)
        if last is not None and event.num_tokens and not self.is_followed:
            self.metrics.record_tokens(self.model, now - last, event.num_tokens)
        self._last_token_at[index] = now

    def stages(self, e2e_s: float) -> dict[str, float]:
        """The stages of the slowest choice of a complete answer."""
        known = self._stages = self._stages or self._known_stages()
        return {**known, "relay": max(0.0, e2e_s - sum(known.values()))}

    def _known_stages(self) -> dict[str, float]:
        """All stages except `relay`."""
        timings = [event.timings for event in self.totals.finished]
        worker = max(timings, key=lambda each: each.total_s) if len(timings) > 1 else timings[0]
        own = {"ingest": self._ingest_s, "image_decode": self.image_decode_s}
        return own | {name: getattr(worker, f"{name}_s") for name in STAGES[len(own) : -1]}

    def known_timing(self) -> Headers:
        stages = {"ingest": self._ingest_s, "image_decode": self.image_decode_s}
        return timing_headers(stages, self.elapsed_s(), is_whole=False)

    # End

    def count(self, error: ApiError | None, *, is_answered: bool) -> None:
        """Count the outcome once, before the client sees it."""
        if is_answered:
            self.outcome = "followed" if self.is_followed else "ok"
        elif isinstance(error, Overloaded):
            self.metrics.count("admission_rejections", error.reason)
            self.outcome = "rejected"
        elif error is not None:
            self.outcome = error.code or self.outcome
        if error is not None and error.model is not None:
            self.model = error.model
        self.metrics.count("requests", self.model, self.outcome)

    def stop(self, status: int | None) -> None:
        """Stop the clock and close the span. `status` is the response status, if one was sent."""
        self._ended_at = time.perf_counter()
        if self._span is not None and self._span.is_recorded:
            self._end_span(self._span, status)

    def account(self, status: int | None) -> None:
        """Log the request and observe the metrics of a complete answer."""
        e2e_s = self.elapsed_s()
        stages = self.stages(e2e_s) if self.is_complete else {}
        if logger.isEnabledFor(logging.INFO):
            self._log(status, stages, e2e_s)
        record = self._observe(stages, e2e_s) if stages and self.outcome == "ok" else None
        if self._tracer is not None and self._tracer.is_metered:
            self._measure(self._tracer, record, e2e_s)

    def _measure(self, tracer: "Tracer", record: RequestRecord | None, e2e_s: float) -> None:
        """Record OpenTelemetry's GenAI metrics."""
        attributes = self._attributes()
        error = {} if self.outcome in NOT_FAILURES else {"error.type": self.outcome}
        tracer.measure("gen_ai.server.request.duration", e2e_s, attributes | error)
        if record is None:
            return
        counts = {"input": record.prompt.num_prompt_tokens, "output": record.num_output_tokens}
        for kind, count in counts.items():
            typed = attributes | {"gen_ai.token.type": kind}
            tracer.measure("gen_ai.client.token.usage", count, typed)
        delays = {"to_first_token": record.ttft_s, "per_output_token": record.per_token_s}
        for name, seconds in delays.items():
            if seconds is not None:
                tracer.measure(f"gen_ai.server.time_{name}", seconds, attributes)

    def _observe(self, stages: dict[str, float], e2e_s: float) -> RequestRecord:
        ttft_s = self._ttft_s
        if ttft_s is not None and not self._is_streamed:
            # Tokens of a whole answer arrive together, so the worker's time to the first one is used.
            ttft_s = sum([s for name, s in stages.items() if name not in ("decode", "relay")])
        record = RequestRecord(
            model=self.model,
            priority=self.priority.value,
            stages=stages,
            e2e_s=e2e_s,
            ttft_s=ttft_s,
            prompt=self.totals.prompt,
            num_output_tokens=self.totals.num_output_tokens,
            num_choices=self._num_choices,
            key=self.key,
        )
        self.metrics.record_finished(record)
        return record

    def _log(self, status: int | None, stages: dict[str, float], e2e_s: float) -> None:
        context = self.context
        fields: dict[str, object] = {
            "request_id": context.id, "model": self.model, "outcome": self.outcome, "status": status,
        }  # fmt: skip
        if context.client_id is not None:
            fields["client_request_id"] = context.client_id
        if context.trace_parent is not None:
            fields["trace_id"] = trace_id_of(context.trace_parent)
        if context.tenant:
            fields["tenant"] = short_hash(context.tenant)
        if self.user:
            fields["user"] = short_hash(self.user)
        if stages:
            for kind in ("prompt", "image", "audio", "cached"):
                fields[f"{kind}_tokens"] = getattr(self.totals.prompt, f"num_{kind}_tokens")
            fields["output_tokens"] = self.totals.num_output_tokens
            fields.update(body_timings(stages, e2e_s))
        else:
            fields["e2e_s"] = round(e2e_s, 6)
        logger.info("request ended", extra=fields)

    def _end_span(self, span: "RequestSpan", status: int | None) -> None:
        e2e_s, attributes = self.elapsed_s(), self._attributes()
        span.rename(f"{attributes['gen_ai.operation.name']} {self.model}")
        span.add(attributes)
        span.add({"vlm.request.id": self.context.id, "vlm.outcome": self.outcome})
        if status is not None:
            span.add({"http.response.status_code": status})
        if self.is_complete:
            span.add(self._answer_attributes())
        is_ours = self.outcome not in NOT_FAILURES and (status is None or not 400 <= status < 500)
        span.end(e2e_s, self._own_stages(e2e_s), self.outcome if is_ours else None)

    def _attributes(self) -> dict[str, str]:
        return {
            "gen_ai.operation.name": self.surface.operation or self.surface.name,
            "gen_ai.provider.name": "vlm-fleet",
            "gen_ai.request.model": self.model,
        }

    def _answer_attributes(self) -> Attributes:
        prompt, ttft_s = self.totals.prompt, self._ttft_s
        reasons = [event.finish_reason.value for event in self.totals.finished]
        answer: Attributes = {
            "gen_ai.response.id": self.surface.id_prefix + self.context.id,
            "gen_ai.response.model": self.model,
            "gen_ai.response.finish_reasons": reasons,
            "gen_ai.usage.input_tokens": prompt.num_prompt_tokens,
            "gen_ai.usage.output_tokens": self.totals.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": prompt.num_cached_tokens,
            "vlm.usage.image_tokens": prompt.num_image_tokens,
            "vlm.usage.audio_tokens": prompt.num_audio_tokens,
        }
        if ttft_s is None:
            return answer
        return {**answer, "gen_ai.response.time_to_first_chunk": ttft_s}

    def _own_stages(self, e2e_s: float) -> list[Stage]:
        """The stages that this process measured. `relay` ends with the request."""
        if not self.submitted_at:
            return []
        stages = [Stage("ingest", 0.0, self._ingest_s)]
        if self.image_decode_s:
            begin_s = self.submitted_at - self.context.received_at - self.image_decode_s
            stages.append(Stage("image_decode", begin_s, self.image_decode_s))
        if self.is_complete:
            relay_s = self.stages(e2e_s)["relay"]
            stages.append(Stage("relay", e2e_s - relay_s, relay_s))
        return stages


def timing_headers(stages: dict[str, float], elapsed_s: float, *, is_whole: bool) -> Headers:
    """The headers `server-timing` and `openai-processing-ms`. Units: seconds; milliseconds in the headers."""
    entries = [f"{name};dur={seconds * 1e3:.3f}" for name, seconds in stages.items()]
    if is_whole:
        entries.append(f"total;dur={elapsed_s * 1e3:.3f}")
    return [
        (b"server-timing", ", ".join(entries).encode()),
        (b"openai-processing-ms", b"%d" % round(elapsed_s * 1e3)),
    ]


def body_timings(stages: dict[str, float], e2e_s: float) -> dict[str, float]:
    """The `timings` object of a body: each stage and the total. Units: seconds."""
    timings = {f"{name}_s": round(seconds, 6) for name, seconds in stages.items()}
    timings["e2e_s"] = round(e2e_s, 6)
    return timings
