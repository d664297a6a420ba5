"""A client of the gateway's `/v1/applications`."""

import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import httpx

from shared.packages.manifest import MANIFEST_TYPE, Manifest
from shared.packages.resumable_file import Report

_TIMEOUT_S = 60.0
_UPLOAD_S = 600.0
_TRIES = 4
_PIECE_BYTES = 256 * 1024
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ApiFailed(Exception):
    """The gateway refuses or fails; message and code are its own. `retry_after_s`: time until a retry."""

    code: str = ""
    retry_after_s: float | None = None


class Client:
    """Client of one gateway. The key: the given one, else that of `vlm serve` on this machine."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/")
        key = key or _own_key(url)
        self._http = httpx.Client(
            base_url=self.url, timeout=_TIMEOUT_S, trust_env=False,
            headers={"authorization": f"Bearer {key}"} if key else {},
        )  # fmt: skip
        weakref.finalize(self, self._http.close)

    def call(self, method: str, path: str = "", body: dict[str, Any] | None = None) -> Any:
        """Call a path below `/v1/applications`. Raises: ApiFailed."""
        return self.ask(method, f"/v1/applications{path}", body)

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Raises: ApiFailed."""
        return _content(self.send(method, path, json=body))

    def text(self, path: str) -> str:
        """The text at a path. Raises: ApiFailed."""
        answer = self.send("GET", path)
        return answer.text if answer.is_success else _content(answer)

    def send(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Send a request; returns any response. Raises: ApiFailed if there is none."""
        try:
            return self._http.request(method, path, **more)
        except httpx.HTTPError as error:
            raise ApiFailed(f"{self.url} does not answer: {error}") from None

    def close(self) -> None:
        self._http.close()


class GatewayStore:
    """The gateway as a store for clients without access to its store. Write-only."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.url = client.url
        self._there: dict[str, int] = {}
        self._starts: dict[str, int] = {}

    def begin(self, manifest: Manifest) -> None:
        """Ask which blobs of a package are missing; they are protected from collection. Raises: ApiFailed."""
        headers = {"content-type": MANIFEST_TYPE}
        plan = self._client.send("POST", "/v1/packages", content=manifest.encode(), headers=headers)
        missing = _content(plan)["missing"]
        self._starts = {each["digest"]: each["start"] for each in missing}
        sizes = {layer.digest: layer.size for layer in manifest.layers}
        self._there = {d: size for d, size in sizes.items() if d not in self._starts}

    def size(self, digest: str) -> int | None:
        """See `PackageStore.size`. Raises: ApiFailed."""
        return self._there.get(digest)

    def put(self, digest: str, file: IO[bytes], report: Report | None = None) -> None:
        """See `PackageStore.put`; resumes after a broken connection. Raises: ApiFailed."""
        size = file.seek(0, os.SEEK_END)
        start = self._starts.get(digest, 0)
        for is_last in (*[False] * (_TRIES - 1), True):
            file.seek(start)
            if report is not None:
                report(start)
            try:
                sent = self._send(digest, file, start, size, report)
                if sent.status_code != 409 or is_last:
                    _content(sent)
                    return
            except ApiFailed:
                if is_last or (start := self._start(digest)) == 0:
                    raise
            else:
                start = self._start(digest)
            if report is not None:
                report(-file.tell())

    def _send(
        self, digest: str, file: IO[bytes], start: int, size: int, report: Report | None
    ) -> httpx.Response:
        def pieces() -> Iterator[bytes]:
            while piece := file.read(_PIECE_BYTES):
                yield piece
                if report is not None:
                    report(len(piece))

        headers = {"content-length": str(size - start), "content-type": "application/octet-stream"}
        if start:
            headers["content-range"] = f"bytes {start}-{size - 1}/{size}"
        content = pieces() if size > start else b""
        return self._client.send(
            "PUT", f"/v1/blobs/{digest}", content=content, headers=headers, timeout=_UPLOAD_S
        )

    def _start(self, digest: str) -> int:
        found = self._client.send("HEAD", f"/v1/blobs/{digest}")
        return int(found.headers.get("upload-offset", "0"))


def _content(answer: httpx.Response) -> Any:
    """The content of a successful response. Raises: ApiFailed."""
    try:
        content = answer.json() if answer.content else {}
    except ValueError:
        raise ApiFailed(f"the gateway answers {answer.status_code}, and no JSON") from None
    if answer.is_success:
        return content
    error = content.get("error", {})
    message = error.get("message", "")
    if answer.status_code in (401, 403):
        message += (
            " Give a key with --api-key, or set VLM_API_KEY, or DEPLOY_KEY for commands that deploy; "
            "`vlm serve` keeps one that may do both in deploy.key in its data folder, that of --data-dir "
            "or ~/.local/state/vlm-fleet/PORT."
        )
    failed = ApiFailed(message or f"the gateway answers {answer.status_code}")
    failed.code = error.get("code") or ""
    if (after := answer.headers.get("retry-after", "")).isdigit():
        failed.retry_after_s = float(after)
    raise failed


def _own_key(url: str) -> str | None:
    """The key that `vlm serve` created on this machine, for its own port only."""
    parts = urlsplit(url)
    if parts.hostname not in LOOPBACK:
        return None
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    folder = state / "vlm-fleet" / str(parts.port or 80)
    paths = (folder / "data-dir.key", folder / "deploy.key")
    try:
        return next(path.read_text().strip() for path in paths if path.exists())
    except (OSError, StopIteration):
        return None
