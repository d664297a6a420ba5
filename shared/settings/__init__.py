"""The tree of settings, and its sources."""

import ipaddress
import os
from pathlib import Path
from typing import Literal


class SettingsError(Exception):
    """Invalid settings; the message names each field and the reason."""


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type; for libraries with long messages."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]


#: Variables with the address and the key for commands that call a gateway. They are not settings.
URL_VARIABLE = "VLM_URL"
KEY_VARIABLE = "VLM_API_KEY"


def own_folder(kind: Literal["cache", "state"]) -> Path:
    """The folder of vlm-fleet in XDG_CACHE_HOME or XDG_STATE_HOME."""
    base = os.environ.get(f"XDG_{kind.upper()}_HOME")
    home = {"cache": ".cache", "state": ".local/state"}[kind]
    return (Path(base) if base else Path.home() / home) / "vlm-fleet"


def is_loopback(host: str | None) -> bool:
    """True if only this machine can reach the host: 127.0.0.0/8, ::1 or localhost."""
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"
