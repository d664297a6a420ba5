"""Remote images: refused addresses, connections to checked addresses only, and errors that reveal nothing."""

import asyncio
import inspect
import io
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpcore
import httpx
import pytest

from gateway.media import fetch as image_fetch
from gateway.media.fetch import CANNOT_FETCH, ImageFetcher, is_public, parse_url
from gateway.media.loader import ImageRefused
from shared.settings.tree import GatewaySettings
from tests.factories_gateway import make_body
from tests.factories_images import encoded, image_part
from tests.factories_keys import code
from tests.waiting import until

PUBLIC = "93.184.216.34"
TLS = Path(__file__).parent / "tls"
TLS_NAMES = ("first.example", "second.example")  #: hosts that have certificates in these tests


class Request(NamedTuple):
    target: str
    headers: dict[str, str]
    tls_name: str | None  #: the SNI name of the connection

    @property
    def host(self) -> str:
        return self.headers["host"]


def image(request: Request) -> bytes:
    return respond(200, b"image")


class World(httpcore.AsyncNetworkBackend):
    """A fake internet and a fetcher: one server in this process has every address and responds with `answer`."""

    def __init__(
        self, answer: Callable[[Request], Any] = image, lookup: Callable[..., Any] | None = None, *,
        hosts: tuple[str, ...] = ("any-public",), max_bytes: int = 100, timeout_s: float = 5.0,
    ) -> None:  # fmt: skip
        self.answer = answer
        self.max_bytes = max_bytes
        self.requests: list[Request] = []
        self.connects: list[tuple[str, int]] = []
        self.fetcher = ImageFetcher(
            hosts=hosts, timeout_s=timeout_s, lookup=lookup or Names(),
            network=self, ssl_context=client_context(),
        )  # fmt: skip
        self._names: dict[int, str] = {}
        self._servers: list[asyncio.Server] = []
        self._serving: set[asyncio.Task[None] | None] = set()
        self._network: Any = httpcore.AnyIOBackend()

    async def __aenter__(self) -> Self:
        contexts = {name: server_context(name) for name in TLS_NAMES}

        def choose(tls: ssl.SSLObject, name: str, context: ssl.SSLContext) -> None:
            tls.context = contexts.get(name, door)
            self._names[id(tls)] = name

        door = server_context(TLS_NAMES[0])
        door.sni_callback = choose  # type: ignore[assignment]
        for context in (None, door):
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)
            self._servers.append(server)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.fetcher.close()
        for server in self._servers:
            server.close()
        await asyncio.gather(*filter(None, self._serving))  # their clients have disconnected

    async def fetch(self, url: str) -> bytes:
        file = io.BytesIO()
        await self.fetcher.fetch(url, file, lambda _: None, self.max_bytes)
        return file.getvalue()

    async def is_fetched(self, url: str) -> bool:
        try:
            return bool(await self.fetch(url))
        except ImageRefused as refused:
            error = (refused.message, refused.code)
        assert error == (CANNOT_FETCH, "invalid_image_url")
        return False

    async def connect_tcp(
        self, host: str, port: int, *args: Any, **options: Any
    ) -> httpcore.AsyncNetworkStream:
        self.connects.append((host, port))
        server = self._servers[port in (443, 8443)]
        local = server.sockets[0].getsockname()[1]
        return await self._network.connect_tcp("127.0.0.1", local, *args, **options)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.add(asyncio.current_task())
        tls_name = self._names.get(id(writer.get_extra_info("ssl_object")))
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.strip().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines)
                request = Request(first.split(" ")[1], headers, tls_name)
                self.requests.append(request)
                answer = self.answer(request)
                if inspect.iscoroutine(answer):
                    answer = await answer
                for piece in [answer] if isinstance(answer, bytes) else answer:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (OSError, EOFError):
            pass
        finally:
            writer.close()


def server_context(name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / f"{name.partition('.')[0]}.pem")
    return context


def client_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    for name in TLS_NAMES:
        context.load_verify_locations(TLS / f"{name.partition('.')[0]}.pem")
    return context


