"""Pages of other origins: no header without a setting; with it, those origins and no others."""

import pytest

from tests.factories_gateway import CHAT, make_body

PAGE = "https://app.example.com"
ASKS = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}
with_cors = pytest.mark.parametrize(
    "changes", [{"gateway": {"cors_origins": (PAGE,), "api_keys": ("sk-one",)}}]
)


async def test_without_a_setting_no_origin_is_allowed(gateway):
    asked = await gateway.client.options(CHAT, headers=ASKS)
    answered = await gateway.chat(headers={"origin": PAGE})
    assert (asked.status_code, answered.status_code) == (405, 200)
    for response in (asked, answered):
        assert not [name for name in response.headers if name.startswith("access-control-")]


@with_cors
async def test_a_page_of_an_allowed_origin_asks_without_a_key_and_calls_with_one(gateway, changes):
    asked = await gateway.client.options(CHAT, headers=ASKS)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in asked.headers["access-control-allow-headers"]
    key = {"authorization": "Bearer sk-one"}
    for body in (make_body(), make_body(stream=True)):
        response = await gateway.chat(body, headers={"origin": PAGE, **key})
        assert response.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in response.headers["access-control-expose-headers"]


@with_cors
async def test_a_page_sees_why_it_was_refused(gateway, changes):
    response = await gateway.chat(headers={"origin": PAGE})
    assert response.status_code == 401
    assert response.headers["access-control-allow-origin"] == PAGE


@with_cors
async def test_other_origins_are_not_allowed(gateway, changes):
    headers = {**ASKS, "origin": "https://evil.example.com"}
    asked = await gateway.client.options(CHAT, headers=headers)
    assert asked.status_code == 400
    assert "access-control-allow-origin" not in asked.headers
