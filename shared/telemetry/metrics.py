"""The definition of every metric: name, labels, buckets and help.

Used by the gateway (requests) and the worker (engine); docs and dashboards are tested against `METRICS`.
Health probes and warm-ups are not counted. Labels are bounded: model names come from workers' cards,
outcomes and reasons from code, never from clients.

The latencies, with vLLM's formulas:

- TTFT: request received until the first non-empty text.
- E2E: request received until the terminal event has been handed to the socket.
- TPOT: (E2E - TTFT) / (output tokens - 1), with the mean tokens per choice if `n` > 1; undefined for one token.
- ITL: time between consecutive tokens; the gap before an event with k tokens counts as k gaps of 1/k of its length.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from shared.packages.rollout import App
from shared.protocol import Usage
from shared.queue.api import QueueStats
from shared.queue.registry import WorkerRecord

#: The stages of a request in order. They add up to its end-to-end time.
STAGES = (
    "ingest",
    "image_decode",
    "queue",
    "media_decode",
    "preprocess",
    "vision",
    "prefill",
    "decode",
    "relay",
)

#: Buckets from one millisecond to five minutes, about 1-2-5 per decade.
LATENCY_BUCKETS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip

#: Finer buckets for the time between tokens, from a tenth of a millisecond.
TOKEN_BUCKETS = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
)  # fmt: skip

_MAX_SEEN = 10_000
CLIENT_GONE = 499  #: status of a request whose client disconnected before the response
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """The definition of a metric. Names of counters end in `_total`, as in Prometheus."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


GATEWAY_METRICS = (
    Metric("vlm_requests_total", "counter",
           "Requests by outcome: ok, followed (a repeated request that got the answer of the first request; its tokens and "
           "times are not counted again), cancelled, rejected, or the code of an error.",
           ("model", "outcome")),
    Metric("vlm_http_requests_total", "counter",
           "HTTP requests by route template, without probes and /metrics. Status 499: the client disconnected.",
           ("method", "route", "status")),
    Metric("vlm_request_stage_seconds", "histogram",
           "Time that finished requests spent in each stage.", ("stage", "model"), LATENCY_BUCKETS),
    Metric("vlm_queue_wait_seconds", "histogram",
           "Time in the stage `queue` by priority: interactive or batch.", ("priority", "model"), LATENCY_BUCKETS),
    Metric("vlm_request_duration_seconds", "histogram",
           "E2E: time from a request's arrival to the last byte of its answer.", ("model",), LATENCY_BUCKETS),
    Metric("vlm_time_to_first_token_seconds", "histogram",
           "TTFT: time from a request's arrival to its first text.", ("model",), LATENCY_BUCKETS),
    Metric("vlm_time_per_output_token_seconds", "histogram",
           "TPOT: mean time per output token after the first, one value per request.", ("model",),
           TOKEN_BUCKETS),
    Metric("vlm_inter_token_latency_seconds", "histogram",
           "ITL: time between consecutive tokens.", ("model",), TOKEN_BUCKETS),
    Metric("vlm_prompt_tokens_total", "counter",
           "Prompt tokens, including image tokens and cached tokens.", ("model",)),
    Metric("vlm_image_tokens_total", "counter", "Prompt tokens of images and videos.", ("model",)),
    Metric("vlm_audio_tokens_total", "counter", "Prompt tokens of audio.", ("model",)),
    Metric("vlm_cached_tokens_total", "counter",
           "Prompt tokens that were found in a prefix cache.", ("model",)),
    Metric("vlm_generation_tokens_total", "counter", "Output tokens.", ("model",)),
    Metric("vlm_key_tokens_total", "counter",
           "Tokens of complete answers by the name of a stored key; all keys after the first 1,000 are `other`. `type`: "
           "input, output.", ("key", "type")),
    Metric("vlm_queue_depth", "gauge", "Requests in a model's queue, including running ones.", ("model",)),
    Metric("vlm_queue_age_seconds", "gauge",
           "Waiting time of the oldest request that no worker has claimed; 0 if none waits.", ("model",)),
    Metric("vlm_batch_backlog", "gauge", "Batch requests that no worker has claimed.", ("model",)),
    Metric("vlm_open_requests", "gauge", "Open requests of this gateway."),
    Metric("vlm_ready_workers", "gauge", "Workers that accept requests. The same at every gateway.", ("model",)),
    Metric("vlm_admission_rejections_total", "counter",
           "Requests refused before they were queued.", ("reason",)),
    Metric("vlm_fallbacks_total", "counter",
           "Requests that went to a model's fallback, because its queue was full or it had no worker.",
           ("model", "fallback")),
    Metric("vlm_hook_failures_total", "counter", "Hooks that failed or took too long.", ("hook",)),
    Metric("vlm_images_total", "counter", "Images, videos and audio in requests: accepted or refused.", ("outcome",)),
    Metric("vlm_home_requests_total", "counter",
           "Requests with prefix affinity. home: reserved for the preferred worker; shared: counted as home, but moved "
           "to the queue after the grace time. Any worker can claim the others. new: no worker is preferred; busy: the "
           "preferred worker has more than its share, or other requests wait; gone: that worker is gone.", ("outcome",)),
    Metric("vlm_dropped_events_total", "counter",
           "Events of workers for requests that had ended or were superseded."),
    Metric("vlm_redis_up", "gauge",
           "1 if Redis answers this gateway, else 0. `shard` is empty with a single Redis.", ("shard",)),
    Metric("vlm_redis_memory_bytes", "gauge", "Memory that Redis uses.", ("shard",)),
    Metric("vlm_redis_max_memory_bytes", "gauge", "The `maxmemory` of Redis; 0: no limit.", ("shard",)),
    Metric("vlm_redis_replicas", "gauge", "Connected replicas of Redis.", ("shard",)),
    Metric("vlm_redis_saves", "gauge",
           "1 if the last write and rewrite of Redis's append-only file succeeded, else 0.", ("shard",)),
    Metric("vlm_deployment_generation", "gauge",
           "The latest generation of a deployment. The same at every gateway.", ("application",)),
    Metric("vlm_deployment_instances", "gauge",
           "Instances by version (active, candidate, retiring) and state (wanted, starting, ready, draining).",
           ("application", "version", "digest", "state")),
    Metric("vlm_deployment_desired_instances", "gauge",
           "Desired number of instances of the active version.", ("application",)),
    Metric("vlm_deployment_canary_ratio", "gauge",
           "Fraction of requests that go to the candidate.", ("application",)),
    Metric("vlm_deployment_start_seconds", "gauge",
           "Time from the claim of the latest instance until it was ready.", ("application",)),
    Metric("vlm_deployment_rollouts_total", "counter",
           "Ended rollouts by outcome: active or rolled_back.", ("application", "outcome")),
    Metric("vlm_deployment_requests_total", "counter",
           "Requests that a version (first 12 digits) finished or failed; refusals and deadlines are not counted.",
           ("application", "digest", "outcome")),
)  # fmt: skip

