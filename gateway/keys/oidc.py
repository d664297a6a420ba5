"""Authenticates callers by a token (JWT) of an OpenID Connect issuer instead of a key.

The token names a stored key, whose roles, models and limits apply to the caller. The tenant is a hash of issuer
and subject. Sources: RFC 7519 (JWT), RFC 7517 (JWK), RFC 8725 (best practices), OpenID Connect Discovery 1.0.
"""

import asyncio
import hashlib
import logging
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import cryptography  # noqa: F401 (without it, jwt supports only shared secrets)
import httpx
import jwt
import msgspec

from gateway.http.auth import WrongKey
from gateway.http.errors import unavailable
from gateway.keys.directory import GUEST, KeyDirectory, KeyRecord
from shared.settings import is_loopback
from shared.settings.tree import OidcSettings, SettingsError

ALGORITHMS = ("RS256", "ES256", "EdDSA")
LEEWAY_S = 30.0  #: tolerated difference between the clocks of issuer and gateway
MAX_TOKEN_BYTES = 16 * 1024
REFRESH_S = 600.0  #: interval of reading the issuer's keys
RETRY_S = 10.0  #: minimum interval of reads for tokens with an unknown key
_MAX_DOCUMENT_BYTES = 256 * 1024
_MAX_CLAIM_CHARS = 256
_MAX_SEEN = 10_000
_TIMEOUT_S = 5.0
_FAULTS: dict[type[Exception], str] = {
    jwt.ExpiredSignatureError: "the token has expired",
    jwt.ImmatureSignatureError: "the token is not valid yet",
    jwt.InvalidAudienceError: "the token is for another audience",
    jwt.InvalidIssuerError: "the token is from another issuer",
    jwt.InvalidSignatureError: "the signature is wrong",
    jwt.InvalidKeyError: "the key is too short",
    jwt.InvalidAlgorithmError: f"alg does not match the key, or is not one of {', '.join(ALGORITHMS)}",
}

logger = logging.getLogger(__name__)


class _Discovery(msgspec.Struct):
    issuer: str
    jwks_uri: str


class _KeySet(msgspec.Struct):
    keys: list[dict[str, Any]]


