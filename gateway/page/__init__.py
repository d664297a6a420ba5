"""The chat page, that of deployments and the API reference: a handful of fixed files, read once, that a browser gets without a key.

They hold nothing secret; the page asks its user for the key and sends it with each call of the API.
Its policy lets it run its own scripts alone and talk to this gateway alone, so that no text of a
model or of a client becomes code.

Source: Content Security Policy Level 3; Trusted Types; RFC 9110, sections 8.8.3 and 13.1.2.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

FOLDER = Path(__file__).parent
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
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


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file, an ASGI application.

    Its tag changes with its bytes, so browsers ask again and rarely load again.
    """

    body: bytes
    content_type: bytes
    tag: bytes

    def matches(self, if_none_match: bytes) -> bool:
        """Whether the browser has these very bytes."""
        known = {tag.strip().removeprefix(b"W/") for tag in if_none_match.split(b",")}
        return self.tag in known or b"*" in known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, or 304. The server leaves the body out where only the head was asked for."""
        if_none_match = Request(scope).headers.get("if-none-match", "").encode("latin-1")
        headers = [(b"etag", self.tag), (b"cache-control", b"no-cache"), *_SECURITY]
        body = b""
        status = 304
        if not self.matches(if_none_match):
            status, body = 200, self.body
            headers.append((b"content-type", self.content_type))
            headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def load_page(folder: Path = FOLDER) -> dict[str, PageFile]:
    """Every file of the pages by its path: `/` is `index.html`, `/apps` and `/docs` are pages, the others lie under `/page/`."""
    files = {
        f"/page/{path.relative_to(folder).as_posix()}": _read(path)
        for path in sorted(folder.rglob("*"))
        if path.suffix in _TYPES
    }
    pages = {"/": "index", "/apps": "apps", "/docs": "docs"}
    return {path: files.pop(f"/page/{name}.html") for path, name in pages.items()} | files


def create_page_routes() -> list[Route]:
    """A route for each file."""
    return [Route(path, file, methods=["GET"]) for path, file in load_page().items()]


def _read(path: Path) -> PageFile:
    body = path.read_bytes()
    tag = b'"%b"' % hashlib.sha256(body).hexdigest()[:32].encode()
    return PageFile(body, _TYPES[path.suffix], tag)
