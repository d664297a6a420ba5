"""Uploads of packages through the gateway."""

import os
from collections.abc import Iterator
from typing import IO

import httpx

from shared.gateway_client import ApiFailed, Client, read_content
from shared.packages.manifest import MANIFEST_TYPE, Manifest
from shared.packages.store import Report

_UPLOAD_S = 600.0
_TRIES = 4
_PIECE_BYTES = 256 * 1024


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
        missing = read_content(plan)["missing"]
        self._starts = {each["digest"]: each["start"] for each in missing}
        sizes = {layer.digest: layer.size for layer in manifest.layers}
        self._there = {d: size for d, size in sizes.items() if d not in self._starts}

    def size(self, digest: str) -> int | None:
        """See `FileStore.size`. Raises: ApiFailed."""
        return self._there.get(digest)

    def put(self, digest: str, file: IO[bytes], report: Report | None = None) -> None:
        """See `FileStore.put`; resumes after a broken connection. Raises: ApiFailed."""
        size = file.seek(0, os.SEEK_END)
        start = self._starts.get(digest, 0)
        for is_last in (*[False] * (_TRIES - 1), True):
            file.seek(start)
            if report is not None:
                report(start)
            try:
                sent = self._send(digest, file, start, size, report)
                if sent.status_code != 409 or is_last:
                    read_content(sent)
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