def respond(status: int, body: bytes = b"", **headers: str) -> bytes:
    head = {"content-length": str(len(body)), **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in head.items())
    return f"HTTP/1.1 {status} x\r\n{lines}\r\n".encode() + body


class Names:
    """A name server that returns `addresses` by name, and `default` for other names."""

    def __init__(self, *default: str, **addresses: str) -> None:
        self.default = default or (PUBLIC,)
        self.addresses = {name.replace("_", "."): (a,) for name, a in addresses.items()}
        self.asked: list[tuple[str, int]] = []

    def __call__(self, host: str, port: int, **options: Any) -> list[Any]:
        self.asked.append((host, port))
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in self.addresses.get(host, self.default)
        ]


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.1.2.3", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.0.1", "169.254.169.254",
        "100.64.0.1", "100.100.100.200", "192.0.0.192", "192.0.0.9", "192.0.2.1", "198.18.0.1", "198.51.100.1",
        "203.0.113.1", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255",
        "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1", "100::1",
        "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::169.254.169.254", "::127.0.0.1",
        "2002:a9fe:a9fe::", "2002:7f00:1::", "64:ff9b::a9fe:a9fe", "64:ff9b::7f00:1", "64:ff9b:1::1",
        "2001:0:4136:e378:8000:63bf:5601:5601", "2001:470::5efe:7f00:1", "2001:470::200:5efe:a9fe:a9fe",
        "fec0::1", "feff::1", "168.63.129.16", "::ffff:168.63.129.16", "161.26.0.6", "166.9.0.1", "192.80.8.124",
    ],
)  # fmt: skip
def test_private_addresses_are_refused(address):
    assert not is_public(ipaddress.ip_address(address))


def test_public_addresses_are_accepted():
    for address in (PUBLIC, "8.8.8.8", "2606:2800:220:1::1", "2a00:1450::8", "64:ff9b::808:808"):
        assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "url",
    [
        "https://good.com\\@127.0.0.1/", "http://good.com:80@127.0.0.1/", "http://user@good.com/",
        "http://127.0.0.1#@good.com\r\n", "http://good.com/\r\nx: y", "http://good.com/\ta", "http://good.com/ a",
        "http://good.com/\x00", "http://good.com%00.evil/", "//host/x", "http:///x", "http://", "http:/x",
        "http://ⓖood.com/", "http://①②⑦.⓪.⓪.①/", "http://[fe80::1%25eth0]/", "http://good.com:99999/",
        "http://good.com:0/", "http://good.com:x/", "ftp://good.com/", "http://good.com/" + "x" * 3000,
        "http://good.com/<x>", "http://[::1/",
    ],
)  # fmt: skip
def test_urls_that_two_parsers_could_read_differently_are_refused(url):
    with pytest.raises(ValueError):
        parse_url(url)


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:6379/", "http://[::1]/", "http://0/", "http://localhost./", "http://127.1/",
     "http://2130706433/", "http://0x7f.1/", "http://0177.0.0.1/", "http://169.254.169.254/latest",
     "http://no-such-host.invalid/x.png"],
)  # fmt: skip
async def test_no_packet_is_sent_to_a_private_address(url):
    """One private address among several is enough to refuse a host."""
    for lookup in (socket.getaddrinfo, Names(PUBLIC, "10.0.0.1")):
        async with World(lookup=lookup) as world:
            assert not await world.is_fetched(url)
        assert not world.connects


async def test_the_connection_goes_to_the_address_that_was_checked():
    names = Names()
    async with World(lookup=names, hosts=("first.example:8443",)) as world:
        assert await world.fetch("https://first.example:8443/a?b=c#d") == b"image"
    [request] = world.requests
    assert names.asked == [("first.example", 8443)]
    assert world.connects == [(PUBLIC, 8443)]
    assert (request.target, request.tls_name) == ("/a?b=c", "first.example")
    assert request.host == "first.example:8443"
    assert request.headers["accept-encoding"] == "identity"


async def test_a_connection_kept_for_one_host_never_carries_anothers_request():
    """Both names resolve to one address, whose server keeps connections open."""
    async with World() as world:
        for name in (*TLS_NAMES, *TLS_NAMES):
            await world.fetch(f"https://{name}/")
    assert [request.host for request in world.requests] == [*TLS_NAMES, *TLS_NAMES]
    assert [request.tls_name for request in world.requests] == [*TLS_NAMES, *TLS_NAMES]
    assert len(world.connects) == 2  # one connection per host, each used twice


