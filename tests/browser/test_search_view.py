"""The search view with a real fleet and the built-in model that finds images by words."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from engines.packages.shapes_clip import __file__ as PACKAGE
from tests.browser.chat_page import DESK, ChatPage
from tests.integration.fleet_process import Served, start_fleet
from tests.long import long

SAMPLES = sorted((Path(PACKAGE).parent / "samples").glob("*.png"))


@pytest.fixture(scope="module")
def clip(browser, tmp_path_factory) -> Iterator[Served]:
    """A fleet with only shapes-clip and an API key."""
    folder = tmp_path_factory.mktemp("clip")
    with start_fleet(
        folder, "--model", "shapes-clip", engine="auto", VLM_GATEWAY__API_KEYS="sk-one"
    ) as fleet:
        yield fleet


@pytest.fixture
def search(browser, clip) -> Iterator[ChatPage]:
    """The search view after the key was entered."""
    page = ChatPage(browser, f"{clip.url}/#search")
    page.open()
    page.wait_for(lambda: page.find("#key-dialog").is_displayed())
    page.find("#key").send_keys("sk-one", Keys.ENTER)
    page.wait_for(lambda: page.find("#search-welcome").is_displayed())
    assert page.find("#search-model").get_property("value") == "shapes-clip"
    yield page
    refused = ("401 (Unauthorized)", "400 (Bad Request)")  # first no key, then a broken image
    complaints = page.complaints()
    assert [line for line in complaints if not any(text in line for text in refused)] == []


def hits(page: ChatPage) -> list[tuple[str, float]]:
    rows = [row.text.split("\n") for row in page.find_all("#hits li")]
    return [(row[0], float(row[1]) if len(row) > 1 else 0.0) for row in rows]


def wait_for_all(page: ChatPage, count: int) -> None:
    page.wait_for(lambda: page.find("#search-status").text.startswith(f"{count} image"))


def ask(page: ChatPage, words: str) -> str:
    """Searches by words; returns the name of the nearest image."""
    page.find("#words").clear()
    page.find("#words").send_keys(words, Keys.ENTER)
    said = f"Nearest to {words}: "
    text = page.wait_for(
        lambda: (t := page.find("#announcer").get_property("textContent")).startswith(said) and t
    )
    return text.removeprefix(said)


def test_a_dropped_folder_is_found_by_words_and_by_an_image(search: ChatPage, tmp_path):
    folder = tmp_path / "images" / "deeper"
    folder.mkdir(parents=True)
    for sample in SAMPLES:
        shutil.copy(sample, folder / sample.name)
    (folder / "notes.txt").write_text("no image")
    (folder / "broken.png").write_bytes(SAMPLES[0].read_bytes()[:60])
    search.drop(tmp_path / "images")
    wait_for_all(search, len(SAMPLES))
    assert "1 file left out: broken.png" in search.find("#search-status").text
    assert ask(search, "a red star") == "wreath.png"
    found = hits(search)
    assert len(found) == len(SAMPLES)
    assert found == sorted(found, key=lambda hit: -hit[1])
    assert found[0][1] > found[1][1]
    search.find('[aria-label="More like sea.png"]').click()
    search.wait_for(lambda: hits(search)[0] == ("sea.png", 1.0))
    search.find("#query-file").send_keys(str(folder / "toys.png"))
    search.wait_for(lambda: hits(search)[0] == ("toys.png", 1.0))
    search.find('[aria-label="Remove toys.png"]').click()
    assert [score for _, score in hits(search)] == [0.0] * len(SAMPLES)
    search.find("#search-clear").click()
    assert search.find("#search-intro").is_displayed()
    search.find("#words").clear()
    search.find("#words").send_keys("a red star", Keys.ENTER)  # before there are images
    for _ in range(2):  # the second time they are already there
        search.find("#gallery-folder").send_keys(str(SAMPLES[0].parent))
        wait_for_all(search, len(SAMPLES))
    search.wait_for(lambda: hits(search)[0][0] == "wreath.png" and hits(search)[0][1] > 0)


@long("browser-test")
def test_without_a_model_the_view_explains_how_to_start_one(page: ChatPage):
    page.find('#views [href="#search"]').click()
    page.wait_for(lambda: page.find("#search-none").is_displayed())
    assert "vlm serve --also shapes-clip" in page.find("#search-none").text
    page.find('#views [href="#chat"]').click()
    assert page.answer_to("What is it?")


def test_the_reference_of_a_gateway_with_keys_asks_for_a_key(browser, clip):
    page = ChatPage(browser, f"{clip.url}/docs")
    page.open(DESK)
    page.wait_for(lambda: page.find("#key-dialog").is_displayed())
    page.find("#key").send_keys("sk-one", Keys.ENTER)
    page.wait_for(lambda: page.find_all("#operations details"))
    assert all("401 (Unauthorized)" in line for line in page.complaints())
