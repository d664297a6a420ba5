"""One browser and one fleet for all tests of the page; every test ends with an empty console."""

from collections.abc import Iterator

import pytest

from tests.browser.chat_page import ChatPage, start_browser
from tests.integration.fleet_process import Served, start_fleet

NUM_TOKENS = 24
DECODE_S = 0.03  # slow enough to see an answer grow and to stop it


@pytest.fixture(scope="package")
def browser(tmp_path_factory):
    browser = start_browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.quit()


@pytest.fixture(scope="package")
def fleet(browser, tmp_path_factory) -> Iterator[Served]:
    with start_fleet(
        tmp_path_factory.mktemp("page"),
        VLM_ENGINE__MOCK__DECODE_S=str(DECODE_S),
        VLM_ENGINE__MOCK__NUM_OUTPUT_TOKENS=str(NUM_TOKENS),
        VLM_GATEWAY__ALIASES='{"shapes": "mock"}',
    ) as fleet:
        yield fleet


@pytest.fixture
def page(browser, fleet) -> Iterator[ChatPage]:
    page = ChatPage(browser, fleet.url)
    page.open()
    page.wait_for_model()
    yield page
    assert page.complaints() == []