WORKER_METRICS = (
    Metric("vlm_num_requests_running", "gauge", "Sequences in the running batch."),
    Metric("vlm_num_requests_waiting", "gauge", "Sequences that wait in the engine."),
    Metric("vlm_kv_cache_usage_ratio", "gauge", "Fraction of the KV blocks in use, 0 to 1."),
    Metric("vlm_prefix_cache_query_tokens_total", "counter", "Prompt tokens looked up in the prefix cache."),
    Metric("vlm_prefix_cache_hit_tokens_total", "counter", "Prompt tokens found in the prefix cache."),
    Metric("vlm_encoder_cache_queries_total", "counter", "Images and chunks of videos looked up in the feature cache."),
    Metric("vlm_encoder_cache_hits_total", "counter", "Images and chunks of videos found in the feature cache."),
    Metric("vlm_encoder_cache_bytes", "gauge", "Bytes of cached image features."),
    Metric("vlm_result_cache_queries_total", "counter", "Inputs looked up in the result cache."),
    Metric("vlm_result_cache_hits_total", "counter", "Inputs found in the result cache, or being computed for another request."),
    Metric("vlm_result_cache_bytes", "gauge", "Bytes of cached vectors and scores."),
    Metric("vlm_media_seconds_total", "counter", "Seconds of the videos and audio that were decoded."),
    Metric("vlm_media_decode_seconds_total", "counter", "CPU time for decoding videos and audio."),
    Metric("vlm_media_refusals_total", "counter",
           "Refused videos and audio by reason: `file`, `time` (decoding takes too long), or the name of an option.", ("reason",)),
    Metric("vlm_preemptions_total", "counter", "Sequences that were preempted: their KV blocks were freed."),
    Metric("vlm_draft_tokens_total", "counter", "Draft tokens of speculative decoding."),
    Metric("vlm_draft_accepted_tokens_total", "counter", "Draft tokens that were accepted."),
    Metric("vlm_num_adapters", "gauge", "LoRA adapters that are loaded."),
    Metric("vlm_engine_steps_total", "counter", "Forward passes."),
    Metric("vlm_memory_bytes", "gauge", "Memory by use.", ("use",)),
    Metric("vlm_startup_seconds", "gauge", "Time of each phase of the worker's start.", ("phase",)),
    Metric("vlm_claims_total", "counter", "Claimed requests by kind: new, reclaimed or reconciled.", ("kind",)),
    Metric("vlm_fenced_total", "counter", "Events refused because another worker owns the request."),
)  # fmt: skip

