"""The log line of each request: its fields, what it must not contain, and its cost."""

import logging
import time

import pytest

from shared.telemetry.metrics import STAGES
from tests.factories_gateway import fail_halfway, make_body
from tests.factories_keys import bearer

LOGGER = "gateway.calls.recorder"


@pytest.fixture
def lines(caplog, gateway):
    caplog.set_level(logging.INFO, LOGGER)

    def logged() -> list[dict[str, object]]:
        return [vars(record) for record in caplog.records if record.name == LOGGER]

    return logged


async def test_a_finished_request_is_one_line_with_its_tokens_and_stages(gateway, worker, lines):
    headers = {"x-request-id": "mine", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    body = make_body("secret prompt", user="jane@example.com", metadata={"k": "label"})
    await gateway.chat(body, headers=headers)
    [line] = lines()
    assert worker.requests[0].id.startswith(line["request_id"])
    assert (line["model"], line["outcome"], line["status"]) == ("tiny", "ok", 200)
    assert (line["client_request_id"], line["trace_id"]) == ("mine", "a" * 32)
    assert (line["prompt_tokens"], line["output_tokens"]) == (7, 3)
    assert sum(line[f"{stage}_s"] for stage in STAGES) == pytest.approx(line["e2e_s"], abs=1e-4)
    assert len(line["user"]) == 12
    for secret in ("secret", "jane", "label", "Hello"):
        assert secret not in str(line)


@pytest.mark.parametrize("changes", [{"gateway": {"api_keys": ("sk-one", "sk-two")}}])
async def test_log_lines_have_the_request_id_and_a_hash_of_the_key(gateway, lines):
    for key, more in (("sk-one", {}), ("sk-two", {"idempotency-key": "once"}), ("sk-one", {})):
        response = await gateway.chat(headers=bearer(key) | more)
        assert response.headers["x-request-id"] == f"req_{lines()[-1]['request_id']}"
    first, other, again = [line["tenant"] for line in lines()]
    assert first == again != other
    assert len(first) == 12
    assert "sk-" not in str(lines())


async def test_log_lines_of_refusals_and_failures_show_the_clients_error(gateway, worker, lines):
    worker.script = fail_halfway
    await gateway.chat(make_body(n=-1))
    await gateway.stream()
    found = [(line["model"], line["outcome"], line["status"]) for line in lines()]
    assert found == [("tiny", "invalid_value", 400), ("tiny", "engine_failure", 200)]


HTTP_LOGGER = "gateway.http.router"


@pytest.mark.parametrize("changes", [{"gateway": {"api_keys": ("sk-one",)}}])
async def test_every_route_writes_a_line_and_counts_by_its_template(gateway, worker, caplog):
    caplog.set_level(logging.INFO)
    key = bearer("sk-one")
    client = gateway.client
    await gateway.chat(headers=key)
    for path in ("/v1/models", "/v1/sessions/secret", "/v1/responses/secret", "/secret"):
        await client.get(path, headers=key)
    await client.get("/v1/streams/secret", headers=key)
    await client.get("/v1/chat/completions", headers=key)
    await client.post("/v1/chat/completions")
    await client.get("/healthz")
    records = [vars(each) for each in caplog.records if each.name in (LOGGER, HTTP_LOGGER)]
    lines = {(record.get("route"), record["status"]) for record in records}
    assert lines == {
        (None, 200), ("/v1/models", 200), ("/v1/sessions/{session_id}", 404),
        ("/v1/responses/{response_id}", 404), ("unknown", 404), ("/v1/streams/{id}", 404),
        ("/v1/chat/completions", 405), ("/v1/chat/completions", 401),
    }  # fmt: skip
    text = (await client.get("/metrics", headers=key)).text
    counted = [line for line in text.splitlines() if line.startswith("vlm_http_requests_total{")]
    assert len(counted) == 8
    assert '{method="POST",route="/v1/chat/completions",status="200"} 1.0' in text
    assert "secret" not in text + str(records)
    assert "healthz" not in text


@pytest.mark.parametrize("changes", [{"gateway": {"api_keys": ("sk-one",)}}])
async def test_refusals_are_logged_at_most_ten_times_a_second(gateway, caplog):
    caplog.set_level(logging.INFO, HTTP_LOGGER)
    began = time.monotonic()
    for _ in range(60):
        await gateway.client.get("/v1/models")
    seconds = int(time.monotonic() - began) + 2
    lines = [vars(record) for record in caplog.records if record.name == HTTP_LOGGER]
    assert len(lines) <= 10 * seconds
    await gateway.client.get("/apps")
    told = [vars(record) for record in caplog.records if record.name == HTTP_LOGGER]
    assert len(lines) + sum(line.get("num_unlogged", 0) for line in told) == 60
