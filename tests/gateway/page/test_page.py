"""The files of the chat page: public, complete, and with a content security policy."""

import hashlib
import re

import pytest

from gateway.page import FOLDER, load_page
from tests.integration.fleet_process import SAMPLE

KEYS = {"gateway": {"api_keys": ("sk-one",)}}
FILES = load_page()


@pytest.mark.parametrize("changes", [{}, KEYS])
async def test_every_file_is_served_without_a_key(gateway):
    for path, file in FILES.items():
        response = await gateway.client.get(path)
        assert (response.status_code, response.content) == (200, file.body), path
        assert response.headers["x-request-id"]


@pytest.mark.parametrize("changes", [KEYS])
async def test_nothing_else_is_public_with_the_page(gateway):
    for path in (
        "/page", "/page/", "/page/index.html", "/page/../v1/models", "/page/../page.py", "//",
        "/index.html", "/page/%2e%2e/page.py",
    ):  # fmt: skip
        assert (await gateway.client.get(gateway.url + path)).status_code == 401, path


async def test_only_reading_is_answered(gateway):
    assert (await gateway.client.post("/")).status_code == 405
    head = await gateway.client.head("/")
    assert (head.status_code, head.content) == (200, b"")


async def test_the_policy_allows_this_pages_own_files_alone(gateway):
    headers = (await gateway.client.get("/")).headers
    policy = dict(
        part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


async def test_a_browser_that_has_the_bytes_is_told_so(gateway):
    first = await gateway.client.get("/page/main.js")
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = await gateway.client.get("/page/main.js", headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b""), known
        assert again.headers["etag"] == tag
    other = await gateway.client.get("/page/main.js", headers={"if-none-match": '"other"'})
    assert other.status_code == 200


def test_the_page_has_no_inline_code_and_names_only_files_that_are_there():
    html = "".join(FILES[path].body.decode() for path in ("/", "/admin", "/apps", "/docs"))
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", html)
    assert all(" src=" in tag for tag in re.findall(r"<script[^>]*>", html))
    named = set(re.findall(r'(?:src|href)="([^"#]+)"', html)) - {"openapi.json"}
    for path, file in FILES.items():
        if path.endswith(".js"):
            text = file.body.decode()
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text
            )
            assert not re.search(r"localStorage|document\.cookie", text)
            assert "sessionStorage" not in text or path == "/page/key_dialog.js"
            assert "indexedDB" not in text or path == "/page/history.js"
            named |= {f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', text)}
            named |= set(re.findall(r'"(page/[^"]+)"', text))
    assert {f"/{name}" for name in named} == set(FILES) - {"/"}


def test_sample_images_are_those_of_the_built_in_model():
    for folder, package in (("samples", "shapes"), ("samples/search", "shapes_clip")):
        originals = SAMPLE.parents[2] / package / "samples"
        shown, known = (
            {path.name: path.read_bytes() for path in place.glob("*.png")}
            for place in (FOLDER / folder, originals)
        )
        assert shown == known


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two `#rrggbb` colors, 1 to 21. Source: WCAG 2.2, "relative luminance"."""

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read_in_both_schemes(scheme):
    css = FILES["/page/style.css"].body.decode()
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", css)
    colors = {name: (light, dark)[scheme] for name, light, dark in pairs}
    for ground in ("ground", "surface", "sunken"):
        assert contrast(colors["text"], colors[ground]) >= 7
        for text in ("muted", "accent", "error"):
            assert contrast(colors[text], colors[ground]) >= 4.5, (text, ground)
    assert contrast(colors["on-accent"], colors["accent"]) >= 4.5


def test_the_markdown_library_is_the_published_file():
    """marked 18.2.1 of npm, lib/marked.esm.js."""
    digest = hashlib.sha256((FOLDER / "marked.js").read_bytes()).hexdigest()
    assert digest == "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de"
