"""The way of a request can be printed, and is bounded: gateway, what both share, a worker and its engine."""

import re
import subprocess
import sys

import pytest

from tests.integration.fleet_process import ROOT


@pytest.mark.parametrize(("engine", "most"), [("mock", 42), ("torch", 61)])
def test_the_way_of_a_request_is_printed_by_package_and_grows_no_longer(engine, most):
    done = subprocess.run(
        [sys.executable, "-m", "tests.trace_request", "--engine", engine, "--image"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    counts = re.search(
        r"(\d+) files \(gateway (\d+), shared (\d+), worker (\d+), engines (\d+)\)", done.stdout
    )
    assert counts is not None, done.stdout
    total, *parts = map(int, counts.groups())
    assert sum(parts) == total <= most
