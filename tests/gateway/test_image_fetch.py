"""Remote pictures, where allowed: which addresses are refused, and how little an answer tells."""

import asyncio
import ipaddress
import socket

import httpx
import pytest

from gateway import image_fetch
from gateway.image_fetch import ImageFetcher, is_public, parse_url
from gateway.image_header import ImageRefused
from shared.settings import GatewaySettings
from tests.factories_gateway import make_body
from tests.factories_pictures import encoded

MESSAGE = "The image could not be fetched from its URL."


def make_fetcher(
    *, hosts=("any-public",), max_bytes=100, timeout_s=5.0, answer=None, transport=None
):
    """A fetcher whose packets go to a function."""
    transport = transport or httpx.MockTransport(answer)
    return ImageFetcher(hosts=hosts, max_bytes=max_bytes, timeout_s=timeout_s, transport=transport)


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
    ],
)  # fmt: skip
def test_addresses_of_the_house_are_refused(address):
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address",
    ["93.184.216.34", "8.8.8.8", "2606:2800:220:1::1", "2a00:1450::8", "64:ff9b::808:808"],
)
def test_addresses_of_the_world_are_accepted(address):
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
async def test_no_packet_goes_to_the_house(url):
    def refuse(request: httpx.Request) -> httpx.Response:
        raise AssertionError("a packet was sent")

    fetcher = make_fetcher(max_bytes=100, timeout_s=5, transport=httpx.MockTransport(refuse))
    with pytest.raises(ImageRefused, match=MESSAGE):
        await fetcher.fetch(url)
    await fetcher.close()


def resolve_to(monkeypatch, *addresses: str) -> list[tuple[str, int]]:
    """Let names resolve to these addresses; returns the names asked for."""
    asked: list[tuple[str, int]] = []

    async def getaddrinfo(self, host, port, **options):
        asked.append((host, port))
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in addresses]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    return asked


async def test_one_private_address_among_many_is_enough_to_refuse(monkeypatch):
    resolve_to(monkeypatch, "93.184.216.34", "10.0.0.1")
    fetcher = make_fetcher(max_bytes=100, timeout_s=5, transport=httpx.MockTransport(None))  # type: ignore[arg-type]
    with pytest.raises(ImageRefused, match=MESSAGE):
        await fetcher.fetch("http://rebind.example/x.png")
    await fetcher.close()


async def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch):
    asked = resolve_to(monkeypatch, "93.184.216.34")
    requests: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(200, stream=httpx.ByteStream(b"picture"))

    fetcher = make_fetcher(max_bytes=100, timeout_s=5, transport=httpx.MockTransport(answer))
    assert await fetcher.fetch("https://pictures.example:8443/a?b=c#d") == b"picture"
    await fetcher.close()
    [request] = requests
    assert asked == [("pictures.example", 8443)]
    assert str(request.url) == "https://93.184.216.34:8443/a?b=c"
    assert request.headers["host"] == "pictures.example:8443"
    assert request.headers["accept-encoding"] == "identity"
    assert request.extensions["sni_hostname"] == "pictures.example"


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(302, headers={"location": "ftp://pictures.example/"}), httpx.Response(302),
        httpx.Response(300, headers={"location": "/"}), httpx.Response(302, headers={"location": "/"}),
        httpx.Response(204), httpx.Response(206, stream=httpx.ByteStream(b"x")), httpx.Response(401), httpx.Response(404),
        httpx.Response(500), httpx.Response(200, stream=httpx.ByteStream(b"x" * 101)),
        httpx.Response(200, stream=httpx.ByteStream(b"x"), headers={"content-encoding": "gzip"}),
    ],
    ids=lambda response: str(response.status_code),
)  # fmt: skip
async def test_every_failure_reads_the_same(monkeypatch, response):
    resolve_to(monkeypatch, "93.184.216.34")
    fetcher = make_fetcher(
        max_bytes=100, timeout_s=5, transport=httpx.MockTransport(lambda _: response)
    )
    with pytest.raises(ImageRefused) as raised:
        await fetcher.fetch("http://pictures.example/")
    await fetcher.close()
    assert (raised.value.message, raised.value.code) == (MESSAGE, "invalid_image_url")


async def test_the_whole_time_is_bounded(monkeypatch):
    resolve_to(monkeypatch, "93.184.216.34")

    class Trickle(httpx.AsyncByteStream):
        async def __aiter__(self):
            while True:
                yield b"x"
                await asyncio.sleep(0.05)

    fetcher = make_fetcher(
        max_bytes=10_000,
        timeout_s=0.3,
        transport=httpx.MockTransport(lambda _: httpx.Response(200, stream=Trickle())),
    )
    with pytest.raises(ImageRefused, match=MESSAGE):
        async with asyncio.timeout(5):
            await fetcher.fetch("http://pictures.example/")
    await fetcher.close()