METRICS = GATEWAY_METRICS + WORKER_METRICS


class Buckets:
    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, count: int) -> None:
        """Count a value `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def add_all(self, values: Iterable[float]) -> None:
        """Count many values, which is cheaper than one at a time."""
        ordered, at = sorted(values), 0
        self._sum += sum(ordered)
        for place, bound in enumerate((*self._bounds, float("inf"))):
            end = bisect_right(ordered, bound, at)
            self._counts[place] += end - at
            at = end

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Bounds with the numbers of values up to them, and the sum of all values."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True)), self._sum


class Histogram(Collector):
    """A single-threaded replacement of prometheus_client's histogram with the same output.

    Each request has a dozen observations. Many requests are counted together, without locks.
    """

    def __init__(self, metric: Metric, registry: CollectorRegistry) -> None:
        self._metric = metric
        self._children: dict[tuple[str, ...], Buckets] = {}
        registry.register(self)

    def labels(self, *values: str) -> Buckets:
        """The child of these label values."""
        return self._children.setdefault(values, Buckets(self._metric.buckets))

    def describe(self) -> list[HistogramMetricFamily]:
        metric = self._metric
        return [HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        [family] = self.describe()
        for values, child in self._children.items():
            family.add_metric(values, *child.read())
        yield family


class MetricSet:
    """The prometheus_client objects of metric definitions, in one registry, by kind and name."""

    def __init__(self, metrics: tuple[Metric, ...]) -> None:
        disable_created_metrics()  # a second series for each metric, which no graph uses
        self.registry = CollectorRegistry()
        self.counters: dict[str, Counter] = {}
        self.gauges: dict[str, Gauge] = {}
        self.histograms: dict[str, Histogram] = {}
        for metric in metrics:
            name, arguments = metric.name, (metric.name, metric.help, metric.labels)
            if metric.kind == "counter":
                self.counters[name] = Counter(*arguments, registry=self.registry)
            elif metric.kind == "gauge":
                self.gauges[name] = Gauge(*arguments, registry=self.registry)
            else:
                self.histograms[name] = Histogram(metric, self.registry)


class RequestRecord(Struct, frozen=True):
    """The measurements of a finished request. Units: seconds, tokens."""

    model: str
    stages: dict[str, float]
    e2e_s: float
    ttft_s: float | None
    prompt: Usage
    num_output_tokens: int  #: of all choices
    num_choices: int = 1
    priority: str = "interactive"
    key: str = ""  #: name of the stored key

    @property
    def per_token_s(self) -> float | None:
        """Mean time per output token after the first."""
        num_gaps = self.num_output_tokens - self.num_choices
        if self.ttft_s is None or num_gaps <= 0:
            return None
        return (self.e2e_s - self.ttft_s) * self.num_choices / num_gaps


_MAX_KEYS = 1000
#: Finished requests of a model that are kept until they are counted; reading the metrics counts them too.
_COUNT_EVERY = 200


class GatewayMetrics:
    def __init__(self) -> None:
        self._set = MetricSet(GATEWAY_METRICS)
        self.deployments = DeploymentMetrics(self._set)
        self._finished: dict[str, _ModelMetrics] = {}
        self._counters: dict[tuple[str, ...], Counter] = {}  # by name and labels
        self._keys: set[str] = set()  # names of keys that are labels

    @property
    def registry(self) -> CollectorRegistry:
        """The registry, after all recorded requests are counted."""
        for each in self._finished.values():
            each.count()
        return self._set.registry

    def record_http(self, method: str, route: str, status: int | None) -> None:
        """Count an HTTP request. `status`: None if the client disconnected before the response."""
        labels = (method if method in _METHODS else "other", route, str(status or CLIENT_GONE))
        self._counter("vlm_http_requests_total", *labels).inc()

    def _counter(self, *key: str) -> Counter:
        """The counter of a name and labels, looked up once: `labels()` is slow."""
        counter = self._counters.get(key)
        if counter is None:
            name, *labels = key
            counter = self._counters[key] = self._set.counters[name].labels(*labels)
        return counter

    def record_finished(self, record: RequestRecord) -> None:
        """Observe the latencies and tokens of a complete answer."""
        self._of_model(record.model).record(record)
        if record.key:
            if len(self._keys) < _MAX_KEYS:
                self._keys.add(record.key)
            name = record.key if record.key in self._keys else "other"
            self._counter("vlm_key_tokens_total", name, "input").inc(
                record.prompt.num_prompt_tokens
            )
            self._counter("vlm_key_tokens_total", name, "output").inc(record.num_output_tokens)

    def record_tokens(self, model: str, gap_s: float, num_tokens: int) -> None:
        """Observe the gap before an event, divided among its `num_tokens` tokens."""
        self._of_model(model).inter_token.add(gap_s / num_tokens, num_tokens)

    def count(self, name: str, label: str, *labels: str) -> None:
        """Add 1 to the counter `vlm_NAME_total` with these labels."""
        self._counter(f"vlm_{name}_total", label, *labels).inc()

    def record_dropped_events(self, count: int) -> None:
        self._set.counters["vlm_dropped_events_total"].inc(count)

    def set_queues(self, queues: Mapping[str, QueueStats]) -> None:
        """Set the state of each model's queue, and remove the models that are gone."""
        for name, field in (
            ("vlm_queue_depth", "num_open"),
            ("vlm_batch_backlog", "num_backlog"),
            ("vlm_queue_age_seconds", "age_s"),
        ):
            gauge = self._set.gauges[name]
            gauge.clear()
            for model, stats in queues.items():
                gauge.labels(model).set(getattr(stats, field))

    def set_redis(self, shards: Iterable[str], servers: Mapping[str, Mapping[str, str]]) -> None:
        """Set the state of each shard from the fields of `INFO`. A shard that `servers` lacks is down."""
        gauges = self._set.gauges
        for shard in shards:
            fields = servers.get(shard)
            gauges["vlm_redis_up"].labels(shard).set(fields is not None)
            if not fields:
                continue
            for name, field in (
                ("vlm_redis_memory_bytes", "used_memory"),
                ("vlm_redis_max_memory_bytes", "maxmemory"),
                ("vlm_redis_replicas", "connected_slaves"),
            ):
                gauges[name].labels(shard).set(float(fields.get(field, 0)))
            states = [
                fields.get(f"aof_last_{what}_status", "ok") for what in ("write", "bgrewrite")
            ]
            gauges["vlm_redis_saves"].labels(shard).set(set(states) == {"ok"})

    def set_open(self, num_requests: int, num_workers: Mapping[str, int]) -> None:
        """Set the open requests of this gateway, and the ready workers of each model."""
        self._set.gauges["vlm_open_requests"].set(num_requests)
        gauge = self._set.gauges["vlm_ready_workers"]
        gauge.clear()
        for model, count in num_workers.items():
            gauge.labels(model).set(count)

    def _of_model(self, model: str) -> "_ModelMetrics":
        metrics = self._finished.get(model)
        if metrics is None:
            metrics = self._finished[model] = _ModelMetrics(self._set, model)
        return metrics