async def test_a_host_without_its_own_certificate_is_refused():
    async with World(lookup=Names()) as world:
        assert await world.is_fetched("https://first.example/")
        assert not await world.is_fetched("https://victim.example/")
    assert [request.host for request in world.requests] == ["first.example"]


@pytest.mark.parametrize(
    "response",
    [
        respond(302, location="ftp://images.example/"), respond(302), respond(300, location="/"), respond(302, location="/"),
        respond(204), respond(206, b"x"), respond(401), respond(404), respond(500), respond(200, b"x" * 101),
        respond(200, b"x", content_encoding="gzip"), b"nonsense\r\n\r\n", respond(200, content_length="x"),
        respond(200, b"x", content_length="5")[:-1],
    ],
)  # fmt: skip
async def test_every_failure_reads_the_same(response):
    async with World(lambda request: response, timeout_s=1.0) as world:
        assert not await world.is_fetched("http://images.example/")


async def test_the_total_time_is_bounded():
    def trickle(request):
        yield respond(200, content_length="10000")
        while True:
            yield b"x"

    async with World(trickle, max_bytes=10**9, timeout_s=0.3) as world, asyncio.timeout(5):
        assert not await world.is_fetched("http://images.example/")


@pytest.mark.parametrize(
    ("hosts", "fetched", "refused"),
    [
        # The server of a.example speaks TLS on port 443.
        ("any-public", "http://a.example:80 https://first.example:443", "http://a.example:443 http://a.example:6379"),
        ("any-public a.example:6379", "http://a.example:6379 http://b.example", "http://b.example:6379"),
        ("a.example", "http://a.example http://a.example.",
         "http://evil.example http://a.example.evil.example http://a.example:8080"),
        ("a.example:8080", "http://a.example:8080", "http://a.example"),
    ],
)  # fmt: skip
async def test_only_allowed_hosts_and_ports_are_connected_to(hosts, fetched, refused):
    async with World(hosts=tuple(hosts.split()), timeout_s=1.0) as world:
        assert all([await world.is_fetched(f"{url}/") for url in fetched.split()])
        assert not any([await world.is_fetched(f"{url}/") for url in refused.split()])


