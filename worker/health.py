"""The HTTP server of probes and metrics (`/healthz`, `/readyz`, `/metrics`), and the collector of a worker's metrics.

It runs on the worker's event loop. A worker is alive unless a step of its engine hangs, and ready while it claims
requests.
"""

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import httpx
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from shared.queue.api import WorkerQueue
from shared.settings import SettingsError
from shared.telemetry.metrics import WORKER_METRICS
from worker.engine_thread import EngineThread
from worker.prepare.preparer import MediaCounts

REQUEST_WITHIN_S = 5.0
MAX_REQUEST_BYTES = 8192

Answer = tuple[int, str, bytes]  # status, content type, body
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 503: "Service Unavailable"}
Samples = Iterable[tuple[tuple[str, ...], float]]


@dataclass
class HealthServer:
    """`_registry` may return None while the worker starts."""

    _is_alive: Callable[[], bool]
    _is_ready: Callable[[], bool]
    _registry: Callable[[], CollectorRegistry | Awaitable[CollectorRegistry] | None]
    _server: asyncio.Server | None = None
    port: int = 0  #: 0 until the server listens

    async def start(self, host: str, port: int, variable: str) -> None:
        """Listen on a port (0: a free one), or at `host` if it is a path. Raises: SettingsError, naming `variable`."""
        serve, limit = self._serve, MAX_REQUEST_BYTES
        try:
            if host.startswith("/"):
                self._server = await asyncio.start_unix_server(serve, host, limit=limit)
                return
            self._server = await asyncio.start_server(serve, host, port, limit=limit)
        except OSError as error:
            raise SettingsError(
                f"{variable}: cannot listen on {host}:{port} ({error.strerror}); use another port, or 0 for any free port"
            ) from None
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(REQUEST_WITHIN_S):
                head = await reader.readuntil(b"\r\n\r\n")
                status, content_type, body = await self._answer(head)
                writer.write(
                    f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: {content_type}\r\n"
                    f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
                    + (b"" if head.startswith(b"HEAD ") else body)
                )
                await writer.drain()
        writer.close()

    async def _answer(self, head: bytes) -> Answer:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or words[0] not in (b"GET", b"HEAD"):
            return 400, "text/plain", b"only GET and HEAD are supported\n"
        path = words[1].split(b"?")[0]
        if path == b"/healthz":
            return _probe(self._is_alive())
        if path == b"/readyz":
            return _probe(self._is_ready())
        if path == b"/metrics":
            registry = self._registry()
            if inspect.isawaitable(registry):
                registry = await registry
            body = generate_latest(registry) if registry is not None else b""
            return 200, CONTENT_TYPE_LATEST, body
        return 404, "text/plain", b"no such page\n"


def _probe(is_good: bool) -> Answer:
    return (200, "text/plain", b"ok\n") if is_good else (503, "text/plain", b"no\n")


@dataclass(eq=False)
class WorkerCollector(Collector):
    """The metrics of a worker; `shared.telemetry.metrics` defines their names."""

    _engine: EngineThread
    _queues: Collection[WorkerQueue]
    _media: MediaCounts

    def collect(self) -> Iterator[Metric]:
        """One family per metric, in the order of their definition."""
        samples = self._samples()
        for metric in WORKER_METRICS:
            family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            one = family(metric.name.removesuffix("_total"), metric.help, labels=metric.labels)
            for labels, value in samples[metric.name]:
                one.add_metric(labels, value)
            yield one

    def _samples(self) -> dict[str, Samples]:
        stats = self._engine.stats
        num_claims: Counter[str] = Counter()
        for queue in self._queues:
            num_claims.update(queue.num_claims)
        plain: dict[str, float] = {
            "vlm_num_requests_running": stats.num_running,
            "vlm_num_requests_waiting": stats.num_waiting,
            "vlm_kv_cache_usage_ratio": stats.kv_usage_ratio,
            "vlm_prefix_cache_query_tokens_total": stats.num_prefix_query_tokens,
            "vlm_prefix_cache_hit_tokens_total": stats.num_prefix_hit_tokens,
            "vlm_encoder_cache_queries_total": stats.num_encoder_queries,
            "vlm_encoder_cache_hits_total": stats.num_encoder_hits,
            "vlm_encoder_cache_bytes": stats.encoder_cache_bytes,
            "vlm_result_cache_queries_total": stats.num_result_queries,
            "vlm_result_cache_hits_total": stats.num_result_hits,
            "vlm_result_cache_bytes": stats.result_cache_bytes,
            "vlm_preemptions_total": stats.num_preemptions,
            "vlm_draft_tokens_total": stats.num_drafted_tokens,
            "vlm_draft_accepted_tokens_total": stats.num_accepted_tokens,
            "vlm_num_adapters": stats.num_adapters,
            "vlm_media_seconds_total": self._media.length_s,
            "vlm_media_decode_seconds_total": self._media.decode_s,
            "vlm_engine_steps_total": stats.num_steps,
            "vlm_fenced_total": sum(queue.num_fenced for queue in self._queues),
        }
        labelled: dict[str, Samples] = {
            "vlm_memory_bytes": _by_label(stats.memory_bytes),
            "vlm_startup_seconds": _by_label(stats.startup_s),
            "vlm_claims_total": _by_label(num_claims),
            "vlm_media_refusals_total": _by_label(self._media.refusals),
        }
        return {name: [((), value)] for name, value in plain.items()} | labelled


def _by_label(values: Mapping[str, float] | Mapping[str, int]) -> Samples:
    return [((label,), value) for label, value in values.items()]


_TIMEOUT_S = 2.0

Labels = Mapping[str, str]


class _Pages(Collector):
    def __init__(self, pages: Iterable[tuple[Labels, str]]) -> None:
        self._merged: dict[str, Metric] = {}
        for labels, page in pages:
            for found in text_string_to_metric_families(page):
                metric = self._merged.setdefault(
                    found.name, Metric(found.name, found.documentation, found.type)
                )
                for sample in found.samples:
                    metric.add_sample(sample.name, {**sample.labels, **labels}, sample.value)

    def collect(self) -> Iterator[Metric]:
        yield from self._merged.values()


async def collect_metrics(sockets: Iterable[tuple[Labels, str]]) -> CollectorRegistry:
    """The metrics of workers that answer on their health sockets within 2 s."""
    wanted = list(sockets)
    found = await asyncio.gather(*(_fetch(path) for _, path in wanted))
    pages = ((labels, page) for (labels, _), page in zip(wanted, found, strict=True))
    registry = CollectorRegistry()
    registry.register(_Pages(pages))
    return registry


async def _fetch(path: str) -> str:
    """The metrics page of a worker; empty if the worker does not answer."""
    # Without TLS: loading the CA certificates blocks the event loop for 20 ms.
    transport = httpx.AsyncHTTPTransport(uds=path, verify=False)
    try:
        async with httpx.AsyncClient(transport=transport, timeout=_TIMEOUT_S) as client:
            return (await client.get("http://worker/metrics")).text
    except httpx.HTTPError:
        return ""
