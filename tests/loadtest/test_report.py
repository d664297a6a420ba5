"""Percentiles and tables."""

import math

import pytest

from loadtest.record import percentile
from loadtest.result import in_ms, in_number, show, to_failure_table
from tests.loadtest.factories import record, result


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1), (0.5, 50), (0.95, 95), (0.99, 99), (1.0, 100)]
)
def test_percentile_is_the_nearest_rank(share, expected):
    assert percentile(range(100, 0, -1), share) == expected


def test_percentile_of_nothing_is_no_number_and_is_shown_as_a_dash():
    assert math.isnan(percentile([], 0.5))
    assert in_ms(math.nan) == in_number(math.nan) == "-"


@pytest.mark.parametrize(
    ("value", "text"), [(0.00123, "0.00"), (1.234, "1.23"), (45.67, "45.7"), (12345.6, "12,346")]
)
def test_numbers_have_three_figures(value, text):
    assert in_number(value) == text
    assert in_ms(value / 1000) == text


def test_page_shows_what_a_server_says_as_text(tmp_path):
    table = to_failure_table(result([record(error="</pre><script>[bold]")] * 3))
    show([table], page := tmp_path / "page.html")
    written = page.read_text()
    assert "&lt;/pre&gt;&lt;script&gt;[bold]" in written
    assert "<script" not in written
