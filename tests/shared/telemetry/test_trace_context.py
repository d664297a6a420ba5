"""W3C `traceparent` headers: what is understood, and what is ignored."""

import pytest

from shared.telemetry.tracing import parse_trace_parent, trace_id_of

HEADER = f"00-{'a' * 32}-{'b' * 16}-01"


def test_a_header_is_itself():
    assert parse_trace_parent(HEADER.encode()) == HEADER
    assert trace_id_of(HEADER) == "a" * 32


@pytest.mark.parametrize("more", ["", "-", "-what-comes-then"])
def test_a_later_version_is_read_as_far_as_it_is_known(more):
    assert parse_trace_parent(f"cc{HEADER[2:]}{more}".encode()) == HEADER


@pytest.mark.parametrize(
    "malformed",
    ["", "no", HEADER.upper(), "ff" + HEADER[2:], HEADER + "-x", HEADER[:-1], HEADER + "0", f" {HEADER}",
     HEADER.replace("a", "0"), HEADER.replace("b", "0"), f"cc{HEADER[2:]}more", HEADER + "\n"],
)  # fmt: skip
def test_what_is_malformed_is_ignored(malformed):
    assert parse_trace_parent(malformed.encode()) is None
