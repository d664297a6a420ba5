"""The page needs nothing but itself, and every plot has something in it that can be drawn."""

import json
import random
from html.parser import HTMLParser

import pytest

from loadtest.html_report import figures, to_html
from loadtest.record import Objective
from loadtest.result import Result
from tests.loadtest.factories import record, result

STAGES = {"queue": 0.02, "vision": 0.03, "decode": 0.05}
VOID = {"meta"}  # without an end of their own
PLOTLY_BYTES = 5_500_000


class Page(HTMLParser):
    """What a browser would see of it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.num_scripts = 0
        self.tags: set[str] = set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs) -> None:
        self.attributes += attrs
        self.tags.add(tag)
        self.num_scripts += tag == "script"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)


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


def page_of(run: Result) -> Page:
    return Page(to_html(run))


@pytest.mark.parametrize("plan", [{}, {"loop": "open", "levels": (10.0, 20.0, 40.0)}])
def test_page_is_whole_and_loads_nothing(plan):
    run = busy_run(**plan)
    text = to_html(run)
    page = Page(text)
    assert page.open == []
    assert not page.tags & {"link", "img", "iframe", "object"}
    assert not [value for name, value in page.attributes if name in ("src", "href", "srcset")]
    assert "default-src 'none'" in text
    assert page.num_scripts == 3  # plotly, data, and what draws them
    assert sum("against load" in figure.title for figure in figures(run)) == (3 if plan else 0)
    assert len(text) < PLOTLY_BYTES


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


def test_page_of_a_long_run_is_small_and_shows_the_slowest():
    run = long_run()
    text = to_html(run)
    assert len(text) < PLOTLY_BYTES
    assert "950 other kinds" in text
    plots = {figure.title: figure for figure in figures(run)}
    assert max(max(trace["y"]) for trace in plots["E2E over time"].data) > 1000


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
    assert page_of(run).open == []
    for figure in figures(run):
        for trace in figure.data:
            assert trace["x"], figure.title
            assert len(trace["x"]) == len(trace["y"])
            json.dumps([trace["x"], trace["y"]], allow_nan=False)


def test_what_a_server_says_is_text():
    word = "</script><script>alert(1)</script>"
    run = result([record(error=word), record(1.0, stages_s={word: 1.0})], model=word)
    run.url = word
    assert page_of(run).num_scripts == 3
    assert any(word in text for text in page_of(run).words)
