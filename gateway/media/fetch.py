"""Fetch a file from an http(s) URL without giving access to the operator's network.

Fetching is disabled until the operator lists hosts, or `any-public`. A URL is parsed once, and its host name is
resolved once. All addresses of the host must be global, and the connection goes to one of them, so that no second
lookup can return another address. URL, Host header, TLS name and the pool's keys contain the host name, so that a
pooled connection serves only its verified host. Redirects pass the same checks. Proxies and .netrc of the environment
are ignored, and content encodings are refused. Bytes, time, name lookups and concurrent fetches (per host, per address
and in total) are limited. All failures have the same message, so that it does not reveal which ports are open.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO, Any, cast
from urllib.parse import SplitResult, urljoin, urlsplit

import httpcore

from gateway.http.auth import Address, network_of
from shared.settings.limits import MAX_IMAGE_URL_CHARS

#: One message for every failure, so that it does not reveal which servers exist in the network.
CANNOT_FETCH = "The file could not be fetched from its URL: send it as a data: URL."

_MAX_CONCURRENT = 32  #: concurrent fetches in this process
_MAX_PER_HOST = 8  #: concurrent fetches from one host
_MAX_PER_ADDRESS = 16  #: concurrent fetches from one address, which hosts of a CDN share
_MAX_REDIRECTS = 3
_MAX_LOOKUPS = 32  #: concurrent lookups in this process, abandoned ones included
_MAX_LOOKUPS_PER_DOMAIN = 4  #: concurrent lookups of one domain, whose name server may be down
LOOKUP_TIMEOUT_S = 3.0
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
ANY_PUBLIC = "any-public"  #: any host that has global addresses only
_PORTS = {"http": 80, "https": 443}
_FORBIDDEN = frozenset('\\"<>^`{}|')
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_NAT64_LOCAL = ipaddress.ip_network("64:ff9b:1::/48")
_V4_COMPATIBLE = ipaddress.ip_network("::/96")
#: Global addresses that a cloud reserves for services to its own machines, such as metadata.
_CLOUD_SERVICES = tuple(
    ipaddress.ip_network(network)
    for network in (
        "192.0.0.0/24",  # Oracle Cloud; Python 3.11 treats some of these addresses as global
        "168.63.129.16/32",  # Azure
        "161.26.0.0/16",  # IBM Cloud
        "166.8.0.0/14",  # IBM Cloud
        "192.80.8.124/32",  # Equinix Metal
    )
)
_FAILURES = (
    OSError,
    ValueError,
    KeyError,
    httpcore.NetworkError,
    httpcore.TimeoutException,
    httpcore.ProtocolError,
)


class ImageRefused(Exception):
    """An image, video or audio is unusable; the message is for the client."""

    def __init__(self, message: str, code: str = "invalid_image") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class ImageFetcher:
    """Fetches images by URL from `hosts`, within limits. Units: bytes, seconds.

    `hosts`: names (for ports 80 and 443), `name:port`, `any-public`. `lookup`: resolves a name in a thread, like
    `socket.getaddrinfo`. `network`: connects to addresses.
    """

    def __init__(
        self,
        *,
        hosts: Collection[str],
        timeout_s: float,
        lookup: Callable[..., list[Any]] = socket.getaddrinfo,
        network: httpcore.AsyncNetworkBackend | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self.hosts = frozenset(hosts)
        self.timeout_s = timeout_s
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)
        self._num_by_host: Counter[str] = Counter()
        self._num_by_address: Counter[str] = Counter()
        self._resolver = _Resolver(lookup)
        anyio = cast(httpcore.AsyncNetworkBackend, httpcore.AnyIOBackend())
        self._network = _PinnedNetwork(network or anyio)
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl_context,
            max_connections=_MAX_CONCURRENT,
            max_keepalive_connections=_MAX_PER_HOST,
            keepalive_expiry=5.0,
            network_backend=self._network,
        )

    async def fetch(
        self,
        url: str,
        file: IO[bytes],
        reserve: Callable[[int], None],
        max_bytes: int,
        more_s: float = 0.0,
    ) -> None:
        """Write the bytes of a URL to a file. `reserve` is called with a number of bytes before they are written.

        `more_s`: seconds added to the timeout. Raises: ImageRefused, always with the same message; errors of `reserve`.
        """

        def write(piece: bytes) -> None:
            if file.tell() + len(piece) > max_bytes:
                raise ValueError("too many bytes")
            reserve(len(piece))
            file.write(piece)

        with suppress(*_FAILURES):
            async with asyncio.timeout(self.timeout_s + more_s):
                return await self._follow(parse_url(url), write)
        raise ImageRefused(CANNOT_FETCH, code="invalid_image_url")

    async def _follow(self, url: SplitResult, write: Callable[[bytes], None]) -> None:
        for _ in range(1 + _MAX_REDIRECTS):
            location = await self._fetch(url, write)
            if location is None:
                return
            target = parse_url(urljoin(url.geturl(), location))
            if url.scheme == "https" != target.scheme:
                raise ValueError("a redirect from https to http")
            url = target
        raise ValueError("too many redirects")

    async def _fetch(self, url: SplitResult, write: Callable[[bytes], None]) -> str | None:
        """Write the file. Returns the URL of a redirect instead, if the server sends one."""
        host, port = (url.hostname or "").rstrip("."), url.port or _PORTS[url.scheme]
        self._check_host(host, port)
        with _share(self._num_by_host, host, _MAX_PER_HOST):
            address = await self._resolver.resolve(host, port)
            with _share(self._num_by_address, network_of(address), _MAX_PER_ADDRESS):
                async with self._slots:
                    with self._network.pinned(host, address):
                        return await self._get(url, host, port, write)

    def _check_host(self, host: str, port: int) -> None:
        if f"{host}:{port}" in self.hosts:
            return
        if port not in _PORTS.values() or not self.hosts & {host, ANY_PUBLIC}:
            raise ValueError("not an allowed host and port")

    async def _get(
        self, url: SplitResult, host: str, port: int, write: Callable[[bytes], None]
    ) -> str | None:
        target = (url.path or "/") + (f"?{url.query}" if url.query else "")
        headers = [
            ("Host", url.netloc),
            ("Accept", "image/*, video/*, audio/*"),
            ("Accept-Encoding", "identity"),
        ]
        where = httpcore.URL(scheme=url.scheme, host=host, port=port, target=target)
        async with self._pool.stream("GET", where, headers=headers) as response:
            answered = {name.lower(): value for name, value in response.headers}
            if response.status in _REDIRECTS:
                return answered[b"location"].decode("ascii")
            if response.status != 200 or b"content-encoding" in answered:
                raise ValueError("not a plain answer")
            async for piece in response.aiter_stream():
                write(piece)
            return None

    async def close(self) -> None:
        """Close the connections; a hanging lookup ends by itself."""
        await self._pool.aclose()
        self._resolver.close()


@contextmanager
def _share(counts: Counter[str], key: str, most: int) -> Iterator[None]:
    """Hold one of the `most` slots of a key. Raises: ValueError if none is free."""
    if counts[key] >= most:
        raise ValueError("too many at a time")
    counts[key] += 1
    try:
        yield
    finally:
        counts[key] -= 1
        if not counts[key]:
            del counts[key]


class _Resolver:
    """Name lookups in threads, which a timeout cannot cancel: an abandoned lookup is counted until it ends."""

    def __init__(self, lookup: Callable[..., list[Any]]) -> None:
        self._lookup = lookup
        self._threads = ThreadPoolExecutor(_MAX_LOOKUPS, thread_name_prefix="lookup")
        self._num_by_domain: Counter[str] = Counter()

    async def resolve(self, host: str, port: int) -> Address:
        """The address to connect to. Raises: ValueError unless all addresses are global; OSError, TimeoutError."""
        domain = ".".join(host.rsplit(".", 2)[-2:])
        counts = self._num_by_domain
        if counts.total() >= _MAX_LOOKUPS or counts[domain] >= _MAX_LOOKUPS_PER_DOMAIN:
            raise ValueError("too many lookups at a time")
        look_up = partial(self._lookup, host, port, type=socket.SOCK_STREAM)
        running = asyncio.get_running_loop().run_in_executor(self._threads, look_up)
        counts[domain] += 1
        running.add_done_callback(lambda future: self._ended(domain, future))
        async with asyncio.timeout(LOOKUP_TIMEOUT_S):
            answers = await asyncio.shield(running)
        addresses = [ipaddress.ip_address(answer[4][0]) for answer in answers]
        if not addresses or not all(is_public(address) for address in addresses):
            raise ValueError("not a public address")
        return addresses[0]

    def _ended(self, domain: str, future: "asyncio.Future[list[Any]]") -> None:
        if not future.cancelled():
            future.exception()  # read it, or asyncio warns about an abandoned lookup
        self._num_by_domain[domain] -= 1
        if not self._num_by_domain[domain]:
            del self._num_by_domain[domain]

    def close(self) -> None:
        """Drop waiting lookups; a running one ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class _PinnedNetwork(httpcore.AsyncNetworkBackend):
    """Connects only to the addresses that hosts were resolved to."""

    def __init__(self, inner: httpcore.AsyncNetworkBackend) -> None:
        self._inner = inner
        self._pinned: dict[str, list[Address]] = {}

    @contextmanager
    def pinned(self, host: str, address: Address) -> Iterator[None]:
        """Inside the block, connections to `host` go to a checked address: `address`, or that of a concurrent fetch."""
        addresses = self._pinned.setdefault(host, [])
        addresses.append(address)
        try:
            yield
        finally:
            addresses.remove(address)
            if not addresses:
                del self._pinned[host]

    async def connect_tcp(
        self, host: str, port: int, *args: Any, **options: Any
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the host's address. Raises: KeyError for a host that was not resolved."""
        return await self._inner.connect_tcp(str(self._pinned[host][-1]), port, *args, **options)


def parse_url(url: str) -> SplitResult:
    """Split a URL once. Raises: ValueError for URLs that parsers read differently."""
    if len(url) > MAX_IMAGE_URL_CHARS or not url.isascii() or not url.isprintable():
        raise ValueError("not a plain URL")
    if " " in url or _FORBIDDEN.intersection(url):
        raise ValueError("not a plain URL")
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or "@" in parts.netloc or not parts.hostname:
        raise ValueError("not a plain http(s) URL")
    if "%" in parts.netloc or parts.port == 0:
        raise ValueError("not a plain host")
    return parts


def is_public(address: Address) -> bool:
    """Whether an address, and any IPv4 address embedded in it, is global unicast and not reserved by a cloud."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None or address.is_site_local or address in _NAT64_LOCAL:
            return False
        hidden = embedded_ipv4(address)
        if hidden is not None:
            return is_public(hidden)
    elif any(address in network for network in _CLOUD_SERVICES):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def embedded_ipv4(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address embedded in an IPv6 address: mapped, compatible, 6to4, Teredo, NAT64, ISATAP."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    is_isatap = int(address) >> 32 & 0xFDFFFFFF == 0x00005EFE
    if address in _V4_COMPATIBLE or address in _NAT64 or is_isatap:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return None
