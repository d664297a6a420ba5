"""Fetching a picture from an http(s) URL without becoming a way into the operator's network.

Off until the operator names hosts, or `any-public`. A URL is split once; its name is resolved once, every address it
has must be global, and the connection goes to that very address with the original Host and TLS name, so a second
resolution cannot point elsewhere. Redirects are followed by hand, a few, each through all of these checks. No proxies
or .netrc from the environment, no content encodings; bytes, the whole time and the fetches at a time, in all and from
one host, are bounded. Every failure reads the same, so that the answer does not tell which ports are open.
"""

import asyncio
import ipaddress
import socket
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import SplitResult, urljoin, urlsplit

import httpx

from gateway.image_header import ImageRefused

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_MAX_URL_CHARS = 2048
_MAX_CONCURRENT = 32  #: fetches at a time in this process
_MAX_PER_HOST = 8  #: of these
_MAX_REDIRECTS = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
ANY_PUBLIC = "any-public"  #: stands for every host with global addresses only
_PORTS = {"http": 80, "https": 443}
_FORBIDDEN = frozenset('\\"<>^`{}|')
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_NAT64_LOCAL = ipaddress.ip_network("64:ff9b:1::/48")
_V4_COMPATIBLE = ipaddress.ip_network("::/96")
_IETF = ipaddress.ip_network(
    "192.0.0.0/24"
)  # holds a cloud's metadata service; Python 3.11 calls parts global


class ImageFetcher:
    """Fetches pictures by URL from `hosts`, within limits. Units: bytes, seconds."""

    def __init__(
        self,
        *,
        hosts: Collection[str],
        max_bytes: int,
        timeout_s: float,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.hosts = None if ANY_PUBLIC in hosts else frozenset(hosts)
        self.max_bytes = max_bytes
        self.timeout_s = timeout_s
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)
        self._num_by_host: Counter[str] = Counter()
        self._client = httpx.AsyncClient(
            trust_env=False, follow_redirects=False, transport=transport, timeout=timeout_s
        )

    async def fetch(self, url: str) -> bytes:
        """The bytes behind a URL. Raises: ImageRefused, always with the same words."""
        with suppress(
            TimeoutError, OSError, httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError
        ):
            async with asyncio.timeout(self.timeout_s):
                return await self._follow(parse_url(url))
        raise ImageRefused("The image could not be fetched from its URL.", code="invalid_image_url")

    async def _follow(self, url: SplitResult) -> bytes:
        for _ in range(1 + _MAX_REDIRECTS):
            with self._share_of_host(url.hostname or ""):
                async with self._slots:
                    answer = await self._fetch(url)
            if isinstance(answer, bytes):
                return answer
            target = parse_url(urljoin(url.geturl(), answer))
            if url.scheme == "https" != target.scheme:
                raise ValueError("a redirect gives up encryption")
            url = target
        raise ValueError("too many redirects")

    @contextmanager
    def _share_of_host(self, host: str) -> Iterator[None]:
        """Count a fetch from a host. Raises: ValueError if it is not allowed, or has too many already."""
        if self.hosts is not None and host.rstrip(".") not in self.hosts:
            raise ValueError("not an allowed host")
        if self._num_by_host[host] >= _MAX_PER_HOST:
            raise ValueError("too many fetches from this host")
        self._num_by_host[host] += 1
        try:
            yield
        finally:
            self._num_by_host[host] -= 1
            if not self._num_by_host[host]:
                del self._num_by_host[host]

    async def _fetch(self, url: SplitResult) -> bytes | str:
        """The picture, or where else it is said to be."""
        host = url.hostname or ""
        port = url.port or _PORTS[url.scheme]
        address = await resolve(host, port)
        target = f"[{address}]" if address.version == 6 else str(address)
        pinned = url._replace(netloc=f"{target}:{port}", fragment="").geturl()
        headers = {"host": url.netloc, "accept": "image/*", "accept-encoding": "identity"}
        async with self._client.stream(
            "GET", pinned, headers=headers, extensions={"sni_hostname": host}
        ) as response:
            if response.status_code in _REDIRECTS:
                return response.headers["location"]
            if response.status_code != 200 or "content-encoding" in response.headers:
                raise ValueError("not a plain answer")
            body = bytearray()
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > self.max_bytes:
                    raise ValueError("too many bytes")
            return bytes(body)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def parse_url(url: str) -> SplitResult:
    """Split a URL once. Raises: ValueError for anything that two parsers could read differently."""
    if len(url) > _MAX_URL_CHARS or not url.isascii() or not url.isprintable():
        raise ValueError("not a plain URL")
    if " " in url or _FORBIDDEN.intersection(url):
        raise ValueError("not a plain URL")
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or "@" in parts.netloc or not parts.hostname:
        raise ValueError("not a plain http(s) URL")
    if "%" in parts.netloc or parts.port == 0:
        raise ValueError("not a plain host")
    return parts


async def resolve(host: str, port: int) -> Address:
    """The address to connect to. Raises: ValueError unless all addresses of the name are global; OSError."""
    loop = asyncio.get_running_loop()
    answers = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [ipaddress.ip_address(answer[4][0]) for answer in answers]
    if not addresses or not all(is_public(address) for address in addresses):
        raise ValueError("not a public address")
    return addresses[0]


def is_public(address: Address) -> bool:
    """Whether an address, and any IPv4 address hidden in it, is a global unicast one."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None or address in _NAT64_LOCAL:
            return False
        hidden = embedded_ipv4(address)
        if hidden is not None:
            return is_public(hidden)
    elif address in _IETF:
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def embedded_ipv4(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that an IPv6 one leads to: mapped, compatible, 6to4, Teredo, NAT64, ISATAP."""
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
