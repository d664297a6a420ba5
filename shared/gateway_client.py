"""HTTP client of a gateway for the command line."""

import time
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx

from shared.settings import is_loopback, own_folder

_TIMEOUT_S = 60.0
_CONNECT_S = 5.0
_LONGEST_WAIT_S = 30.0  #: maximum delay between two retries


class ApiFailed(Exception):
    """The gateway returned an error. `retry_after_s`: delay before a retry; None: a retry does not help."""

    code: str = ""
    retry_after_s: float | None = None


class GatewaySilent(ApiFailed):
    """The gateway does not answer."""


class Client:
    """Client of one gateway. Without `key`, it uses the key that `vlm serve` created on this machine.

    Raises: ApiFailed if the key has characters that are not visible ASCII.
    """

    def __init__(self, url: str, key: str | None, timeout_s: float = _TIMEOUT_S) -> None:
        self.url = url.rstrip("/")
        key = key or _own_key(url)
        if key and not (key.isascii() and key.isprintable()):
            raise ApiFailed("The API key has characters that are not visible ASCII: check it.")
        self._http = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(timeout_s, connect=_CONNECT_S),
            trust_env=False,
            verify=not self.url.lower().startswith("http:"),  # loading certificates takes 50 ms
            headers={"authorization": f"Bearer {key}"} if key else {},
        )
        weakref.finalize(self, self._http.close)

    def call(self, method: str, path: str = "", body: dict[str, Any] | None = None) -> Any:
        """Call a path below `/v1/applications`. Raises: ApiFailed."""
        return self.ask(method, f"/v1/applications{path}", body)

    def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, tries: int = 1
    ) -> Any:
        """Send a request, with retries after temporary failures. Raises: ApiFailed."""
        for attempt in range(1, tries):
            try:
                return read_content(self.send(method, path, json=body))
            except GatewaySilent:
                time.sleep(2**attempt / 8)
            except ApiFailed as error:
                if error.retry_after_s is None:
                    raise
                time.sleep(min(error.retry_after_s, _LONGEST_WAIT_S))
        return read_content(self.send(method, path, json=body))

    def pages(
        self, path: str, tries: int = 1, after: str = "", **query: object
    ) -> Iterator[dict[str, Any]]:
        """Iterate over the entries of a paginated list, beginning after the id `after`. Raises: ApiFailed."""
        has_more = True
        while has_more:
            page = self.ask("GET", f"{path}?{urlencode({**query, 'after': after})}", None, tries)
            yield from page["data"]
            has_more = page["has_more"] and bool(page["data"])
            after = page["data"][-1]["id"] if page["data"] else ""

    def send(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Send a request; returns any response. Raises: ApiFailed, GatewaySilent if the gateway does not respond."""
        request = self._build(method, path, **more)
        with self._reaching():
            return self._http.send(request)

    @contextmanager
    def stream(self, method: str, path: str, **more: Any) -> Iterator[httpx.Response]:
        """Send a request. The body of its response is read inside the block. Raises: ApiFailed."""
        request = self._build(method, path, **more)
        with self._reaching(), closing(self._http.send(request, stream=True)) as answer:
            if not answer.is_success:
                answer.read()
                read_content(answer)
            yield answer

    def _build(self, method: str, path: str, **more: Any) -> httpx.Request:
        """Raises: ApiFailed for data that no request can hold, such as a number that is not finite."""
        try:
            return self._http.build_request(method, path, **more)
        except UnicodeEncodeError:  # from arguments or input in another encoding
            raise ApiFailed("The request has text that is not UTF-8: send UTF-8.") from None
        except (ValueError, httpx.InvalidURL) as error:
            raise ApiFailed(f"The request cannot be sent: {error}.") from None

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            raise GatewaySilent(
                f"{self.url} does not answer ({error}): start a server there with `vlm serve`, "
                "or give the address of a running server with --url"
            ) from None

    def close(self) -> None:
        self._http.close()


def read_content(answer: httpx.Response) -> Any:
    """The content of a successful response. Raises: ApiFailed."""
    try:
        content = answer.json() if answer.content else {}
    except ValueError:
        text = f"the server at --url answered {answer.status_code} without JSON: check that it is a gateway"
        raise ApiFailed(text) from None
    if answer.is_success:
        return content
    try:
        error = dict(content["error"])
    except (KeyError, TypeError, ValueError):  # not a gateway
        error = {}
    message = error.get("message", "")
    if answer.status_code in (401, 403):
        message += (
            " Give a key with --api-key, or set VLM_API_KEY, or DEPLOY_KEY for commands that deploy; "
            "`vlm serve` stores a key with both permissions in the file deploy.key of its --data-dir "
            "(default: ~/.local/state/vlm-fleet/PORT)."
        )
    failed = ApiFailed(message or f"the gateway answered with HTTP status {answer.status_code}")
    failed.code = error.get("code") or ""
    if (after := answer.headers.get("retry-after", "")).isdigit():
        failed.retry_after_s = float(after)
    raise failed


def _own_key(url: str) -> str | None:
    """The key that `vlm serve` created on this machine for the port of the URL; None if there is none."""
    parts = urlsplit(url)
    if not is_loopback(parts.hostname):
        return None
    folder = own_folder("state") / str(parts.port or 80)
    paths = (folder / "data-dir.key", folder / "deploy.key")
    try:
        return next(path.read_text().strip() for path in paths if path.exists())
    except (OSError, StopIteration):
        return None
