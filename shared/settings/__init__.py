"""The tree of settings, and its sources."""

import ipaddress
import os
from pathlib import Path
from typing import Literal


class SettingsError(Exception):
    """Invalid settings; the message names each field and the reason."""


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type; for libraries whose messages have many."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]


#: Address and key for commands that call a gateway. Not settings.
URL_VARIABLE = "VLM_URL"
KEY_VARIABLE = "VLM_API_KEY"


def own_folder(kind: Literal["cache", "state"]) -> Path:
    """Our folder in XDG_CACHE_HOME or XDG_STATE_HOME."""
    base = os.environ.get(f"XDG_{kind.upper()}_HOME")
    home = {"cache": ".cache", "state": ".local/state"}[kind]
    return (Path(base) if base else Path.home() / home) / "vlm-fleet"


def is_loopback(host: str | None) -> bool:
    """Whether only this machine reaches the host: 127.0.0.0/8, ::1 or localhost."""
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"
