"""The tree of settings, and its sources."""

import ipaddress


class SettingsError(Exception):
    """Invalid settings; the message names each field and the reason."""


#: Address and key for commands that call a gateway. Not settings.
URL_VARIABLE = "VLM_URL"
KEY_VARIABLE = "VLM_API_KEY"


def is_loopback(host: str | None) -> bool:
    """Whether only this machine reaches the host: 127.0.0.0/8, ::1 or localhost."""
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"
