"""The page needs nothing but itself, and every plot has something in it that can be drawn."""

import random
import re
import time
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

import vlm
from loadtest import charts
from loadtest.html_report import to_html
from loadtest.objective import Objective
from loadtest.result import Result
from loadtest.svg import Axis, Chart, linear_axis, log_axis
from tests.loadtest.factories import record, result

STAGES = {"queue": 0.02, "vision": 0.03, "decode": 0.05}
VOID = {"meta"}  # without an end of their own


class Page(HTMLParser):
    """What a browser would see of it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.headings: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs) -> None:
        self.attributes += attrs
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data)


def busy_run(**plan) -> Result:
    """A run with streams, whole answers, stages and failures."""
    draw = random.Random(0)
    records = []
    for index in range(300):
        at, e2e_s = 10 * index / 300, 0.2 + draw.random()
        one = record(at, e2e_s=e2e_s, stages_s=STAGES)
        if index % 2:
            one = record(at, e2e_s=e2e_s, ttft_s=0.1, stages_s=STAGES, itl_s=[0.01, 0.02])
        if index % 50 == 0:
            one.error = "status 503: <overloaded>"
        records.append(one)
    return result(records, Objective(ttft_s=0.5), **plan)


@pytest.mark.parametrize("plan", [{}, {"loop": "open", "levels": (10.0, 20.0, 40.0)}])
def test_page_is_whole_and_loads_nothing(plan):
    text = to_html(busy_run(**plan))
    page = Page(text)
    assert page.open == []
    assert not page.tags & {"script", "link", "img", "iframe", "object"}
    assert not [value for name, value in page.attributes if name in ("src", "href", "srcset")]
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text


def test_every_question_has_its_plot():
    headings = Page(to_html(busy_run(loop="open", levels=(10.0, 20.0)))).headings
    assert headings[0] == "Load test of mock"
    for title in (
        "Answers a second against load", "TTFT against load", "E2E against load",
        "Requests a second", "Requests on their way", "TTFT over time", "E2E over time",
        "TTFT, distribution", "TPOT, distribution", "ITL, distribution", "E2E, distribution",
        "Stages", "Failures over time",
    ):  # fmt: skip
        assert title in headings


def long_run() -> Result:
    """20,000 requests of 16 tokens in 400 s, one of which waited for a minute, and each failure another one."""
    draw = random.Random(0)
    records = []
    for index in range(20_000):
        at, e2e_s = index / 50, 60.0 if index == 7_777 else 0.2 + draw.random()
        one = record(at, e2e_s=e2e_s, stages_s=STAGES)
        if index % 2:
            one = record(at, e2e_s=e2e_s, ttft_s=e2e_s / 2, stages_s=STAGES, itl_s=[0.01] * 15)
        if index % 20 == 0:
            one.error = f"status 503: {index}"
        records.append(one)
    return result(records, Objective(ttft_s=0.5), duration_s=400.0)


def test_page_of_a_long_run_is_small_and_says_what_it_leaves_out():
    run = long_run()
    began_s = time.process_time()
    text = to_html(run)
    assert time.process_time() - began_s < 6  # about 1 s on an idle core
    assert len(text) < 500_000
    dots = r"Dots: (1,\d+) of 19,000, the slowest of each slice of time among them; lines: all\."
    assert re.search(dots, text)
    assert "moments, peaks among them." in text
    assert "950 other kinds" in text
    assert "996 x other failures" in text


def test_thinned_dots_keep_the_highest_and_a_peak_stays_a_peak():
    points = [(float(index), float(index % 7)) for index in range(20_000)]
    points[12_345] = (12_345.0, 99.0)
    groups = [points[:10_000], points[10_000:]]
    assert (12_345.0, 99.0) in charts.thin(groups)
    assert len(charts.thin(groups)) <= charts.MAX_DOTS + len(groups)
    assert charts.thin([points[:1000]]) == points[:1000]
    assert (12_345.0, 99.0) in charts.peaks(points)
    assert len(charts.peaks(points)) <= charts.MAX_LINE_POINTS
    assert charts.peaks([]) == []


def test_constant_load_has_no_plot_against_load():
    assert not [title for title in Page(to_html(busy_run())).headings if "against load" in title]


@pytest.mark.parametrize(
    "run",
    [
        result([]),
        result([record(error="x")]),
        result([record(1.0)]),
        result([record(1.0, e2e_s=0.0)]),
        busy_run(levels=(0.0, 5.0), is_ramp=True),
    ],
)
def test_every_number_in_every_plot_can_be_drawn(run):
    text = to_html(run)
    assert Page(text).open == []
    drawn = " ".join(re.findall(r'(?:d|points|[xy]|width|height)="([^"]*)"', text))
    assert not re.search(r"nan|inf", drawn)


def test_what_a_server_says_is_text():
    word = "<script>alert(1)</script>"
    run = result([record(error=word), record(1.0, stages_s={word: 1.0})], model=word)
    run.url = word
    text = to_html(run)
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


def test_failures_are_counted_by_name():
    text = to_html(busy_run())
    assert "6 x status 503: &lt;overloaded&gt;" in text
    assert "None: 1 answers were complete and right." in to_html(result([record()]))


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        (Axis(0.0, 10.0), [0, 2, 4, 6, 8, 10]),
        (Axis(0.0, 0.37), [0, 0.1, 0.2, 0.3]),
        (Axis(1.0, 1000.0, is_log=True), [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]),
        (Axis(0.001, 1000.0, is_log=True), [0.001, 0.01, 0.1, 1, 10, 100, 1000]),
        (Axis(110.0, 190.0, is_log=True), [120, 140, 160, 180]),
    ],
)
def test_ticks_are_round(axis, expected):
    assert axis.ticks() == pytest.approx(expected)


def test_axes_hold_all_values_and_do_without_any():
    assert linear_axis([3.0, 10.0], "").share(10.0) < 1
    assert 0 < log_axis([0.0, 3.0, 10.0], "").share(3.0) < log_axis([3.0, 10.0], "").share(10.0) < 1
    assert linear_axis([], "").ticks()
    assert log_axis([], "").ticks()


def test_line_goes_where_its_values_are():
    chart = Chart(Axis(0.0, 1.0), Axis(0.0, 1.0))
    chart.line([(0.0, 0.0), (1.0, 1.0)], "c0")
    assert 'points="52.0,216.0 428.0,10.0"' in chart.to_svg("x")


def test_command_makes_the_page_of_a_file(tmp_path):
    source, page = tmp_path / "a.json", tmp_path / "a.html"
    run = busy_run()
    run.save(source)
    done = CliRunner().invoke(vlm.app, ["loadtest", "report", str(source), str(page)])
    assert done.exit_code == 0
    assert page.read_text() == to_html(run)