class DeploymentMetrics:
    """Metrics of deployments from Redis: counters grow by the difference to the last observation."""

    def __init__(self, metrics: MetricSet) -> None:
        self._gauges, self._counters = metrics.gauges, metrics.counters
        self._seen: dict[tuple[str, ...], int] = {}  # last counts; a silent worker may return
        self._versions: set[tuple[str, ...]] = set()

    def observe(self, apps: Mapping[str, App], workers: Sequence[WorkerRecord]) -> None:
        for name, gauge in self._gauges.items():
            if name.startswith("vlm_deployment_"):
                gauge.clear()
        for app in apps.values():
            self._show(app)
            for outcome, count in (
                ("active", app.num_promoted),
                ("rolled_back", app.num_rolled_back),
            ):
                labels = (app.name, outcome)
                self._add("vlm_deployment_rollouts_total", labels, labels, count)
        for worker in workers:
            name, at, version = worker.card.name.partition("@")
            if not at or name not in apps:
                continue
            for outcome, count in (
                ("finished", worker.num_finished),
                ("failed", worker.num_failed),
            ):
                key = (worker.worker_id, outcome)
                self._versions.add((name, version))
                self._add("vlm_deployment_requests_total", (name, version, outcome), key, count)
        self._forget(apps, workers)

    def _forget(self, apps: Mapping[str, App], workers: Sequence[WorkerRecord]) -> None:
        """Remove the metrics of versions that are gone."""
        known = {tuple(worker.card.name.split("@", 1)) for worker in workers}
        for app in apps.values():
            known |= {(app.name, each.digest[7:19]) for each in app.revisions}
        for name, version in self._versions - known:
            for outcome in ("finished", "failed"):
                self._counters["vlm_deployment_requests_total"].remove(name, version, outcome)
        self._versions &= known
        while len(self._seen) > _MAX_SEEN:
            del self._seen[next(iter(self._seen))]

    def _show(self, app: App) -> None:
        gauges, name = self._gauges, app.name
        gauges["vlm_deployment_generation"].labels(name).set(app.number)
        gauges["vlm_deployment_desired_instances"].labels(name).set(app.desired)
        gauges["vlm_deployment_start_seconds"].labels(name).set(app.start_s)
        candidate = app.candidate
        share = candidate.spec.canary if candidate is not None and candidate.is_canary else 0.0
        gauges["vlm_deployment_canary_ratio"].labels(name).set(share)
        versions = {revision.digest: "retiring" for revision in app.retiring}
        versions |= {candidate.digest: "candidate"} if candidate is not None else {}
        versions |= {app.active.digest: "active"} if app.active is not None else {}
        for slot in app.slots:
            version = versions.get(slot.digest, "retiring")
            labels = (name, version, slot.digest[7:19], slot.state)
            gauges["vlm_deployment_instances"].labels(*labels).inc()

    def _add(self, name: str, labels: tuple[str, ...], key: tuple[str, ...], count: int) -> None:
        counter = self._counters[name].labels(*labels)
        counter.inc(max(0, count - self._seen.pop(key, 0)))
        # Move to the end: the least recently seen are removed first.
        self._seen[key] = count


