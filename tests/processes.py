"""Other processes, as tests see them."""

import psutil
import pytest


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Environment of a process. Nodes and workers hide theirs from all users but root."""
    try:
        return process.environ()
    except psutil.AccessDenied:
        pytest.skip("only root can read the environment of nodes and workers")
