"""The way of a request can be printed: it passes the gateway, what both share, a worker and its engine."""

import re
import subprocess
import sys

from tests.integration.fleet_process import ROOT


def test_the_files_that_a_request_passes_are_printed_by_package():
    done = subprocess.run(
        [sys.executable, "-m", "tests.trace_request", "--engine", "mock", "--image"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    counts = re.search(
        r"(\d+) files \(gateway (\d+), shared (\d+), worker (\d+), engines (\d+)\)", done.stdout
    )
    assert counts is not None, done.stdout
    total, *parts = map(int, counts.groups())
    assert total == sum(parts)
    assert all(parts)
