"""The worker's metrics, read from the engine and the queue when somebody scrapes.

Names and meanings are declared in `shared.telemetry.metrics`; here is only where the numbers come
from.
"""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.queue.api import WorkerQueue
from shared.telemetry.metrics import WORKER_METRICS
from worker.engine_thread import EngineThread

Samples = Iterable[tuple[tuple[str, ...], float]]


class WorkerCollector(Collector):
    """Every metric of a worker as of now."""

    def __init__(self, engine: EngineThread, queue: WorkerQueue) -> None:
        self._engine = engine
        self._queue = queue

    def collect(self) -> Iterator[Metric]:
        """One family a metric, in the order of their declaration."""
        samples = self._samples()
        for metric in WORKER_METRICS:
            family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            one = family(metric.name.removesuffix("_total"), metric.help, labels=metric.labels)
            for labels, value in samples[metric.name]:
                one.add_metric(labels, value)
            yield one

    def _samples(self) -> dict[str, Samples]:
        stats = self._engine.stats
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
            "vlm_engine_steps_total": stats.num_steps,
            "vlm_fenced_total": self._queue.num_fenced,
        }
        labelled: dict[str, Samples] = {
            "vlm_memory_bytes": _by_label(stats.memory_bytes),
            "vlm_startup_seconds": _by_label(stats.startup_s),
            "vlm_claims_total": _by_label(self._queue.num_claims),
        }
        return {name: [((), value)] for name, value in plain.items()} | labelled


def _by_label(values: Mapping[str, float] | Mapping[str, int]) -> Samples:
    return [((label,), value) for label, value in values.items()]


def create_registry(engine: EngineThread, queue: WorkerQueue) -> CollectorRegistry:
    """A registry with the worker's metrics alone."""
    registry = CollectorRegistry()
    registry.register(WorkerCollector(engine, queue))
    return registry
