"""Helpers to inspect other processes."""

import psutil
import pytest


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Returns the environment of a process. Only root can read that of nodes and workers."""
    try:
        return process.environ()
    except psutil.AccessDenied:
        pytest.skip("only root can read the environment of nodes and workers")