class TokenKeys:
    """Finds API keys by key or token. While the issuer is unreachable, its last known signature keys are used."""

    def __init__(self, settings: OidcSettings, stored: KeyDirectory) -> None:
        """Raises: SettingsError."""
        for name, url in (("ISSUER", settings.issuer), ("JWKS_URL", settings.jwks_url)):
            if url and not _is_safe(url):
                problem = "use an https:// URL; http:// only for loopback"
                raise SettingsError(f"VLM_GATEWAY__OIDC__{name}: {problem}")
        if not settings.audience:
            raise SettingsError("VLM_GATEWAY__OIDC__AUDIENCE: set it to the `aud` of your tokens")
        self._settings = settings
        self._stored = stored
        self._documents: list[dict[str, Any]] = []
        self._keys: dict[str, jwt.PyJWK] = {}  # by kid
        #: By digest of a verified token: tenant, name of its stored key, name of the caller; expiry (epoch seconds).
        self._seen: dict[bytes, tuple[tuple[str, str, str], float]] = {}
        self._lock = asyncio.Lock()
        self._read_at = float("-inf")
        self._is_away = False
        self._http = httpx.AsyncClient(timeout=_TIMEOUT_S)

    def is_active(self, tenant: str, guest: str = "") -> bool:
        return self._stored.is_active(tenant, guest)

    async def find(self, key: bytes) -> KeyRecord | None:
        """The record of a key or token. Raises: WrongKey, Overloaded if the copy of the keys is too old."""
        if key.count(b".") != 2:
            return await self._stored.find(key)
        digest = hashlib.sha256(key).digest()
        if digest not in self._seen:
            verified = await self._verify(key)
            if len(self._seen) >= _MAX_SEEN:
                del self._seen[next(iter(self._seen))]
            self._seen[digest] = verified
        caller, ends_at = self._seen[digest]
        if time.time() >= ends_at:  # noqa: TID251 (expiry is a date)
            raise _wrong(_FAULTS[jwt.ExpiredSignatureError])
        if (record := await self._stored.admit(*caller)) is None:
            raise _wrong("the stored key that the token names is unknown, revoked or expired")
        return record

    async def _verify(self, token: bytes) -> tuple[tuple[str, str, str], float]:
        if len(token) > MAX_TOKEN_BYTES:
            raise _wrong(f"the token is longer than {MAX_TOKEN_BYTES} bytes")
        own = self._settings
        required = ["exp", "iss", "aud", "sub", own.name_claim]
        try:
            key = await self._find_key(jwt.get_unverified_header(token).get("kid"))
            claims = jwt.decode(
                token, key, ALGORITHMS, {"require": required, "enforce_minimum_key_length": True},
                audience=own.audience, issuer=own.issuer, leeway=LEEWAY_S,
            )  # fmt: skip
        except jwt.MissingRequiredClaimError as error:
            raise _wrong(f"the token lacks the claim {error.claim}") from None
        except (jwt.PyJWTError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
            raise _wrong(_FAULTS.get(type(error), "the token is malformed")) from None
        subject, name = claims["sub"], claims[own.name_claim]
        stored = claims.get(own.key_claim, own.default_key)
        if stored == "":
            raise _wrong(f"the token lacks the claim {own.key_claim}, which names a stored key")
        for text in (subject, name, stored):
            is_text = isinstance(text, str) and 0 < len(text) <= _MAX_CLAIM_CHARS
            if not (is_text and text.isprintable()):
                raise _wrong(f"a claim is not printable text of 1 to {_MAX_CLAIM_CHARS} characters")
        digest = hashlib.sha256(msgspec.json.encode([own.issuer, subject])).hexdigest()
        return (GUEST + digest[:32], stored, name), float(claims["exp"]) + LEEWAY_S

    async def _find_key(self, kid: str | None) -> jwt.PyJWK:
        """Raises: WrongKey, Overloaded."""
        if kid is None:
            raise _wrong("the header has no kid")
        if kid not in self._keys:
            async with self._lock:
                if kid not in self._keys and time.monotonic() >= self._read_at + RETRY_S:
                    await self._read()
        if kid not in self._keys:
            raise unavailable() if self._is_away else _wrong("the issuer has no key with this kid")
        return self._keys[kid]

    async def keep_fresh(self) -> None:
        """Read the issuer's keys periodically, so that withdrawn keys are refused."""
        while True:
            async with self._lock:
                await self._read()
            await asyncio.sleep(RETRY_S if self._is_away else REFRESH_S)

    async def _read(self) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                documents = await self._fetch()
        except (
            httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, msgspec.MsgspecError, RecursionError,
        ) as error:  # fmt: skip
            cause = str(error) or type(error).__name__
            logger.warning("cannot read the keys of %s: %s", self._settings.issuer, cause)
            self._is_away = True
        else:
            self._is_away = False
            if documents != self._documents:
                self._documents, self._keys = documents, _to_keys(documents)
                self._seen.clear()
        self._read_at = time.monotonic()

    async def _fetch(self) -> list[dict[str, Any]]:
        url, issuer = self._settings.jwks_url, self._settings.issuer
        if not url:
            path = issuer.removesuffix("/") + "/.well-known/openid-configuration"
            found = msgspec.json.decode(await self._get(path), type=_Discovery)
            if found.issuer != issuer or not _is_safe(found.jwks_uri):
                raise ValueError("discovery names another issuer, or no https:// jwks_uri")
            url = found.jwks_uri
        return msgspec.json.decode(await self._get(url), type=_KeySet).keys

    async def _get(self, url: str) -> bytes:
        data = bytearray()
        headers = {"accept": "application/json", "accept-encoding": "identity"}
        async with self._http.stream("GET", url, headers=headers) as answer:
            answer.raise_for_status()
            async for part in answer.aiter_raw():
                data += part
                if len(data) > _MAX_DOCUMENT_BYTES:
                    raise ValueError(f"{url} has more than {_MAX_DOCUMENT_BYTES} bytes")
        return bytes(data)

    async def close(self) -> None:
        await self._http.aclose()


def _to_keys(documents: list[dict[str, Any]]) -> dict[str, jwt.PyJWK]:
    """The signature keys of the accepted algorithms, by kid. Other keys are omitted."""
    keys = {}
    for document in documents:
        kid = document.get("kid")
        with suppress(jwt.PyJWTError, ValueError, TypeError):
            key = jwt.PyJWK(document)
            is_ours = key.algorithm_name in ALGORITHMS and document.get("use", "sig") == "sig"
            if isinstance(kid, str) and is_ours:
                keys[kid] = key
    return keys


def _is_safe(url: str) -> bool:
    with suppress(ValueError):  # brackets without an IP address
        parts = urlsplit(url)
        host = parts.hostname or ""
        return bool(host) and (
            parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host))
        )
    return False


def _wrong(problem: str) -> WrongKey:
    return WrongKey(f"Incorrect token: {problem}.", code="invalid_token")
