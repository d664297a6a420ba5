"""The gateway's `/v1/applications`, as the commands call it."""

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

_TIMEOUT_S = 60.0


class ApiFailed(Exception):
    """The gateway does not do it; the message is its own."""


class Client:
    """One gateway. The key: the given one, `DEPLOY_KEY`, or that of `vlm serve` on this machine."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/")
        key = key or _own_key(url)
        self._http = httpx.Client(
            base_url=self.url, timeout=_TIMEOUT_S, trust_env=False,
            headers={"authorization": f"Bearer {key}"} if key else {},
        )  # fmt: skip

    def call(self, method: str, path: str = "", body: dict[str, Any] | None = None) -> Any:
        """Raises: ApiFailed."""
        try:
            answer = self._http.request(method, f"/v1/applications{path}", json=body)
        except httpx.HTTPError as error:
            raise ApiFailed(f"{self.url} does not answer: {error}") from None
        try:
            content = answer.json()
        except ValueError:
            raise ApiFailed(f"{self.url} answers {answer.status_code}, and no JSON") from None
        if answer.is_success:
            return content
        message = content.get("error", {}).get("message", "")
        if answer.status_code in (401, 403):
            message += " Give --api-key or DEPLOY_KEY; `vlm serve` keeps one in deploy.key in its data folder."
        raise ApiFailed(message or f"{self.url} answers {answer.status_code}")

    def close(self) -> None:
        """Hang up."""
        self._http.close()


def _own_key(url: str) -> str | None:
    """The key that `vlm serve` made on this machine, for its own port alone."""
    parts = urlsplit(url)
    if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        return None
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    try:
        return (state / "vlm-fleet" / str(parts.port or 80) / "deploy.key").read_text().strip()
    except OSError:
        return None
