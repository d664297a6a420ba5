"""The chat page with the built-in model: a sample image is described rightly, word by word."""

import re
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.browser.chat_page import ChatPage, start_browser
from tests.integration.fleet_process import ROOT

#: Keeps every text that the latest answer has had.
WATCH_ANSWER = """
window.seen = [];
new MutationObserver(() => {
  const text = document.querySelector(".answer .text")?.textContent;
  if (text && text !== window.seen.at(-1)) window.seen.push(text);
}).observe(document.querySelector("#log"), {childList: true, characterData: true, subtree: true});
"""


@pytest.fixture
def page(shapes_fleet, tmp_path) -> Iterator[ChatPage]:
    browser = start_browser(tmp_path)
    page = ChatPage(browser, shapes_fleet.url)
    page.open()
    page.wait_for_model()
    yield page
    browser.quit()


def test_the_sample_is_described_as_the_documentation_says(page):
    [sentence] = set(
        re.findall(r"^A white background .*$", (ROOT / "docs/api-chat.md").read_text(), re.M)
    )
    page.browser.execute_script(WATCH_ANSWER)
    page.find("#samples button").click()
    page.wait_for(lambda: page.find_all("#tray img"))
    page.ask("Describe the image.")
    page.wait_for(lambda: page.find_all(".answer"))
    assert page.wait_for_end() == sentence
    seen = page.browser.execute_script("return window.seen")
    assert seen[-1] == sentence  # a busy machine may show it in one piece
    assert all(later.startswith(earlier) for earlier, later in pairwise(seen))
    assert page.complaints() == []
    page.keep("built-in-model")
