"""A collector on loopback that receives OTLP over HTTP."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SentSpan

from tests.http_server import Handler, serve_http


@dataclass(frozen=True)
class Span:
    """A received span. Units: seconds of the epoch."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    begin: float
    end: float
    attributes: dict[str, Any]
    is_error: bool

    @property
    def duration(self) -> float:
        return self.end - self.begin


class Collector:
    """Records everything that it receives."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[bytes] = []
        self.metric_bodies: list[bytes] = []
        self._changed = threading.Condition()

    def take(self, path: str, body: bytes) -> None:
        with self._changed:
            (self.metric_bodies if path.endswith("metrics") else self.bodies).append(body)
            self._changed.notify_all()

    @property
    def spans(self) -> list[Span]:
        return [span for body in self.bodies for span in _read(body)]

    @property
    def measured(self) -> list[tuple[str, dict[str, Any], int, float]]:
        """Returns name, attributes, count and sum of each histogram in the last export."""
        last = ExportMetricsServiceRequest.FromString(self.metric_bodies[-1])
        return [
            (metric.name, _values(point.attributes), point.count, point.sum)
            for resource in last.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.histogram.data_points
        ]

    def wait_for(self, count: int) -> list[Span]:
        """Waits until there are `count` spans; returns all."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.spans) >= count, timeout=60), self.spans
        return self.spans


def _read(body: bytes) -> Iterator[Span]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        service = _values(resource.resource.attributes)["service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield _span(span, service)


def _span(span: SentSpan, service: str) -> Span:
    return Span(
        name=span.name,
        service=service,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        begin=span.start_time_unix_nano / 1e9,
        end=span.end_time_unix_nano / 1e9,
        attributes=_values(span.attributes),
        is_error=span.status.code == span.status.STATUS_CODE_ERROR,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {item.key: _value(item.value) for item in attributes if isinstance(item, KeyValue)}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


class _Handler(Handler):
    collector: Collector

    def do_POST(self) -> None:
        self.collector.take(self.path, self.body())
        self.answer(200)


@contextmanager
def run_collector() -> Iterator[Collector]:
    """Runs a collector on a free port."""
    collector = Collector()
    with serve_http(_Handler, collector=collector) as collector.url:
        yield collector
