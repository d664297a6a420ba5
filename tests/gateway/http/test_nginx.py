"""The nginx configuration for a gateway: TLS, streams without buffering, and the client's address."""

import asyncio
import os
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from loadtest.fleet import ROOT
from tests.factories_gateway import CHAT, make_body, says
from tests.waiting import until

NGINX = shutil.which("nginx") or os.environ.get("NGINX", "")
pytestmark = pytest.mark.skipif(not NGINX, reason="no nginx here (Debian: nginx-light)")
TLS = Path(__file__).parents[1] / "media" / "tls"
KEY = "sk-known"
_MAIN = """
daemon off; pid {folder}/pid; error_log {folder}/error.log; worker_processes 1;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    include {folder}/gateway.conf;
}}
"""


@pytest.fixture
def changes() -> dict:
    return {"gateway": {"api_keys": [KEY], "trusted_proxies": ("127.0.0.1",), "drain_s": 1.0}}


@pytest.fixture
async def proxy(gateway, tmp_path: Path) -> AsyncIterator[str]:
    """Starts nginx on a free port; returns its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name in ("privkey.pem", "fullchain.pem"):
        shutil.copy(TLS / "first.pem", tmp_path / name)
    text = (ROOT / "config/nginx/gateway.conf").read_text()
    for old, new in (
        ("127.0.0.1:8000", gateway.url.removeprefix("http://")),
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/nginx/tls", str(tmp_path)),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "gateway.conf").write_text(text)
    (tmp_path / "nginx.conf").write_text(_MAIN.format(folder=tmp_path))
    process = await asyncio.create_subprocess_exec(
        NGINX, "-c", str(tmp_path / "nginx.conf"), "-p", str(tmp_path)
    )

    def listens() -> bool:
        assert process.returncode is None, (tmp_path / "error.log").read_text()
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    try:
        await until(listens)
        yield f"https://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


def client(url: str, address: str = "127.0.0.1", key: str = KEY) -> httpx.AsyncClient:
    """Returns a client that connects from this address."""
    context = ssl._create_unverified_context()
    return httpx.AsyncClient(
        base_url=url,
        headers={"authorization": f"Bearer {key}"},
        transport=httpx.AsyncHTTPTransport(verify=context, local_address=address),
        timeout=20.0,
    )


async def test_a_token_reaches_the_client_before_the_next_is_generated(proxy, gateway, worker):
    has_come = asyncio.Event()
    worker.script = says("two", begins="one", after=has_come)
    async with (
        client(proxy) as https,
        https.stream("POST", CHAT, json=make_body(stream=True)) as response,
    ):
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if "one" in line:
                has_come.set()
            is_whole = "two" in line
            if is_whole:
                break
    assert is_whole


async def test_wrong_keys_are_counted_by_the_real_address_of_a_client(proxy, gateway):
    async def statuses(url: str, address: str, count: int) -> list[int]:
        found = []
        for number in range(count):
            async with client(url, address, "sk-wrong") as http:
                headers = {"x-forwarded-for": f"10.0.0.{number}"}
                found.append((await http.get("/v1/models", headers=headers)).status_code)
        return found

    for url, address in ((proxy, "127.0.0.2"), (gateway.url, "127.0.0.5")):
        assert await statuses(url, address, 62) == [401] * 60 + [429] * 2
    assert await statuses(proxy, "127.0.0.3", 1) == [401]
