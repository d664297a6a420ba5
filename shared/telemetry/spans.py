"""Creates and exports the spans of requests, from the measured durations of their stages.

The only module that imports OpenTelemetry; it is loaded only if traces are enabled. While a request runs, only its own
span is open: the spans of its stages are created at its end. Units: instants are epoch nanoseconds, durations seconds.
"""

import os
import threading
from collections.abc import Sequence
from typing import Literal

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace import Tracer as OtelTracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.telemetry.tracing import NS, Attributes, Stage

#: Maximum time that each exporter can delay the end of the process if its collector does not respond.
CLOSE_WITHIN_S = 3.0

#: Units and buckets by metric. Source: OpenTelemetry's GenAI conventions, "Metrics".
_METRICS = {
    "gen_ai.client.token.usage": ("{token}", [4.0**power for power in range(14)]),
    "gen_ai.server.request.duration": ("s", [0.01 * 2**power for power in range(14)]),
    "gen_ai.server.time_to_first_token": (
        "s", [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10],
    ),
    "gen_ai.server.time_per_output_token": (
        "s", [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5],
    ),
}  # fmt: skip

Kind = Literal["server", "consumer"]
_PARENTS = TraceContextTextMapPropagator()


class Tracer:
    """Creates the spans of one process and exports them in batches, in a thread."""

    def __init__(self, process: str, instance: str, version: str) -> None:
        """Exporter and sampler are configured by OpenTelemetry's own variables (`OTEL_...`)."""
        own = {
            "service.namespace": "vlm-fleet",
            "service.name": f"vlm-{process}",
            "service.instance.id": instance,
            "service.version": version,
        }
        configured = OTELResourceDetector().detect().attributes
        resource = Resource.create({**own, **configured})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("vlm-fleet", version)
        self._meters: MeterProvider | None = None
        self._histograms = {}
        if process == "gateway" and os.environ.get("OTEL_METRICS_EXPORTER", "") == "otlp":
            reader = PeriodicExportingMetricReader(OTLPMetricExporter())
            self._meters = MeterProvider([reader], resource, shutdown_on_exit=False)
            meter = self._meters.get_meter("vlm-fleet", version)
            self._histograms = {
                name: meter.create_histogram(
                    name, unit, explicit_bucket_boundaries_advisory=buckets
                )
                for name, (unit, buckets) in _METRICS.items()
            }

    def begin(
        self, name: str, kind: Kind, trace_parent: str | None, begin_ns: int
    ) -> "RequestSpan":
        """Begin the span of a request, as a child of the caller's span if there is one."""
        carrier = {} if trace_parent is None else {"traceparent": trace_parent}
        context = _PARENTS.extract(carrier, Context())
        span = self._tracer.start_span(name, context, SpanKind[kind.upper()], start_time=begin_ns)
        return RequestSpan(self._tracer, span, begin_ns)

    @property
    def is_metered(self) -> bool:
        """True if `OTEL_METRICS_EXPORTER` enables metrics."""
        return self._meters is not None

    def measure(self, name: str, value: float, attributes: Attributes) -> None:
        """Record a value of one of the GenAI metrics."""
        self._histograms[name].record(value, attributes)

    def close(self) -> None:
        """Export the remaining spans, for a limited time."""
        providers = [each for each in (self._provider, self._meters) if each is not None]
        threads = [threading.Thread(target=each.shutdown, daemon=True) for each in providers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(CLOSE_WITHIN_S)


class RequestSpan:
    """The open span of a request in one process."""

    def __init__(self, tracer: OtelTracer, span: Span, begin_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._begin_ns = begin_ns

    @property
    def trace_parent(self) -> str:
        """The `traceparent` header for child spans."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    @property
    def is_recorded(self) -> bool:
        return self._span.is_recording()

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def add(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def end(self, duration_s: float, stages: Sequence[Stage], error: str | None = None) -> None:
        """End the span, with a child span for each stage. `error`: code of the failure."""
        context = set_span_in_context(self._span, Context())
        for stage in stages:
            begin_ns = self._begin_ns + round(stage.begin_s * NS)
            span = self._tracer.start_span(
                stage.name, context, attributes=stage.attributes, start_time=begin_ns
            )
            span.end(begin_ns + round(stage.duration_s * NS))
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(self._begin_ns + round(duration_s * NS))
