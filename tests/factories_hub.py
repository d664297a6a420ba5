"""A simulated Hugging Face hub for one process: repositories from directories, over real HTTP."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tests.http_server import Handler, serve_http

REPO = "acme/tiny-llava"
_RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_INFO = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/revision/(?P<revision>[^/?]+)")
_TREE = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/?]+)")


@dataclass
class Repository:
    """Revisions by name; files of a gated repository require `token`."""

    revisions: dict[str, Path]
    token: str | None = None

    def commit(self, revision: str) -> str | None:
        names = {self._hash(name): name for name in self.revisions}
        if revision in names:
            return revision
        return self._hash(revision) if revision in self.revisions else None

    def directory(self, commit: str) -> Path:
        return next(path for name, path in self.revisions.items() if self._hash(name) == commit)

    def _hash(self, name: str) -> str:
        return hashlib.sha1(f"{name} {self.revisions[name]}".encode()).hexdigest()


@dataclass
class Hub:
    """The repositories of the server, and the requests that it received."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    downloads: list[str] = field(default_factory=list)  #: files that were sent
    ranges: list[str] = field(default_factory=list)
    cut_after: int | None = None  #: break the connection once, after this many bytes of a file
    url: str = ""


class _Handler(Handler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        for pattern, answer in (
            (_INFO, self._info),
            (_TREE, self._tree),
            (_RESOLVE, self._resolve),
        ):
            if match := pattern.match(self.path):
                repository = self.hub.repositories.get(match["repo"])
                if repository is None:
                    return self._refuse(401, "RepoNotFound")
                commit = repository.commit(match["revision"])
                if commit is None:
                    return self._refuse(404, "RevisionNotFound")
                return answer(match, repository, commit)
        return self._refuse(404, "EntryNotFound")

    do_HEAD = do_GET

    def _info(self, match: re.Match[str], repository: Repository, commit: str) -> None:
        self._send_json({"_id": "1", "id": match["repo"], "sha": commit, "siblings": []})

    def _tree(self, match: re.Match[str], repository: Repository, commit: str) -> None:
        folder = repository.directory(commit)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        self._send_json(
            [
                {
                    "type": "file",
                    "path": str(path.relative_to(folder)),
                    "size": path.stat().st_size,
                    "oid": _etag(path),
                }
                for path in files
            ]
        )

    def _resolve(self, match: re.Match[str], repository: Repository, commit: str) -> None:
        if repository.token and self.headers["Authorization"] != f"Bearer {repository.token}":
            return self._refuse(403 if self.headers["Authorization"] else 401, "GatedRepo")
        file = repository.directory(commit) / match["file"]
        if not file.is_file():
            return self._refuse(404, "EntryNotFound")
        return self._send_file(file, commit)

    def _send_file(self, file: Path, commit: str) -> None:
        content = file.read_bytes()
        start = 0
        if found := re.match(r"bytes=(\d+)-", self.headers["Range"] or ""):
            start = int(found[1])
            if self.command == "GET":
                self.hub.ranges.append(file.name)
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{_etag(file)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        if start:
            end = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.send_header("Content-Range", end)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "GET":
            self.hub.downloads.append(file.name)
            self._send_body(content[start:])

    def _send_body(self, body: bytes) -> None:
        if self.hub.cut_after is not None and len(body) > self.hub.cut_after:
            body, self.hub.cut_after = body[: self.hub.cut_after], None
            self.close_connection = True
        self.wfile.write(body)

    def _send_json(self, content: Any) -> None:
        self.answer(200, json.dumps(content).encode(), content_type="application/json")

    def _refuse(self, status: int, code: str) -> None:
        self.answer(status, x_error_code=code, x_error_message=code)


@contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()
    with serve_http(_Handler, hub=hub) as hub.url:
        yield hub


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Has the effect of HF_ENDPOINT, which the library reads at import time."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", url)
