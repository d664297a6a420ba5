"""Real servers, started as a worker starts them."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx
import pytest

from engines.upstream.dialect import Dialect
from engines.upstream.server import ServerProcess, command_of, free_port
from engines.upstream.settings import UpstreamSettings


@contextmanager
def run_server(
    settings: UpstreamSettings, dialect: Dialect, environment: Mapping[str, str]
) -> Iterator[tuple[str, ServerProcess]]:
    """Its address and process."""
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        server = ServerProcess(command_of(settings, dialect, port), dialect.environment)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(server, f"{url}{dialect.health_path}", settings.start_s)
        yield url, server
    finally:
        server.close()


def _wait_until_ready(server: ServerProcess, url: str, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        server.check()
        try:
            if httpx.get(url, trust_env=False, timeout=30.0).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"{server.name} is not ready after {within_s:g} s")
