"""Cross-origin requests: no CORS header without the setting; with it, only the listed origins are allowed."""

from itertools import product

import pytest

from tests.factories_gateway import CHAT, make_body
from tests.factories_keys import code

PAGE = "https://app.example.com"
ASKS = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


async def test_without_a_setting_no_origin_is_allowed(gateway):
    asked = await gateway.client.options(CHAT, headers=ASKS)
    answered = await gateway.chat(headers={"origin": PAGE})
    assert (asked.status_code, answered.status_code) == (405, 200)
    for response in (asked, answered):
        assert not [name for name in response.headers if name.startswith("access-control-")]


@pytest.mark.parametrize(
    "changes", [{"gateway": {"cors_origins": (PAGE,), "api_keys": ("sk-one",)}}]
)
async def test_a_page_of_an_allowed_origin_asks_without_a_key_and_calls_with_one(gateway, changes):
    for method in ("POST", "PATCH"):
        wish = {**ASKS, "access-control-request-method": method}
        asked = await gateway.client.options(CHAT, headers=wish)
        assert asked.status_code == 200, method
        assert asked.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in asked.headers["access-control-allow-headers"]
    key = {"authorization": "Bearer sk-one"}
    for body in (make_body(), make_body(stream=True)):
        response = await gateway.chat(body, headers={"origin": PAGE, **key})
        assert response.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in response.headers["access-control-expose-headers"]
    refused = await gateway.chat(headers={"origin": PAGE})  # the page can read the error
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == PAGE
    asked = await gateway.client.options(CHAT, headers={**ASKS, "origin": "https://evil.example"})
    assert asked.status_code == 400
    assert "access-control-allow-origin" not in asked.headers


FORM = {"content-type": "multipart/form-data; boundary=x"}
#: Headers of other pages: a foreign origin, a cross-site request, an opaque origin, and a neighbor on this host.
ELSEWHERE = (
    {"origin": "https://evil.example.com"}, {"sec-fetch-site": "cross-site"}, {"origin": "null"},
    {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
)  # fmt: skip


async def test_requests_without_preflight_are_refused_to_other_origins(gateway):
    paths = (CHAT, "/v1/files", "/v1/batches/batch_1/cancel", "/nowhere")
    for path, headers in product(paths, ({}, {"content-type": "Text/Plain;charset=utf-8"}, FORM)):
        for page in ELSEWHERE:
            response = await gateway.client.post(path, content=b"", headers={**headers, **page})
            assert code(response)[:2] == (403, "origin_not_allowed"), (path, page)
        assert (await gateway.client.post(path, content=b"", headers=headers)).status_code != 403


async def test_own_pages_can_post_any_type_and_other_pages_only_json(gateway):
    """The browser marks the request as same-origin, behind any proxy, or over plain HTTP the origin equals the host."""
    host = gateway.client.build_request("POST", "/").headers["host"]
    for page in (
        {"origin": "https://public.example.com", "sec-fetch-site": "same-origin"},
        {"origin": f"http://{host}"},
        {"sec-fetch-site": "none"},
    ):
        response = await gateway.client.post("/v1/files", content=b"", headers={**FORM, **page})
        assert response.status_code != 403, page
    # The browser sent a preflight for JSON, or an extension that needs none sent it.
    json_of_another = await gateway.chat(headers={"origin": "chrome-extension://abc"})
    assert json_of_another.status_code == 200


@pytest.mark.parametrize(
    "changes", [{"gateway": {"cors_origins": (PAGE,)}}, {"gateway": {"cors_origins": ("*",)}}]
)
async def test_pages_of_an_allowed_origin_can_post_any_type(gateway, changes):
    response = await gateway.client.post("/v1/files", headers={**FORM, "origin": PAGE})
    assert response.status_code != 403
