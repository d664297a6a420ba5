"""The files of the chat page: public, complete, and with a content security policy."""

import hashlib

import pytest

from gateway.page import FOLDER, load_page

FILES = {page.path: page for page in load_page()}


@pytest.mark.parametrize("changes", [{"gateway": {"api_keys": ("sk-one",)}}])
async def test_every_file_is_served_without_a_key_and_nothing_else(gateway):
    for path, file in FILES.items():
        response = await gateway.client.get(path)
        assert (response.status_code, response.content) == (200, file.body), path
        assert response.headers["x-request-id"]
    for path in (
        "/page", "/page/", "/page/index.html", "/page/../v1/models", "/page/../page.py", "//",
        "/index.html", "/page/%2e%2e/page.py",
    ):  # fmt: skip
        assert (await gateway.client.get(gateway.url + path)).status_code == 401, path


async def test_the_page_has_a_content_security_policy_and_an_etag(gateway):
    assert (await gateway.client.post("/")).status_code == 405
    head = await gateway.client.head("/")
    assert (head.status_code, head.content) == (200, b"")
    headers = (await gateway.client.get("/")).headers
    parts = headers["content-security-policy"].split(";")
    policy = dict(part.strip().split(" ", 1) for part in parts)
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    first = await gateway.client.get("/page/main.js")
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = await gateway.client.get("/page/main.js", headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b""), known
        assert again.headers["etag"] == tag
    other = await gateway.client.get("/page/main.js", headers={"if-none-match": '"other"'})
    assert other.status_code == 200


def test_the_markdown_library_is_the_published_file():
    """The file lib/marked.esm.js of marked 18.2.1 on npm."""
    digest = hashlib.sha256((FOLDER / "marked.js").read_bytes()).hexdigest()
    assert digest == "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de"
