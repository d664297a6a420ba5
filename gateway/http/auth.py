"""API keys: bearer tokens or `x-api-key`. Keys of the settings are compared by digest in constant time.

Plain keys are not stored. Without keys the gateway is open, which `check_exposure` allows only on loopback addresses
or with `allow_open`. With keys, `/metrics` requires a key; if the settings have admin keys or a root key, the key needs
the role `adapters`. Prometheus reads the key from the file in its setting `authorization: credentials_file`.
"""

import hashlib
import hmac
import ipaddress
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import SecretStr

from gateway.http.errors import AuthenticationError, Forbidden, RateLimited
from shared.settings import SettingsError, is_loopback
from shared.settings.tree import GatewaySettings

if TYPE_CHECKING:
    from gateway.keys.directory import KeyDirectory
    from gateway.keys.oidc import TokenKeys

MAX_ADDRESSES = 10_000
WINDOW_S = 60.0

logger = logging.getLogger(__name__)


Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Role = Literal["any", "use", "adapters", "deploy", "admin"]
_SETTINGS = {
    "any": "VLM_GATEWAY__API_KEYS",
    "use": "VLM_GATEWAY__API_KEYS",
    "adapters": "VLM_GATEWAY__ADMIN_KEYS",
    "deploy": "VLM_GATEWAY__DEPLOY_KEYS",
    "admin": "VLM_GATEWAY__ROOT_KEY",
}


class WrongKey(AuthenticationError):
    """The key is malformed or unknown."""


class KeyRing:
    """The accepted keys: keys of the settings, and stored keys."""

    def __init__(
        self, settings: GatewaySettings, stored: "KeyDirectory | TokenKeys | None" = None
    ) -> None:
        """Admin keys and deploy keys also have the rights of `api_keys`."""
        roots = () if settings.root_key is None else (settings.root_key,)
        users = (*settings.api_keys, *settings.admin_keys, *settings.deploy_keys)
        keys = (*users, *roots)
        roles = {
            "any": keys,
            "use": users,
            "adapters": settings.admin_keys,
            "deploy": settings.deploy_keys,
            "admin": roots,
        }
        # tenants by role
        self._roles = {role: frozenset(map(tenant_of, held)) for role, held in roles.items()}
        self._salts = {_digest(_bytes(key)): tenant_of(key) for key in keys}
        self.is_open = not settings.api_keys and not roots  #: whether requests need no key
        self._stored = stored

    def knows(self, salt: str, guest: str = "") -> bool:
        """Whether the tenant with this cache salt has a valid key. `guest`: see `KeyDirectory.is_active`."""
        if self.is_open or salt in self._salts.values():
            return True
        return self._stored is not None and self._stored.is_active(salt, guest)

    async def authenticate(self, headers: Sequence[tuple[bytes, bytes]], role: Role = "use") -> str:
        """Check that the caller has a role. Returns its cache salt; empty if the gateway is open.

        Raises: AuthenticationError without a key, WrongKey for an unknown one, Forbidden without the role,
        Overloaded while stored keys cannot be read.
        """
        if role in ("any", "use") and self.is_open:
            return ""
        setting = _SETTINGS[role]
        nobody_may = self._stored is None and not self._roles[role]
        salt, has_role = "", False
        if not (nobody_may and self.is_open):
            salt, has_role = await self._identify(headers, role)
        if not has_role:
            message = f"This API key lacks the role {role}: send a key of {setting}, or a stored key with this role."
            if nobody_may:
                message = f"No API key has the role {role}: the operator can set {setting}."
            raise Forbidden(message, code="insufficient_permissions")
        return salt

    async def _identify(
        self, headers: Sequence[tuple[bytes, bytes]], role: Role
    ) -> tuple[str, bool]:
        """The cache salt of the caller, and whether it has the role."""
        keys = [_bearer(value) for name, value in headers if name == b"authorization"]
        if not keys:  # Anthropic's clients send this header
            keys = [value for name, value in headers if name == b"x-api-key"]
        if not keys:
            message = "You did not provide an API key. Send it as `Authorization: Bearer KEY`."
            raise AuthenticationError(message, code="invalid_api_key")
        if len(keys) == 1:
            if (salt := self._find(keys[0])) is not None:
                return salt, salt in self._roles[role]
            if self._stored is not None and (found := await self._stored.find(keys[0])) is not None:
                return found.tenant, role == "any" or role in found.roles
        raise WrongKey(
            "Incorrect API key: send a valid key of this server.", code="invalid_api_key"
        )

    def _find(self, key: bytes) -> str | None:
        digest = _digest(key)
        found = None
        for known, salt in self._salts.items():
            # No early exit: timing must not reveal which key is close.
            if hmac.compare_digest(known, digest):
                found = salt
        return found


def _bearer(authorization: bytes) -> bytes:
    """The key, or an empty string for another scheme."""
    scheme, _, key = authorization.partition(b" ")
    return key if scheme.lower() == b"bearer" else b""


def _bytes(key: SecretStr) -> bytes:
    return key.get_secret_value().encode()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def tenant_of(key: SecretStr) -> str:
    """The cache salt of a key of the settings."""
    return hmac.new(_bytes(key), b"vlm-fleet cache salt", hashlib.sha256).hexdigest()[:32]


class WrongKeys:
    """Counts the wrong keys that each client address sends within a minute.

    A valid key always passes, so that nobody can lock out others behind the same proxy. The table is bounded: the
    oldest entry is evicted. `per_minute` 0 disables the limit.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._minutes: dict[str, tuple[int, float]] = {}  # wrong keys, and the end of the minute

    def count(self, host: str) -> None:
        """Count a wrong key. Raises: RateLimited."""
        address, now = _place(host), self._clock()
        num_keys, until = self._minutes.get(address, (0, 0.0))
        if until <= now:
            self._minutes.pop(address, None)  # re-added last, so that the first one is the oldest
            num_keys, until = 0, now + WINDOW_S
        self._minutes[address] = (num_keys + 1, until)
        if len(self._minutes) > MAX_ADDRESSES:
            del self._minutes[next(iter(self._minutes))]
        if self._per_minute and num_keys >= self._per_minute:
            if num_keys == self._per_minute:
                logger.warning("%s sends wrong API keys, more than %d a minute", address, num_keys)
            message = "Too many wrong API keys from this address: send a known key, or retry later."
            wait_s = math.ceil(until - now)
            raise RateLimited("wrong_keys", message, wait_s, code="too_many_wrong_keys")


def _place(host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "unknown"
    return network_of(getattr(address, "ipv4_mapped", None) or address)


def network_of(address: Address) -> str:
    """The addresses of one owner: an IPv4 address, or an IPv6 network of 64 bits."""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(ipaddress.ip_network(f"{address}/64", strict=False))


def check_exposure(settings: GatewaySettings) -> None:
    """Refuse to serve non-loopback addresses without keys, unless `allow_open` is set. Raises: SettingsError."""
    if settings.api_keys or settings.root_key or settings.allow_open or is_loopback(settings.host):
        return
    raise SettingsError(
        "gateway.host: this address can be reached from other machines and no API key is set; "
        "set VLM_GATEWAY__API_KEYS or VLM_GATEWAY__ROOT_KEY, or VLM_GATEWAY__ALLOW_OPEN=true to serve everyone"
    )
