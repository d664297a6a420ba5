"""The report of a load test in a browser: nothing is loaded, nothing overflows, dark and light, wide and narrow."""

import pytest

from loadtest.html_report import write_page
from tests.browser.chat_page import DESK, PHONE, ChatPage
from tests.loadtest.test_html_report import busy_run
from tests.long import long


@pytest.fixture(scope="module")
def report_url(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_page(busy_run(loop="open", levels=(10.0, 20.0, 40.0)), path)
    return path.as_uri()


@long("browser-test")
@pytest.mark.parametrize(
    ("name", "size", "scheme"), [("desk", DESK, "light"), ("phone", PHONE, "dark")]
)
def test_report_is_readable(browser, report_url, name, size, scheme):
    page = ChatPage(browser, report_url)
    page.open(size, scheme)
    width = browser.execute_script("return document.documentElement.scrollWidth")
    assert width <= size[0]
    font_px = browser.execute_script(
        "return parseFloat(getComputedStyle(document.querySelector('.plot .xtick text')).fontSize)"
    )
    assert 9 <= font_px <= 20
    num_plots, num_drawn = browser.execute_script(
        "const plots = [...document.querySelectorAll('.plot')];"
        "const drawn = plots.filter((plot) => plot.querySelector('.trace, .bars'));"
        "return [plots.length, drawn.length]"
    )
    assert num_plots == num_drawn == 7
    loaded = browser.execute_script("return performance.getEntriesByType('resource').length")
    assert loaded == 0
    assert page.complaints() == []
    page.keep(f"load_report_{name}")
