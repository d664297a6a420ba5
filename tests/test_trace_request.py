"""The files of a request's path are printed, and their number is limited."""

import re
import subprocess
import sys

import pytest

from tests.integration.fleet_process import ROOT


@pytest.mark.parametrize(("engine", "most"), [("mock", 42), ("torch", 61)])
def test_the_path_of_a_request_is_printed_and_has_a_maximum_length(engine, most):
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