@pytest.mark.parametrize("changes", [{"gateway": {"remote_images": "any-public"}}])
async def test_a_remote_picture_reaches_the_worker_where_it_is_allowed(
    gateway, worker, changes, monkeypatch
):
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        data = encoded(5)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    body = make_body()
    body["messages"][0]["content"] = [
        {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{port}/x.png"}}
    ]
    refused = await gateway.chat(body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages.[0].content.[0].image_url"
    monkeypatch.setattr(image_fetch, "is_public", lambda address: True)
    assert (await gateway.chat(body)).status_code == 200
    server.close()
    await server.wait_closed()
    [request] = worker.requests
    assert await worker.images.get(request.images[0].sha256) == encoded(5)


def redirect_to(location: str) -> httpx.Response:
    return httpx.Response(302, headers={"location": location})


async def fetch_along(fetcher: ImageFetcher, url: str) -> bytes | None:
    """The picture, or None if it is refused."""
    try:
        return await fetcher.fetch(url)
    except ImageRefused:
        return None
    finally:
        await fetcher.close()


@pytest.mark.parametrize(
    ("start", "location", "is_followed"),
    [
        ("http://a.example/", "http://b.example/x", True),
        ("http://a.example/", "/moved", True),
        ("http://a.example/", "https://a.example/", True),
        ("https://a.example/", "http://a.example/", False),
        ("http://a.example/", "http://house.example/", False),
        ("http://a.example/", "http://127.0.0.1/", False),
        ("http://a.example/", "http://user@b.example/", False),
        ("http://a.example/", "file:///etc/passwd", False),
        ("http://a.example/", "//house.example/", False),
    ],
)
async def test_a_redirect_passes_the_same_checks(monkeypatch, start, location, is_followed):
    async def getaddrinfo(self, host, port, **options):
        address = {"house.example": "10.0.0.1", "127.0.0.1": host}.get(host, "93.184.216.34")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    hosts: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        hosts.append(request.headers["host"])
        if len(hosts) == 1:
            return redirect_to(location)
        return httpx.Response(200, stream=httpx.ByteStream(b"picture"))

    picture = await fetch_along(make_fetcher(answer=answer), start)
    assert picture == (b"picture" if is_followed else None)
    assert len(hosts) == 1 + is_followed


async def test_redirects_come_to_an_end(monkeypatch):
    resolve_to(monkeypatch, "93.184.216.34")
    requests: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return redirect_to("/again")

    assert await fetch_along(make_fetcher(answer=answer), "http://a.example/") is None
    assert len(requests) == 4


@pytest.mark.parametrize(
    ("url", "location"),
    [("http://evil.example/", None), ("http://a.example.evil.example/", None), ("http://a.example/", "http://evil.example/")],
)  # fmt: skip
async def test_only_named_hosts_are_asked(monkeypatch, url, location):
    resolve_to(monkeypatch, "93.184.216.34")
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers["host"])
        return redirect_to(location)

    assert await fetch_along(make_fetcher(hosts=("a.example",), answer=answer), url) is None
    assert set(asked) <= {"a.example"}


async def test_a_slow_host_does_not_take_all_fetches(monkeypatch):
    resolve_to(monkeypatch, "93.184.216.34")
    go_on = asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.headers["host"] == "slow.example":
            await go_on.wait()
        return httpx.Response(200, stream=httpx.ByteStream(b"picture"))

    fetcher = make_fetcher(answer=answer)
    slow = [asyncio.ensure_future(fetcher.fetch("http://slow.example/")) for _ in range(40)]
    refused, waiting = await asyncio.wait(slow, return_when=asyncio.FIRST_EXCEPTION)
    while len(refused) < 32:
        more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        refused |= more
    assert all(isinstance(task.exception(), ImageRefused) for task in refused)
    assert await fetcher.fetch("http://quick.example/") == b"picture"
    go_on.set()
    assert [await task for task in waiting] == [b"picture"] * 8
    await fetcher.close()


async def test_proxies_of_the_environment_are_not_asked(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    fetcher = ImageFetcher(hosts=("any-public",), max_bytes=1, timeout_s=1)
    assert not fetcher._client._mounts
    await fetcher.close()


@pytest.mark.parametrize(
    "host", ["http://a.example", "*.example", "a.example:80", "a/b", "A.example", "-"]
)
def test_an_allowed_host_is_a_plain_name(host):
    with pytest.raises(ValueError, match="name hosts"):
        GatewaySettings(remote_images=(host,))


def test_allowed_hosts_come_as_one_variable():
    assert GatewaySettings(remote_images="a.example, b.example").remote_images == (
        "a.example",
        "b.example",
    )  # type: ignore[arg-type]
