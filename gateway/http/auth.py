"""Who may use the gateway: API keys as bearer tokens or in `x-api-key`, by digest.

They are needed for every path but the health probes and the chat page's files.

Keys are compared as SHA-256 digests in constant time; clear keys are not kept. Without any key the
gateway is open, which `check_exposure` allows on loopback addresses only. `/metrics` needs a key
like all the rest, an operator's where there are such: Prometheus can send one (`authorization:
credentials_file`).
"""

import hashlib
import hmac
import ipaddress
from collections.abc import Sequence

from pydantic import SecretStr

from gateway.http.errors import AuthenticationError, Forbidden
from shared.settings.tree import GatewaySettings, SettingsError

#: Of the probes; the chat page's files are public too.
PUBLIC_PATHS = frozenset({"/health", "/healthz", "/ping", "/readyz"})


class WrongKey(AuthenticationError):
    """What was sent is no key, or not a known one."""


class KeyRing:
    """The accepted keys, each with the cache salt of the tenant who holds it."""

    def __init__(
        self,
        api_keys: Sequence[SecretStr],
        admin_keys: Sequence[SecretStr] = (),
        deploy_keys: Sequence[SecretStr] = (),
    ) -> None:
        """Those of operators, and those who deploy, may do all that others may, and each one thing more."""
        keys = [_bytes(key) for key in (*api_keys, *admin_keys, *deploy_keys)]
        self._salts = {_digest(key): _tenant(key) for key in keys}
        self._admins = frozenset(_tenant(_bytes(key)) for key in admin_keys)
        self._deployers = frozenset(_tenant(_bytes(key)) for key in deploy_keys)
        self._is_open = not api_keys

    @property
    def is_open(self) -> bool:
        """Whether no key is needed for what everybody may."""
        return self._is_open

    def knows(self, salt: str) -> bool:
        """Whether a caller of this cache salt may still ask."""
        return self._is_open or salt in self._salts.values()

    def authenticate(self, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """The cache salt of the caller.

        Raises: AuthenticationError if no key is sent, WrongKey if no known one.
        """
        return "" if self._is_open else self._salt(headers)

    def check_admin(self, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """The cache salt of an operator. Raises: Forbidden, and as `authenticate` where keys are needed."""
        return self._check(headers, self._admins, "VLM_GATEWAY__ADMIN_KEYS")

    def check_deployer(self, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """The cache salt of a caller who may deploy. Raises: Forbidden, and as `authenticate` where keys are needed."""
        return self._check(headers, self._deployers, "VLM_GATEWAY__DEPLOY_KEYS")

    def _check(
        self, headers: Sequence[tuple[bytes, bytes]], allowed: frozenset[str], setting: str
    ) -> str:
        if not allowed:
            raise Forbidden(
                f"Nobody may do this: {setting} names no key.", code="insufficient_permissions"
            )
        if (salt := self._salt(headers)) not in allowed:
            raise Forbidden(
                f"This API key may not do this: send one of {setting}.",
                code="insufficient_permissions",
            )
        return salt

    def _salt(self, headers: Sequence[tuple[bytes, bytes]]) -> str:
        keys = [_bearer(value) for name, value in headers if name == b"authorization"]
        if not keys:  # as Anthropic's clients send it
            keys = [value for name, value in headers if name == b"x-api-key"]
        if not keys:
            raise AuthenticationError(
                "You did not provide an API key. Send it as `Authorization: Bearer KEY`.",
                code="invalid_api_key",
            )
        salt = self._find(keys[0]) if len(keys) == 1 else None
        if salt is None:
            raise WrongKey(
                "Incorrect API key: send one that this server knows.", code="invalid_api_key"
            )
        return salt

    def _find(self, key: bytes) -> str | None:
        digest = _digest(key)
        found = None
        for known, salt in self._salts.items():
            # No early exit: the time must not tell which key came close.
            if hmac.compare_digest(known, digest):
                found = salt
        return found


def _bearer(authorization: bytes) -> bytes:
    """The key; empty, which none is, if it is sent in another way."""
    scheme, _, key = authorization.partition(b" ")
    return key if scheme.lower() == b"bearer" else b""


def _bytes(key: SecretStr) -> bytes:
    return key.get_secret_value().encode()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _tenant(key: bytes) -> str:
    return hmac.new(key, b"vlm-fleet cache salt", hashlib.sha256).hexdigest()[:32]


def check_exposure(settings: GatewaySettings) -> None:
    """Refuse to serve strangers without keys. Raises: SettingsError."""
    if settings.api_keys or settings.allow_open or is_loopback(settings.host):
        return
    raise SettingsError(
        "gateway.host: this address can be reached from other machines and no API key is set; "
        "set VLM_GATEWAY__API_KEYS, or VLM_GATEWAY__ALLOW_OPEN=true to serve everyone"
    )


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
