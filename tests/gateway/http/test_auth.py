"""API keys: which requests pass, how tenants are separated, and where an open gateway can listen."""

import asyncio
import logging
from functools import partial

import pytest

from gateway.http.auth import check_exposure
from shared.settings.tree import GatewaySettings, SettingsError
from tests.factories_gateway import CHAT, make_body
from tests.factories_images import data_url, image_part
from tests.factories_keys import bearer, code

KEYS = {"gateway": {"api_keys": ("sk-one", "sk-two")}}

with_keys = pytest.mark.parametrize("changes", [KEYS])


@with_keys
async def test_known_keys_pass_with_any_host_name_and_have_separate_tenants(
    gateway, worker, changes
):
    for headers in (
        {},
        *({"authorization": value} for value in (
            "", "Bearer", "Bearer  sk-one", "Bearer sk-onex", "Bearer sk-on", "Basic sk-one", "sk-one",
            b"Bearer sk-\xff\xfe", "Bearer ' OR 1=1--", "Bearer *", "Bearer " + "x" * 20_000,
        )),
        [("authorization", "Bearer sk-one"), ("authorization", "Bearer sk-one")],
        [("authorization", "Bearer nobody"), ("authorization", "Bearer sk-one")],
        {"x-api-key": "sk-on", "cookie": "key=sk-one"},
        {"x-api-key": "Bearer sk-one"},
        [("x-api-key", "sk-one"), ("x-api-key", "sk-one")],
        {"authorization": "Bearer nobody", "x-api-key": "sk-one"},
    ):  # fmt: skip
        response = await gateway.client.post(CHAT, json=make_body(), headers=headers)
        assert response.status_code == 401, headers
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"]
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert "sk-" not in response.text
    assert worker.answers == []
    by_url = await gateway.client.get("/v1/models?api_key=sk-one&authorization=Bearer%20sk-one")
    assert by_url.status_code == 401
    for given in ("Bearer sk-one", "bearer sk-one", "Bearer sk-two", "bearer sk-two"):
        headers = {"authorization": given, "host": "evil.example", "cache-salt": "x"}
        assert (await gateway.chat(headers=headers)).status_code == 200, given
    one, again, two, _ = (request.tenant for request in worker.requests)
    assert one == again != two
    assert "sk-" not in one
    assert len(one) == 32


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "example.com", "192.168.1.1"])
def test_a_gateway_that_others_can_reach_needs_keys_and_one_on_loopback_does_not(host):
    with pytest.raises(SettingsError, match="API_KEYS"):
        check_exposure(GatewaySettings(host=host))
    check_exposure(GatewaySettings(host=host, allow_open=True))
    check_exposure(GatewaySettings(host=host, api_keys=("k",)))
    for loopback in ("127.0.0.1", "127.5.5.5", "::1", "localhost"):
        check_exposure(GatewaySettings(host=loopback))


@with_keys
async def test_logs_hold_no_key_no_prompt_and_no_image(
    gateway, worker, changes, caplog, monkeypatch
):
    caplog.set_level(logging.DEBUG)
    ended = asyncio.Semaphore(0)  # released by each line that logs the end of a request
    watch = logging.Handler()
    watch.emit = lambda record: ended.release()  # type: ignore[method-assign]
    monkeypatch.setattr(logging.getLogger("gateway.calls.recorder"), "handlers", [watch])
    image = data_url(size=(300, 200))
    body = make_body([{"type": "text", "text": "pRoMpT"}, image_part(image)])
    for key in ("sk-one", "sk-wrong"):
        for extra in ({}, {"unknown": "pRoMpT"}, {"temperature": 9}, {"model": "pRoMpT"}):
            await gateway.client.post(CHAT, json={**body, **extra}, headers=bearer(key))
    async with asyncio.timeout(10):
        for _ in range(4):  # the requests with a key
            await ended.acquire()
    assert caplog.text.count("request ended") == 8
    written = caplog.text + "".join(str(vars(record)) for record in caplog.records)
    for secret in ("sk-one", "sk-two", "sk-wrong", "pRoMpT", image[100:400]):
        assert secret not in written


OWN = ("127.0.0.1:8000", "10.0.0.5:8000", "[::1]:8000", "LocalHost", "models.lan:80")
FOREIGN = (
    "evil.example", "evil.example:8000", "localhost.evil.example", "", "a b", "[::1", "127.0.0.1@x",
)  # fmt: skip


@pytest.mark.parametrize("changes", [{"gateway": {"hosts": ("models.lan",)}}])
async def test_without_keys_a_foreign_name_is_refused(gateway, worker, changes):
    for host in OWN:
        assert (await gateway.chat(headers={"host": host})).status_code == 200, host
    for host in FOREIGN:
        for request in (gateway.chat, partial(gateway.client.get, "/v1/files")):
            refused = await request(headers={"host": host})
            assert code(refused)[:2] == (403, "host_not_allowed"), host
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await gateway.client.get(path, headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "changes", [{"gateway": {"api_keys": ["sk-one"], "admin_keys": ["sk-admin"]}}]
)
async def test_with_admin_keys_only_operators_can_read_metrics(gateway):
    for key, status in ((None, 401), ("sk-none", 401), ("sk-one", 403), ("sk-admin", 200)):
        answer = await gateway.client.get("/metrics", headers=bearer(key) if key else {})
        assert answer.status_code == status


@with_keys
async def test_anthropics_clients_get_its_error_format_from_the_list_of_models(gateway):
    version = {"anthropic-version": "2023-06-01"}
    refused = await gateway.client.get("/v1/models", headers=version)
    assert (refused.status_code, refused.json()["type"]) == (401, "error")
    assert refused.json()["error"]["type"] == "authentication_error"
    known = {**version, "x-api-key": "sk-one"}
    missing = await gateway.client.get("/v1/models/none", headers=known)
    assert (missing.status_code, missing.json()["type"]) == (404, "error")
    assert missing.json()["error"]["type"] == "not_found_error"
    plain = await gateway.client.get("/v1/models/none", headers={"x-api-key": "sk-one"})
    assert "type" not in plain.json()
