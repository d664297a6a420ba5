"""Client and server report the same latencies; Locust's own modes work with a real fleet."""

from collections import Counter

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadtest.asking import first_model
from loadtest.fleet import free_port, run_server
from loadtest.record import Order, Plan, Record, Target, Workload
from loadtest.result import values_of
from loadtest.run import drive
from tests.integration.fleet_process import Served, run_vlm, start_fleet

VISION_S, DECODE_S, NUM_TOKENS = 0.3, 0.03, 12
ROUNDS = 8  # one is enough on an idle machine
SERVER_NAMES = {
    "TTFT": "vlm_time_to_first_token_seconds",
    "TPOT": "vlm_time_per_output_token_seconds",
    "ITL": "vlm_inter_token_latency_seconds",
    "E2E": "vlm_request_duration_seconds",
}


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """A fleet whose engine is so slow that other times are small in comparison."""
    times = {"VLM_ENGINE__MOCK__VISION_S": VISION_S, "VLM_ENGINE__MOCK__DECODE_S": DECODE_S}
    variables = {name: str(value) for name, value in times.items()}
    with start_fleet(tmp_path_factory.mktemp("slow"), **variables) as fleet:
        yield fleet


def read_sums(client: httpx.Client) -> Counter[tuple[str, str]]:
    """Returns the gateway's metrics, by name and stage."""
    sums: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            sums[sample.name, sample.labels.get("stage", "")] += sample.value
    return sums


def load(fleet: Served) -> tuple[list[Record], Counter[tuple[str, str]]]:
    """Streams questions about new images, two at a time; returns the client's records and the server's counts."""
    target = Target(url=fleet.url, model=first_model(fleet.url, ""))
    workload = Workload(profile="image", stream_ratio=1.0, max_tokens=NUM_TOKENS, image_bytes=2_000)
    plan = Plan(levels=(2.0,), duration_s=1.5, warmup_s=0.0)
    with httpx.Client(base_url=fleet.url, trust_env=False, verify=False) as client:
        before = read_sums(client)
        records, _ = drive(Order(target=target, workload=workload, plan=plan))
        grown = read_sums(client)
        grown.subtract(before)
        return records, grown


def difference(records: list[Record], server: Counter[tuple[str, str]], latency: str) -> float:
    """Returns the difference of the two means, relative to the server's."""
    values, name = values_of(records, latency), SERVER_NAMES[latency]
    assert len(values) == server[f"{name}_count", ""]
    mean_s = server[f"{name}_sum", ""] / len(values)
    return abs(sum(values) / len(values) - mean_s) / mean_s


def test_client_latencies_equal_the_histograms_of_the_server(slow):
    """A busy machine can delay the client's reads; a different definition would differ in every round."""
    for _ in range(ROUNDS):
        records, server = load(slow)
        assert not [record.error for record in records if record.error]
        num_tokens = sum(record.num_output_tokens for record in records)
        assert num_tokens == server["vlm_generation_tokens_total", ""] == NUM_TOKENS * len(records)
        differences = {latency: difference(records, server, latency) for latency in SERVER_NAMES}
        if len(records) >= 4 and max(differences.values()) <= 0.02:
            break
    assert len(records) >= 4
    assert max(differences.values()) <= 0.02, differences
    for stage in ("queue", "vision", "prefill", "decode"):
        told_s = sum(record.stages_s[stage] for record in records)
        stage_s = server["vlm_request_stage_seconds_sum", stage]
        assert told_s == pytest.approx(stage_s, abs=1e-5 * len(records))


LOCUST = ("-m", "locust", "-f", "loadtest/locustfile.py", "--stream-ratio", "1")


def test_locusts_page_starts_and_runs_users(slow):
    port = free_port()
    arguments = [*LOCUST, "--host", slow.url, "--mix", "conversation", "--max-tokens", "4"]
    arguments += ["--web-host", "127.0.0.1", "--web-port", str(port)]
    with (
        run_server(arguments, port, "/") as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=30) as page,
    ):
        assert "<title>Locust" in page.get("/").text
        started = page.post("/swarm", data={"user_count": 1, "spawn_rate": 1})
        assert started.json()["success"]
        while answered(page) != set(SERVER_NAMES):
            assert server.process.poll() is None


def answered(page: httpx.Client) -> set[str]:
    """Returns the latencies that Locust has shown so far. The request itself is the pause between two calls."""
    stats = page.get("/stats/requests").json()["stats"]
    assert not [row for row in stats if row["num_failures"]]
    return {row["method"] for row in stats if row["num_requests"]} - {"Aggregated", None, ""}


def test_command_can_start_its_own_fleet():
    done = run_vlm("loadtest", "--duration", "0.5", "--warmup", "0", "--profile", "conversation")
    assert done.returncode == 0, done.stderr
    assert "conversation, streamed" in done.stdout
