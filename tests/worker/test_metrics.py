"""The worker's metrics are those that are declared, with the engine's numbers."""

from collections import Counter
from types import SimpleNamespace

from engines.base import EngineStats
from shared.telemetry.metrics import WORKER_METRICS
from worker.health import create_registry
from worker.prepare.preparer import MediaCounts


def test_every_declared_metric_has_its_number():
    stats = EngineStats(
        num_running=3, num_steps=40, kv_usage_ratio=0.5, memory_bytes={"weights": 7},
        startup_s={"load": 1.5}, num_drafted_tokens=9, num_accepted_tokens=5,
    )  # fmt: skip
    engine = SimpleNamespace(stats=stats)
    claims = SimpleNamespace(num_claims=Counter(new=2), num_fenced=1)

    media = MediaCounts(12.5, 3.0, Counter(fps=2))

    registry = create_registry(engine, [claims], media)  # type: ignore[arg-type]

    families = {family.name: family for family in registry.collect()}
    assert set(families) == {metric.name.removesuffix("_total") for metric in WORKER_METRICS}
    assert registry.get_sample_value("vlm_num_requests_running") == 3
    assert registry.get_sample_value("vlm_engine_steps_total") == 40
    assert registry.get_sample_value("vlm_kv_cache_usage_ratio") == 0.5
    assert registry.get_sample_value("vlm_draft_tokens_total") == 9
    assert registry.get_sample_value("vlm_draft_accepted_tokens_total") == 5
    assert registry.get_sample_value("vlm_memory_bytes", {"use": "weights"}) == 7
    assert registry.get_sample_value("vlm_startup_seconds", {"phase": "load"}) == 1.5
    assert registry.get_sample_value("vlm_claims_total", {"kind": "new"}) == 2
    assert registry.get_sample_value("vlm_fenced_total") == 1
    assert registry.get_sample_value("vlm_media_seconds_total") == 12.5
    assert registry.get_sample_value("vlm_media_decode_seconds_total") == 3
    assert registry.get_sample_value("vlm_media_refusals_total", {"reason": "fps"}) == 2
