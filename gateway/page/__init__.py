"""The chat, applications and admin pages, and the API reference: static files that browsers get without a key.

They contain no secrets: a page asks its user for the API key, and sends the key with each call. The content security
policy allows only scripts of, and connections to, this gateway, so that no text of a model or client is run as code.

Source: Content Security Policy Level 3; Trusted Types; RFC 9110, sections 8.8.3 and 13.1.2.
"""

import hashlib
from functools import cache
from pathlib import Path

from gateway.http.endpoint import Endpoint
from gateway.http.exchange import Exchange

FOLDER = Path(__file__).parent
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src data:; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".png": b"image/png",
}
_SECURITY = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class PageEndpoint(Endpoint):
    """A file of the pages, with its ETag: browsers revalidate it, and rarely download it again."""

    method = "GET"
    access = "public"
    is_documented = False

    def __init__(self, path: str, file: Path) -> None:
        self.path = path
        self.body = file.read_bytes()
        self._content_type = _TYPES[file.suffix]
        self._tag = b'"%b"' % hashlib.sha256(self.body).hexdigest()[:32].encode()

    async def serve(self, exchange: Exchange) -> None:
        """Send the file, or 304. The server drops the body of an answer to HEAD."""
        headers = [(b"etag", self._tag), (b"cache-control", b"no-cache"), *_SECURITY]
        known = exchange.context.headers.get(b"if-none-match", b"").split(b",")
        if {self._tag, b"*"} & {tag.strip().removeprefix(b"W/") for tag in known}:
            await exchange.start(304, headers)
            await exchange.write(b"", is_last=True)
        else:
            headers.append((b"content-type", self._content_type))
            await exchange.answer(200, headers, self.body)


@cache
def load_page() -> list[PageEndpoint]:
    """All files: the pages `/`, `/admin`, `/apps` and `/docs`, and the other files under `/page/`."""
    files = {
        f"/page/{path.relative_to(FOLDER).as_posix()}": path
        for path in sorted(FOLDER.rglob("*"))
        if path.suffix in _TYPES
    }
    pages = {"/": "index", "/admin": "admin", "/apps": "apps", "/docs": "docs"}
    files |= {path: files.pop(f"/page/{name}.html") for path, name in pages.items()}
    return [PageEndpoint(path, file) for path, file in files.items()]