class _ModelMetrics:
    """Label children of one model, looked up once: `labels()` is slower than `observe()`."""

    def __init__(self, metrics: MetricSet, model: str) -> None:
        stages = metrics.histograms["vlm_request_stage_seconds"]
        self.stages = {stage: stages.labels(stage, model) for stage in STAGES}
        waits = metrics.histograms["vlm_queue_wait_seconds"]
        self.waits = {name: waits.labels(name, model) for name in ("interactive", "batch")}
        self.duration = metrics.histograms["vlm_request_duration_seconds"].labels(model)
        self.first_token = metrics.histograms["vlm_time_to_first_token_seconds"].labels(model)
        self.per_token = metrics.histograms["vlm_time_per_output_token_seconds"].labels(model)
        self.inter_token = metrics.histograms["vlm_inter_token_latency_seconds"].labels(model)
        names = ("prompt", "image", "audio", "cached", "generation")
        tokens = {n: metrics.counters[f"vlm_{n}_tokens_total"].labels(model) for n in names}
        self.output_tokens, self.prompt_tokens = tokens.pop("generation"), tokens
        self._records: list[RequestRecord] = []  # not counted yet

    def record(self, record: RequestRecord) -> None:
        self._records.append(record)
        if len(self._records) >= _COUNT_EVERY:
            self.count()

    def count(self) -> None:
        """Count the records since the last call."""
        records, self._records = self._records, []
        for stage, buckets in self.stages.items():
            buckets.add_all([each.stages[stage] for each in records if stage in each.stages])
        for name, buckets in self.waits.items():
            own = [each.stages for each in records if each.priority == name]
            buckets.add_all([stages["queue"] for stages in own if "queue" in stages])
        self.duration.add_all([each.e2e_s for each in records])
        self.first_token.add_all([each.ttft_s for each in records if each.ttft_s is not None])
        self.per_token.add_all([s for each in records if (s := each.per_token_s) is not None])
        for name, counter in self.prompt_tokens.items():
            counter.inc(sum([getattr(each.prompt, f"num_{name}_tokens") for each in records]))
        self.output_tokens.inc(sum([each.num_output_tokens for each in records]))
