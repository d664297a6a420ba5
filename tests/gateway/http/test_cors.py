"""Pages of other origins: no header without a setting; with it, those origins and no others."""

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
    refused = await gateway.chat(headers={"origin": PAGE})  # and the page sees why
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == PAGE
    asked = await gateway.client.options(CHAT, headers={**ASKS, "origin": "https://evil.example"})
    assert asked.status_code == 400
    assert "access-control-allow-origin" not in asked.headers


FORM = {"content-type": "multipart/form-data; boundary=x"}
#: Of a page elsewhere: told by name, by the browser alone, by a page without an origin, by a neighbor on this host.
ELSEWHERE = (
    {"origin": "https://evil.example.com"}, {"sec-fetch-site": "cross-site"}, {"origin": "null"},
    {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
)  # fmt: skip


async def test_what_no_browser_asks_about_is_refused_to_pages_of_other_origins(gateway):
    paths = (CHAT, "/v1/files", "/v1/batches/batch_1/cancel", "/nowhere")
    for path, headers in product(paths, ({}, {"content-type": "Text/Plain;charset=utf-8"}, FORM)):
        for page in ELSEWHERE:
            response = await gateway.client.post(path, content=b"", headers={**headers, **page})
            assert code(response)[:2] == (403, "origin_not_allowed"), (path, page)
        assert (await gateway.client.post(path, content=b"", headers=headers)).status_code != 403


async def test_the_pages_of_the_gateway_may_post_anything_and_others_json(gateway):
    """By the browser's word, behind any proxy; by their host where a browser says no more (plain HTTP)."""
    host = gateway.client.build_request("POST", "/").headers["host"]
    for page in (
        {"origin": "https://public.example.com", "sec-fetch-site": "same-origin"},
        {"origin": f"http://{host}"},
        {"sec-fetch-site": "none"},
    ):
        response = await gateway.client.post("/v1/files", content=b"", headers={**FORM, **page})
        assert response.status_code != 403, page
    # JSON came after a preflight, or of an extension that needs none.
    json_of_another = await gateway.chat(headers={"origin": "chrome-extension://abc"})
    assert json_of_another.status_code == 200


@pytest.mark.parametrize(
    "changes", [{"gateway": {"cors_origins": (PAGE,)}}, {"gateway": {"cors_origins": ("*",)}}]
)
async def test_pages_of_an_allowed_origin_may_post_anything(gateway, changes):
    response = await gateway.client.post("/v1/files", headers={**FORM, "origin": PAGE})
    assert response.status_code != 403