@pytest.fixture
def door() -> Iterator[socket.socket]:
    """The listening socket of an image server; the gateway allows its host and port."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        yield door


@pytest.fixture
def changes(door: socket.socket) -> dict[str, dict[str, Any]]:
    host = f"127.0.0.1:{door.getsockname()[1]}"
    return {"gateway": {"remote_images": host}, "limits": {"max_open_body_bytes": 50_000}}


async def test_a_remote_image_reaches_the_worker_and_counts_against_the_memory_for_bodies(
    gateway, worker, door, monkeypatch
):
    sent, go_on = asyncio.Event(), asyncio.Event()
    data = encoded(5) + bytes(49_000)  # bytes after the image are ignored

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(respond(200, data)[:-1])
        await writer.drain()
        sent.set()
        if b"/first" in head:
            await go_on.wait()
        writer.write(data[-1:])
        writer.close()

    async def ask(path: str) -> httpx.Response:
        url = f"http://127.0.0.1:{door.getsockname()[1]}{path}"
        return await gateway.chat(make_body([image_part(url)]))

    admission = gateway.services.admission
    async with await asyncio.start_server(serve, sock=door):
        refused = await ask("/second")
        assert code(refused)[::2] == (400, "messages.[0].content.[0].image_url")
        monkeypatch.setattr(image_fetch, "is_public", lambda address: True)
        first = asyncio.create_task(ask("/first"))
        async with asyncio.timeout(5):
            await sent.wait()
            await until(lambda: admission.num_body_bytes >= 49_000)
        assert code(await ask("/second"))[:2] == (503, "server_overloaded")
        go_on.set()
        assert (await first).status_code == 200
        assert (await ask("/second")).status_code == 200
    assert admission.num_body_bytes == 0
    request = worker.requests[0]
    assert await worker.blobs.get(request.task.images[0]) == data


@pytest.mark.parametrize(
    ("start", "location", "is_followed"),
    [
        *[("http://a.example/", location, True)
          for location in ("http://b.example/x", "/moved", "https://first.example/")],
        ("https://first.example/", "http://a.example/", False),
        *[("http://a.example/", location, False) for location in (
            "http://a.example:6379/", "http://house.example/", "http://127.0.0.1/", "http://user@b.example/",
            "file:///etc/passwd", "//house.example/")],
    ],
)  # fmt: skip
async def test_a_redirect_passes_the_same_checks(start, location, is_followed):
    def answer(request):
        return respond(302, location=location) if len(world.requests) == 1 else image(request)

    names = Names(house_example="10.0.0.1")
    names.addresses["127.0.0.1"] = ("127.0.0.1",)
    async with World(answer, names) as world:
        assert await world.is_fetched(start) == is_followed
    assert len(world.requests) == 1 + is_followed


@pytest.mark.parametrize(
    ("slow_url", "slow_address", "most"),
    [
        ("http://slow.example/", "8.8.8.8", 8),
        ("http://{}.slow.example/", "8.8.8.8", 16),
        ("http://{}.slow{}.example/", "2a00:1450::{}", 16),
    ],
    ids=["a host", "an address with many names", "a network with many addresses"],
)
async def test_one_slow_server_does_not_occupy_all_fetches(slow_url, slow_address, most):
    go_on = asyncio.Event()

    async def answer(request):
        if "slow" in request.host:
            await go_on.wait()
        return image(request)

    def look_up(host: str, port: int, **options: Any) -> list[Any]:
        number = host.partition(".")[0] if host[0].isdigit() else "1"
        address = slow_address.format(number) if "slow" in host else PUBLIC
        return Names(address)(host, port)

    async with World(answer, look_up) as world:
        waiting: set[asyncio.Task[bool]] = set()
        num_refused = 0
        for number in range(1, 41):
            url = slow_url.format(number, number // 4)
            waiting.add(asyncio.create_task(world.is_fetched(url)))
            while len(world.requests) + num_refused < number:
                done, waiting = await asyncio.wait(
                    waiting, timeout=0.01, return_when=asyncio.FIRST_COMPLETED
                )
                assert not any(task.result() for task in done)
                num_refused += len(done)
        assert await world.is_fetched("http://quick.example/")
        assert len(waiting) == most
        go_on.set()
        assert all([await task for task in waiting])


async def test_a_dead_name_server_does_not_stall_other_names(monkeypatch):
    monkeypatch.setattr(image_fetch, "LOOKUP_TIMEOUT_S", 0.2)
    come_back = threading.Event()

    def look_up(host: str, port: int, **options: Any) -> list[Any]:
        if host.endswith("dead.example"):
            come_back.wait(30)
        return Names()(host, port)

    async with World(lookup=look_up) as world:
        try:
            dead = [
                asyncio.create_task(world.is_fetched(f"http://{number}.dead.example/"))
                for number in range(40)
            ]
            assert not any(await asyncio.wait_for(asyncio.gather(*dead), 5))
            assert await world.is_fetched("http://quick.example/")
            assert not await world.is_fetched("http://more.dead.example/")
        finally:
            come_back.set()


async def test_proxies_of_the_environment_are_not_used(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with World() as world:
        assert await world.is_fetched("http://images.example/")
    assert world.connects == [(PUBLIC, 80)]


def test_an_allowed_host_is_a_plain_name_or_a_name_and_a_port():
    for host in (
        "http://a.example", "*.example", "a.example:0", "a.example:", "a/b", "A.example", "-",
    ):  # fmt: skip
        with pytest.raises(ValueError, match="name hosts"):
            GatewaySettings(remote_images=(host,))
    settings = GatewaySettings(remote_images="a.example, b.example:8443")
    assert settings.remote_images == ("a.example", "b.example:8443")


async def test_the_number_of_redirects_is_limited():
    async with World(lambda request: respond(302, location="/again")) as world:
        assert not await world.is_fetched("http://a.example/")
    assert len(world.requests) == 4
