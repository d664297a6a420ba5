"""Real servers, started in the same way as by a worker."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress

import httpx
import pytest

from engines.upstream.dialect import Dialect
from engines.upstream.server import ServerProcess, command_of, free_port
from engines.upstream.settings import UpstreamSettings
from tests.waiting import wait_for


@contextmanager
def run_server(
    settings: UpstreamSettings, dialect: Dialect, environment: Mapping[str, str]
) -> Iterator[tuple[str, ServerProcess]]:
    """Runs a server; yields its URL and process."""
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        server = ServerProcess(command_of(settings, dialect, port), dialect.environment)
    url = f"http://127.0.0.1:{port}"
    with closing(server):
        wait_until_healthy(url + dialect.health_path, server.check, settings.start_s)
        yield url, server


def wait_until_healthy(url: str, check: Callable[[], object], within_s: float) -> None:
    """Waits until the server is healthy. `check` must raise if it has ended."""

    def is_healthy() -> bool:
        check()
        with suppress(httpx.HTTPError):
            return httpx.get(url, trust_env=False, timeout=30.0).status_code == httpx.codes.OK
        return False

    wait_for(is_healthy, within_s)
