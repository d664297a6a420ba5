"""URLs of Redis: one server, the primary of a Sentinel group, or several of these as shards."""

import re
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator

SENTINEL_PORT = 26379
_SENTINEL = "+sentinel"
_SHARD = re.compile(r"(?:^|,)([a-z0-9]{1,16})=(?=rediss?\b|unix:)")


@dataclass(frozen=True)
class SentinelUrl:
    """`redis+sentinel://USER:PASSWORD@HOST:PORT+HOST:PORT+HOST:PORT/NAME/DB?OPTION=VALUE`."""

    sentinels: tuple[tuple[str, int], ...]
    name: str  #: of the primary
    primary: str  #: credentials, database and options of the primary, as a URL with a host to be replaced

    @classmethod
    def parse(cls, url: str) -> "SentinelUrl | None":
        """Returns None for the URL of a single server. Raises: ValueError."""
        parts = urlsplit(url)
        if not parts.scheme.endswith(_SENTINEL):
            return None
        credentials, at, hosts = parts.netloc.rpartition("@")
        name, _, database = parts.path.removeprefix("/").partition("/")
        scheme = parts.scheme.removesuffix(_SENTINEL)
        if scheme == "unix" or not name or (database and not database.isdecimal()):
            raise ValueError(
                "a Sentinel URL needs hosts, the name of the primary, and a number as the database"
            )
        primary = f"{scheme}://{credentials}{at}primary/{database}?{parts.query}"
        return cls(tuple(map(_parse_host, hosts.split("+"))), unquote(name), primary)


def _parse_host(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.port == 0:
        raise ValueError("no host")
    return parts.hostname, parts.port or SENTINEL_PORT


def split_shards(url: str) -> dict[str, str]:
    """The URLs of `NAME=URL,NAME=URL` by name; one URL without a name has the name ''. Raises: ValueError."""
    before, *parts = _SHARD.split(url)
    if not parts:
        return {"": url}
    shards = dict(zip(parts[::2], parts[1::2], strict=True))
    if before or len(shards) < len(parts) // 2:
        raise ValueError("text before the first shard, or a name that two shards share")
    return shards


def _check(text: str) -> str:
    try:
        shards = split_shards(text)
    except ValueError as error:
        raise ValueError(f"{error}; write NAME=URL,NAME=URL with names of a-z and 0-9") from None
    for url in shards.values():
        _check_one(url)
    return text


def _check_one(url: str) -> None:
    try:
        sentinels = SentinelUrl.parse(url)
        parts = urlsplit(sentinels.primary if sentinels else url)
        place = parts.path if parts.scheme == "unix" else parts.hostname
        is_good = parts.scheme in ("redis", "rediss", "unix") and place and parts.port != 0
    except ValueError:  # the message may contain a part of the password
        is_good = False
    if url and not is_good:
        raise ValueError(
            "not a Redis URL; write redis://HOST:PORT/0, rediss:// for TLS, unix:///PATH, or "
            "redis+sentinel://HOST:PORT+HOST:PORT+HOST:PORT/NAME for the primary NAME of these "
            "Sentinels, with %-escapes for special characters in a password"
        )


RedisUrl = Annotated[str, AfterValidator(_check)]
