"""The machine that a load runs on, in words."""

import platform

import psutil


def machine() -> str:
    """The machine in words."""
    return f"{psutil.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
